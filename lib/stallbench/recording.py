"""The timeline of a Trainer: what is recorded, and the layer over its class that records it."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stallbench.checkpointing import commit
from stallbench.checkpointing.checkpointer import Guard, no_guard
from stallbench.config import Wait
from stallbench.spans import Span, Timeline
from stallbench.storage.emulated import wait_until
from stallbench.storage.pagecache import files_below, sync_tree, tree_size
from stallbench.storage.targets import Workspace

# Which files of the Trainer's layout each of its loading calls reads; the weights' call reads all others.
_RESTORED = {"optimizer": ("optimizer.pt", "scheduler.pt"), "rng": ("rng_state.pth",)}


def synchronize() -> None:
    """Wait for the accelerator's pending work, if there is an accelerator."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def add_layer(trainer: Trainer, layer: type) -> None:
    """Put a layer over a Trainer that exists, whatever its class is."""
    cls = type(trainer)
    trainer.__class__ = type(f"{layer.__name__}{cls.__name__}", (layer, cls), {})


@dataclass
class Recorder:
    """What a recorded Trainer writes to, and under which rules.

    Attributes
    ----------
    keep
        Checkpoints of the Trainer's own layout that stay; None leaves deletion to the Trainer.
    strict
        Whether a save that turns out not to be durable is an error; else it only has no durable time, and a warning.
    guard
        A limit on the time of a save.
    """

    timeline: Timeline
    workspace: Workspace
    wait: Wait = "return"
    keep: int | None = None
    warmup_steps: int = 0
    warmup_saves: int = 0
    last_step: int | None = None
    strict: bool = True
    guard: Guard = no_guard
    saves: int = 0
    _current: Span | None = None
    _syncs: dict[Path, Future] = field(default_factory=dict)
    _background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="sync"))

    def counted(self, step: int) -> bool:
        """Whether a step counts: not a warm-up, and not the one after the last save that proves the restore."""
        return step > self.warmup_steps and (self.last_step is None or step <= self.last_step)

    def count_save(self) -> bool:
        """Count a save; gives whether it is a warm-up."""
        self.saves += 1
        return self.saves <= self.warmup_saves

    def phase(self, part: str) -> AbstractContextManager[Any]:
        """Open a part of the Trainer's own save; outside of one, nothing is recorded."""
        if self._current is None:
            return nullcontext()
        return self._phase(self._current, "write" if self.workspace.device is None else "serialize", part)

    def _phase(self, save: Span, kind: str, part: str = "") -> AbstractContextManager[Span]:
        return self.timeline.span(kind, part=part, step=save.step, parent=save.id, warmup=save.warmup)

    def save_as_shipped(self, step: int, folder: Path, save_checkpoint: Callable[[], None]) -> None:
        """Time the Trainer's own save until it returned and until its bytes were durable."""
        if self.strict:
            self.workspace.require_present()
        with self.guard(step), self.timeline.span("save", step=step, warmup=self.count_save()) as save:
            with self._phase(save, "call"):
                self._current = save
                try:
                    save_checkpoint()
                finally:
                    self._current = None
                durable_s = self._charge(save, folder)
            if self.wait == "durable":
                self._make_durable(save, folder, durable_s)
        if folder.is_dir() or self.strict:  # a user's callback may have moved it
            save.size_bytes, save.files = tree_size(folder)
        if self.wait == "return":
            self._syncs[folder] = self._background.submit(self._guarded_sync, save, folder, durable_s)
        self._delete_old(step, folder.parent)

    def _charge(self, save: Span, folder: Path) -> float | None:
        if self.workspace.device is None:
            return None
        with self._phase(save, "write"):
            return self.workspace.charge_write(folder)

    def _make_durable(self, save: Span, folder: Path, durable_s: float | None) -> None:
        """Put the save on stable storage: fsync, or the wait that the emulated device computed."""
        with self._phase(save, "sync"):
            if durable_s is None:
                sync_tree(folder)
            else:
                wait_until(durable_s)

    def _guarded_sync(self, save: Span, folder: Path, durable_s: float | None) -> None:
        with self.guard(save.step):
            self._make_durable(save, folder, durable_s)

    def _delete_old(self, step: int, parent: Path) -> None:
        """Delete what is beyond ``keep``, except where a sync in the background still needs the files."""
        if self.keep is None:
            return
        for folder in sorted(parent.glob("checkpoint-*"), key=commit.step_of)[: -self.keep]:
            sync = self._syncs.get(folder)
            if sync is None or sync.done():
                size_bytes, files = tree_size(folder)
                with self.timeline.span("delete", step=step, size_bytes=size_bytes, files=files):
                    shutil.rmtree(folder, ignore_errors=True)

    def settle(self) -> None:
        """Wait until every save is durable.

        Raises
        ------
        OSError
            What a sync in the background met: the save that looked fine was not.
        """
        for sync in self._syncs.values():
            try:
                sync.result()
            except OSError as error:
                if self.strict:
                    raise
                warnings.warn(f"stallbench: a save has no durable time: {error}", stacklevel=2)
        if not self.strict:
            self._syncs.clear()

    def close(self) -> None:
        """Wait as ``settle`` does, and end the thread."""
        self._background.shutdown()
        self.settle()


class StepClock(TrainerCallback):
    """Time each step between its batch and its update."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._step: Span | None = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open the step's span: the batch is there."""
        step = state.global_step + 1
        self._step = self._recorder.timeline.begin("step", step=step, warmup=not self._recorder.counted(step))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the step's span."""
        self._recorder.timeline.end(self._step)


class Recorded:
    """Layer over a Trainer's class: the timeline around what it does. Its saves are its own, in their own layout."""

    recorder: Recorder

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Time the wait for the next batch."""
        step = self.state.global_step + 1
        with self.recorder.timeline.span("data_wait", step=step, warmup=not self.recorder.counted(step)):
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """Time an evaluation."""
        with self.recorder.timeline.span("eval", step=self.state.global_step):
            return super().evaluate(*arguments, **keywords)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        synchronize()  # the accelerator's pending steps are not the save's
        if hasattr(self, "checkpointer"):  # it records its own phases
            return super()._save_checkpoint(model, trial)
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{step}"
        self.recorder.save_as_shipped(step, folder, lambda: super(Recorded, self)._save_checkpoint(model, trial))

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        """Time the weights' part of a save."""
        with self.recorder.phase("weights"):
            super().save_model(*arguments, **keywords)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self.recorder.phase("optimizer"):
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with self.recorder.phase("random state"):
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        others = {name for names in _RESTORED.values() for name in names}
        files = [path for path in files_below(Path(checkpoint)) if path.name not in others]
        with self._restoring("weights", files):
            super()._load_from_checkpoint(checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._restoring("optimizer", _existing(checkpoint, _RESTORED["optimizer"])):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._restoring("rng", _existing(checkpoint, _RESTORED["rng"])):
            super()._load_rng_state(checkpoint)

    @contextmanager
    def _restoring(self, part: str, files: list[Path] | None) -> Iterator[None]:
        if files is None:  # nothing is resumed
            yield
            return
        size_bytes = sum(path.stat().st_size for path in files)
        step = self.recorder.last_step or self.state.global_step
        with self.recorder.timeline.span("restore", part=part, step=step, size_bytes=size_bytes, files=len(files)):
            self.recorder.workspace.charge_read(files)
            yield


def _existing(checkpoint: str | None, names: tuple[str, ...]) -> list[Path] | None:
    if checkpoint is None:
        return None
    return [path for name in names if (path := Path(checkpoint, name)).exists()]
