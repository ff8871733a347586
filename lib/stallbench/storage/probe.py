"""The raw limits of a path: what its storage takes and gives back, so that no save is judged by its own writer."""

import errno
import json
import mmap
import os
import random
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from stallbench.spans import Timeline
from stallbench.storage.pagecache import reserve, sync_file
from stallbench.storage.targets import Workspace

SIZE_BYTES = 128 << 20
BLOCK_BYTES = 4 << 20
PAGE_BYTES = 4 << 10
RANDOM_READS = 64
SMALL_FILES = 16
LIMIT_S = 5.0  # a pattern starts no request later than this: a slow disk is probed with fewer bytes
CHUNKS = 8
CHUNK_BYTES = 8 << 20
CHUNKS_LIMIT_S = 4.0

_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM}
_NO_AIO = {errno.EAGAIN, errno.ENOSYS}  # the system's limit on asynchronous I/O is reached, or a sandbox forbids it


@dataclass(frozen=True)
class Pattern:
    """A way to use one file: a fresh one that an fsync ends, or pages anywhere in it, or all of it in order."""

    kind: str
    words: str
    writes: bool = False
    random: bool = False
    block_bytes: int = BLOCK_BYTES
    depth: int = 8
    direct: bool = True


# The random reads come before the sequential one, which would leave the file in a server's or a drive's memory.
PATTERNS = (
    Pattern("raw_write", "sequential write, O_DIRECT, 8 x 4 MiB in flight, fsync", writes=True),
    Pattern("raw_random", "random read, O_DIRECT, 1 x 4 KiB in flight", random=True, block_bytes=PAGE_BYTES, depth=1),
    Pattern("raw_read", "sequential read, O_DIRECT, 8 x 4 MiB in flight"),
    Pattern("raw_buffered", "sequential write, buffered, 4 MiB a call, fsync", writes=True, depth=1, direct=False),
)


class _NoFioError(Exception):
    """The installed fio can't do what is asked."""


class Measured(NamedTuple):
    """What one pattern moved, by which tool, and when on the monotonic clock."""

    tool: str
    size_bytes: int
    start_s: float
    end_s: float


def raw_limits(workspace: Workspace, timeline: Timeline) -> None:
    """Record what the path can do as spans; ``part`` says by which tool, ``fio`` where it is installed, or ``own``.

    ``raw_write`` (O_DIRECT, final fsync inside the time: the limit), ``raw_read`` (cold) and ``raw_buffered`` (page
    cache, then fsync) move 128 MiB of incompressible data. ``raw_random`` reads pages one by one, and ``raw_small``
    makes small files durable (write, fsync, rename, fsync of the folder): their ``files`` is the number of requests.
    A span of fio is as long as fio says, so that its start-up doesn't count. No pattern starts a request after
    ``LIMIT_S``; where the path has no O_DIRECT (macOS, some memory file systems), only the last two are recorded.
    Nothing is probed on an emulated device: its limit is what its profile states. On a URL one plain PUT and GET of
    64 MiB are ``raw_write`` and ``raw_read``, with the part ``fsspec``.

    Raises
    ------
    OSError
        If the path fails, for example ENOSPC.
    """
    if workspace.device is not None:
        return
    if workspace.store is not None:
        for kind, start_s, end_s, size_bytes in workspace.store.transfers(workspace.folder):
            span = timeline.begin(kind, part="fsspec", size_bytes=size_bytes, files=1)
            span.start_s, span.end_s = timeline.at(start_s), timeline.at(end_s)
        return
    workspace.require_present()  # fio would make a missing folder
    found = [(pattern.kind, pattern.random, measured) for pattern, measured in _run(workspace.folder, _best)]
    found.append(("raw_small", True, _small_files(workspace.folder)))
    for kind, counted, measured in found:
        files = measured.size_bytes // PAGE_BYTES if counted else 1
        span = timeline.begin(kind, part=measured.tool, size_bytes=measured.size_bytes, files=files)
        span.start_s, span.end_s = timeline.at(measured.start_s), timeline.at(measured.end_s)


def both(folder: Path, rounds: int = 7) -> list[dict[str, str | int | float]]:
    """Measure with fio and with our own prober, in turn, to see whether they agree.

    Returns
    -------
    list of dict
        A row a pattern, with medians of ``n`` measurements by each tool; ``ratio`` is own / fio.

    Raises
    ------
    FileNotFoundError
        If fio isn't installed.
    """
    rates: dict[tuple[Pattern, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        for measure in (_own, _fio) if number % 2 else (_fio, _own):
            for pattern, measured in _run(folder, measure):
                rates[pattern, measured.tool].append(measured.size_bytes / (measured.end_s - measured.start_s))
    rows = []
    for pattern in dict.fromkeys(pattern for pattern, _ in rates):
        row = {f"{tool}_bytes_per_s": median(rates[pattern, tool]) for tool in ("fio", "own")}
        row["ratio"] = row["own_bytes_per_s"] / row["fio_bytes_per_s"]
        rows.append({"kind": pattern.kind, "pattern": pattern.words, "n": rounds, **row})
    return rows


def _run(folder: Path, measure: Callable[[Path, Pattern, int], Measured]) -> list[tuple[Pattern, Measured]]:
    path = folder / "raw.bin"
    direct = hasattr(os, "O_DIRECT")
    size_bytes = SIZE_BYTES
    found = []
    try:
        for pattern in PATTERNS:
            if pattern.direct and not direct:
                continue
            if not pattern.direct:
                _warm_page_cache(path, size_bytes)
            try:
                measured = measure(path, pattern, size_bytes)
            except OSError as error:
                if not pattern.direct or error.errno not in _NO_DIRECT:
                    raise
                direct = False
                continue
            found.append((pattern, measured))
            size_bytes = found[0][1].size_bytes  # of the file, which a slow disk had no time for in full
    finally:
        path.unlink(missing_ok=True)
    return found


def _warm_page_cache(path: Path, size_bytes: int) -> None:
    # In a virtual machine the first use of a page can cost more than a disk. Nothing reaches the storage: the file is
    # emptied while it is open.
    block = os.urandom(BLOCK_BYTES)
    with path.open("wb", buffering=0) as file:
        for _ in range(0, size_bytes, BLOCK_BYTES):
            file.write(block)
        file.truncate(0)
    path.unlink()


def _best(path: Path, pattern: Pattern, size_bytes: int) -> Measured:
    # Where there is no O_DIRECT, on macOS, an fsync isn't enough either, and our own prober knows what is.
    if shutil.which("fio") and hasattr(os, "O_DIRECT"):
        with suppress(_NoFioError):
            return _fio(path, pattern, size_bytes)
    return _own(path, pattern, size_bytes)


def _fio(path: Path, pattern: Pattern, size_bytes: int) -> Measured:
    # Not posixaio where libaio is missing: glibc's has one request of a file in flight, whatever the depth. And by name
    # inside the folder, as a colon in a path would separate two files.
    engine = "libaio" if pattern.depth > 1 else "psync"
    mode = "write" if pattern.writes else "randread" if pattern.random else "read"
    command = ["fio", "--name=raw", "--output-format=json", f"--filename={path.name}", f"--ioengine={engine}"]
    command += [f"--rw={mode}", f"--bs={pattern.block_bytes}", f"--iodepth={pattern.depth}", f"--size={size_bytes}"]
    command += [f"--direct={pattern.direct:d}", f"--runtime={LIMIT_S * 1e3:.0f}ms", "--randrepeat=0", "--disk_util=0"]
    command += ["--end_fsync=1"] if pattern.writes else []
    command += [f"--io_size={RANDOM_READS * pattern.block_bytes}"] if pattern.random else []
    run = subprocess.run(command, cwd=path.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    end_s = time.monotonic()
    try:
        job = json.loads(run.stdout[run.stdout.index("{") :])["jobs"][0]  # an error message may stand before it
    except (ValueError, LookupError):
        raise _NoFioError from None
    if job["error"] in _NO_AIO:
        raise _NoFioError
    if job["error"]:
        raise OSError(job["error"], os.strerror(job["error"]))
    done = job[mode.removeprefix("rand")]
    duration_s = done["runtime"] / 1e3
    if pattern.random:  # a few milliseconds in all, too short for a runtime in whole ones
        duration_s = done["lat_ns"]["mean"] * done["total_ios"] / 1e9
    return Measured("fio", done["io_bytes"], end_s - duration_s, end_s)


def _own(path: Path, pattern: Pattern, size_bytes: int) -> Measured:
    buffers = [mmap.mmap(-1, pattern.block_bytes) for _ in range(pattern.depth)]  # page-aligned, as O_DIRECT demands
    for buffer in buffers:
        buffer[:] = os.urandom(pattern.block_bytes)  # touched before the clock runs
    blocks = range(0, size_bytes, pattern.block_bytes)
    offsets = iter(random.sample(blocks, RANDOM_READS) if pattern.random else blocks)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC if pattern.writes else os.O_RDONLY
    descriptor = os.open(path, flags | (os.O_DIRECT if pattern.direct else 0), 0o600)
    try:
        if pattern.writes:
            reserve(descriptor, size_bytes)  # as fio does
        start_s = time.monotonic()
        transfer = partial(_transfer, descriptor, pattern.writes, offsets, start_s + LIMIT_S)
        with ThreadPoolExecutor(pattern.depth) as pool:
            in_turn = map if pattern.depth == 1 else pool.map  # a thread's start would take as long as a few requests
            moved_bytes = sum(in_turn(transfer, buffers))
        if pattern.writes:
            sync_file(path)
        return Measured("own", moved_bytes, start_s, time.monotonic())
    finally:
        os.close(descriptor)


def _transfer(descriptor: int, writes: bool, offsets: Iterator[int], last_s: float, buffer: mmap.mmap) -> int:
    moved_bytes = 0
    for offset in offsets:
        if writes:
            # Another byte in each page, as fio scrambles its buffers: a store that deduplicates must keep every block.
            memoryview(buffer)[::PAGE_BYTES] = bytes([offset // len(buffer) % 256]) * (len(buffer) // PAGE_BYTES)
            count = os.pwrite(descriptor, buffer, offset)
        else:
            count = os.preadv(descriptor, [buffer], offset)
        if count != len(buffer):
            raise OSError(errno.ENOSPC if writes else errno.EIO, "short transfer")
        moved_bytes += count
        if time.monotonic() > last_s:
            break
    return moved_bytes


def _small_files(folder: Path) -> Measured:
    with TemporaryDirectory(prefix="raw-", dir=folder) as made:
        fresh = Path(made, "fresh")
        count = 0
        start_s = time.monotonic()
        while count < SMALL_FILES and time.monotonic() - start_s < LIMIT_S:
            fresh.write_bytes(os.urandom(PAGE_BYTES))
            sync_file(fresh)
            fresh.rename(fresh.with_name(str(count)))
            sync_file(fresh.parent)
            count += 1
        return Measured("own", count * PAGE_BYTES, start_s, time.monotonic())


def chunk_rates(folder: Path) -> list[float]:
    """Write up to eight chunks of 8 MiB one after the other, each past the page cache and put on stable storage.

    A device that lends speed (burst credits of a cloud's disk, a drive's fast region) may slow down on the way. At most
    64 MiB are written, no chunk is begun after ``CHUNKS_LIMIT_S``, and the file is removed.

    Returns
    -------
    list of float
        Rates of the chunks in bytes/s, in the order of writing.

    Raises
    ------
    OSError
        If the path fails, for example ENOSPC.
    """
    path = folder / "chunks.bin"
    buffer = mmap.mmap(-1, CHUNK_BYTES)
    rates = []
    try:
        descriptor = _open_direct(path)
        try:
            last_s = time.monotonic() + CHUNKS_LIMIT_S
            while len(rates) < CHUNKS and time.monotonic() < last_s:
                buffer[:] = os.urandom(CHUNK_BYTES)
                start_s = time.monotonic()
                if os.pwrite(descriptor, buffer, len(rates) * CHUNK_BYTES) != CHUNK_BYTES:
                    raise OSError(errno.ENOSPC, "short transfer")
                sync_file(path)
                rates.append(CHUNK_BYTES / (time.monotonic() - start_s))
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)
    return rates


def _open_direct(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return os.open(path, flags, 0o600)
