"""The raw limits of a path, probed in the pattern of a checkpoint, so that no save is judged by its own writer.

Fresh file, incompressible data, 4 MiB requests, 8 of them in flight past the page cache, an fsync at the end: by fio
where it is installed, else by our own prober of the same pattern. ``both`` sets the two side by side.
"""

import errno
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from stallbench.pagecache import reserve, sync_file
from stallbench.spans import Timeline
from stallbench.targets import Workspace

BLOCK_BYTES, DEPTH = 4 << 20, 8
SIZE_BYTES = 128 << 20
RANDOM_READS, RANDOM_BYTES = 64, 4096
SMALL_FILES, SMALL_BYTES = 16, 4096
ROUNDS = 7
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM}

# Each probe: kind of span, and its bytes and requests. The order matters: reads find the file that was written.
_PROBES = {
    "raw_buffered": (SIZE_BYTES, 1),
    "raw_write": (SIZE_BYTES, 1),
    "raw_read": (SIZE_BYTES, 1),
    "raw_random": (RANDOM_READS * RANDOM_BYTES, RANDOM_READS),
}


def raw_limits(workspace: Workspace, timeline: Timeline) -> None:
    """Record what the path can do: spans ``raw_write``, ``raw_buffered``, ``raw_read``, ``raw_random``, ``raw_small``.

    A span's ``part`` names the tool, ``files`` the number of requests where they are single ones. Where the file system
    has no O_DIRECT (macOS, some memory file systems) only the buffered and the small writes are recorded. Nothing is
    probed on an emulated device: its limits are what its profile states.

    Raises
    ------
    OSError
        If the path fails, for example ENOSPC.
    """
    if workspace.device is not None:
        return
    workspace.require_present()  # fio would make a missing folder
    path = workspace.folder / "raw.bin"
    tool = "fio" if shutil.which("fio") else "own"
    prober = _fio if tool == "fio" else Prober().run
    try:
        for kind, (size_bytes, requests) in _PROBES.items():
            span = timeline.begin(kind, part=tool, size_bytes=size_bytes, files=requests)
            try:
                span.end_s = span.start_s + prober(kind, path)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                timeline.spans.remove(span)
        with timeline.span("raw_small", part="own", size_bytes=SMALL_FILES * SMALL_BYTES, files=SMALL_FILES):
            _small_files(workspace.folder)
    finally:
        path.unlink(missing_ok=True)


def _fio(kind: str, path: Path) -> float:
    """Run fio and give the seconds that it reports, final fsync included, its own start not."""
    command = ["fio", "--name=raw", f"--filename={path}", f"--size={SIZE_BYTES}", f"--ioengine={_engine()}"]
    command += {
        "raw_write": ["--rw=write", "--direct=1", "--end_fsync=1", "--refill_buffers"],
        "raw_buffered": ["--rw=write", "--direct=0", "--end_fsync=1", "--refill_buffers"],
        "raw_read": ["--rw=read", "--direct=1"],
        "raw_random": ["--rw=randread", "--direct=1", f"--number_ios={RANDOM_READS}"],
    }[kind]
    random_read = kind == "raw_random"
    command += [f"--bs={RANDOM_BYTES if random_read else BLOCK_BYTES}", f"--iodepth={1 if random_read else DEPTH}"]
    if kind in ("raw_write", "raw_buffered"):
        path.unlink(missing_ok=True)
    done = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True)
    try:
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (ValueError, LookupError):
        raise OSError(errno.EIO, f"fio failed: {done.stderr.strip()[-200:]}") from None
    if job["error"]:
        raise OSError(job["error"], os.strerror(job["error"]))
    found = job["read" if kind in ("raw_read", "raw_random") else "write"]
    return found["lat_ns"]["mean"] * RANDOM_READS / 1e9 if random_read else SIZE_BYTES / found["bw_bytes"]


def _engine() -> str:
    return "libaio" if os.uname().sysname == "Linux" else "posixaio"


class Prober:
    """Our own prober; its buffers are page-aligned, as O_DIRECT demands, and touched before any clock runs."""

    def __init__(self) -> None:
        self._buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(DEPTH)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(BLOCK_BYTES)

    def run(self, kind: str, path: Path) -> float:
        """Probe in the pattern of one kind of span; gives seconds.

        Raises
        ------
        OSError
            As the file system does; EINVAL where it has no O_DIRECT.
        """
        if kind in ("raw_write", "raw_buffered"):
            path.unlink(missing_ok=True)
        if kind != "raw_buffered" and not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        flags = os.O_RDONLY if kind in ("raw_read", "raw_random") else os.O_RDWR | os.O_CREAT
        descriptor = os.open(path, flags | (0 if kind == "raw_buffered" else os.O_DIRECT), 0o600)
        try:
            if kind == "raw_random":
                return self._random_reads(descriptor)
            if flags & os.O_CREAT:
                reserve(descriptor, SIZE_BYTES)  # as fio does, before its clock runs
            begin_s = time.perf_counter()
            if kind == "raw_buffered":  # one writer, as a saving program is
                for at in range(0, SIZE_BYTES, BLOCK_BYTES):
                    _whole(os.pwrite(descriptor, self._buffers[at // BLOCK_BYTES % DEPTH], at))
            elif kind == "raw_write":
                self._in_parallel(lambda buffer, at: os.pwrite(descriptor, buffer, at))
            else:
                self._in_parallel(lambda buffer, at: os.preadv(descriptor, [buffer], at))
            if flags & os.O_CREAT:
                os.fsync(descriptor)
            return time.perf_counter() - begin_s
        finally:
            os.close(descriptor)

    def _random_reads(self, descriptor: int) -> float:
        view = memoryview(self._buffers[0])[:RANDOM_BYTES]
        places = [RANDOM_BYTES * random.randrange(SIZE_BYTES // RANDOM_BYTES) for _ in range(RANDOM_READS)]
        begin_s = time.perf_counter()
        for at in places:
            os.preadv(descriptor, [view], at)
        return time.perf_counter() - begin_s

    def _in_parallel(self, transfer: Callable[[mmap.mmap, int], int]) -> None:
        errors: list[OSError] = []

        def work(first: int) -> None:
            for block in range(first, SIZE_BYTES // BLOCK_BYTES, DEPTH):
                try:
                    _whole(transfer(self._buffers[first], block * BLOCK_BYTES))
                except OSError as error:
                    errors.append(error)
                    return

        workers = [threading.Thread(target=work, args=[first]) for first in range(DEPTH)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]


def _whole(transferred: int) -> None:
    if transferred != BLOCK_BYTES:
        raise OSError(errno.ENOSPC, "short transfer")


def _small_files(folder: Path) -> None:
    """Create, write, sync and rename small files, each durable before the next: what a log or a marker costs."""
    data = os.urandom(SMALL_BYTES)
    for index in range(SMALL_FILES):
        path = folder / f"raw-small-{index}"
        path.with_suffix(".new").write_bytes(data)
        sync_file(path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        sync_file(folder)
    for index in range(SMALL_FILES):
        (folder / f"raw-small-{index}").unlink()


def both(folder: Path) -> pd.DataFrame:
    """Probe with fio and with our own prober, in turn, on one folder.

    Returns
    -------
    pandas.DataFrame
        Indexed by kind: ``fio_s`` and ``own_s`` (median seconds of ``rounds``), ``own_over_fio`` (speeds, without
        unit). Empty where fio isn't installed.
    """
    if not shutil.which("fio"):
        return pd.DataFrame(columns=["fio_s", "own_s", "own_over_fio", "rounds"])
    path, tools = folder / "raw.bin", {"fio_s": _fio, "own_s": Prober().run}
    seconds: dict[tuple[str, str], list[float]] = {}
    try:
        for _ in range(ROUNDS + 1):
            for (name, tool), kind in ((pair, kind) for pair in tools.items() for kind in _PROBES):
                seconds.setdefault((kind, name), []).append(partial(tool, kind)(path))
    finally:
        path.unlink(missing_ok=True)
    medians = {key: statistics.median(values[1:]) for key, values in seconds.items()}  # the first warms up
    table = pd.Series(medians).unstack()
    return table.assign(own_over_fio=table.fio_s / table.own_s, rounds=ROUNDS)
