"""A Trainer whose waits are measured: data, steps, saves until returned and until durable, and restores."""

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stallbench.config import TrialConfig
from stallbench.emulated import wait_until
from stallbench.pagecache import files_below, sync_tree, tree_size
from stallbench.spans import Span, Timeline
from stallbench.targets import Workspace

# Which files of the Trainer's layout each of its three loading calls reads.
_RESTORED = {
    "optimizer": ("optimizer.pt", "scheduler.pt"),
    "rng": ("rng_state.pth",),
}


def synchronize() -> None:
    """Wait for the accelerator's pending work, if there is an accelerator."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def counted(config: TrialConfig, step: int) -> bool:
    """Whether a step counts: not a warm-up, and not the one step after the last save that proves the restore."""
    return config.warmup_steps < step <= config.steps


def fingerprint(trainer: Trainer) -> dict[str, str | int]:
    """Give SHA-256 digests of everything that a checkpoint must bring back.

    Returns
    -------
    dict
        ``weights``, ``optimizer``, ``scheduler`` and ``rng`` as hex digests, and ``step``.
    """
    import random

    rng = [random.getstate(), np.random.get_state(), torch.random.get_rng_state()]
    if torch.cuda.is_available():
        rng.append(torch.cuda.random.get_rng_state())
    return {
        "weights": _digest(trainer.model.state_dict()),
        "optimizer": _digest(trainer.optimizer.state_dict()),
        "scheduler": _digest(trainer.lr_scheduler.state_dict()),
        "rng": _digest(rng),
        "step": trainer.state.global_step,
    }


def _digest(value: Any) -> str:
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            array = value.detach().cpu().contiguous()
            digest.update(f"{array.dtype}{tuple(array.shape)}".encode())
            digest.update(array.reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, np.ndarray):
            digest.update(np.ascontiguousarray(value))
        elif isinstance(value, dict):
            for key in value:
                digest.update(repr(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        else:
            digest.update(repr(value).encode())

    feed(value)
    return digest.hexdigest()


class SaveClock(TrainerCallback):
    """Say when to save, by steps or by time, and time each step between its batch and its update."""

    def __init__(self, config: TrialConfig, timeline: Timeline) -> None:
        self._config, self._timeline = config, timeline
        self._step: Span | None = None
        self._last_save_s = timeline.now_s()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock of the first interval."""
        self._last_save_s = self._timeline.now_s()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open the step's span: the batch is there."""
        step = state.global_step + 1
        self._step = self._timeline.begin("step", step=step, warmup=not counted(self._config, step))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the step's span, and ask for a save where one is due.

        The last planned step is always saved; the Trainer runs one step more, which the restored run repeats.
        """
        self._timeline.end(self._step)
        due = state.global_step == self._config.steps
        if self._config.every_steps:
            due = due or state.global_step % self._config.every_steps == 0
        else:
            due = due or self._timeline.now_s() - self._last_save_s >= self._config.every_s
        control.should_save = due and state.global_step <= self._config.steps

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the next interval when the save is over."""
        self._last_save_s = self._timeline.now_s()


class MeasuredTrainer(Trainer):
    """``transformers.Trainer`` with a timeline around what it does; its training is deterministic, to be provable.

    The save itself is the Trainer's own: its layout, its serialisation, no fsync. Around it stand the time at which
    it returned, the time at which its bytes were durable, and the deletion of old checkpoints as a span of its own.

    Parameters
    ----------
    on_overdue
        Called from a watching thread with a reason when a save passes ``config.save_limit_s``.
    """

    def __init__(
        self,
        *,
        config: TrialConfig,
        timeline: Timeline,
        workspace: Workspace,
        on_overdue: Callable[[str], None],
        **arguments: Any,
    ) -> None:
        super().__init__(callbacks=[SaveClock(config, timeline)], **arguments)
        self.remove_callback(PrinterCallback)
        self.config, self.timeline, self.workspace = config, timeline, workspace
        self.fingerprints: dict[str, dict] = {}
        self._on_overdue = on_overdue
        self._losses: list[torch.Tensor] = []
        self.saves = 0
        self._syncs: dict[Path, Future] = {}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="sync")

    @property
    def losses(self) -> list[float]:
        """The loss of each step so far."""
        return [loss.item() for loss in self._losses]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Time the wait for the next batch."""
        step = self.state.global_step + 1
        with self.timeline.span("data_wait", step=step, warmup=not counted(self.config, step)):
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Keep the loss, without reading it: that would make the accelerator wait."""
        loss = super().training_step(*arguments, **keywords)
        self._losses.append(loss.detach())
        return loss

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.workspace.require_present()
        step = self.state.global_step
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        self.saves += 1
        fields = {"step": step, "warmup": self.saves <= self.config.warmup_saves}
        with self._watched(step), self.timeline.span("save", **fields) as save:
            with self.timeline.span("write", parent=save.id, **fields) as write:
                super()._save_checkpoint(model, trial)
                durable_s = self.workspace.charge_write(folder)
            if self.config.wait == "durable":
                self._make_durable(folder, durable_s, save)
        write.size_bytes, write.files = save.size_bytes, save.files = tree_size(folder)
        if self.config.wait == "return":
            self._syncs[folder] = self._background.submit(self._sync_watched, folder, durable_s, save)
        self._delete_old()
        if step == self.config.steps:
            self.fingerprints["saved"] = fingerprint(self)

    def _make_durable(self, folder: Path, durable_s: float | None, save: Span) -> None:
        """Put the save on stable storage: fsync, or the wait that the emulated device computed."""
        with self.timeline.span("sync", step=save.step, parent=save.id, warmup=save.warmup):
            if durable_s is None:
                sync_tree(folder)
            else:
                wait_until(durable_s)

    def _sync_watched(self, folder: Path, durable_s: float | None, save: Span) -> None:
        with self._watched(save.step):
            self._make_durable(folder, durable_s, save)

    @contextmanager
    def _watched(self, step: int) -> Iterator[None]:
        limit_s = self.config.save_limit_s
        reason = f"the save at step {step} passed its limit of save_limit_s={limit_s:g} s"
        watch = threading.Timer(limit_s, self._on_overdue, [reason])
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def _delete_old(self) -> None:
        """Delete what is beyond ``keep``, except where a sync in the background still needs the files."""
        folders = sorted(Path(self.args.output_dir).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        for folder in folders[: -self.config.keep]:
            sync = self._syncs.get(folder)
            if sync is None or sync.done():
                size_bytes, files = tree_size(folder)
                with self.timeline.span("delete", step=self.state.global_step, size_bytes=size_bytes, files=files):
                    shutil.rmtree(folder, ignore_errors=True)

    def finish_syncs(self) -> None:
        """Wait until every save is durable.

        Raises
        ------
        OSError
            What a sync in the background met: the save that looked fine was not.
        """
        self._background.shutdown()
        for sync in self._syncs.values():
            sync.result()

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        others = {name for names in _RESTORED.values() for name in names}
        files = [path for path in files_below(Path(checkpoint)) if path.name not in others]
        with self._restoring("weights", files):
            super()._load_from_checkpoint(checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        with self._restoring("optimizer", [Path(checkpoint, name) for name in _RESTORED["optimizer"]]):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._restoring("rng", [Path(checkpoint, name) for name in _RESTORED["rng"]]):
            super()._load_rng_state(checkpoint)
        self.fingerprints["restored"] = fingerprint(self)

    @contextmanager
    def _restoring(self, part: str, files: list[Path]) -> Iterator[None]:
        size_bytes = sum(path.stat().st_size for path in files)
        with self.timeline.span("restore", part=part, step=self.config.steps, size_bytes=size_bytes, files=len(files)):
            self.workspace.charge_read(files)
            yield
