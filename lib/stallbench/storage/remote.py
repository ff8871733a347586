"""Object stores and SFTP servers through fsspec: files go there from a local folder, and come back when they are read.

A store has no rename and no fsync of its own in fsspec, so a checkpoint's manifest is sent last, and what says that a
file is durable is the store's acknowledgement, or a server's fsync where it offers one.
"""

import errno
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stallbench.config import MANIFEST, ConfigError, Target
from stallbench.storage.ownership import MARKER, MARKER_LIMIT_BYTES, abandoned, parse_marker

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PROBE_BYTES = 64 << 20
SFTP = ("sftp", "ssh")
# A server that is gone must fail a save, not hang it.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 2}}},
}
_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "sftp": "paramiko", "ssh": "paramiko"}


def connect(target: Target) -> tuple["AbstractFileSystem", str]:
    """Open a target's file system, without any cache of listings; gives it and the target's path on it.

    Credentials are the driver's own affair: AWS_* and ~/.aws, the SSH agent and keys, fsspec's configuration.

    Raises
    ------
    ConfigError
        If the driver is missing (with the line that installs it), or the server can't be reached.
    """
    from fsspec.core import url_to_fs

    scheme = target.scheme
    # SFTP keeps no listings, and would hand the option on to its connection.
    options = {"timeout": 10} if scheme in SFTP else {"use_listings_cache": False} | _OPTIONS.get(scheme, {})
    try:
        return url_to_fs(target.location, skip_instance_cache=True, **options)
    except ImportError:
        driver = _DRIVERS.get(scheme, f"fsspec's driver for {scheme}://")
        raise ConfigError(
            f"target {target.name} has no driver for {scheme}:// installed; run: pip install {driver}"
        ) from None
    except Exception as error:  # each driver raises kinds of its own
        raise ConfigError(f"target {target.name} can't be reached: {_line(error)}") from None


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


class Store:
    """Our folder on a store, in front of a local folder that has the same files while they are needed.

    It takes an emulated device's place: ``write`` sends a file, ``read`` brings it. A file that was sent, or dropped,
    is hollow here: it keeps its name and size, and no byte, so that nothing but the store's can be read back.

    Parameters
    ----------
    fs
        As ``connect`` gives it.
    path
        Our folder on it.
    local
        The local folder that stands for it.
    """

    def __init__(self, fs: "AbstractFileSystem", path: str, local: Path) -> None:
        self.fs, self._path, self._local = fs, path, local
        self._hollow: set[Path] = set()
        self._sftp = "sftp" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))

    def key(self, path: Path) -> str:
        """Give the name that a local path has on the store."""
        return "/".join([self._path, *path.relative_to(self._local).parts])

    def write(self, folder: Path, paths: Sequence[Path]) -> float:
        """Send files and wait for their acknowledgement; a manifest goes last, once all others are there.

        Returns
        -------
        float
            Monotonic time at which they are durable; NaN where the server can't say.
        """
        self.make_folder(folder)
        durable = True
        for path in sorted(paths, key=lambda path: path.name == MANIFEST):
            if path not in self._hollow:
                self.make_folder(path.parent)
                self._put(path)
            durable &= self._sync(self.key(path))
            if path.name != MANIFEST:
                self._empty(path, path.stat().st_size)
        return time.monotonic() if durable else math.nan

    def make_folder(self, folder: Path) -> None:
        """Make a folder where the store has such; an object store would take it for a bucket."""
        if self._sftp:
            self.fs.makedirs(self.key(folder), exist_ok=True)

    def _sync(self, key: str) -> bool:
        """Put an acknowledged file on stable storage; gives whether it is known to be there.

        Object stores acknowledge only what is (Amazon S3 user guide, "Data durability"). SFTP has an extension,
        fsync@openssh.com (OpenSSH, PROTOCOL, 4.6), for which paramiko has no call.
        """
        if not self._sftp:
            return True
        from paramiko.sftp import CMD_EXTENDED

        with self.fs.ftp.open(key, "r+") as file:
            try:
                self.fs.ftp._request(CMD_EXTENDED, "fsync@openssh.com", file.handle)
            except OSError as error:
                if error.errno != errno.EACCES and "unsupported" not in str(error).lower():  # not offered, or forbidden
                    raise
                return False
        return True

    def read(self, paths: Sequence[Path]) -> None:
        """Bring those files that are hollow."""
        for path in paths:
            if path in self._hollow:
                self._get(path)
                self._hollow.discard(path)

    def _empty(self, path: Path, size_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size_bytes)
        self._hollow.add(path)

    def drop(self, folder: Path) -> dict[str, str]:
        """Drop all local bytes of a folder, in favour of what the store lists; says what is cold."""
        self.adopt(folder)
        self.read([path for path in self._hollow if path.name == MANIFEST and path.is_relative_to(folder)])
        return {"cache_data": "cold", "cache_metadata": "cold", "cache_server": "unknown"}

    def adopt(self, folder: Path) -> None:
        """Show files that another writer put on the store as hollow ones here."""
        for path, size_bytes in self.sizes(folder).items():
            self._empty(path, size_bytes)

    def sizes(self, folder: Path) -> dict[Path, int]:
        """List the files below a folder with their bytes, as the store has them now."""
        try:
            found = self.fs.find(self.key(folder), detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._path.rstrip("/")) + 1
        return {self._local / name[start:]: entry["size"] for name, entry in found.items() if entry["type"] == "file"}

    def complete(self, folder: Path) -> bool:
        """Whether the store holds a checkpoint's manifest and every file that it lists, in its size."""
        sizes = self.sizes(folder)
        if folder / MANIFEST not in sizes:
            return False
        try:
            files = json.loads(self.fs.cat_file(self.key(folder / MANIFEST)))["files"]
        except ValueError:  # cut short
            return False
        return all(sizes.get(folder / name) == size_bytes for name, size_bytes in files.items())

    def recover(self, parent: Path) -> None:
        """Remove checkpoints that a killed process left without all their files."""
        folders = {parent / path.relative_to(parent).parts[0] for path in self.sizes(parent)}
        for folder in sorted(folders):
            if folder.name.startswith("checkpoint-") and not self.complete(folder):
                self.forget(folder)

    def forget(self, folder: Path) -> None:
        """Delete a folder: a manifest first, so that half of it is never taken for a checkpoint, our marker last."""
        names = sorted(self.sizes(folder), key=lambda path: (path.name == MARKER, path.name != MANIFEST))
        self._hollow.difference_update(names)
        for path in names:
            self.fs.rm_file(self.key(path))
        if self._sftp and self.fs.exists(self.key(folder)):
            for inner, _, _ in sorted(self.fs.walk(self.key(folder)), reverse=True):
                self.fs.rmdir(inner)

    def transfers(self, folder: Path) -> Iterator[tuple[str, float, float, int]]:
        """Time one plain PUT and one GET of 64 MiB: kind, start and end on the monotonic clock, bytes."""
        path = folder / "raw.bin"
        self.make_folder(folder)
        path.write_bytes(os.urandom(PROBE_BYTES))
        try:
            for kind, move in (("raw_write", self._put), ("raw_read", self._get)):
                start_s = time.monotonic()
                move(path)
                if kind == "raw_write":
                    self._sync(self.key(path))
                yield kind, start_s, time.monotonic(), PROBE_BYTES
            self.fs.rm_file(self.key(path))
        finally:
            path.unlink()

    def _put(self, path: Path) -> None:
        self.fs.put_file(str(path), self.key(path))

    def _get(self, path: Path) -> None:
        self.fs.get_file(self.key(path), str(path))


@contextmanager
def claim(target: Target, local: Path, marker: dict[str, Any]) -> Iterator[None]:
    """Hold our folder on a store, marked; it, and those that killed runs left, are removed by the marker alone.

    Raises
    ------
    ConfigError
        If the store refuses the marker: no such bucket, no permission, no room.
    """
    fs, root = connect(target)
    root = root.rstrip("/")
    store = Store(fs, f"{root}/{local.name}", local)
    try:
        for other in _listed(fs, root):
            name = other.rstrip("/").rpartition("/")[2]
            found = _marker(fs, f"{root}/{name}")
            if found and (name == local.name or abandoned(found)):
                Store(fs, f"{root}/{name}", local).forget(local)
        store.make_folder(local)
        fs.pipe_file(store.key(local / MARKER), json.dumps(marker).encode())
    except Exception as error:  # each driver raises kinds of its own
        raise ConfigError(f"target {target.name} takes no files: {_line(error)}") from None
    try:
        yield
    finally:
        with suppress(Exception):  # a server that is gone: the next start removes it, by its marker
            store.forget(local)


def _listed(fs: "AbstractFileSystem", root: str) -> list[str]:
    try:
        return [name for name in fs.ls(root, detail=False) if "/stallbench-" in name]
    except FileNotFoundError:
        return []


def _marker(fs: "AbstractFileSystem", path: str) -> dict | None:
    try:
        content = fs.cat_file(f"{path}/{MARKER}", start=0, end=MARKER_LIMIT_BYTES + 1)
    except OSError:
        return None
    return parse_marker(content, path.rpartition("/")[2])
