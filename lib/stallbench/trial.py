"""One fine-tuning run on one target under one condition: data on the target, training with saves, a proven restore."""

import errno
import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psutil

from stallbench import workload
from stallbench.config import ASYNCHRONOUS, RESULTS, ConfigError, Target, TrialConfig
from stallbench.privacy import Redactor
from stallbench.results import FAILURE, METHOD_VERSION, SCHEMA_VERSION, SPANS, TRIAL, trial_id, write_json
from stallbench.spans import Span, Timeline
from stallbench.storage import targets
from stallbench.storage.faults import chain, full_disk, read_only
from stallbench.storage.pagecache import files_below, sync_tree
from stallbench.storage.probe import raw_limits

if TYPE_CHECKING:
    from transformers import Trainer

# A restore also deserialises, so it can not outrun the raw limit; that limit itself varied by a factor of 2 here.
COLD_READ_SLACK = 2.0
OVERDUE_EXIT_CODE = 70
INTERRUPTED = "stopped before the trial ended"


class TrialError(RuntimeError):
    """A trial that ran and can't count; the message says why in one line."""


def step_of_trial(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn an error inside one of the trial's steps into a recorded failure, and leave nothing on the target."""

    @wraps(method)
    def guarded(self: "Trial") -> Any:
        try:
            return method(self)
        except BaseException as error:
            self.fail(self.explain(error))
            raise

    return guarded


class Trial:
    """One trial, step by step: ``put_data``, ``train``, ``restore``, ``control``, ``finish``.

    Parameters
    ----------
    config
        What to run. With a ``claim_id`` the study has made our folder on the target already; alone, the trial makes
        and removes its own.

    Raises
    ------
    ConfigError
        If the target can't serve; nothing was written then.
    """

    def __init__(self, config: TrialConfig) -> None:
        workload.prepare_libraries(config.allow_download)
        self.config = config
        self.target = Target(name=config.target_name, location=config.target)
        self.id = trial_id(config.block, config.attempt, config.target_name, config.method, config.wait)
        self._began_s, self._began_utc = time.monotonic(), datetime.now(UTC)
        self._closing = ExitStack()
        if not config.claim_id:
            targets.check([self.target], self._needed_bytes() or 0)
            workload.check_memory(config.method, config.model)
        self.out = self._make_out()
        places = [*config.places, (config.target_name, config.target)]
        paths = [(name, path) for name, path in places if path.startswith(("/", "~", "$", ".")) or "://" in path]
        self.redactor = Redactor(paths, config.show_paths)
        owned = self._own_folder()
        self.workspace = targets.open_workspace(self.target, owned, self.id)
        self._closing.callback(shutil.rmtree, self.workspace.folder, ignore_errors=True)
        self._closing.callback(self.workspace.forget, self.workspace.folder)
        self._scratch = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="stallbench-cache-")))
        self._memory_free_bytes = psutil.virtual_memory().available
        self._staging_folder: Path | None = None
        self._trainer: Trainer | None = None
        self.timeline = Timeline()
        self.checks: dict[str, Any] = {}

    def _make_out(self) -> Path:
        if self.config.out:
            out = Path(self.config.out).expanduser().absolute()
        else:
            out = RESULTS / "alone" / f"{self._began_utc:%Y%m%d-%H%M%S}-{uuid4().hex[:6]}"
        out.mkdir(parents=True, exist_ok=True)
        if (out / TRIAL).exists() or (out / FAILURE).exists():
            raise ConfigError(f"out={self.config.out!r} holds a trial already; name a fresh folder")
        return out

    def _own_folder(self) -> Path:
        if self.config.claim_id:
            return targets.directory(self.target) / f"stallbench-{self.config.claim_id}"
        return self._closing.enter_context(targets.claim(self.target, uuid4().hex[:12]))

    def _needed_bytes(self) -> int | None:
        return workload.planned_bytes(self.config, self.config.method, self.config.wait)

    @step_of_trial
    def put_data(self) -> None:
        """Write the tokenised data to the target, then read it back cold: what a fresh iteration waits for."""
        from stallbench.recording import synchronize

        self.timeline = Timeline(synchronize)
        folder = self.workspace.folder / "data"
        with self.timeline.span("put_data"):
            self._classes = workload.put_data(self.config, folder, self._scratch)
            self.workspace.charge_write(folder)
            sync_tree(folder)
        with self._cold_span("reload_data", folder) as span:
            shards = [path for path in files_below(folder) if path.suffix == ".arrow"]
            self.workspace.charge_read(shards)
            span.size_bytes, span.files = workload.reload(shards), len(shards)
        self.checks["training_data_cache"] = (
            "local copy" if self.workspace.store else self.workspace.drop(folder)["cache_data"]
        )

    @contextmanager
    def _cold_span(self, kind: str, folder: Path) -> Iterator[Span]:
        caches = self.workspace.drop(folder)
        with self.timeline.span(kind, **caches) as span:
            yield span

    @step_of_trial
    def train(self) -> None:
        """Fine-tune with saves at the interval, one step beyond the last save, and an evaluation.

        Raises
        ------
        TrialError
            If a save failed, or was not durable in the end.
        """
        raw_limits(self.workspace, self.timeline)
        trainer = self._trainer = self._make_trainer()
        self._check_room(trainer)
        trainer.train()
        trainer.recorder.close()
        if trainer.recorder.saves <= self.config.warmup_saves:
            raise TrialError(
                f"{trainer.recorder.saves} saves were made, warmup_saves={self.config.warmup_saves} of them are not "
                "counted: nothing was measured; use more steps or a shorter every_s"
            )
        self._unbroken = self._fingerprint(trainer)
        self.evaluation = trainer.evaluate()

    @step_of_trial
    def restore(self) -> None:
        """Read the last checkpoint back cold into a new model and optimizer, prove it equal, and train on for a step.

        Raises
        ------
        TrialError
            If any part differs from what was saved, the next step differs from the unbroken run, or a cold read was
            faster than the raw limit, which means that it wasn't cold.
        """
        first, self._trainer = self._trainer, None
        saved, self.losses = first.saved, [loss.item() for loss in first.losses]
        self._close_checkpointer(first)
        del first
        gc.collect()
        checkpoint = self._output_dir / f"checkpoint-{self.config.steps}"
        caches = self.workspace.drop(checkpoint)
        second = self._trainer = self._make_trainer()
        second.train(resume_from_checkpoint=str(checkpoint))
        second.recorder.close()
        for span in self._restore_spans():
            for layer, state in caches.items():
                setattr(span, layer, state)
        self._prove_restored(saved, second)
        self._check_cold("restore", self._restore_spans())

    def _prove_restored(self, saved: dict, second: "Trainer") -> None:
        """Compare the restored state with the saved one, and the next step with the unbroken run's.

        A method that leaves the optimizer out can bring back the weights only, and no training goes on as it was.
        """
        full = self.config.method not in ("model-only", "adapter-only")
        parts = list(saved) if full else ["weights", "step"]
        restored = getattr(second, "restored", None)
        if restored is None:
            raise TrialError("nothing was restored: the Trainer read no random state")
        self._prove("restored state", saved, restored, parts)
        if full:
            self._prove("state one step on", self._unbroken, self._fingerprint(second), parts)
            losses = [loss.item() for loss in second.losses]
            if losses != self.losses[-1:]:
                raise TrialError(f"the restored run's next loss is {losses}, the unbroken run's {self.losses[-1:]}")
        self.checks |= {"restored_equal": parts, "next_step_equal": full, "loss": self.losses[-1]}

    @step_of_trial
    def control(self) -> None:
        """Record the same save to memory, and what a save beside it takes from an emulated accelerator's steps."""
        from stallbench.controls import memory_saves, mock_steps

        trainer, self._trainer = self._trainer, None
        saves = [span.size_bytes for span in self.timeline.spans if span.kind == "save"]
        if self.workspace.device is None:  # an emulated device's bytes lie in memory already
            memory_saves(trainer, self.config, self.timeline, max(saves))
        if self.config.method in ASYNCHRONOUS:
            steps = [span.duration_s for span in self.timeline.spans if span.kind == "step" and not span.warmup]
            mock_steps(trainer, trainer.checkpointer, self.timeline, sum(steps) / len(steps))
        self._close_checkpointer(trainer)

    @step_of_trial
    def finish(self) -> Path:
        """Leave the target as it was and write the results; ``trial.json`` comes last and says that the trial counts.

        Returns
        -------
        pathlib.Path
            The folder of the results.
        """
        if "restored_equal" not in self.checks or self._trainer is not None:
            raise TrialError("there is nothing to write: run put_data, train, restore and control first")
        self._closing.close()
        self.timeline.frame().to_parquet(self.out / SPANS, index=False)
        hidden = set() if self.config.show_paths else {"target", "out", "model", "dataset", "staging"}
        write_json(
            self.out / TRIAL,
            {
                "schema_version": SCHEMA_VERSION,
                "method_version": METHOD_VERSION,
                "trial": self.id,
                "config": self.redactor.tree(self.config.model_dump(exclude=hidden)),
                "storage": self.redactor.tree(targets.storage_of(self.target)),
                "began_utc": self._began_utc.isoformat(timespec="seconds"),
                "wall_s": time.monotonic() - self._began_s,
                "memory_free_bytes": self._memory_free_bytes,
                "autosave_off": bool(self.config.claim_id),
                "losses": self.losses,
                "eval_loss": self.evaluation["eval_loss"],
                "checks": self.checks,
            },
        )
        return self.out

    @property
    def _output_dir(self) -> Path:
        return self.workspace.folder / "checkpoints"

    def _make_trainer(self) -> "Trainer":
        from stallbench.training import make_trainer

        return make_trainer(
            self.config, self._classes, self.workspace, self._output_dir, self.timeline, self._staging(), self._guard
        )

    def _staging(self) -> Path:
        """Give the folder for staged saves' local copies; on a path that the user named, one of our own."""
        if not self.config.staging:
            return self._scratch
        if self._staging_folder is None:
            staging = Target(name="staging", location=self.config.staging)
            self._staging_folder = self._closing.enter_context(targets.claim(staging, uuid4().hex[:12]))
        return self._staging_folder

    @staticmethod
    def _close_checkpointer(trainer: "Trainer") -> None:
        checkpointer = getattr(trainer, "checkpointer", None)
        if checkpointer is not None:
            checkpointer.close()

    @contextmanager
    def _guard(self, step: int) -> Iterator[None]:
        """End the trial if a save passes its limit."""
        limit_s = self.config.save_limit_s
        reason = f"the save at step {step} passed its limit of save_limit_s={limit_s:g} s"
        watch = threading.Timer(limit_s, self._abort, [reason])
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def _check_room(self, trainer: "Trainer") -> None:
        """Refuse before the first step, now that the model's size is known, also that of a Hub model."""
        weights_bytes = sum(parameter.nbytes for parameter in trainer.model.parameters())
        trained_bytes = sum(parameter.nbytes for parameter in trainer.model.parameters() if parameter.requires_grad)
        needed_bytes = workload.saved_bytes(self.config.method, weights_bytes, trained_bytes)
        needed_bytes *= workload.checkpoints_at_once(self.config, self.config.method, self.config.wait)
        free_bytes = shutil.disk_usage(self.workspace.folder).free
        if needed_bytes > free_bytes:
            raise TrialError(
                f"target {self.target.name} is too full: the checkpoints need {needed_bytes / 1e6:,.0f} MB and "
                f"{free_bytes / 1e6:,.0f} MB are free"
            )

    @staticmethod
    def _fingerprint(trainer: "Trainer") -> dict:
        from stallbench.training import fingerprint

        return fingerprint(trainer)

    @staticmethod
    def _prove(what: str, expected: dict, found: dict, parts: Sequence[str]) -> None:
        unlike = [part for part in parts if expected[part] != found[part]]
        if unlike:
            raise TrialError(f"the {what} differs from the unbroken run in: {', '.join(unlike)}")

    def _restore_spans(self) -> list[Span]:
        return [span for span in self.timeline.spans if span.kind == "restore"]

    def _check_cold(self, what: str, reads: Sequence[Span]) -> None:
        """Fail on cold reads that are faster than the raw limit: they weren't cold."""
        rate = sum(read.size_bytes for read in reads) / sum(read.duration_s for read in reads)
        if reads[0].cache_data != "cold" or not 0 < COLD_READ_SLACK * self._raw_read() < rate:
            return
        raw_limits(self.workspace, self.timeline)  # what else ran may have slowed the first probe down
        if rate > COLD_READ_SLACK * self._raw_read():
            raise TrialError(
                f"the cold {what} ran at {rate / 1e6:,.0f} MB/s, above the raw limit of {self._raw_read() / 1e6:,.0f} "
                "MB/s: some cache below was warm, so the figure would be wrong"
            )

    def _raw_read(self) -> float:
        """Give the best raw cold read in bytes per second; 0 where none was probed."""
        # One plain GET is no limit of a store; there the restore is cold since no local byte was left.
        probes = [span for span in self.timeline.spans if span.kind == "raw_read" and span.part != "fsspec"]
        return max((span.size_bytes / span.duration_s for span in probes), default=0.0)

    def _abort(self, reason: str) -> None:
        """End this process from the watching thread: a write that hangs in the kernel can't be interrupted."""
        self.fail(reason, clean=False)
        os._exit(OVERDUE_EXIT_CODE)

    def fail(self, reason: str, clean: bool = True) -> None:
        """Record the failure, unless one is recorded, and clear the target where that can't hang."""
        if not (self.out / FAILURE).exists():
            failure = {"trial": self.id, "reason": self.redactor.text(reason), "interrupted": reason == INTERRUPTED}
            write_json(self.out / FAILURE, failure)
        if clean:
            self._closing.close()

    def explain(self, error: BaseException) -> str:
        """Say in one line why a step failed; a full or read-only disk is named, however the writer put it."""
        from stallbench.checkpointing.state import CheckpointError

        try:
            free_bytes = shutil.disk_usage(self.workspace.folder.parent).free
        except OSError as lost:
            return f"the target is gone: {lost.strerror}"
        links = list(chain(error))
        gone = [link.strerror for link in links if isinstance(link, OSError) and link.errno == errno.ENODEV]
        if gone:
            return str(gone[0])
        if isinstance(error, CheckpointError):
            return str(error)
        if full := full_disk(error, self._needed_bytes() or 0, free_bytes):
            return full
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        lines = str(error).strip().splitlines()
        words = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        return f"{words}; the target is read-only now" if read_only(self.workspace.folder) else words
