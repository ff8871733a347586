"""The kernel's page cache: make bytes durable, make reads cold, and prove both."""

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such module outside POSIX
    fcntl = None


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the regular files below ``folder`` in sorted order; links are not followed.

    Raises
    ------
    OSError
        If a folder can't be read: a vanished mount must not pass for an empty one.
    """
    for parent, _, names in sorted(os.walk(folder, onerror=_raise)):
        yield from (Path(parent, name) for name in sorted(names) if not Path(parent, name).is_symlink())


def _raise(error: OSError) -> None:
    raise error


def tree_size(folder: Path) -> tuple[int, int]:
    """Give the bytes and the number of the files below ``folder``."""
    sizes = [path.stat().st_size for path in files_below(folder)]
    return sum(sizes), len(sizes)


def sync_file(path: Path) -> None:
    """Put one file or directory on stable storage.

    Raises
    ------
    OSError
        As ``fsync`` does, for example EIO, ENOSPC or EDQUOT.
    """
    folder = path.is_dir()
    # A descriptor that can't write is flushed nowhere on CIFS (cifs_strict_fsync).
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        if sys.platform == "darwin" and not folder:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # fsync leaves the drive's own cache: fsync(2) of macOS
        else:
            os.fsync(descriptor)
    except OSError as error:
        if not (folder and error.errno in {errno.EINVAL, errno.EBADF}):  # some file systems have none for a folder
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Put a folder on stable storage: its files, its directories, and its name in the parent."""
    for path in files_below(folder):
        sync_file(path)
    for parent, _, _ in os.walk(folder, topdown=False, onerror=_raise):
        sync_file(Path(parent))
    sync_file(folder.parent)


def reserve(descriptor: int, size_bytes: int) -> None:
    """Ask for a file's room at once, where the file system can: a full disk shows before the first byte.

    ``posix_fallocate`` would write to every block where it can't, as on NFS before 4.2 (its manual page, "Notes").

    Raises
    ------
    OSError
        If there is no room.
    """
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return
    if fallocate(descriptor, 0, ctypes.c_longlong(0), ctypes.c_longlong(size_bytes)):
        number = ctypes.get_errno()
        if number not in {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}:
            raise OSError(number, os.strerror(number))


def drop_tree(folder: Path) -> str:
    """Drop the data of all files below a folder from this machine's page cache, as ``drop_files`` does."""
    return drop_files(list(files_below(folder)))


def drop_files(paths: Sequence[Path]) -> str:
    """Drop the files' data from this machine's page cache and check that it is gone.

    Returns
    -------
    str
        ``cold`` if no page is left, ``warm`` if some stay (as on a memory file system), ``unknown`` where the
        system offers no way to drop or to check.
    """
    if not hasattr(os, "posix_fadvise"):
        return "unknown"
    for path in paths:
        sync_file(path)  # dirty pages can't be dropped
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    resident = [resident_pages(path) for path in paths]
    if None in resident:
        return "unknown"
    return "warm" if sum(resident) else "cold"


def drop_metadata() -> str:
    """Drop cached inodes and directory entries, which needs root on Linux: ``cold``, or ``unknown`` where refused.

    The page cache goes with them (3, not 2): ext4's inode tables and directories lie in that of the block device, and
    an inode that is read anew from there costs the device nothing.
    """
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return "unknown"
    return "cold"


def resident_pages(path: Path) -> int | None:
    """Count the file's pages that lie in the page cache, by mincore(2); None where the system lacks it."""
    size = path.stat().st_size
    if size == 0:
        return 0
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except AttributeError:
        return None
    pages = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    # A private mapping is writable, which from_buffer asks for; it is never written to.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=3) as mapping:
        anchor = ctypes.c_char.from_buffer(mapping)
        failed = mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), vector)
        del anchor
    return None if failed else sum(page & 1 for page in vector)
