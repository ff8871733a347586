"""A full or read-only disk, named as such, however the writer that met it put it; and the memory really free."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import psutil

_FULL = {errno.ENOSPC: "disk full", errno.EDQUOT: "quota used up"}


def chain(error: BaseException) -> Iterator[BaseException]:
    """Give an error and those that it came from."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        link = link.__cause__ or link.__context__


def full_disk(error: BaseException, needed_bytes: int, free_bytes: int) -> str | None:
    """Say that a write failed for lack of room, with what it needed and had; None if it failed for another reason.

    The writers of torch and safetensors lose the error's number (pytorch issues 76108 and 10577).
    """
    links = list(chain(error))
    numbers = [link.errno for link in links if isinstance(link, OSError)]
    text = " ".join(str(link) for link in links)
    full = next((words for number, words in _FULL.items() if number in numbers or os.strerror(number) in text), None)
    if full is None and free_bytes < needed_bytes and ("unexpected pos" in text or "PytorchStreamWriter" in text):
        full = _FULL[errno.ENOSPC]
    if full is None:
        return None
    return f"{full}: the checkpoints need {needed_bytes / 1e6:,.0f} MB, {free_bytes / 1e6:,.0f} MB are free"


def read_only(folder: Path) -> bool:
    """Whether a file system takes no files any more; statvfs(3) doesn't tell where ext4 gave up (since Linux 6.15)."""
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def free_memory_bytes() -> int:
    """Give the memory that can still be had: the machine's, or less where a control group (container, job) limits it.

    Linux, admin-guide/cgroup-v2 (memory.max, memory.current) and cgroup-v1/memory.
    """
    available = psutil.virtual_memory().available
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, int((root / limit).read_text()) - int((root / used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return max(0, available)
