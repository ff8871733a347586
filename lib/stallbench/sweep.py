"""Saves at many checkpoint sizes, per target and method, without training in between (claim 1.10)."""

import gc
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import numpy as np
import pandas as pd
from transformers import Trainer

from stallbench import states
from stallbench.checkpointing import commit
from stallbench.checkpointing.checkpointer import Checkpointer
from stallbench.checkpointing.state import capture
from stallbench.config import AS_SHIPPED, SNAPSHOTS, ConfigError, StudyConfig, Target
from stallbench.lab import building as lab
from stallbench.recording import Recorder, synchronize
from stallbench.results import TRIAL_KEYS, events_of
from stallbench.spans import Timeline
from stallbench.storage import places, targets
from stallbench.storage.faults import free_memory_bytes
from stallbench.storage.targets import Workspace

# The first touches fresh memory, and is recorded as a warm-up.
WARMUP_SAVES, COUNTED_SAVES = 1, 2
# What a file system and a library's padding take of a lab's disk besides.
LAB_SHARE = 0.9
COLUMNS = ("model", "target", "method", "block", "warmup", "size_bytes", "files", "returned_s", "stall_s", "durable_s")

# Called when a cell of the sweep is done: what it was, and its counted saves' mean durable seconds.
OnCell = Callable[[str, float], None]


def check(config: StudyConfig, models: Sequence[str]) -> list[str]:
    """Refuse a sweep that can't work; gives warnings, one line each.

    Raises
    ------
    ConfigError
        For a model that isn't known or is named twice, a method that saves a part only, a target that can't serve, or
        a state that doesn't fit into memory.
    """
    if not models or len(set(models)) < len(models):
        raise ConfigError(f"model={', '.join(models) or 'none'} is refused: name models, each of them once")
    partial = [method for method in config.methods if method in ("model-only", "adapter-only")]
    if partial:
        raise ConfigError(f"method={partial[0]!r} is refused: a sweep saves full states; use a method that does")
    for target in config.targets:
        if target.lab:
            lab.require(target.location)
    needed_bytes = {name: states.checkpoint_bytes(name) for name in models}
    largest = max(needed_bytes, key=needed_bytes.get)
    copies = 1 + any(method in SNAPSHOTS for method in config.methods)
    copies += any(not target.mounted for target in config.targets)  # its bytes lie in memory
    if copies * needed_bytes[largest] > free_memory_bytes():
        raise ConfigError(
            f"model={largest!r} is refused: it needs {copies * needed_bytes[largest] / 1e9:.1f} GB of memory, and "
            f"{free_memory_bytes() / 1e9:.1f} GB are free; name smaller ones with --model"
        )
    left_out = [
        f"{name} doesn't fit on target {target.name}, a lab of {lab.SIZE_BYTES / 1e9:.1f} GB, and is left out there"
        for target in config.targets
        for name in models
        if not _fits(target, name)
    ]
    return left_out + targets.check(config.targets, needed_bytes[largest], config.control)


def _fits(target: Target, name: str) -> bool:
    """Whether a lab, whose disk is small, holds a state; of other targets ``targets.check`` looks at the room."""
    return not target.lab or states.checkpoint_bytes(name) <= LAB_SHARE * lab.SIZE_BYTES


def run(config: StudyConfig, models: Sequence[str], on_cell: OnCell = lambda words, durable_s: None) -> pd.DataFrame:
    """Save each model's state by each method to each target, in every block, in seeded random order.

    A save begins once the one before is durable and removed. The wait rule is ``return``: one save gives all three
    times. What would run beside it, training, isn't there.

    Parameters
    ----------
    config
        Targets, methods, blocks and seed count; the rest of a study's parameters is not used.
    models
        Keys of ``states.MODELS``.

    Returns
    -------
    pandas.DataFrame
        One row a save, ``COLUMNS``: bytes, seconds from the save's beginning.

    Raises
    ------
    ConfigError
        If a target can't be written.
    CheckpointError, OSError
        If a save fails.
    """
    draw, tables = np.random.default_rng(config.seed), []
    with ExitStack() as stack:
        held = stack.enter_context(places.held(config.targets, uuid4().hex[:12]))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stallbench-")))
        for block in range(1, config.blocks + 1):
            for name in (str(name) for name in draw.permutation(list(models))):
                trainer = states.make_trainer(name, scratch, config.seed + block)
                fitting = [target.name for target in config.targets if _fits(target, name)]
                cells = [(target, method) for target in fitting for method in config.methods]
                for target, method in (cells[index] for index in draw.permutation(len(cells))):
                    saves = _saves(trainer, held[target], method, scratch, f"{block}-{name}-{method}")
                    tables.append(saves.assign(model=name, block=block))
                    mean_s = float(saves[~saves.warmup].durable_s.mean())
                    on_cell(f"block {block}: {name}, {target}, {method}", mean_s)
                del trainer
                gc.collect()
    return pd.concat(tables, ignore_index=True)[list(COLUMNS)]


def _saves(trainer: Trainer, place: places.Place, method: str, scratch: Path, name: str) -> pd.DataFrame:
    """Save a state a few times to a folder of its own, and remove it."""
    workspace = targets.open_workspace(place.target, place.owned, name)
    timeline = Timeline(synchronize)
    shipped = method in AS_SHIPPED
    save = _shipped if shipped else _ours
    local = Path(tempfile.mkdtemp(dir=scratch))
    try:
        save(trainer, workspace, timeline, method, local)
    finally:
        workspace.forget(workspace.folder)
        shutil.rmtree(workspace.folder, ignore_errors=True)
        shutil.rmtree(local, ignore_errors=True)
    spans = timeline.frame()
    keys = {"trial": name, "target": place.target.name, "method": method, "wait": "return", "block": 0}
    spans = spans.assign(duration_s=spans.end_s - spans.start_s, **{key: keys[key] for key in TRIAL_KEYS})
    return events_of(spans).drop(columns="block")


def _shipped(trainer: Trainer, workspace: Workspace, timeline: Timeline, method: str, local: Path) -> None:
    recorder = Recorder(timeline, workspace, warmup_saves=WARMUP_SAVES)
    trainer.args.output_dir = str(workspace.folder)
    for step in range(1, WARMUP_SAVES + COUNTED_SAVES + 1):
        trainer.state.global_step = step
        folder = workspace.folder / f"checkpoint-{step}"
        recorder.save_as_shipped(step, folder, lambda: Trainer._save_checkpoint(trainer, trainer.model, None))
        recorder.settle()
        shutil.rmtree(folder)
    recorder.close()


def _ours(trainer: Trainer, workspace: Workspace, timeline: Timeline, method: str, local: Path) -> None:
    parent = workspace.folder / "checkpoints"
    checkpointer = Checkpointer(method, workspace, parent, timeline, local=local)
    try:
        for step in range(1, WARMUP_SAVES + COUNTED_SAVES + 1):
            checkpointer.save(step, lambda: capture(trainer), lambda folder: None, warmup=step <= WARMUP_SAVES)
            checkpointer.wait()
            folder = commit.final_folder(parent, step)
            workspace.forget(folder)
            shutil.rmtree(folder)
    finally:
        checkpointer.close()
