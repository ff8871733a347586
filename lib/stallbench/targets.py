"""Whether a place can serve, and the one folder on it that is ours."""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from stallbench import emulated, remote
from stallbench.config import EMULATED, ConfigError, Target
from stallbench.pagecache import drop_files, drop_metadata, drop_tree, files_below, tree_size
from stallbench.storage import Storage, backing_file, describe

MARKER = "stallbench.json"
MARKER_LIMIT_BYTES = 4096  # a hundred are in use
MARGIN_BYTES = 64 << 20
UNMARKED_AFTER_S = 60.0  # between making a folder and marking it lie milliseconds
_NAME = re.compile(r"stallbench-[0-9a-f]{12}(-\d+)?")


@dataclass
class Workspace:
    """Our own folder on a target, with the emulated device in front of it where the target is emulated."""

    target: Target
    folder: Path
    storage: Storage
    device: emulated.Device | None = None
    store: remote.Store | None = None

    def __post_init__(self) -> None:
        """Remember on which file system the folder was made."""
        self._file_system = self._found()

    def _found(self) -> int | None:
        try:
            return self.folder.stat().st_dev
        except OSError:
            return None

    def require_present(self) -> None:
        """Refuse to go on where the target was unmounted: the path would then lead to some other disk.

        Raises
        ------
        OSError
            ENODEV, if our folder is gone or lies on another file system now.
        """
        if self._found() != self._file_system:
            raise OSError(errno.ENODEV, "the target is gone, or another file system lies at its path")

    def charge_write(self, folder: Path) -> float | None:
        """Charge the files below ``folder``, just written, to the emulated device, or send them to the store.

        Blocks until they are acknowledged.

        Returns
        -------
        float or None
            Monotonic time at which they are durable, NaN where that can't be known; None on a directory.
        """
        if self.store is not None:
            return self.store.write(folder, list(files_below(folder)))
        if self.device is None:
            return None
        written = [self.device.write(str(path), path.stat().st_size) for path in files_below(folder)]
        return max((one.durable_s for one in written), default=time.monotonic())

    def charge_read(self, paths: Sequence[Path]) -> None:
        """Charge a cold read of ``paths``, about to be read, to the emulated device, or bring them from the store."""
        if self.store is not None:
            self.store.read(paths)
        if self.device is not None:
            for path in paths:
                self.device.read(str(path), path.stat().st_size)

    @property
    def buffered(self) -> bool:
        """Whether files are written to memory first, and reach the target by ``charge_write``."""
        return self.device is not None or self.store is not None

    def drop(self, folder: Path) -> dict[str, str]:
        """Drop what can be dropped below ``folder``; say for each layer whether it is cold."""
        if self.store is not None:
            return self.store.drop(folder)
        if self.device is not None:  # it charges each first read as a cold one
            return {"cache_data": "cold", "cache_metadata": "cold", "cache_server": "cold"}
        states = {"cache_data": drop_tree(folder), "cache_metadata": drop_metadata(), "cache_server": "unknown"}
        if self.storage.medium == "memory":
            states["cache_server"] = "warm"
        elif beneath := backing_file(folder):
            states["cache_server"] = drop_files([beneath])
        return states

    def recover(self, parent: Path) -> None:
        """Remove partial checkpoints from a store; a directory has names for them (``commit.recover``)."""
        if self.store is not None:
            self.store.recover(parent)

    def forget(self, folder: Path) -> None:
        """Delete a folder from the store, as far as it answers; what lies on a directory is the caller's."""
        if self.store is not None:
            with suppress(Exception):  # each driver raises kinds of its own; the next start clears it
                self.store.forget(folder)


def directory(target: Target) -> Path:
    """Give the directory in which the target's bytes will lie, as an absolute path.

    Raises
    ------
    ConfigError
        If it is missing or not a directory.
    """
    if not target.mounted:  # its bytes pass through memory
        return emulated.default_folder()[0]
    path = Path(os.path.expandvars(target.location)).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"target {target.name}={target.location!r} is missing; make the directory or mount it first")
    if not path.is_dir():
        raise ConfigError(f"target {target.name}={target.location!r} is not a directory; name one")
    return path


def check(targets: Sequence[Target], needed_bytes: int, control: bool = False) -> list[str]:
    """Refuse what can't work before anything runs.

    Parameters
    ----------
    needed_bytes
        What the study will keep on each target at once.
    control
        Allow one directory under two names.

    Returns
    -------
    list of str
        Warnings, one line each.

    Raises
    ------
    ConfigError
        If a target is missing, no directory, not writable, too full, unknown, or named twice.
    """
    warnings: list[str] = []
    seen: dict[str, Target] = {}
    for target in targets:
        folder = directory(target)
        if target.emulated:
            warnings += _check_profile(target, folder)
        elif target.remote:
            remote.connect(target)
        elif target.mounted:
            real = os.path.realpath(folder)
            if real in seen and not control:
                raise ConfigError(
                    f"target {target.name}={target.location!r} is the same directory as {seen[real].name}; "
                    "give another one, or --control for an A/A study"
                )
            seen[real] = target
        _check_room(target, folder, needed_bytes)
    return warnings


def _check_profile(target: Target, folder: Path) -> list[str]:
    try:
        emulated.check_ceiling(emulated.parse_profile(target.location.removeprefix(EMULATED)), folder)
    except ValueError as error:
        raise ConfigError(f"target {target.name}={target.location!r} is refused: {error}") from None
    if emulated.default_folder()[1]:
        return []
    return [f"target {target.name} is emulated, and its bytes lie on a disk, as this machine has no /dev/shm"]


def _check_room(target: Target, folder: Path, needed_bytes: int) -> None:
    if not os.access(folder, os.W_OK | os.X_OK) or os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise ConfigError(f"target {target.name}={target.location!r} is not writable; choose one that you may write to")
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes + MARGIN_BYTES > free_bytes:
        raise ConfigError(
            f"target {target.name}={target.location!r} is too full: the checkpoints need "
            f"{(needed_bytes + MARGIN_BYTES) / 1e6:,.0f} MB and {free_bytes / 1e6:,.0f} MB are free; "
            "free some, or use fewer steps or a smaller model"
        )


def _machine() -> str:
    """Tell this machine, and this container on it, from others: a process number means something only within one."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()}{uuid.getnode()}{namespace}".encode()).hexdigest()[:16]


def _owned(folder: Path) -> dict | None:
    """Read the marker of a folder of ours; None for anything else, as a link or a large file."""
    try:
        if folder.is_symlink() or not folder.is_dir():
            return None
        marker = json.loads(_small_file(folder / MARKER))
    except (OSError, ValueError, RecursionError):
        return None
    return marker if isinstance(marker, dict) and folder.name == f"stallbench-{marker.get('study_id')}" else None


def _small_file(path: Path) -> bytes:
    # A stranger's marker may be a link, a pipe that would block for ever, or anything of any size.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MARKER_LIMIT_BYTES:
            raise ValueError("no marker of ours")
        return os.read(descriptor, MARKER_LIMIT_BYTES)
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
    marker = _owned(folder)
    if marker is None:
        return "unmarked" if _is_unmarked(folder) else None
    if marker.get("machine") != _machine():
        return "elsewhere"
    pid = marker.get("pid")
    # A number that makes no sense names nobody who could have ended.
    return "gone" if type(pid) is int and 0 < pid < 1 << 31 and not psutil.pid_exists(pid) else "running"


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


@contextmanager
def claim(target: Target, study_id: str) -> Iterator[Path]:
    """Make and mark our folder on the target, and remove it (and nothing else) at the end.

    Folders that earlier runs on this machine left behind when they were killed are removed first: they carry the
    marker, and the process that it names is gone. (No file lock: on NFS one may hang, on others there is none.)

    Raises
    ------
    ConfigError
        If the folder can't be made.
    """
    root = directory(target)
    sweep(root)
    folder = root / f"stallbench-{study_id}"
    remove(folder)  # of an earlier run of this very study, whose process can't be told to be gone
    try:
        folder.mkdir()
        marker = {"study_id": study_id, "machine": _machine(), "pid": os.getpid()}
        (folder / MARKER).write_text(json.dumps(marker))
    except OSError as error:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise ConfigError(
            f"target {target.name}={target.location!r}: {error.strerror}; choose one that takes files"
        ) from None
    held = remote.claim(target, folder, marker, _abandoned) if target.remote else nullcontext()
    try:
        with held:
            yield folder
    finally:
        remove(folder)


def _abandoned(marker: dict) -> bool:
    return marker.get("machine") == _machine() and not psutil.pid_exists(marker["pid"])


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
    if _owned(folder) is None:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def open_workspace(target: Target, owned: Path, trial_id: str) -> Workspace:
    """Make a trial's fresh folder inside the folder that ``claim`` made.

    Raises
    ------
    ConfigError
        If ``owned`` doesn't carry our marker.
    """
    if _owned(owned) is None:
        raise ConfigError(f"target {target.name}: {owned.name} carries no marker of this study; start the study again")
    folder = owned / trial_id
    folder.mkdir()
    if target.remote:
        fs, root = remote.connect(target)
        store = remote.Store(fs, f"{root.rstrip('/')}/{owned.name}", owned)
        return Workspace(target, folder, _remote_storage(target), store=store)
    if not target.emulated:
        return Workspace(target, folder, describe(folder))
    profile = emulated.parse_profile(target.location.removeprefix(EMULATED))
    device = emulated.Device(profile, owned / "queue")
    return Workspace(target, folder, Storage(f"emulated {target.location.removeprefix(EMULATED)}", "emulated"), device)


def _remote_storage(target: Target) -> Storage:
    return Storage(f"{target.scheme}: a server reached through fsspec, medium unknown", "network", "fsspec")


def storage_of(target: Target) -> dict:
    """Say what a target is, as plain values for a results file."""
    if target.emulated:
        text = target.location.removeprefix(EMULATED)
        profile = emulated.parse_profile(text).model_dump()
        return {**asdict(Storage(f"emulated {text}", "emulated")), "options": [], "profile": profile}
    if target.lab:
        words = f"emulated on real kernel I/O: {target.location}"
        return {**asdict(Storage(words, "emulated")), "options": []}
    storage = _remote_storage(target) if target.remote else describe(directory(target))
    return {**asdict(storage), "options": list(storage.options)}  # as JSON gives it back
