"""The reading instrument, measured: the reader beside a bare loop, Arrow beside fio, the cost of recording a read."""

import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from stallbench.config import Target
from stallbench.load import dataset
from stallbench.load.config import Load
from stallbench.load.reading import Reader, Record
from stallbench.spans import Timeline
from stallbench.storage import emulated, targets
from stallbench.storage.pagecache import drop_files

READER_GOAL, ARROW_GOAL, RECORDING_GOAL = 1.3, 0.8, 0.02
READS_PER_S = 10_000  # at which the cost of recording is judged
_ROUNDS = 5
_READS = 100_000
_ADDS = 200_000
_ARROW_BYTES, _ROW_BYTES = 256 << 20, 64 << 10
_BATCH = 500  # large, so that what a batch costs the DataLoader isn't charged to each read
_CONFIG = Load(files=2000)


def lines(folder: Path) -> list[str]:
    """Measure, and say what was found beside its goal.

    Parameters
    ----------
    folder
        A directory on a disk, for the cold reads.
    """
    slower = reader_beside_bare()
    found = [
        f"reading warm small files: {slower:.2f} times as long as a bare open, read, close loop with as many workers, "
        f"in batches of {_BATCH}; "
        f"goal at most {READER_GOAL}: {_met(slower <= READER_GOAL)}"
    ]
    add_s = recording_s()
    share = add_s * READS_PER_S
    found.append(
        f"recording a read: {add_s * 1e6:.2f} us, {share:.2%} of a worker's time at {READS_PER_S:,} reads a second; "
        f"goal at most {RECORDING_GOAL:.0%}: {_met(share <= RECORDING_GOAL)}"
    )
    rates = arrow_beside_fio(folder) if shutil.which("fio") else None
    if rates is None:
        return [*found, "Arrow beside fio: not measured, fio is not installed or nothing could be made cold"]
    arrow, fio = rates
    return [
        *found,
        f"reading Arrow cold: {arrow / 1e6:,.0f} MB/s, fio's cold sequential read {fio / 1e6:,.0f} MB/s, "
        f"{arrow / fio:.2f} of it; goal at least {ARROW_GOAL}: {_met(arrow / fio >= ARROW_GOAL)}",
    ]


def _met(met: bool) -> str:
    return "met" if met else "missed"


def reader_beside_bare() -> float:
    """Give how many times as long our reader takes for a warm small file in memory as a bare loop: median of rounds."""
    place = Target(name="memory", location=str(emulated.default_folder()[0]))
    with targets.claim(place, os.urandom(6).hex()) as owned:
        made = dataset.open_dataset(_CONFIG, targets.open_workspace(place, owned, "bench"), Timeline())
        ratios = [_ours_s(made) / _bare_s(made) for _ in range(_ROUNDS)]
    return statistics.median(ratios)


def _ours_s(made: dataset.Dataset) -> float:
    """Seconds of a read, from the first to the last one of all workers."""
    with Reader(made, _CONFIG.workers, _BATCH, 0, None).small(_READS / 50_000, cold=False) as stream:
        batches = iter(stream)
        for _ in range(_READS // _BATCH):
            next(batches)
        reads = stream.record.frame()
    return float((reads.start_s.iloc[-1] - reads.start_s.iloc[0]) / len(reads))


def _bare_s(made: dataset.Dataset) -> float:
    """Seconds of a read by as many processes that do nothing else; the slowest one counts."""
    with multiprocessing.Pool(_CONFIG.workers, _bare_init, (made.paths,)) as pool:
        each = _READS // _CONFIG.workers
        return max(pool.map(_bare, [each] * _CONFIG.workers, chunksize=1)) / _READS


_paths: list[str] = []


def _bare_init(paths: list[str]) -> None:
    _paths[:] = paths


def _bare(count: int) -> float:
    start_s = time.monotonic()
    for number in range(count):
        descriptor = os.open(_paths[number * 7919 % len(_paths)], os.O_RDONLY)
        os.read(descriptor, 1 << 20)
        os.close(descriptor)
    return time.monotonic() - start_s


def recording_s() -> float:
    """Give the seconds that recording one read takes, in batches as a worker does it: median of rounds."""
    rows, costs = [(1.0, 2.0, 4096, 0)] * _CONFIG.read_batch, []
    for _ in range(_ROUNDS):
        record = Record(1, _ADDS / 100_000)
        record.add(0, rows)
        start_s = time.perf_counter()
        for _ in range(_ADDS // len(rows)):
            record.add(0, rows)
        costs.append((time.perf_counter() - start_s) / _ADDS + 2 * _clock_s())
    return statistics.median(costs)


def _clock_s() -> float:
    start_s = time.perf_counter()
    for _ in range(_ADDS):
        time.monotonic()
    return (time.perf_counter() - start_s) / _ADDS


def arrow_beside_fio(folder: Path) -> tuple[float, float] | None:
    """Give the bytes a second of cold Arrow shards by our reader, and of fio reading the same files cold; medians.

    Rows are large here, so that the files are read and not decoded. None where nothing can be made cold.
    """
    import datasets

    datasets.disable_progress_bars()
    rows, rates = _ARROW_BYTES // _ROW_BYTES, {"arrow": [], "fio": []}
    with tempfile.TemporaryDirectory(prefix="stallbench-bench-", dir=folder) as inside:
        made = dataset.Dataset(Path(inside), np.full(rows, _ROW_BYTES))
        (made.folder / "arrow").mkdir()
        text = os.urandom(_ROW_BYTES // 2).hex()
        for number in range(dataset.SHARDS):
            path = str(made.folder / "arrow" / f"{number:05d}.arrow")
            with datasets.arrow_writer.ArrowWriter(path=path) as writer:
                for _ in range(rows // dataset.SHARDS):
                    writer.write({"text": text})
                writer.finalize()
        size_bytes = sum(path.stat().st_size for path in made.arrow)
        for _ in range(_ROUNDS):
            for name, read in (("arrow", _arrow_s), ("fio", _fio_s)):
                if drop_files(made.arrow) != "cold":
                    return None
                rates[name].append(size_bytes / read(made))
    return statistics.median(rates["arrow"]), statistics.median(rates["fio"])


def _arrow_s(made: dataset.Dataset) -> float:
    found = Reader(made, _CONFIG.workers, _CONFIG.read_batch, 0, None).shards("arrow")
    return found.end_s - found.start_s


def _fio_s(made: dataset.Dataset) -> float:
    names = ":".join(str(path).replace(":", "\\:") for path in made.arrow)
    command = ["fio", "--name=read", f"--filename={names}", "--rw=read", "--bs=1M", "--ioengine=psync", "--readonly"]
    command += ["--invalidate=0", "--file_service_type=sequential", "--output-format=json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["jobs"][0]["read"]
    return found["io_bytes"] / found["bw_bytes"]
