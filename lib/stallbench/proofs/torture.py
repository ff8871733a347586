"""Proof that a durable checkpoint is never lost: saves killed, and their power cut, at random moments.

A child saves a state that changes with every step, in place, as training does, and reports each step that is committed.
It is killed, or the disk below it forgets what was not flushed. Then the newest complete checkpoint must be the state
of its step, bit for bit, and no older than the last one reported. The Trainer's own layout goes through the same, to
count how often it leaves a folder that resuming takes for whole and that isn't.
"""

import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from stallbench.checkpointing import commit
from stallbench.checkpointing.checkpointer import Checkpointer, load
from stallbench.config import AS_SHIPPED, METHODS
from stallbench.proofs.powercut import PowerCutDisk, missing
from stallbench.spans import Timeline
from stallbench.storage.emulated import default_folder
from stallbench.storage.targets import Workspace, describe

TRAINER = "trainer"
DISK_BYTES = 512 << 20
_ELEMENTS, _TENSORS = 1 << 20, 6  # 24 MiB of float32: a save lasts some tens of milliseconds
_SAVES = 4  # the random moment lies within the time that this many saves take
# DCP's process takes seconds to start for each event, so it gets fewer.
_SLOW_START, _SLOW_SHARE = "dcp-async-process", 0.1

# Saves forever in a folder, and writes lines to a descriptor: "begin", then each step that is durable.
Saver = Callable[[Path, int], None]
# Says of a folder after an event: the step of the newest checkpoint (0 for none), and whether it is whole.
Checker = Callable[[Path], tuple[int, bool]]


@dataclass(frozen=True)
class Outcome:
    """What one event left: a partial checkpoint, nothing as new as was reported, or one that isn't what was saved."""

    left_partial: bool
    lost: bool
    broken: bool


def torture(
    kills: int, cuts: int, methods: tuple[str, ...] | None = None, on_row: Callable[[dict], None] = lambda row: None
) -> pd.DataFrame:
    """Kill each method's saves, and cut their power.

    Parameters
    ----------
    kills, cuts
        Events for each method; a tenth for the one that takes seconds to start.
    methods
        Names of ``config.METHODS``; all that commit, and the Trainer's own, by default.
    on_row
        Called with each row when it is there.

    Returns
    -------
    pandas.DataFrame
        One row a method and kind of event: ``method``, ``event``, ``events``, ``left_partial`` (a folder that isn't
        committed was found; the Trainer has no such thing), ``lost`` (nothing as new as was reported durable),
        ``broken`` (the newest isn't what was saved), ``seconds``. Without the programs for power cuts, their rows are
        missing.
    """
    torch.set_num_threads(1)  # a process with threads must not be forked
    methods = methods or (TRAINER, *(name for name in METHODS if name not in AS_SHIPPED))
    rows = []
    for method in methods:
        saver, checker = _trainers() if method == TRAINER else (_method_saver(method), check)
        share = _SLOW_SHARE if method == _SLOW_START else 1.0
        for event, number, strike in (("kill", kills, _kills), ("power cut", cuts, _cuts)):
            if not number or (event == "power cut" and missing()):
                continue
            begin_s = time.monotonic()
            outcomes = list(strike(saver, checker, max(1, round(number * share)), random.Random(f"{method}{event}")))
            row = {"method": method, "event": event, "events": len(outcomes)}
            row |= {name: sum(getattr(one, name) for one in outcomes) for name in ("left_partial", "lost", "broken")}
            if method == TRAINER:
                row["left_partial"] = None
            rows.append(row | {"seconds": round(time.monotonic() - begin_s)})
            on_row(rows[-1])
    return pd.DataFrame(rows).convert_dtypes()


def lost(table: pd.DataFrame) -> bool:
    """Say whether a method of ours lost or broke anything; what the Trainer's own layout loses is only reported."""
    ours = table[table.method != TRAINER]
    return bool(ours.lost.sum() or ours.broken.sum())


def _kills(saver: Saver, checker: Checker, events: int, draw: random.Random) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="stallbench-torture-") as base:
        span_s = _span_s(saver, Path(base) / "timed")
        for index in range(events):
            folder = Path(base) / str(index)
            folder.mkdir()
            with _running(saver, folder) as child:
                time.sleep(draw.uniform(0, span_s))
            yield _judge(checker, folder, child.reported())
            shutil.rmtree(folder)


def _cuts(saver: Saver, checker: Checker, events: int, draw: random.Random) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="stallbench-torture-") as base:
        span_s = _span_s(saver, Path(base) / "timed") * 2  # the disk below is slower
        for index in range(events):
            with PowerCutDisk(DISK_BYTES, default_folder()[0]) as disk:
                with _running(saver, disk.mountpoint) as child:
                    time.sleep(draw.uniform(0, span_s))
                    disk.cut(draw.randrange(1 << 30) if index % 2 else None)
                disk.restart()
                yield _judge(checker, disk.mountpoint, child.reported())


def _judge(checker: Checker, folder: Path, reported: int) -> Outcome:
    partial = any(path.name.startswith(".checkpoint-") for path in folder.iterdir())
    step, whole = _in_child(lambda: checker(folder))
    return Outcome(partial, reported > step, step > 0 and not whole)


def _span_s(saver: Saver, folder: Path) -> float:
    """Time some saves, the first of which is counted as well."""
    folder.mkdir()
    with _running(saver, folder) as child:
        begin_s = time.monotonic()
        while child.read() < _SAVES and time.monotonic() - begin_s < 30:
            time.sleep(0.001)
    return time.monotonic() - begin_s


class _Child:
    """A saving process of its own group, and the lines that it wrote."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self._descriptor, self._text = pid, descriptor, b""

    def read(self) -> int:
        """Take in what was written so far; give the last step that is durable."""
        while True:
            try:
                more = os.read(self._descriptor, 65536)
            except BlockingIOError:
                break
            if not more:
                break
            self._text += more
        lines = self._text[: self._text.rfind(b"\n") + 1].split()
        return max((int(line) for line in lines if line != b"begin"), default=0)

    @property
    def begun(self) -> bool:
        """Whether its first save began."""
        self.read()
        return b"begin" in self._text

    def kill(self) -> None:
        """Kill the group at once, and wait."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def reported(self) -> int:
        """Give the last step that it reported before it died."""
        step = self.read()
        os.close(self._descriptor)
        return step


@contextmanager
def _running(saver: Saver, folder: Path) -> Iterator[_Child]:
    """Run a saver from its first save on, and kill it at the end."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(reading)
            saver(folder, writing)
        finally:
            os._exit(1)
    os.close(writing)
    child = _Child(pid, reading)
    limit_s = time.monotonic() + 60
    while not child.begun:
        if time.monotonic() > limit_s or os.waitpid(pid, os.WNOHANG)[0]:
            raise RuntimeError("the saving process ended before its first save")
        time.sleep(0.001)
    try:
        yield child
    finally:
        child.kill()


def _in_child(work: Callable[[], Any]) -> Any:
    """Run in a process of its own, as threads that a library starts would make a later fork unsafe."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else (1, False)


def state_of(step: int) -> dict[str, Any]:
    """Give the whole state of a step: whole numbers, which float32 holds exactly."""
    tensors = {
        f"t{index}": torch.arange(_ELEMENTS, dtype=torch.float32) % 997 + index + step for index in range(_TENSORS)
    }
    return {"model": tensors, "optimizer": {"step": step, "groups": [{"lr": 0.1, "params": (0, 1)}]}}


def _method_saver(method: str) -> Saver:
    def save(folder: Path, report: int) -> None:
        workspace = Workspace(None, folder, describe(folder))
        checkpointer = Checkpointer(
            method,
            workspace,
            folder,
            Timeline(),
            local=folder / "local",
            keep=2,
            on_durable=lambda step: os.write(report, f"{step}\n".encode()),
        )
        state = state_of(0)
        os.write(report, b"begin\n")
        for step in itertools.count(1):
            for tensor in state["model"].values():  # as the optimizer does, right after the last save returned
                tensor += 1
            state["optimizer"]["step"] = step
            checkpointer.save(step, lambda: state, lambda partial: None)

    return save


def check(folder: Path) -> tuple[int, bool]:
    """Recover a folder as a resuming job does; give the newest checkpoint's step (0: none), and whether it is whole."""
    commit.recover(folder)
    found = commit.complete_checkpoints(folder)
    if not found:
        return 0, True
    step = commit.step_of(found[-1])
    try:
        restored, expected = load(found[-1]), state_of(step)
    except Exception:  # whatever a reader makes of a broken file
        return step, False
    equal = all(torch.equal(restored["model"][name], tensor) for name, tensor in expected["model"].items())
    return step, equal and restored["optimizer"] == expected["optimizer"]


def _trainers() -> tuple[Saver, Checker]:
    """Give the Trainer's own save and what its own resume would take, on a tiny model whose numbers tell their step."""
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

    from stallbench.proofs.bench import tiny_model

    with tempfile.TemporaryDirectory(prefix="stallbench-torture-") as base:
        model = AutoModelForSequenceClassification.from_pretrained(tiny_model(Path(base) / "model"), num_labels=2)
        arguments = TrainingArguments(
            base, max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_total_limit=2
        )
        trainer = Trainer(model=model, args=arguments)
    trainer.create_optimizer_and_scheduler(1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]

    def save(folder: Path, report: int) -> None:
        trainer.args.output_dir = str(folder)
        os.write(report, b"begin\n")
        for step in itertools.count(1):
            for tensor in (*(parameter.data for parameter in model.parameters()), *moments):
                tensor.fill_(float(step))
            trainer.state.global_step = step
            Trainer._save_checkpoint(trainer, model, None)
            os.write(report, f"{step}\n".encode())

    return save, _check_as_shipped


def _check_as_shipped(folder: Path) -> tuple[int, bool]:
    from safetensors.torch import load_file
    from transformers.trainer_pt_utils import safe_globals
    from transformers.trainer_utils import get_last_checkpoint

    picked = get_last_checkpoint(str(folder))
    if picked is None:
        return 0, True
    step = commit.step_of(Path(picked))
    try:
        weights = load_file(Path(picked, "model.safetensors"))
        optimizer = torch.load(Path(picked, "optimizer.pt"), weights_only=True)
        torch.load(Path(picked, "scheduler.pt"), weights_only=True)
        with safe_globals():
            torch.load(Path(picked, "rng_state.pth"), weights_only=True)
        state = json.loads(Path(picked, "trainer_state.json").read_text())
        moments = [one["exp_avg"] for one in optimizer["state"].values()]
        equal = all(
            bool((tensor == step).all()) for tensor in (*weights.values(), *moments) if tensor.is_floating_point()
        )
    except Exception:  # whatever a reader makes of a broken file
        return step, False
    return step, equal and state["global_step"] == step
