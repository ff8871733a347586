"""What a trial measures beside its training: the same save to memory, and waits in steps' stead while a save runs."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stallbench.checkpointing.checkpointer import Checkpointer
from stallbench.checkpointing.state import capture
from stallbench.config import AS_SHIPPED, ASYNCHRONOUS, PAST_THE_CACHE, TrialConfig
from stallbench.spans import Timeline
from stallbench.storage import emulated
from stallbench.storage.targets import Storage, Workspace

if TYPE_CHECKING:
    from transformers import Trainer

MEMORY_SAVES = 3  # the first touches fresh memory, and is recorded as a warm-up
MOCK_STEPS_ALONE, MOCK_STEPS_BESIDE = 10, 40


def memory_saves(trainer: "Trainer", config: TrialConfig, timeline: Timeline, needed_bytes: int) -> None:
    """Record the same save to a memory file system: the part of it that no storage can speed up.

    Nothing is recorded for asynchronous methods, nor for those that pass the page cache by: memory's pages cost what
    the page cache's do, which they don't use. Nor where the machine has no memory file system with room for it.
    """
    folder, memory = emulated.default_folder()
    elsewhere = config.method in (*ASYNCHRONOUS, *PAST_THE_CACHE)
    if elsewhere or not memory or shutil.disk_usage(folder).free < 2 * needed_bytes:
        return
    with tempfile.TemporaryDirectory(prefix="stallbench-", dir=folder) as parent, _output_dir(trainer, Path(parent)):
        save = _saver(Path(parent), trainer, config)
        for index in range(MEMORY_SAVES):
            with timeline.span("memory_save", warmup=index == 0):
                save()
            for path in Path(parent).iterdir():
                shutil.rmtree(path)


def _saver(parent: Path, trainer: "Trainer", config: TrialConfig) -> Callable[[], None]:
    if config.method in AS_SHIPPED:
        from transformers import Trainer

        return lambda: Trainer._save_checkpoint(trainer, trainer.model, None)
    workspace = Workspace(None, parent, Storage("memory", "memory"))
    checkpointer = Checkpointer(config.method, workspace, parent, Timeline(), local=parent, wait="durable")
    return lambda: checkpointer.save(trainer.state.global_step, lambda: capture(trainer), lambda folder: None)


@contextmanager
def _output_dir(trainer: "Trainer", folder: Path) -> Iterator[None]:
    before, trainer.args.output_dir = trainer.args.output_dir, str(folder)
    try:
        yield
    finally:
        trainer.args.output_dir = before


def mock_steps(trainer: "Trainer", checkpointer: Checkpointer, timeline: Timeline, step_s: float) -> None:
    """Record waits as long as a step, alone and while a save is under way: an *emulated* accelerator's training.

    On a machine with few cores a real step and the save compete for them, which overstates what a job on an
    accelerator would lose. A wait understates it: it needs a core and the interpreter's lock only to wake up, where
    such a job launches kernels. The first of two saves touches fresh buffers, and nothing is recorded beside it.

    Parameters
    ----------
    step_s
        Length of a step, in seconds.
    """
    for _ in range(MOCK_STEPS_ALONE):
        with timeline.span("mock_step", part="alone"):
            time.sleep(step_s)
    for first in (True, False):
        checkpointer.save(trainer.state.global_step, lambda: capture(trainer), lambda folder: None, warmup=True)
        for _ in range(0 if first else MOCK_STEPS_BESIDE):
            begin = timeline.begin("mock_step", part="beside a save")
            time.sleep(step_s)
            timeline.end(begin)
            if not checkpointer.busy:
                break
        checkpointer.wait()
