"""Several experiments at once on one target: each a process of its own that reads one shared dataset and saves.

An experiment's training is an *emulated* accelerator: a wait of its step time. Its next batch is read meanwhile by two
threads; the first one, which no step hides, isn't counted. Half-way all experiments save at the same moment, the worst
case of a shared store: a file as large as the study's checkpoint, written, made durable and renamed. A process here
needs neither torch nor a DataLoader, so that many fit on few cores.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stallbench.load.config import LoadTrialConfig
from stallbench.storage import emulated
from stallbench.storage.pagecache import sync_file

READY, GO, PATHS, RESULT = "ready-{}", "go", "paths.txt", "result-{}.json"
BLOCK_BYTES = 16 << 20  # of what is saved; incompressible, repeated
THREADS = 2
START_LIMIT_S = 60.0
_HEAD_START_S = 0.3  # from the word to the common beginning


@dataclass(frozen=True)
class Experiment:
    """What one experiment does; ``profile`` is its emulated device's, with the queue in ``state_path``, or None.

    Parameters
    ----------
    meeting
        Local folder in which experiments and parent meet: file list, barrier, results.
    folder
        Where it saves.
    """

    number: int
    meeting: str
    folder: str
    step_s: float
    batch: int
    seconds: float
    save_bytes: int
    seed: int
    profile: dict[str, Any] | None = None
    state_path: str = ""


@dataclass(frozen=True)
class Outcome:
    """How an experiment ended: ``lost`` says why there is no result; else its steps and its save, in seconds.

    ``waits_s`` has the wait for data of each step; times are monotonic.
    """

    number: int
    lost: str = ""
    start_s: float = 0.0
    end_s: float = 0.0
    samples: int = 0
    starts_s: tuple[float, ...] = ()
    waits_s: tuple[float, ...] = ()
    save_start_s: float = 0.0
    save_end_s: float = 0.0


def planned(
    config: LoadTrialConfig, count: int, meeting: str, folder: str, save_bytes: int, device: emulated.Device | None
) -> list[Experiment]:
    """Say what ``count`` experiments do that begin at once, each in a folder of its own inside of ``folder``."""
    return [
        Experiment(
            number,
            meeting,
            tempfile.mkdtemp(dir=folder),
            config.neighbour_step_s,
            config.neighbour_batch,
            config.neighbour_s,
            save_bytes,
            (config.seed * 100 + count) * 100 + number,  # no other number of them reads the same files in turn
            device.profile.model_dump() if device else None,
            str(device.state_path) if device else "",
        )
        for number in range(count)
    ]


def run(experiments: Sequence[Experiment], paths: Sequence[str], limit_s: float) -> list[Outcome]:
    """Run experiments at once, from a common beginning, and wait for all; one that is killed costs its own result only.

    Parameters
    ----------
    paths
        Files of the shared dataset.
    limit_s
        Seconds after which those that still run are ended, and are lost.
    """
    meeting = Path(experiments[0].meeting)
    (meeting / PATHS).write_text("\n".join(paths))
    command = [sys.executable, "-m", "stallbench.load.neighbours"]
    processes = [
        subprocess.Popen(
            [*command, json.dumps(asdict(one))], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )
        for one in experiments
    ]  # fmt: skip
    try:
        _await_ready(experiments, processes)
        word = meeting / f"{GO}.partial"
        word.write_text(str(time.monotonic() + _HEAD_START_S))
        word.rename(meeting / GO)
        until_s = time.monotonic() + limit_s
        return [_outcome(*pair, until_s) for pair in zip(experiments, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _await_ready(experiments: Sequence[Experiment], processes: Sequence[subprocess.Popen]) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    for one, process in zip(experiments, processes, strict=True):
        ready = Path(one.meeting) / READY.format(one.number)
        while not ready.exists() and process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.01)


def _outcome(one: Experiment, process: subprocess.Popen, until_s: float) -> Outcome:
    try:
        _, errors = process.communicate(timeout=max(0.1, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Outcome(one.number, lost="it passed its time limit")
    if process.returncode < 0:
        return Outcome(one.number, lost=f"killed by signal {-process.returncode}")
    if process.returncode:
        lines = errors.strip().splitlines()
        return Outcome(one.number, lost=lines[-1] if lines else f"exit code {process.returncode}")
    found = json.loads((Path(one.meeting) / RESULT.format(one.number)).read_text())
    return Outcome(**found | {name: tuple(found[name]) for name in ("starts_s", "waits_s")})


class _Running:
    """An experiment in its own process."""

    def __init__(self, one: Experiment) -> None:
        self.one, self._parent = one, os.getppid()
        self._paths = (Path(one.meeting) / PATHS).read_text().splitlines()
        self._order = np.random.default_rng(one.seed)
        profile = emulated.Profile.model_validate(one.profile) if one.profile else None
        self._device = emulated.Device(profile, one.state_path) if profile else None
        self._block = os.urandom(min(BLOCK_BYTES, one.save_bytes))
        self._pool = ThreadPoolExecutor(THREADS)

    def _read(self, path: str) -> int:
        if self._device is not None:
            self._device.read(path, os.stat(path).st_size)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = len(os.read(descriptor, os.fstat(descriptor).st_size))
            if hasattr(os, "posix_fadvise"):  # a colleague on another machine would find nothing in this one's cache
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        return size

    def _next_batch(self) -> list:
        picked = self._order.integers(0, len(self._paths), self.one.batch)
        return [self._pool.submit(self._read, self._paths[index]) for index in picked]

    def _save(self) -> None:
        """Write the checkpoint, make it durable, and give it its name."""
        folder = Path(self.one.folder)
        partial, left = folder / "checkpoint.partial", self.one.save_bytes
        with partial.open("wb", buffering=0) as file:
            while left:
                left -= file.write(self._block[:left])
        if self._device is None:
            sync_file(partial)
        else:
            emulated.wait_until(self._device.write(str(partial), self.one.save_bytes).durable_s)
        partial.rename(folder / "checkpoint")
        if self._device is None:
            sync_file(folder)

    def run(self) -> Outcome:
        """Wait for the word, then train until the time is over, with one save half-way."""
        one, meeting = self.one, Path(self.one.meeting)
        (meeting / READY.format(one.number)).touch()
        while not (meeting / GO).exists():
            self._require_parent()
            time.sleep(0.005)
        start_s = float((meeting / GO).read_text())
        emulated.wait_until(start_s)
        starts_s, waits_s, save_s = [], [], None
        for read in self._next_batch():
            read.result()
        batch = self._next_batch()
        emulated.wait_for(one.step_s)
        while save_s is None or time.monotonic() < start_s + one.seconds:
            self._require_parent()
            begin_s = time.monotonic()
            for read in batch:
                read.result()
            starts_s.append(begin_s)
            waits_s.append(time.monotonic() - begin_s)
            batch = self._next_batch()
            emulated.wait_for(one.step_s)
            if save_s is None and time.monotonic() >= start_s + one.seconds / 2:
                save_begin_s = time.monotonic()
                self._save()
                save_s = save_begin_s, time.monotonic()
        end_s = time.monotonic()
        self._pool.shutdown(cancel_futures=True)
        samples = len(waits_s) * one.batch
        return Outcome(one.number, "", start_s, end_s, samples, tuple(starts_s), tuple(waits_s), *save_s)

    def _require_parent(self) -> None:
        """End with the trial: one that was killed can't end its experiments."""
        if os.getppid() != self._parent:
            sys.exit("the trial is gone")


def main() -> None:
    """Run the experiment that the first argument describes, and leave its result where experiments and parent meet."""
    one = Experiment(**json.loads(sys.argv[1]))
    outcome = _Running(one).run()
    result = Path(one.meeting) / RESULT.format(one.number)
    result.with_suffix(".partial").write_text(json.dumps(asdict(outcome)))
    result.with_suffix(".partial").rename(result)


if __name__ == "__main__":
    main()
