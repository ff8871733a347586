"""The methods side by side on one path: durable saves, stalls, cold restores, memory, beside fio and a plain copy."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pandas as pd
import psutil
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, set_seed

from stallbench import states, workload
from stallbench.checkpointing import commit
from stallbench.checkpointing.checkpointer import Checkpointer, load
from stallbench.checkpointing.state import capture, flatten, size_bytes
from stallbench.config import AS_SHIPPED, ASYNCHRONOUS, METHODS, Target, TrialConfig
from stallbench.spans import Timeline
from stallbench.storage import targets
from stallbench.storage.pagecache import drop_tree, sync_file, sync_tree
from stallbench.storage.targets import Workspace, describe

OURS = [method for method in METHODS if method not in AS_SHIPPED]
PEER = "torch.save, Python file"  # what DLIO does, the core of MLPerf Storage's checkpoint workload
# A BERT whose full AdamW state has 1.5 GB: 125 million parameters.
_LARGE = BertConfig(vocab_size=50_265, num_labels=2)
ROUNDS = {"0.27 GB": 7, "1.5 GB": 3}


def make_state(size: str, folder: Path) -> Trainer:
    """Make a Trainer whose optimizer has done a step, so that its full state is there to be saved."""
    set_seed(0)
    small = size == "0.27 GB"
    model = workload.load_model(TrialConfig(), 8) if small else BertForSequenceClassification(_LARGE)
    return states.trainer_of(model, folder)


class Race:
    """Time each way of saving one Trainer's state on one folder, in turn; seconds by ``times[what, who]``."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.times: dict[tuple[str, str], list[float]] = {}
        self.size_bytes = size_bytes(flatten(capture(trainer)))
        self._into = {name: tensor.clone() for name, tensor in flatten(capture(trainer)).items()}
        self._local = folder / "local"
        self._makers = {method: self._checkpointer(method) for method in OURS}

    def _checkpointer(self, method: str) -> dict[str, Checkpointer]:
        waits = ("durable", "return") if method in ASYNCHRONOUS else ("durable",)
        parent = self.folder / method
        parent.mkdir()
        workspace = Workspace(None, parent, describe(parent))
        return {
            wait: Checkpointer(method, workspace, parent, Timeline(), local=self._local / method, wait=wait)
            for wait in waits
        }

    def close(self) -> None:
        """End all threads and processes."""
        for checkpointer in itertools.chain.from_iterable(maker.values() for maker in self._makers.values()):
            checkpointer.close()

    @contextmanager
    def _timed(self, what: str, who: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self.times.setdefault((what, who), []).append(time.perf_counter() - begin_s)

    def round(self, order: random.Random) -> None:
        """Time everything once, in random order."""
        runs: list[Callable[[], None]] = [self._trainer, self._peer, self._copy, self._fio]
        runs += [lambda method=method: self._ours(method) for method in OURS]
        order.shuffle(runs)
        for run in runs:
            run()

    def _trainer(self) -> None:
        parent = self.folder / "trainer"
        self.trainer.args.output_dir = str(parent)
        with self._timed("durable", "trainer"):
            Trainer._save_checkpoint(self.trainer, self.trainer.model, None)
            sync_tree(parent)
        shutil.rmtree(parent)

    def _peer(self) -> None:
        path = self.folder / "peer.pt"
        tensors = flatten(capture(self.trainer))
        with self._timed("durable", PEER):
            with path.open("wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())
            sync_file(self.folder)
        path.unlink()

    def _copy(self) -> None:
        tensors = flatten(capture(self.trainer))
        with self._timed("copy", "into memory that exists"):
            for name, tensor in tensors.items():
                self._into[name].copy_(tensor)

    def _ours(self, method: str) -> None:
        for wait, checkpointer in self._makers[method].items():
            what = {"durable": "durable", "return": "stall"}[wait]
            with self._timed(what, method):
                checkpointer.save(1, lambda: capture(self.trainer), lambda folder: None)
            checkpointer.wait()
        folder = commit.final_folder(checkpointer.parent, 1)
        model = {name: tensor for name, tensor in self._into.items() if name.startswith("model.")}
        for what, into in (("cold restore", self._into), ("cold resume", model)):
            if drop_tree(folder) == "warm":
                raise RuntimeError(f"{folder.name} can't be made cold here: name another --folder")
            with self._timed(what, method):
                load(folder, into)
        shutil.rmtree(folder)

    def _fio(self) -> None:
        if shutil.which("fio") is None:
            return
        path = self.folder / "fio.bin"
        for what, rw in (("durable", "write"), ("cold restore", "read")):
            command = ["fio", "--name=limit", f"--filename={path}", f"--size={self.size_bytes // 4096 * 4096}"]
            command += [f"--rw={rw}", "--bs=4M", "--iodepth=8", "--ioengine=libaio", "--direct=1", "--refill_buffers"]
            command += ["--end_fsync=1"] if rw == "write" else []
            done = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True, check=True)
            rate = json.loads(done.stdout)["jobs"][0][rw]["bw_bytes"]
            self.times.setdefault((what, "fio, O_DIRECT"), []).append(self.size_bytes / rate)
        path.unlink()


def run(size: str, parent: Path) -> tuple[pd.DataFrame, list[str]]:
    """Race at one size.

    Returns
    -------
    pandas.DataFrame
        Indexed by who: median seconds ``durable``, ``stall``, ``cold restore`` (into memory that exists for all of the
        state, as DCP loads; torch takes fresh memory), ``cold resume`` (only the model's exists, as when a job starts),
        the shares of fio's limit, and ``peak memory`` over the state's size (a copy is 1.0).
    list of str
        The goals, each with what was found.
    """
    with targets.claim(Target(name="race", location=str(parent)), uuid4().hex[:12]) as folder:
        race = Race(make_state(size, folder / "trainer"), folder)
        try:
            order = random.Random(0)
            for _ in range(ROUNDS[size] + 1):
                race.round(order)
        finally:
            race.close()
        medians = {key: statistics.median(values[1:]) for key, values in race.times.items()}  # the first warms up
        peaks = {who: _peak_in_process(size, who, folder) for who in ("trainer", PEER, *OURS)}
    columns = ["durable", "stall", "cold restore", "cold resume", "copy"]
    table = pd.Series(medians).unstack(level=0).reindex(columns=columns)
    for what in ("durable", "cold restore"):
        if ("durable", "fio, O_DIRECT") in medians:
            table[f"share of fio, {what}"] = medians[what, "fio, O_DIRECT"] / table[what]
    table["peak memory"] = pd.Series(peaks)
    return table.sort_values("durable"), _goals(size, medians)


def _goals(size: str, medians: dict[tuple[str, str], float]) -> list[str]:
    durable = {who: value for (what, who), value in medians.items() if what == "durable"}
    stalls = {who: value for (what, who), value in medians.items() if what == "stall"}
    copy_s = medians["copy", "into memory that exists"]
    lines = [
        _goal(f"{size}: stall of fast-async over one copy", stalls["fast-async"] / copy_s, 1.5, at_most=True),
        _goal(f"{size}: trainer over fast, durable", durable["trainer"] / durable["fast"], 4.0),
    ]
    if "fio, O_DIRECT" in durable:
        ceiling = durable["trainer"] / durable["fio, O_DIRECT"]
        lines[1] += f"; fio's limit itself is {ceiling:.1f} times as fast as the Trainer here, which bounds this"
        least = 0.8 if size == "0.27 GB" else 0.9
        restore = medians["cold restore", "fio, O_DIRECT"] / medians["cold restore", "fast"]
        share = durable["fio, O_DIRECT"] / durable["fast"]
        lines += [
            _goal(f"{size}: fast over fio's O_DIRECT limit, durable", share, least),
            _goal(f"{size}: fast cold restore into memory that exists, over fio's cold read", restore, 0.9),
        ]
    return lines


def _goal(words: str, found: float, goal: float, at_most: bool = False) -> str:
    met = found <= goal if at_most else found >= goal
    return f"{words}: {found:.2f} (goal: at {'most' if at_most else 'least'} {goal:g}): {'met' if met else 'missed'}"


def _peak_in_process(size: str, who: str, folder: Path) -> float:
    """Measure one method's peak memory in a fresh process, which has no other method's buffers."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, size, who, folder).result()


def _peak(size: str, who: str, folder: Path) -> float:
    """Give the peak memory of two saves over the state's size: proportional set size, of child processes too."""
    workload.prepare_libraries(allow_download=False)
    parent = Path(tempfile.mkdtemp(dir=folder))
    trainer = make_state(size, parent / "trainer")
    saved_bytes = size_bytes(flatten(capture(trainer)))
    save = _saver(who, trainer, parent)
    before, peak, over = _memory_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            peak[0] = max(peak[0], _memory_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(2):
        save()
    over.set()
    thread.join()
    shutil.rmtree(parent)
    return (peak[0] - before) / saved_bytes


def _saver(who: str, trainer: Trainer, parent: Path) -> Callable[[], Any]:
    if who == "trainer":
        return lambda: Trainer._save_checkpoint(trainer, trainer.model, None)
    if who == PEER:

        def save() -> None:
            with (parent / "peer.pt").open("wb") as file:
                torch.save(flatten(capture(trainer)), file)

        return save
    workspace = Workspace(None, parent, describe(parent))
    checkpointer = Checkpointer(who, workspace, parent, Timeline(), local=parent / "local", wait="durable")
    return lambda: checkpointer.save(1, lambda: capture(trainer), lambda folder: None)


def _memory_bytes() -> int:
    process = psutil.Process()
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:  # it ended meanwhile
            continue
    return total
