"""The raw limit of a path: O_DIRECT, a deep queue, incompressible data, so that no save is judged by its own writer."""

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from stallbench.spans import Timeline
from stallbench.targets import Workspace

BLOCK_BYTES = 4 << 20
BLOCKS = 32
THREADS = 4
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM}


def raw_limits(workspace: Workspace, timeline: Timeline) -> None:
    """Record how fast the path takes and gives back 128 MiB past the page cache: spans ``raw_write``, ``raw_read``.

    Four threads keep 4 MiB requests in flight on one fresh file; the write ends with an fsync. Where the file system
    has no O_DIRECT (macOS, some memory file systems) nothing is recorded, and the limit stays unknown. Nothing is
    probed on an emulated device either: its limit is what its profile states.

    Raises
    ------
    OSError
        If the path fails, for example ENOSPC.
    """
    if workspace.device is not None:
        return
    path = workspace.folder / "raw.bin"
    if not hasattr(os, "O_DIRECT"):
        return
    buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(THREADS)]  # page-aligned, as O_DIRECT demands
    for buffer in buffers:
        buffer[:] = os.urandom(BLOCK_BYTES)  # touched before the clock runs
    try:
        _timed(path, "raw_write", os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.pwrite, buffers, timeline)
        _timed(path, "raw_read", os.O_RDONLY, lambda fd, buffer, at: os.preadv(fd, [buffer], at), buffers, timeline)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
    finally:
        path.unlink(missing_ok=True)


def _timed(
    path: Path,
    kind: str,
    flags: int,
    transfer: Callable[[int, mmap.mmap, int], int],
    buffers: list[mmap.mmap],
    timeline: Timeline,
) -> None:
    descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    try:
        with timeline.span(kind, size_bytes=BLOCK_BYTES * BLOCKS, files=1):
            _in_parallel(lambda buffer, at: transfer(descriptor, buffer, at), buffers)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_parallel(transfer: Callable[[mmap.mmap, int], int], buffers: list[mmap.mmap]) -> None:
    errors: list[OSError] = []

    def work(first: int) -> None:
        for block in range(first, BLOCKS, THREADS):
            try:
                if transfer(buffers[first], block * BLOCK_BYTES) != BLOCK_BYTES:
                    raise OSError(errno.ENOSPC, "short transfer")
            except OSError as error:
                errors.append(error)
                return

    workers = [threading.Thread(target=work, args=[first]) for first in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
