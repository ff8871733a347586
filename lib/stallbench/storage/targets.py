"""Whether a place can serve, and the one folder on it that is ours."""

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from stallbench.config import EMULATED, ConfigError, Target
from stallbench.storage import emulated, remote
from stallbench.storage.medium import Storage, backing_file, describe
from stallbench.storage.ownership import MARKER, machine_id, marker_of, remove, sweep
from stallbench.storage.pagecache import drop_files, drop_metadata, drop_tree, files_below, sync_tree

MARGIN_BYTES = 64 << 20


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
        if target.mounted or target.remote:
            real = os.path.realpath(folder) if target.mounted else target.location.rstrip("/")
            if real in seen and not control:
                raise ConfigError(
                    f"target {target.name}={target.location!r} is the same place as {seen[real].name}; "
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
        place = "is too full" if target.mounted else f"needs room in {folder}, through which its bytes pass"
        raise ConfigError(
            f"target {target.name}={target.location!r} {place}: the checkpoints need "
            f"{(needed_bytes + MARGIN_BYTES) / 1e6:,.0f} MB and {free_bytes / 1e6:,.0f} MB are free; "
            "free some, or use fewer steps or a smaller model"
        )


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
        marker = {"study_id": study_id, "machine": machine_id(), "pid": os.getpid()}
        (folder / MARKER).write_text(json.dumps(marker))
        sync_tree(folder)  # else a device that fails leaves the folder, and a marker that says nothing
    except OSError as error:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise ConfigError(
            f"target {target.name}={target.location!r}: {error.strerror}; choose one that takes files"
        ) from None
    held = remote.claim(target, folder, marker) if target.remote else nullcontext()
    try:
        with held:
            yield folder
    finally:
        remove(folder)


def open_workspace(target: Target, owned: Path, trial_id: str) -> Workspace:
    """Make a trial's fresh folder inside the folder that ``claim`` made.

    Raises
    ------
    ConfigError
        If ``owned`` doesn't carry our marker.
    """
    if marker_of(owned) is None:
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
