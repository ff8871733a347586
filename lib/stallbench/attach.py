"""Anyone's own training: record a Trainer that knows nothing of us, or let it save by one of our methods."""

import shutil
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stallbench.checkpointing.checkpointer import Checkpointer
from stallbench.config import AS_SHIPPED, METHODS, ConfigError, Target, Wait
from stallbench.environment import capture
from stallbench.privacy import Redactor
from stallbench.recording import Recorded, Recorder, StepClock, add_layer
from stallbench.results import (
    ENVIRONMENT,
    METHOD_VERSION,
    SCHEMA_VERSION,
    SPANS,
    STUDY,
    TRIAL,
    read_json,
    trial_id,
    write_json,
)
from stallbench.spans import Timeline
from stallbench.storage import targets
from stallbench.storage.targets import Workspace
from stallbench.training import Checkpointed

_TARGET = "output_dir"
_SAVES_AND_RESTORES = (
    "_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state",
)  # fmt: skip
_WARMUP_STEPS = 2  # the first steps allocate and compile


def checkpoint(trainer: Trainer, method: str = "fast-async", wait: Wait = "return", staging: str = "") -> None:
    """Let a Trainer save and resume its full state by one of our methods, into its own ``output_dir``.

    When it saves, how many checkpoints it keeps (``save_total_limit``) and what ``resume_from_checkpoint`` means stay
    as they are; checkpoints in the Trainer's own layout can still be resumed from. Folders hold the state for a
    resume: call ``trainer.save_model()`` for a model to load elsewhere.

    Parameters
    ----------
    method
        A name of ``stallbench.config.METHODS``, but for the Trainer's own.
    wait
        ``return``: training goes on when the save call is back, ``durable``: when the checkpoint is committed.
    staging
        Fast local folder for ``staged``; empty for the temporary one.

    Raises
    ------
    ConfigError
        If the method is unknown, or the Trainer does what none of them can save.
    """
    _require_plain(trainer, method)
    folder = Path(trainer.args.output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    recorded = isinstance(trainer, Recorded)
    workspace = Workspace(None, folder, targets.describe(folder))
    if not recorded:
        trainer.recorder = Recorder(Timeline(), workspace)
    trainer.checkpointer = None  # under several ranks the first saves for all
    if trainer.args.should_save:
        trainer.checkpointer = Checkpointer(
            method,
            workspace,
            folder,
            trainer.recorder.timeline,
            local=_staging(trainer, staging),
            wait=wait,
            keep=trainer.args.save_total_limit,
        )
    if recorded:  # the recording stays on top
        trainer.__class__ = type(trainer).__bases__[1]
    add_layer(trainer, Checkpointed)
    if recorded:
        add_layer(trainer, Recorded)


def _staging(trainer: Trainer, folder: str) -> Path:
    """Make a folder for local copies that goes when the Trainer does."""
    made = Path(tempfile.mkdtemp(prefix="stallbench-staging-", dir=folder or None))
    weakref.finalize(trainer, shutil.rmtree, made, ignore_errors=True)
    return made


def _require_plain(trainer: Trainer, method: str) -> None:
    known = [name for name in METHODS if name not in AS_SHIPPED]
    if method not in known:
        raise ConfigError(f"method={method!r} is unknown here; known are: {', '.join(known)}")
    if isinstance(trainer, Checkpointed):
        raise ConfigError("this Trainer saves by one of our methods already; make a fresh one for another")
    args = trainer.args
    own = type(trainer).__bases__[1] if isinstance(trainer, Recorded) else type(trainer)
    unfit = {
        "DeepSpeed, which shards the state": trainer.is_deepspeed_enabled,
        "FSDP, which shards the state": trainer.is_fsdp_enabled,
        "load_best_model_at_end, which reads the Trainer's own layout": args.load_best_model_at_end,
        "metric_for_best_model, which keeps the best checkpoint": args.metric_for_best_model is not None,
        "save_only_model, which leaves the state out": args.save_only_model,
        "push_to_hub, which uploads the Trainer's own layout": args.push_to_hub,
        "several ranks with dcp-async-process": args.world_size > 1 and method == "dcp-async-process",
        "a Trainer class with saves or restores of its own": any(
            getattr(own, name) is not getattr(Trainer, name) for name in _SAVES_AND_RESTORES
        ),
    }
    for what, found in unfit.items():
        if found:
            raise ConfigError(f"method={method!r} can't serve {what}; turn that off, or keep the Trainer's own saves")


def watch(trainer: Trainer, out: str | Path) -> None:
    """Record a Trainer's timeline: steps, waits for data, evaluations, saves, restores; ``stallbench report`` reads it.

    One line in a training script, before ``trainer.train()``. The training itself stays as it is, also where recording
    fails; after each save a thread asks for its files to be put on stable storage, to know when they are. Each call of
    ``train()`` adds a block. Under several ranks each writes its own timeline, and the slowest counts. Some hundred
    bytes of memory a step are taken.

    Parameters
    ----------
    out
        Folder of the results, away from the storage that is watched; under several ranks one that all of them see.

    Raises
    ------
    ConfigError
        If ``out`` holds something else.
    """
    out = Path(out).absolute()
    if trainer.args.process_index == 0:
        _require_ours(out)
    folder = Path(trainer.args.output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    trainer.recorder = Recorder(Timeline(), Workspace(None, folder, targets.describe(folder)), strict=False)
    checkpointer = getattr(trainer, "checkpointer", None)
    if checkpointer is not None:
        checkpointer.timeline = trainer.recorder.timeline
    add_layer(trainer, Recorded)
    trainer.add_callback(StepClock(trainer.recorder))
    trainer.add_callback(_Writer(trainer, out))


def _require_ours(out: Path) -> None:
    found = read_json(out / STUDY) if (out / STUDY).exists() else None
    if not (found.get("watched") if found else not out.exists() or not any(out.iterdir())):
        raise ConfigError(f"out={str(out)!r} holds another study, or something else; name a fresh folder")


class _Writer(TrainerCallback):
    """Write a watched Trainer's timeline now and then and at the end: a killed training leaves what it has.

    What goes wrong here costs the recording, never the training.
    """

    def __init__(self, trainer: Trainer, out: Path) -> None:
        self._trainer, self._out = trainer, out
        self._folder: Path | None = None
        self._since_s, self._next_write_s = 0.0, 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open a fresh trial; the first rank decides for all, also that there can be none."""
        recorder = self._trainer.recorder
        recorder.warmup_steps, recorder.saves = state.global_step + _WARMUP_STEPS, 0
        self._began_s, self._began_utc = time.monotonic(), datetime.now(UTC)
        chosen = [""]
        if args.process_index == 0:
            with _harmless():
                chosen = [str(_open_trial(self._trainer, self._out))]
        if args.world_size > 1:
            torch.distributed.broadcast_object_list(chosen, src=0)
        self._folder = Path(chosen[0]) if chosen[0] else None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write what there is, so seldom that it takes at most a hundredth of the time."""
        if time.monotonic() > self._next_write_s:
            self._write(args)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait until the last save is durable, and write all."""
        self._trainer.recorder.settle()
        checkpointer = getattr(self._trainer, "checkpointer", None)
        if checkpointer is not None:
            checkpointer.wait()
        self._write(args)
        self._since_s = self._trainer.recorder.timeline.now_s()

    def _write(self, args: TrainingArguments) -> None:
        if self._folder is None:
            return
        begin_s = time.monotonic()
        with _harmless():
            frame = self._trainer.recorder.timeline.frame()
            # A phase that isn't over keeps its open end: its save is not durable yet.
            frame = frame[(frame.start_s >= self._since_s) & (frame.end_s.notna() | (frame.parent >= 0))]
            saves = frame[frame.kind == "save"].id
            if len(saves) > 1:  # the first touches fresh memory
                first = (frame.id == saves.iloc[0]) | (frame.parent == saves.iloc[0])
                frame = frame.assign(warmup=frame.warmup | first)
            rank = args.process_index
            frame.to_parquet(self._folder / (SPANS if rank == 0 else f"spans-{rank}.parquet"), index=False)
            if rank == 0:
                write_json(self._folder / TRIAL, self._trial(args))
        self._next_write_s = time.monotonic() + max(60.0, 100 * (time.monotonic() - begin_s))

    def _trial(self, args: TrainingArguments) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "method_version": METHOD_VERSION,
            "trial": self._folder.name,
            "began_utc": self._began_utc.isoformat(timespec="seconds"),
            "wall_s": time.monotonic() - self._began_s,
            "ranks": args.world_size,
            "losses": [],
            "checks": {},
        }


@contextmanager
def _harmless() -> Iterator[None]:
    """Turn what goes wrong with the recording into a warning."""
    try:
        yield
    except (OSError, ConfigError) as error:
        warnings.warn(f"stallbench: not recorded: {error}", stacklevel=3)


def _open_trial(trainer: Trainer, out: Path) -> Path:
    """Make the study's folder, or recognise it, and a fresh trial in it."""
    checkpointer = getattr(trainer, "checkpointer", None)
    method = checkpointer.method if checkpointer else "trainer"
    wait = checkpointer.wait_rule if checkpointer else "return"
    request = _open_study(trainer, out, method, wait)
    block = 1 + len(list((out / "trials").glob("b*")))
    folder = out / "trials" / trial_id(block, 1, _TARGET, method, wait)
    folder.mkdir()
    write_json(out / STUDY, request | {"blocks": block})
    return folder


def _open_study(trainer: Trainer, out: Path, method: str, wait: Wait) -> dict[str, Any]:
    redactor = Redactor([(_TARGET, Path(trainer.args.output_dir).absolute()), ("out", out)])
    _require_ours(out)
    if (out / STUDY).exists():
        request = read_json(out / STUDY)
        if (request["methods"], request["waits"]) == ([method], [wait]):
            return request
        raise ConfigError(f"out={out.name!r} holds saves by another method; name a fresh folder")
    (out / "trials").mkdir(parents=True, exist_ok=True)
    write_json(out / ENVIRONMENT, redactor.tree(capture()))
    place = Target(name=_TARGET, location=str(Path(trainer.args.output_dir).absolute()))
    study_id = uuid4().hex[:12]
    return {
        "schema_version": SCHEMA_VERSION,
        "method_version": METHOD_VERSION,
        "study_id": study_id,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redactor.text(Path(sys.argv[0]).name),
        "watched": True,
        "targets": [
            {"name": _TARGET, "storage": targets.storage_of(place), "fingerprint": study_id, "device": study_id}
        ],
        "methods": [method],
        "waits": [wait],
        "warmup_saves": 1,
        "keep": 0,
        "model": type(trainer.model).__name__,
        "dataset": type(trainer.train_dataset).__name__,
    }
