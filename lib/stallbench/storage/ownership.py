"""Whose a folder on a target is: ours carry a marker, and only what carries it is ever removed."""

import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import psutil

from stallbench.storage.pagecache import tree_size

MARKER = "stallbench.json"
MARKER_LIMIT_BYTES = 4096  # a hundred are in use
UNMARKED_AFTER_S = 60.0  # between making a folder and marking it lie milliseconds
_NAME = re.compile(r"stallbench-[0-9a-f]{12}(-\d+)?")


def machine_id() -> str:
    """Tell this machine, and this container on it, from others: a process number means something only within one."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()}{uuid.getnode()}{namespace}".encode()).hexdigest()[:16]


def marker_of(folder: Path) -> dict | None:
    """Read the marker of a folder of ours; None for anything else, as a link or a large file."""
    try:
        if folder.is_symlink() or not folder.is_dir():
            return None
        return parse_marker(_small_file(folder / MARKER), folder.name)
    except OSError:
        return None


def parse_marker(content: bytes, name: str) -> dict | None:
    """Give what a marker says, wherever it was read; None unless it is that of the folder ``name``."""
    if len(content) > MARKER_LIMIT_BYTES:
        return None
    try:
        marker = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return marker if isinstance(marker, dict) and name == f"stallbench-{marker.get('study_id')}" else None


def abandoned(marker: dict) -> bool:
    """Whether a marker names a process of this machine that has ended."""
    pid = marker.get("pid")
    # A number that makes no sense names nobody who could have ended.
    sensible = type(pid) is int and 0 < pid < 1 << 31
    return marker.get("machine") == machine_id() and sensible and not psutil.pid_exists(pid)


def _small_file(path: Path) -> bytes:
    # A stranger's marker may be a link, a pipe that would block for ever, or anything of any size.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        return os.read(descriptor, MARKER_LIMIT_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(descriptor)


class LeftOver(NamedTuple):
    """A folder of ours that lies on a target.

    ``state`` is ``gone`` (its owner ran on this machine and has ended), ``unmarked`` (empty, of an owner that was
    killed before it wrote the marker), ``running`` (a process of the owner's number lives) or ``elsewhere`` (another
    machine or container made it: whether its owner lives can't be told). ``size_bytes`` is None where it can't be read.
    """

    folder: Path
    state: str
    age_s: float
    size_bytes: int | None

    @property
    def removable(self) -> bool:
        """Whether nobody can be using it."""
        return self.state in {"gone", "unmarked"}


def left_overs(root: Path) -> list[LeftOver]:
    """List our folders in ``root``; what carries no valid marker is not listed, but for empty folders of our name."""
    found = []
    for folder in sorted(root.glob("stallbench-*")):
        state = _state(folder)
        if state:
            try:
                age_s, size_bytes = time.time() - folder.lstat().st_mtime, tree_size(folder)[0]
            except OSError:  # being removed, or not ours to read
                age_s, size_bytes = 0.0, None
            found.append(LeftOver(folder, state, max(0.0, age_s), size_bytes))
    return found


def _state(folder: Path) -> str | None:
    marker = marker_of(folder)
    if marker is None:
        return "unmarked" if _is_unmarked(folder) else None
    if marker.get("machine") != machine_id():
        return "elsewhere"
    return "gone" if abandoned(marker) else "running"


def _is_unmarked(folder: Path) -> bool:
    try:
        found = folder.lstat()
        old = time.time() - found.st_mtime > UNMARKED_AFTER_S
        return bool(_NAME.fullmatch(folder.name)) and stat.S_ISDIR(found.st_mode) and old and not os.listdir(folder)
    except OSError:
        return False


def clean(folder: Path, include_foreign: bool = False) -> bool:
    """Remove one of ``left_overs`` if its owner is gone, by what is found now.

    Parameters
    ----------
    include_foreign
        Remove what another machine made too: the caller knows that nothing runs there.

    Returns
    -------
    bool
        Whether it was removed. A running study's folder never is.
    """
    state = _state(folder)
    if state == "unmarked":
        try:
            folder.rmdir()  # never recursively: it fails if anything came into it
        except OSError:
            return False
        return True
    return (state == "gone" or (state == "elsewhere" and include_foreign)) and remove(folder)


def sweep(root: Path) -> None:
    """Remove the folders that killed runs of this machine left in ``root``."""
    for folder in sorted(root.glob("stallbench-*")):
        clean(folder)


def remove(folder: Path) -> bool:
    """Remove a folder that carries our marker; links in it are removed, never followed.

    Returns
    -------
    bool
        Whether it is gone; a clean-up that fails (an NFS client's ``.nfs*`` files) is left to the next start.
    """
    if marker_of(folder) is None:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
