"""A mounted ext4 file system whose power can be cut: what wasn't made durable by then is gone."""

import fcntl
import os
import socket
import struct
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import BinaryIO, Self

from stallbench.storage.mounting import TIMEOUT_S, lacking, run_program

PLUGIN = Path(__file__).with_name("volatile_disk.py")
PACKAGES = {  # Debian's, by program
    "fusermount3": "fuse3",
    "losetup": "mount",
    "mkfs.ext4": "e2fsprogs",
    "mount": "mount",
    "nbdfuse": "libnbd-bin",
    "nbdkit": "nbdkit",
    "umount": "mount",
}
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = struct.pack("I", 2)


def missing() -> str:
    """Say in one line why the power can't be cut here; empty when it can."""
    return lacking("cutting the power", PACKAGES)


class PowerCutDisk:
    """A context manager: an ext4 file system on a device that forgets, at a cut, every write that wasn't flushed.

    Parameters
    ----------
    size_bytes
        Size of the device.
    folder
        Where the durable image lies while the disk is in use. A tmpfs is fast; unflushed writes are held in memory.

    Attributes
    ----------
    mountpoint
        Root of the file system. It is another one after each restart, so that a process that outlived a cut can't
        write to the disk of the next life by path.
    """

    mountpoint: Path

    def __init__(self, size_bytes: int, folder: Path) -> None:
        self.size_bytes = size_bytes
        self.folder = folder.resolve()
        self._life: ExitStack | None = None

    def __enter__(self) -> Self:
        """Make the image and mount it."""
        with ExitStack() as undo:
            self._home = Path(undo.enter_context(TemporaryDirectory(prefix="powercut-", dir=self.folder)))
            self._image = self._home / "image"
            with self._image.open("wb") as image:
                image.truncate(self.size_bytes)
            # Small disks would get smaller blocks than the device's; lazy initialisation would write at any moment.
            options = ["-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0"]
            run_program("mkfs.ext4", "-q", "-F", *options, str(self._image))
            self.restart()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cut the power for good and remove the image."""
        with self._undo:
            if self._life:
                self.cut(None)

    def cut(self, seed: int | None) -> None:
        """Let the power fail now: the device forgets, and everything above it ends.

        Parameters
        ----------
        seed
            None drops every unflushed write. A number chooses, for each 4 KiB block, which of its unflushed versions
            the cut left on the disk, if any: the order of writes between two flushes isn't kept either.
        """
        if not self._life:
            raise RuntimeError("the power is cut already")
        with self._life:
            self._life = None
            answer = b""
            with suppress(OSError):
                self._control.sendall(b"\n" if seed is None else f"{seed}\n".encode())
                answer = self._control.recv(16)
            if not answer:
                raise RuntimeError(f"the device didn't answer to the cut: {self._log()}")

    def restart(self) -> None:
        """Start the device on what is durable, and mount it: ext4 replays its journal."""
        if self._life:
            raise RuntimeError("the power is still on")
        with ExitStack() as life:
            room = Path(life.enter_context(TemporaryDirectory(prefix="life-", dir=self._home)))
            device = self._start_device(life, room / "device")
            # Without direct I/O a second page cache, that of the file below, would lie under the file system.
            loop = run_program("losetup", "--find", "--show", "--direct-io=on", str(device))
            life.callback(run_program, "losetup", "--detach", loop)
            mountpoint = room / "mount"
            mountpoint.mkdir()
            run_program("mount", "-t", "ext4", loop, str(mountpoint))
            # Lazily: processes may still have files open there.
            life.callback(run_program, "umount", "--lazy", str(mountpoint))
            life.callback(_shut_down, mountpoint)
            self.mountpoint = mountpoint
            self._life = life.pop_all()

    def _start_device(self, life: ExitStack, folder: Path) -> Path:
        """Start nbdkit and nbdfuse with a socket between them, and wait for the file that is the device."""
        folder.mkdir()
        device = folder / self._home.name  # all that losetup still shows of it after the cut
        # It fails, harmlessly, where nbdfuse didn't get as far as mounting.
        life.callback(subprocess.run, ["umount", "--lazy", str(folder)], capture_output=True)
        self._control, control = socket.socketpair()
        life.callback(self._control.close)
        self._control.settimeout(TIMEOUT_S)
        server, client = socket.socketpair()
        plugin = [str(PLUGIN), f"file={self._image}", f"control={control.fileno()}"]
        with control, server, client, (self._home / "log").open("wb") as log:
            _start(life, ["nbdkit", "--single", "--log=stderr", "python", *plugin], server, control, log)
            nbdfuse = _start(life, ["nbdfuse", str(device), "--fd", str(client.fileno())], None, client, log)
        deadline = time.monotonic() + TIMEOUT_S
        while not device.exists():
            if nbdfuse.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the device didn't start: {self._log()}")
            time.sleep(0.01)
        return device

    def _log(self) -> str:
        return (self._home / "log").read_text(errors="replace").strip()


def _shut_down(mountpoint: Path) -> None:
    """Make the file system refuse everything at once, else buffered writes into files still open seem to succeed."""
    with suppress(OSError):  # it may have noticed the dead device and given up by itself
        root = os.open(mountpoint, os.O_RDONLY)
        try:
            fcntl.ioctl(root, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH)
        finally:
            os.close(root)


def _start(
    life: ExitStack, command: list[str], stream: socket.socket | None, inherited: socket.socket, log: BinaryIO
) -> subprocess.Popen:
    """Start a program that ends with this life; in a group of its own, so that Ctrl-C reaches only the caller."""
    process = subprocess.Popen(
        command,
        stdin=stream or subprocess.DEVNULL,
        stdout=stream or log,
        stderr=log,
        pass_fds=[inherited.fileno()],
        process_group=0,
    )
    life.callback(process.wait)
    life.callback(process.kill)
    return process
