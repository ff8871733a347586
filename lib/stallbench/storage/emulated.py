"""An in-process *emulated* storage device: charges the time that a real one would have taken.

The bytes lie in memory (tmpfs). Hugging Face's writers are C++ and Rust and can't be hooked, so a caller charges each
file *after* it was written or *before* it is read; the real time of the write to memory comes on top. All threads and
processes of a machine that name the same state file share one first-in-first-out queue, in which the chunks of
concurrent files alternate.

Where server memory ends and disk begins: a read overtakes what the write-back cache still holds, as Linux lets it, but
no write that is yet to be acknowledged; nothing is read from server memory (``cache_server = cold``).
"""

import fcntl
import os
import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# Linux's flusher writes this much of one file before it turns to the next (MIN_WRITEBACK_PAGES, fs/fs-writeback.c), so
# this is how often two writers pay a position; and 21 ms (at 200 MB/s) is long against the error of a sleep.
CHUNK_BYTES = 4 << 20

_PROBE_BYTES = 64 << 20
_PROBE_ROUNDS = 3
_SPIN_S = 2e-4  # measured: time.sleep() wakes 0.07 to 0.15 ms late, a tenth of a small file's four round trips
_STALE_AFTER_S = 86_400.0  # a queue of more than a day is of an earlier boot, or nonsense
_RECORD_BYTES = 512

_Times = TypeVar("_Times")
_AnyProfile = TypeVar("_AnyProfile", bound="Profile")


class Profile(BaseModel):
    """What an emulated device can do. A value out of range, not finite, or for an unknown field raises ValidationError.

    Parameters
    ----------
    disk_bytes_per_s, link_bytes_per_s
        Transfer rates of the server's disk and of the network link.
    position_s
        Seek and half a turn, paid when the disk turns to another stream.
    round_trip_s, round_trips_per_file
        Latency that each file costs its actor without occupying link or disk.
    commit_on_close
        NFS close-to-open: close() returns only after the server acknowledged all bytes. Without it a write returns at
        once (the client's page cache, here without limit, took the file).
    server_cache_bytes
        Write-back cache in the server's memory: absorbs and acknowledges bursts, drains at the disk's rate. 0: none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    disk_bytes_per_s: float = Field(gt=0)
    position_s: float = Field(ge=0)
    link_bytes_per_s: float = Field(gt=0)
    round_trip_s: float = Field(ge=0)
    round_trips_per_file: int = Field(ge=0)
    commit_on_close: bool
    server_cache_bytes: float = Field(ge=0)

    @property
    def sustained_bytes_per_s(self) -> float:
        """Bytes per second once no cache absorbs any more: the slower of link and disk."""
        return min(self.link_bytes_per_s, self.disk_bytes_per_s)

    @property
    def cache_drain_s(self) -> float:
        """Seconds that the disk takes to drain a full server cache."""
        return self.server_cache_bytes / self.disk_bytes_per_s


# Seek about 8 ms (datasheets), half a turn 4.17 ms (geometry of 7200 rpm).
POSITION_S = 8e-3 + 0.5 * 60 / 7200
# An MTU of 1500 bytes holds 1448 of data (less IPv4 20, TCP 20, timestamps 12) and takes 1538 on the wire (Ethernet
# header and checksum 18, preamble 8, gap 12: IEEE 802.3).
TCP_SHARE = 1448 / 1538
_NAS_1GBE = Profile(
    disk_bytes_per_s=200e6,  # low end of 200 to 285 MB/s on outer tracks, 7200 rpm: vendors' datasheets (DESIGN 14)
    position_s=POSITION_S,
    link_bytes_per_s=125e6 * TCP_SHARE,  # 1 Gbit/s: IEEE 802.3
    round_trip_s=0.2e-3,  # a switched LAN: our assumption, ping tells yours
    round_trips_per_file=4,  # OPEN, WRITE, COMMIT, CLOSE: RFC 7530 (NFSv4)
    commit_on_close=True,  # RFC 7530 section 10.3.1
    server_cache_bytes=0.20 * 2e9,  # an entry NAS has 2 GB; Linux lets vm.dirty_ratio, 20 % of it, be dirty
)
PROFILES: dict[str, Profile] = {
    "hdd-nas-1gbe": _NAS_1GBE,
    "hdd-nas-10gbe": _NAS_1GBE.model_copy(update={"link_bytes_per_s": 1250e6 * TCP_SHARE}),  # 10 Gbit/s: IEEE 802.3
}


def parse_profile(text: str, profiles: Mapping[str, _AnyProfile] = PROFILES) -> _AnyProfile:
    """Return the one of ``profiles`` that ``name`` or ``name?field=value&field=value`` asks for.

    Raises
    ------
    ValueError
        One line that names the unknown profile, the unknown or repeated field, or the refused value.
    """
    name, _, query = text.partition("?")
    if name not in profiles:
        raise ValueError(f"unknown emulated profile {name!r}; there are: {', '.join(profiles)}")
    fields = type(profiles[name]).model_fields
    changes: dict[str, str] = {}
    for field, value in parse_qsl(query.replace("+", "%2B"), keep_blank_values=True):  # else 1e+8 is read as "1e 8"
        if field not in fields:
            known = ", ".join(fields)
            raise ValueError(f"unknown field {field!r} in emulated profile {text!r}; there are: {known}")
        if field in changes:
            raise ValueError(f"field {field!r} is given twice in emulated profile {text!r}")
        changes[field] = value
    try:
        return type(profiles[name]).model_validate(profiles[name].model_dump() | changes)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"emulated profile: {first['loc'][0]} = {first['input']!r}: {first['msg']}") from None


class Queue(BaseModel):
    """When each part has done all that was queued (monotonic seconds), and the stream where the disk stands.

    The link is full duplex. `disk_free_at_s` includes what the server's cache holds, `reads_free_at_s` the reads alone.
    The state file holds it as a JSON object, padded with blanks to a fixed length, and when it was written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    uplink_free_at_s: float = 0.0
    downlink_free_at_s: float = 0.0
    disk_free_at_s: float = 0.0
    reads_free_at_s: float = 0.0
    last_stream: int | None = None
    written_at_s: float = 0.0


class Written(NamedTuple):
    """Times of one write on the monotonic clock, in seconds."""

    start_s: float
    acknowledged_s: float
    durable_s: float


def charge_write(profile: Profile, queue: Queue, issue_s: float, stream: int, size_bytes: int) -> tuple[Queue, Written]:
    """Queue one chunk that goes over the link to the disk; pure arithmetic.

    It is acknowledged when it has arrived and the server's cache holds all that isn't on the disk yet.
    """
    link_start_s = max(issue_s, queue.uplink_free_at_s)
    link_done_s = link_start_s + size_bytes / profile.link_bytes_per_s
    position_s = 0.0 if stream == queue.last_stream else profile.position_s
    disk_start_s = max(link_start_s, queue.disk_free_at_s)
    disk_done_s = max(disk_start_s + position_s + size_bytes / profile.disk_bytes_per_s, link_done_s)
    acknowledged_s = max(link_done_s, disk_done_s - profile.cache_drain_s)
    changes = {"uplink_free_at_s": link_done_s, "disk_free_at_s": disk_done_s, "last_stream": stream}
    return queue.model_copy(update=changes), Written(issue_s, acknowledged_s, disk_done_s)


def charge_read(profile: Profile, queue: Queue, issue_s: float, stream: int, size_bytes: int) -> tuple[Queue, float]:
    """Queue one chunk that goes from the disk over the link, and return its time of arrival; pure arithmetic.

    It overtakes acknowledged writes in the server's cache, whose `durable_s` was told already and so ends up too early.
    """
    disk_start_s = max(issue_s, queue.reads_free_at_s, queue.disk_free_at_s - profile.cache_drain_s)
    in_place_s = disk_start_s + (0.0 if stream == queue.last_stream else profile.position_s)
    disk_done_s = in_place_s + size_bytes / profile.disk_bytes_per_s
    link_start_s = max(in_place_s, queue.downlink_free_at_s)
    arrived_s = max(link_start_s + size_bytes / profile.link_bytes_per_s, disk_done_s)
    drained_s = max(queue.disk_free_at_s, disk_start_s) + disk_done_s - disk_start_s
    changes = {"downlink_free_at_s": arrived_s, "disk_free_at_s": drained_s, "reads_free_at_s": disk_done_s}
    return queue.model_copy(update=changes | {"last_stream": stream}), arrived_s


class Device:
    """One emulated device, shared by all threads and processes that name the same state file (and profile).

    Parameters
    ----------
    profile
        What the device can do.
    state_path
        Small file on a local file system that holds the queue. It is made if missing; a damaged one, or one of an
        earlier boot, counts as an idle device and is overwritten.

    Notes
    -----
    A stream is what lies contiguously on the disk: in general one file, so name it by the file's path. An actor's next
    chunk is issued at the time at which the model acknowledged the last, not when the sleep woke: errors of sleeping
    don't add up. It can't overlap what others queued meanwhile, as the queue's own times hold it back.
    """

    def __init__(self, profile: Profile, state_path: str | os.PathLike[str]) -> None:
        self.profile = profile
        self.state_path = Path(state_path)
        self._round_trips_s = profile.round_trips_per_file * profile.round_trip_s
        with _locked(self.state_path):  # a file that can't be made is to fail here, not in the middle of a save
            pass

    def write(self, stream: str, size_bytes: int) -> Written:
        """Charge a file; block until the server acknowledged it, or not at all without ``commit_on_close``.

        It never waits for ``durable_s``: the caller does, with `wait_until`. Without ``commit_on_close`` that time has
        to be final before later actors come, so a file is queued in one piece: actors alternate file by file.
        """
        paced = self.profile.commit_on_close
        limit_bytes = CHUNK_BYTES if paced else max(size_bytes, 1)
        start_s = time.monotonic()
        acknowledged_s = durable_s = start_s + self._round_trips_s
        if paced:  # here, so that link and disk stay free for others during the round trips
            wait_until(acknowledged_s)
        for offset in range(0, size_bytes, limit_bytes):
            chunk_bytes = min(limit_bytes, size_bytes - offset)
            _, acknowledged_s, durable_s = self._submit(charge_write, acknowledged_s, stream, chunk_bytes)
            if paced:
                wait_until(acknowledged_s)
        return Written(start_s, acknowledged_s, durable_s)

    def read(self, stream: str, size_bytes: int) -> float:
        """Charge a file that is about to be read from the disk; block until it arrived; return the seconds waited."""
        start_s = time.monotonic()
        arrived_s = start_s + self._round_trips_s
        wait_until(arrived_s)
        for offset in range(0, size_bytes, CHUNK_BYTES):
            arrived_s = self._submit(charge_read, arrived_s, stream, min(CHUNK_BYTES, size_bytes - offset))
            wait_until(arrived_s)
        return time.monotonic() - start_s

    def _submit(
        self, charge: Callable[..., tuple[Queue, _Times]], issue_s: float, stream: str, size_bytes: int
    ) -> _Times:
        """Book one chunk in the shared queue."""
        with _locked(self.state_path) as state_fd:
            now_s = time.monotonic()  # taken under the lock: a state from later than now is of an earlier boot
            queue = _load(state_fd, now_s)
            queue, times = charge(self.profile, queue, issue_s, zlib.crc32(os.fsencode(stream)), size_bytes)
            record = queue.model_copy(update={"written_at_s": now_s}).model_dump_json()
            os.pwrite(state_fd, record.encode().ljust(_RECORD_BYTES), 0)
            os.ftruncate(state_fd, _RECORD_BYTES)
        return times


def wait_until(time_s: float) -> None:
    """Return at a time of the monotonic clock (seconds), at once if it is past; spins for the last 0.2 ms."""
    sleep_s = time_s - _SPIN_S - time.monotonic()
    if sleep_s > 0:
        time.sleep(sleep_s)
    while time.monotonic() < time_s:
        pass


def wait_for(seconds: float) -> None:
    """Wait as ``wait_until`` does: an emulated accelerator's step."""
    wait_until(time.monotonic() + seconds)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold the state file alone; opened anew by each call, so that threads exclude each other too."""
    state_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(state_fd, fcntl.LOCK_EX)  # the kernel releases it when its holder is killed
        yield state_fd
    finally:
        fcntl.flock(state_fd, fcntl.LOCK_UN)  # closing alone isn't enough: a child forked meanwhile has a copy
        os.close(state_fd)


def _load(state_fd: int, now_s: float) -> Queue:
    """Read the queue: an idle one if the file is new, damaged (with a warning) or of an earlier boot."""
    text = os.pread(state_fd, _RECORD_BYTES + 1, 0)
    if not text:
        return Queue()
    try:
        queue = Queue.model_validate_json(text)
    except ValidationError:
        warnings.warn("the emulated device's state file is damaged: its queue is taken as idle", stacklevel=4)
        return Queue()
    free_at_s = max(queue.uplink_free_at_s, queue.downlink_free_at_s, queue.disk_free_at_s, queue.reads_free_at_s)
    stale = queue.written_at_s > now_s or free_at_s > now_s + _STALE_AFTER_S
    return Queue() if stale else queue


def probe_ceiling(folder: str | os.PathLike[str]) -> float:
    """Return the bytes/s of plain buffered sequential access to a file of 64 MiB: the lower of write and read.

    Each is the median of three, in a warm file: first-touched pages can cost more than the device that is emulated.
    """
    block = bytearray(os.urandom(CHUNK_BYTES))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

        def pass_s(access: Callable[[bytearray], int | None]) -> float:
            file.seek(0)
            start_s = time.perf_counter()
            for _ in range(_PROBE_BYTES // CHUNK_BYTES):
                access(block)
            return time.perf_counter() - start_s

        pass_s(file.write)
        write_s = statistics.median(pass_s(file.write) for _ in range(_PROBE_ROUNDS))
        read_s = statistics.median(pass_s(file.readinto) for _ in range(_PROBE_ROUNDS))
    return _PROBE_BYTES / max(write_s, read_s)


def check_ceiling(profile: Profile, folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if the profile asks for more than half of what the memory below it reaches (`probe_ceiling`)."""
    ceiling_bytes_per_s = probe_ceiling(folder)
    if profile.sustained_bytes_per_s > ceiling_bytes_per_s / 2:
        raise ValueError(
            f"emulated profile needs {profile.sustained_bytes_per_s / 1e6:.0f} MB/s sustained, which is more than "
            f"half of the {ceiling_bytes_per_s / 1e6:.0f} MB/s that this machine's memory file system reaches; "
            "lower disk_bytes_per_s or link_bytes_per_s"
        )


def default_folder() -> tuple[Path, bool]:
    """Return where emulated files may lie, and whether that is memory (if not, say that the bytes lie on a disk)."""
    shm = Path("/dev/shm")
    folder = shm if _is_tmpfs(shm) and os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return folder, _is_tmpfs(folder)


def _is_tmpfs(folder: Path) -> bool:
    """Look the folder's device number up in Linux's mount table (proc_pid_mountinfo(5)); elsewhere False."""
    try:
        device = folder.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(line.split()[2] == number and line.partition(" - ")[2].startswith("tmpfs ") for line in mounts)
