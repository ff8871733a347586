"""A disk's mechanics: an nbdkit plugin that answers when spindles, cache and round trip would have let it.

It runs in the Python inside nbdkit, so it uses the standard library only. Parameters: `file`, the bytes in memory;
`control`, the path of a unix socket; `model`, a profile as JSON (null: no limits). The socket takes a JSON object a
line and answers with the counters; ``{"fault": NAME, "value": VALUE}`` turns a switch.
"""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator

import nbdkit

API_VERSION = 2
STRIPE_BYTES = 512 << 10  # mdadm's default chunk
QUEUE_DEPTH = 32  # commands that a drive sorts (NCQ, ATA8-ACS): a request this many times its size away is near
READ_AHEAD_BYTES = 2 << 20  # a drive goes on reading while nobody asks; about one track
settings: dict[str, str] = {}


class Spindle:
    """One drive: where its head stands, and when it has done all that was queued. Pure arithmetic."""

    def __init__(self, bytes_per_s: float, position_s: float, cache_drain_s: float) -> None:
        self.bytes_per_s, self.position_s, self.cache_drain_s = bytes_per_s, position_s, cache_drain_s
        self.head = -1
        self.free_at_s = 0.0
        self.reads_free_at_s = 0.0
        self.positions = 0

    def _in_place_s(self, offset: int, size_bytes: int) -> float:
        near = self.head >= 0 and abs(offset - self.head) <= QUEUE_DEPTH * size_bytes
        self.positions += not near
        return 0.0 if near else self.position_s

    def write(self, now_s: float, offset: int, size_bytes: int) -> float:
        """Queue a write; give when the cache acknowledges it: when all that isn't on the disk yet fits in it."""
        service_s = self._in_place_s(offset, size_bytes) + size_bytes / self.bytes_per_s
        self.free_at_s = max(now_s, self.free_at_s) + service_s
        self.head = offset + size_bytes
        return max(now_s, self.free_at_s - self.cache_drain_s)

    def flushed_s(self, stable_cache: bool) -> float:
        """Give when all that was queued is stable: on the disk, or in a cache that counts as stable."""
        return self.free_at_s - self.cache_drain_s * stable_cache

    def read(self, now_s: float, offset: int, size_bytes: int) -> float:
        """Queue a read, which overtakes what the write cache holds; give when it is done."""
        ready_s = max(self.reads_free_at_s, self.free_at_s - self.cache_drain_s)
        in_place_s = self._in_place_s(offset, size_bytes)
        if in_place_s:
            start_s = max(now_s, ready_s)
        else:
            start_s = max(ready_s, now_s - READ_AHEAD_BYTES / self.bytes_per_s)
        service_s = in_place_s + size_bytes / self.bytes_per_s
        self.reads_free_at_s = start_s + service_s
        self.free_at_s = max(self.free_at_s, start_s) + service_s
        self.head = offset + size_bytes
        return max(now_s, self.reads_free_at_s)


class Server:
    """The bytes, the spindles below them, and the switches."""

    def __init__(self, image: str, model: dict | None) -> None:
        self.image = os.open(image, os.O_RDWR)
        self.size_bytes = os.fstat(self.image).st_size
        self.lock = threading.Lock()
        self.round_trip_s = model["round_trip_s"] if model else 0.0
        self.stable_cache = bool(model and model["stable_cache"])
        self.spindles: list[Spindle] = []
        if model:
            drain_s = model["server_cache_bytes"] / (model["disk_bytes_per_s"] * model["spindles"])
            self.spindles = [
                Spindle(model["disk_bytes_per_s"], model["position_s"], drain_s) for _ in range(model["spindles"])
            ]
        self.failing: dict[str, bool] = {"write": False, "flush": False, "read": False}
        self.stalled_until_s = 0.0
        self.requests = {"write": 0, "flush": 0, "read": 0}
        self.moved_bytes = {"write": 0, "read": 0}

    def _pieces(self, offset: int, size_bytes: int) -> Iterator[tuple[Spindle, int, int]]:
        """Split a request into those of the spindles: (spindle, offset on it, bytes)."""
        count = len(self.spindles)
        if count == 1:
            yield self.spindles[0], offset, size_bytes
            return
        end = offset + size_bytes
        while offset < end:
            stripe, start = divmod(offset, STRIPE_BYTES)
            length = min(STRIPE_BYTES - start, end - offset)
            yield self.spindles[stripe % count], stripe // count * STRIPE_BYTES + start, length
            offset += length

    def serve(self, kind: str, offset: int, size_bytes: int) -> None:
        """Fail as the switches say, or return when the request is done."""
        while (left_s := self.stalled_until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.1))
        with self.lock:
            self.requests[kind] += 1
            if self.failing[kind]:
                nbdkit.set_error(errno.EIO)
                raise OSError(errno.EIO, f"the {kind} switch is on")
            now_s = done_s = time.monotonic()
            if kind == "flush":
                done_s = max([now_s, *(spindle.flushed_s(self.stable_cache) for spindle in self.spindles)])
            else:
                self.moved_bytes[kind] += size_bytes
                for spindle, place, length in self._pieces(offset, size_bytes) if self.spindles else ():
                    work = spindle.write if kind == "write" else spindle.read
                    done_s = max(done_s, work(now_s, place, length))
        wait_s = done_s + self.round_trip_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)

    def obey(self, order: dict) -> dict:
        """Turn the switch that an order names, if any; give the counters."""
        name, value = order.get("fault"), order.get("value")
        with self.lock:
            if name == "stall":
                self.stalled_until_s = time.monotonic() + value
            elif name == "restore":
                self.stalled_until_s = 0.0
                self.failing = dict.fromkeys(self.failing, False)
            elif name:
                self.failing[name] = True
            return {
                "requests": dict(self.requests),
                "bytes": dict(self.moved_bytes),
                "positions": sum(spindle.positions for spindle in self.spindles),
            }


def listen(server: Server, path: str) -> None:
    """Answer orders, one connection each."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        while True:
            caller, _ = door.accept()
            with caller:
                caller.settimeout(5)
                try:
                    answer = server.obey(json.loads(caller.makefile().readline()))
                except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                    answer = {"error": str(error)}
                try:
                    caller.sendall(json.dumps(answer).encode() + b"\n")
                except OSError:
                    continue  # the caller is gone


def config(key: str, value: str) -> None:
    """Take one parameter of the command line."""
    settings[key] = value


def after_fork() -> None:
    """Open the image and listen."""
    global server
    server = Server(settings["file"], json.loads(settings["model"]))
    threading.Thread(target=listen, args=(server, settings["control"]), daemon=True).start()


def thread_model() -> int:
    """Let requests be in flight side by side; the spindles queue them."""
    return nbdkit.THREAD_MODEL_PARALLEL


def open(readonly: bool) -> Server:
    """Connect a client."""
    return server


def get_size(server: Server) -> int:
    """Give the size of the image."""
    return server.size_bytes


def can_flush(server: Server) -> bool:
    """Tell the client that writes are volatile until it flushes."""
    return True


def can_fua(server: Server) -> int:
    """Let nbdkit make single writes durable by a flush."""
    return nbdkit.FUA_EMULATE


def can_multi_conn(server: Server) -> bool:
    """Every connection sees the same bytes and the same flush."""
    return True


def pread(server: Server, buffer: memoryview, offset: int, flags: int) -> None:
    """Read."""
    server.serve("read", offset, len(buffer))
    os.preadv(server.image, [buffer], offset)


def pwrite(server: Server, data: memoryview, offset: int, flags: int) -> None:
    """Write."""
    server.serve("write", offset, len(data))
    os.pwrite(server.image, data, offset)


def flush(server: Server, flags: int) -> None:
    """Wait until the spindles have written all."""
    server.serve("flush", 0, 0)
