"""A disk with a volatile cache: an nbdkit plugin that holds every write in memory until a flush makes it durable.

It runs in the Python inside nbdkit, so it uses the standard library only. Parameters: `file`, the durable image, and
`control`, the number of an inherited socket. What arrives there cuts the power: a line with a seed, an empty line, or
the end of the stream when the other side has died.
"""

import errno
import os
import random
import socket
import threading
from collections.abc import Iterable, Iterator

import nbdkit

API_VERSION = 2
BLOCK_BYTES = 4096
ZEROS = bytes(BLOCK_BYTES)
settings: dict[str, str] = {}


def pieces(count: int, offset: int) -> Iterator[tuple[int, int, int]]:
    """Split a request at block borders into (block, first byte in the block, length)."""
    end = offset + count
    while offset < end:
        block, start = divmod(offset, BLOCK_BYTES)
        length = min(BLOCK_BYTES - start, end - offset)
        yield block, start, length
        offset += length


class Disk:
    """The durable image, and above it what each block has held since it was last made durable."""

    def __init__(self, image: str) -> None:
        self.image = os.open(image, os.O_RDWR)
        self.size_bytes = os.fstat(self.image).st_size // BLOCK_BYTES * BLOCK_BYTES
        self.pending: dict[int, list[bytes]] = {}  # oldest first: a cut may leave any of them
        self.powered = True
        self.lock = threading.Lock()

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the newest bytes."""
        with self.lock:
            self._need_power()
            position = 0
            for block, start, length in pieces(len(buffer), offset):
                buffer[position : position + length] = self._newest(block)[start : start + length]
                position += length

    def write(self, data: memoryview | None, count: int, offset: int, flags: int) -> None:
        """Hold the data, or zeros for None; with FUA make exactly these blocks durable."""
        with self.lock:
            self._need_power()
            position = 0
            for block, start, length in pieces(count, offset):
                new = ZEROS[:length] if data is None else bytes(data[position : position + length])
                old = self._newest(block)
                self.pending.setdefault(block, []).append(old[:start] + new + old[start + length :])
                position += length
            if flags & nbdkit.FLAG_FUA:
                self._persist(block for block, _, _ in pieces(count, offset))

    def flush(self) -> None:
        """Make every write so far durable."""
        with self.lock:
            self._need_power()
            self._persist(list(self.pending))

    def cut(self, seed: int | None) -> None:
        """Forget what isn't durable and refuse all that follows; with a seed, random blocks had still made it."""
        with self.lock:
            self.powered = False
            dice = random.Random(seed)
            for block, versions in sorted(self.pending.items()) if seed is not None else ():
                survivor = dice.choice([None, *versions])
                if survivor is not None:
                    os.pwrite(self.image, survivor, block * BLOCK_BYTES)
            self.pending.clear()

    def _need_power(self) -> None:
        if not self.powered:
            nbdkit.set_error(errno.EIO)
            raise OSError(errno.EIO, "the power is cut")

    def _newest(self, block: int) -> bytes:
        versions = self.pending.get(block)
        return versions[-1] if versions else os.pread(self.image, BLOCK_BYTES, block * BLOCK_BYTES)

    def _persist(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            os.pwrite(self.image, self.pending.pop(block)[-1], block * BLOCK_BYTES)


def obey(disk: Disk, control: socket.socket) -> None:
    """Cut the power when told to, and say when it is done."""
    seed = control.makefile().readline().strip()
    disk.cut(int(seed) if seed else None)
    control.sendall(b"cut\n")


def config(key: str, value: str) -> None:
    """Take one parameter of the command line."""
    settings[key] = value


def after_fork() -> None:
    """Open the image and listen for the cut."""
    global disk
    disk = Disk(settings["file"])
    control = socket.socket(fileno=int(settings["control"]))
    threading.Thread(target=obey, args=(disk, control), daemon=True).start()


def open(readonly: bool) -> Disk:
    """Connect a client."""
    return disk


def get_size(disk: Disk) -> int:
    """Whole blocks only."""
    return disk.size_bytes


def can_flush(disk: Disk) -> bool:
    """Tell the client that writes are volatile until it flushes."""
    return True


def can_fua(disk: Disk) -> int:
    """Single writes can be made durable."""
    return nbdkit.FUA_NATIVE


def pread(disk: Disk, buffer: memoryview, offset: int, flags: int) -> None:
    """Read."""
    disk.read(buffer, offset)


def pwrite(disk: Disk, data: memoryview, offset: int, flags: int) -> None:
    """Write."""
    disk.write(data, len(data), offset, flags)


def zero(disk: Disk, count: int, offset: int, flags: int) -> None:
    """Write zeros."""
    disk.write(None, count, offset, flags)


def trim(disk: Disk, count: int, offset: int, flags: int) -> None:
    """Discard: the blocks read as zeros, and the power cut can undo that as it can undo a write."""
    disk.write(None, count, offset, flags)


def flush(disk: Disk, flags: int) -> None:
    """Make all writes durable."""
    disk.flush()
