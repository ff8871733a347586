"""Anyone's own training: record a Trainer that knows nothing of us, or let it save by one of our methods."""

import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stallbench import targets
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
from stallbench.targets import Workspace
from stallbench.training import Checkpointed

_TARGET = "output_dir"
_WRITE_EVERY_S = 60.0
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
    trainer.staging = tempfile.TemporaryDirectory(prefix="stallbench-staging-", dir=folder or None)
    return Path(trainer.staging.name)


def _require_plain(trainer: Trainer, method: str) -> None:
    known = [name for name in METHODS if name not in AS_SHIPPED]
    if method not in known:
        raise ConfigError(f"method={method!r} is unknown here; known are: {', '.join(known)}")
    if isinstance(trainer, Checkpointed):
        raise ConfigError("this Trainer saves by one of our methods already; make a fresh one for another")
    args = trainer.args
    unfit = {
        "DeepSpeed, which shards the state": trainer.is_deepspeed_enabled,
        "FSDP, which shards the state": trainer.is_fsdp_enabled,
        "load_best_model_at_end, which reads the Trainer's own layout": args.load_best_model_at_end,
        "save_only_model, which leaves the state out": args.save_only_model,
        "push_to_hub, which uploads the Trainer's own layout": args.push_to_hub,
        "several ranks with dcp-async-process": args.world_size > 1 and method == "dcp-async-process",
    }
    for what, found in unfit.items():
        if found:
            raise ConfigError(f"method={method!r} can't serve {what}; turn that off, or keep the Trainer's own saves")


def watch(trainer: Trainer, out: str | Path) -> None:
    """Record a Trainer's timeline: steps, waits for data, evaluations, saves, restores; ``stallbench report`` reads it.

    One line in a training script, before ``trainer.train()``. The training itself stays as it is; after each save a
    thread asks for its files to be put on stable storage, to know when they are. A second run with the same ``out``
    adds to it. Under several ranks each writes its own timeline, and the slowest counts.

    Parameters
    ----------
    out
        Folder of the results, away from the storage that is watched.

    Raises
    ------
    ConfigError
        If ``out`` holds something else.
    """
    folder = Path(trainer.args.output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(Timeline(), Workspace(None, folder, targets.describe(folder)), warmup_steps=_WARMUP_STEPS)
    trainer.recorder = recorder
    checkpointer = getattr(trainer, "checkpointer", None)
    if checkpointer is not None:
        checkpointer.timeline = recorder.timeline
    add_layer(trainer, Recorded)
    method = checkpointer.method if checkpointer else "trainer"
    wait = checkpointer.wait_rule if checkpointer else recorder.wait
    trainer.add_callback(StepClock(recorder))
    trainer.add_callback(_Writer(trainer, _open_trial(trainer, Path(out), method, wait)))


def _open_trial(trainer: Trainer, out: Path, method: str, wait: Wait) -> Path:
    """Make the study's folder, or recognise it, and a fresh trial in it; the first rank decides for all."""
    chosen = [""]
    if trainer.args.process_index == 0:
        redactor = Redactor([(_TARGET, Path(trainer.args.output_dir).absolute()), ("out", out.absolute())])
        request = _open_study(trainer, out, method, wait, redactor)
        block = 1 + len(list((out / "trials").glob("b*")))
        chosen = [trial_id(block, 1, _TARGET, method, wait)]
        (out / "trials" / chosen[0]).mkdir()
        write_json(out / STUDY, request | {"blocks": block})
    if trainer.args.world_size > 1:
        torch.distributed.broadcast_object_list(chosen, src=0)
    return out / "trials" / chosen[0]


def _open_study(trainer: Trainer, out: Path, method: str, wait: Wait, redactor: Redactor) -> dict[str, Any]:
    if (out / STUDY).exists():
        request = read_json(out / STUDY)
        if request.get("watched") and (request["methods"], request["waits"]) == ([method], [wait]):
            return request
        raise ConfigError(f"out={str(out)!r} holds another study; name a fresh folder")
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


class _Writer(TrainerCallback):
    """Write a watched Trainer's timeline after each save and at the end: a killed training leaves what it has."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer, self._folder = trainer, folder
        self._began_s, self._began_utc = time.monotonic(), datetime.now(UTC)
        self._written_s = 0.0

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write what there is, but not so often that a long training would feel it."""
        if time.monotonic() - self._written_s > _WRITE_EVERY_S:
            self._write(args)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait until the last save is durable, and write all."""
        self._trainer.recorder.settle()
        checkpointer = getattr(self._trainer, "checkpointer", None)
        if checkpointer is not None:
            checkpointer.wait()
        self._write(args)

    def _write(self, args: TrainingArguments) -> None:
        self._written_s = time.monotonic()
        frame = self._trainer.recorder.timeline.frame()
        frame = frame[frame.end_s.notna()]
        saves = frame[frame.kind == "save"].id
        if len(saves) > 1:  # the first touches fresh memory
            frame = frame.assign(warmup=frame.warmup | (frame.id == saves.iloc[0]) | (frame.parent == saves.iloc[0]))
        rank = args.process_index
        frame.to_parquet(self._folder / (SPANS if rank == 0 else f"spans-{rank}.parquet"), index=False)
        if rank == 0:
            values = {
                "schema_version": SCHEMA_VERSION,
                "method_version": METHOD_VERSION,
                "trial": self._folder.name,
                "began_utc": self._began_utc.isoformat(timespec="seconds"),
                "wall_s": time.monotonic() - self._began_s,
                "ranks": args.world_size,
                "losses": [],
                "checks": {},
            }
            write_json(self._folder / TRIAL, values)
