"""The emulated device against hand arithmetic: first the pure model, exactly; then real threads, processes and time."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from stallbench.storage import emulated
from stallbench.storage.emulated import (
    CHUNK_BYTES,
    PROFILES,
    Device,
    Profile,
    Queue,
    charge_read,
    charge_write,
    parse_profile,
)

A, B = 1, 2  # streams
LATE_S = 0.06  # what a busy machine with two cores may add to a wait; every term under test is larger


def profile(**changes: float) -> Profile:
    """100 MB/s disk behind a 1 GB/s link, and nothing else that costs time."""
    plain = {"disk_bytes_per_s": 100e6, "position_s": 0, "link_bytes_per_s": 1e9, "round_trip_s": 0}
    return Profile(**plain | {"round_trips_per_file": 0, "commit_on_close": True, "server_cache_bytes": 0} | changes)


@pytest.fixture
def state_path() -> Iterator[Path]:
    """Keep the state in memory where there is some, as its users do: a disk's own latency would blur the times."""
    with tempfile.TemporaryDirectory(dir=emulated.default_folder()[0]) as folder:
        yield Path(folder, "state")


ACTOR = """
import json, sys, time
from stallbench.storage.emulated import Device, Profile, wait_until
device = Device(Profile.model_validate_json(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
wait_until(float(sys.stdin.readline()))
ends = []
for _ in range(int(sys.argv[6])):
    done = getattr(device, sys.argv[3])(sys.argv[4], int(sys.argv[5]))
    ends.append(time.monotonic() if sys.argv[3] == "read" else max(time.monotonic(), done.durable_s))
print(json.dumps(ends[-1]))
"""


def spawn(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start Python code that says "ready"."""
    library = str(Path(emulated.__file__).parents[1])
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": library},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def race(device: Device, *actors: tuple[str, str, int, int]) -> list[float]:
    """Run (method, stream, bytes, times) as one process each, all at once; seconds from the start to each one's end."""
    children = [spawn(ACTOR, device.profile.model_dump_json(), device.state_path, *actor) for actor in actors]
    start_s = time.monotonic() + 0.1
    for child in children:
        child.stdin.write(f"{start_s}\n")
        child.stdin.flush()
    return [json.loads(child.communicate(timeout=20)[0]) - start_s for child in children]


def elapsed_s(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start_s = time.monotonic()
    work()
    return time.monotonic() - start_s


def assert_took(measured_s: float, by_hand_s: float) -> None:
    """Never early; late by no more than 5 % and a busy machine's delay."""
    assert by_hand_s - 1e-6 <= measured_s <= 1.05 * by_hand_s + LATE_S


# ---- the model, exactly ----

WRITES = {
    # 10 MB: link 0.1 s; disk 0.01 + 0.05 s, hidden behind the link
    "link-bound": ({"link_bytes_per_s": 100e6, "disk_bytes_per_s": 200e6, "position_s": 0.01}, 0.1, 0.1),
    # link 0.01 s; disk 0.02 + 0.1 s
    "disk-bound": ({"position_s": 0.02}, 0.12, 0.12),
    "cache absorbs": ({"position_s": 0.02, "server_cache_bytes": 50e6}, 0.01, 0.12),
    # 5 of the 10 MB must be on the disk first: 0.12 - 0.05 s
    "cache overflows": ({"position_s": 0.02, "server_cache_bytes": 5e6}, 0.07, 0.12),
}


@pytest.mark.parametrize(("changes", "acknowledged_s", "durable_s"), WRITES.values(), ids=WRITES.keys())
def test_one_chunk_written(changes: dict[str, float], acknowledged_s: float, durable_s: float) -> None:
    """Link, disk, position and cache, each where it decides."""
    queue, written = charge_write(profile(**changes), Queue(), 7.0, A, 10_000_000)
    assert written == pytest.approx((7.0, 7 + acknowledged_s, 7 + durable_s))
    assert queue.disk_free_at_s == written.durable_s and queue.last_stream == A


def test_position_is_paid_when_the_stream_changes() -> None:
    """Four writes and two reads: a position only where the stream differs from the last."""
    seeks = profile(position_s=0.02)
    queue, durable_s = Queue(), []
    for stream in (A, A, B, A):
        queue, written = charge_write(seeks, queue, 0.0, stream, 10_000_000)
        durable_s.append(written.durable_s)
    assert durable_s == pytest.approx([0.12, 0.22, 0.34, 0.46])
    assert charge_read(seeks, queue, 1.0, A, 10_000_000)[1] == pytest.approx(1.1)
    assert charge_read(seeks, queue, 1.0, B, 10_000_000)[1] == pytest.approx(1.12)


def test_link_is_shared_and_the_queue_idles_until_the_next_issue() -> None:
    """The second waits for the first one's link time, the third finds all idle."""
    slow_link = profile(link_bytes_per_s=50e6)
    queue, first = charge_write(slow_link, Queue(), 0.0, A, 10_000_000)
    queue, second = charge_write(slow_link, queue, 0.1, B, 10_000_000)
    queue, third = charge_write(slow_link, queue, 3.0, B, 10_000_000)
    assert (first[1], second[1], third[1]) == pytest.approx((0.2, 0.4, 3.2))


@pytest.mark.parametrize(("link_bytes_per_s", "arrived_s"), [(1e9, 0.12), (50e6, 0.22)])
def test_read_pipelines_disk_and_link(link_bytes_per_s: float, arrived_s: float) -> None:
    """The link carries while the disk reads, but not before it is in place."""
    reader = profile(link_bytes_per_s=link_bytes_per_s, position_s=0.02)
    assert charge_read(reader, Queue(), 0.0, A, 10_000_000)[1] == pytest.approx(arrived_s)


def test_reads_queue_behind_reads_and_behind_writes_without_a_cache() -> None:
    """First in, first out, whatever the direction."""
    queue, _ = charge_write(profile(), Queue(), 0.0, A, 10_000_000)
    queue, first_s = charge_read(profile(), queue, 0.0, A, 10_000_000)
    queue, second_s = charge_read(profile(), queue, 0.0, B, 10_000_000)
    queue, written = charge_write(profile(), queue, 0.0, B, 10_000_000)
    assert (first_s, second_s, written.durable_s) == pytest.approx((0.2, 0.3, 0.4))


def test_read_overtakes_only_what_the_cache_holds() -> None:
    """Reads go before acknowledged writes, take the disk from them, and share it with each other."""
    cached = profile(server_cache_bytes=30e6, position_s=0.02)
    queue, written = charge_write(cached, Queue(), 0.0, A, 40_000_000)  # durable at 0.42, of which 0.3 s in the cache
    assert written[1:] == pytest.approx((0.12, 0.42))
    queue, first_s = charge_read(cached, queue, 0.0, B, 10_000_000)  # at 0.12, 0.12 long: the disk is done at 0.54
    queue, second_s = charge_read(cached, queue, 0.0, B, 10_000_000)  # at max(0.24, 0.54 - 0.3), 0.1 long
    assert (first_s, second_s) == pytest.approx((0.24, 0.34))
    queue, later = charge_write(cached, queue, 0.0, A, 10_000_000)  # 0.42 + 0.12 + 0.1, then 0.12 of its own
    assert later[1:] == pytest.approx((0.46, 0.76))
    both = [charge_read(cached, Queue(), 0.0, A, 10_000_000)]
    both.append(charge_read(cached, both[0][0], 0.0, B, 10_000_000))  # on an empty cache readers still share the disk
    assert [arrived_s for _, arrived_s in both] == pytest.approx([0.12, 0.24])


def test_link_is_full_duplex_but_shared_in_each_direction() -> None:
    """Writes wait for writes and reads for reads, as the cache keeps the disk out of it."""
    slow_link = profile(link_bytes_per_s=50e6, disk_bytes_per_s=1e9, server_cache_bytes=1e9)
    queue, first = charge_write(slow_link, Queue(), 0.0, A, 10_000_000)
    queue, first_read_s = charge_read(slow_link, queue, 0.0, A, 10_000_000)
    queue, second_read_s = charge_read(slow_link, queue, 0.0, A, 10_000_000)
    queue, second = charge_write(slow_link, queue, 0.0, A, 10_000_000)
    assert (first_read_s, second_read_s) == pytest.approx((0.2, 0.4))
    assert (first.acknowledged_s, second.acknowledged_s) == pytest.approx((0.2, 0.4))


# ---- real time ----


@pytest.mark.parametrize(
    ("changes", "acknowledged_s", "durable_s"),
    [
        # 10 chunks of 4 MiB = 41.94304 MB
        ({"link_bytes_per_s": 100e6, "disk_bytes_per_s": 200e6}, 0.4194304, 0.4194304),
        ({"position_s": 0.15}, 0.5694304, 0.5694304),
        ({"position_s": 0.15, "server_cache_bytes": 80e6, "link_bytes_per_s": 200e6}, 0.2097152, 0.5694304),
        ({"position_s": 0.15, "server_cache_bytes": 20e6}, 0.3694304, 0.5694304),
        ({"round_trip_s": 0.05, "round_trips_per_file": 4}, 0.6194304, 0.6194304),
    ],
    ids=["link-bound", "disk-bound", "cache absorbs", "cache overflows", "round trips"],
)
def test_one_writer(changes: dict[str, float], acknowledged_s: float, durable_s: float, state_path: Path) -> None:
    """Ten chunks in real time, each profile with one term that matters."""
    device = Device(profile(**changes), state_path)
    start_s = time.monotonic()
    written = device.write("model", 10 * CHUNK_BYTES)
    assert_took(time.monotonic() - start_s, acknowledged_s)
    assert written.acknowledged_s - written.start_s == pytest.approx(acknowledged_s, abs=1e-6)
    assert written.durable_s - written.start_s == pytest.approx(durable_s, abs=1e-6)
    emulated.wait_until(written.durable_s)
    assert_took(time.monotonic() - start_s, durable_s)


def test_one_reader(state_path: Path) -> None:
    """Round trip, position and transfer add up."""
    device = Device(profile(position_s=0.15, round_trip_s=0.1, round_trips_per_file=1), state_path)
    start_s = time.monotonic()
    waited_s = device.read("model", 10 * CHUNK_BYTES)
    assert_took(waited_s, 0.6694304)
    assert_took(time.monotonic() - start_s, 0.6694304)


def test_late_sleeps_do_not_add_up(state_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten sleeps that wake 20 ms late cost one lateness at most."""
    device = Device(profile(), state_path)
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds + 0.02))
    assert_took(elapsed_s(lambda: device.write("model", 10 * CHUNK_BYTES)), 0.4194304)


SHARED_S = 16 * (CHUNK_BYTES / 100e6 + 0.02)  # two times 8 chunks, taking turns, each behind a change of position
TURN_S = 2 * (CHUNK_BYTES / 100e6 + 0.02)


def assert_shared(ends_s: list[float]) -> None:
    """All bytes and positions are paid (but for turns that a late starter has alone), and both end together."""
    assert 0.9 * SHARED_S <= max(ends_s) <= 1.05 * SHARED_S + LATE_S
    assert max(ends_s) - min(ends_s) < 2 * TURN_S


def test_two_writers_in_two_processes_share_fairly(state_path: Path) -> None:
    """All bytes and all positions are paid, and both end together."""
    device = Device(profile(position_s=0.02), state_path)
    ends_s = race(device, ("write", "a", 8 * CHUNK_BYTES, 1), ("write", "b", 8 * CHUNK_BYTES, 1))
    assert_shared(ends_s)


def test_a_reader_beside_a_writer(state_path: Path) -> None:
    """The same between a reader and a writer, as no cache lets the reader overtake."""
    device = Device(profile(position_s=0.02), state_path)
    ends_s = race(device, ("write", "a", 8 * CHUNK_BYTES, 1), ("read", "b", 8 * CHUNK_BYTES, 1))
    assert_shared(ends_s)


def test_two_threads_share_fairly(state_path: Path) -> None:
    """The same within one process."""
    device = Device(profile(position_s=0.02), state_path)
    start_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        ends_s = [written.acknowledged_s - start_s for written in pool.map(device.write, "ab", [8 * CHUNK_BYTES] * 2)]
    assert_took(time.monotonic() - start_s, max(ends_s))
    assert_shared(ends_s)


def test_no_update_is_lost_among_processes_and_threads(state_path: Path) -> None:
    """900 and then 600 bookings of 0.1 s each make 90 s and 60 s."""
    device = Device(profile(commit_on_close=False), state_path)  # unpaced: all hammer on the lock
    assert max(race(device, *[("write", "a", 10_000_000, 300)] * 3)) == pytest.approx(90, abs=0.2)
    before_s = emulated.Queue.model_validate_json(state_path.read_text()).disk_free_at_s
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda _: device.write("a", 10_000_000), range(600)))
    assert max(times.durable_s for times in written) - before_s == pytest.approx(60, abs=1e-3)


def test_small_files_cost_round_trips_that_occupy_nothing(state_path: Path) -> None:
    """A writer pays them for each file; a reader beside it pays its own meanwhile."""
    device = Device(profile(round_trip_s=2.5e-3, round_trips_per_file=4), state_path)
    by_hand_s = 4 * 2.5e-3 + 4096 / 100e6

    def each_s(access: Callable[[str, int], object]) -> list[float]:
        return [elapsed_s(lambda: access("small", 4096)) for _ in range(40)]

    alone_s = each_s(device.write)
    with ThreadPoolExecutor(2) as pool:
        beside_s = list(pool.map(each_s, [device.write, device.read]))
    for files_s in (alone_s, *beside_s):
        assert min(files_s) >= by_hand_s
        assert statistics.median(files_s) == pytest.approx(by_hand_s, rel=0.3)  # the median, as machines are busy


def test_round_trips_do_not_hold_up_others(state_path: Path) -> None:
    """Small files, most of whose time is round trips, leave link and disk to a large one."""
    device = Device(profile(round_trip_s=10e-3, round_trips_per_file=4), state_path)
    with ThreadPoolExecutor(1) as pool:
        small = pool.submit(lambda: [device.write("small", 4096) for _ in range(10)])
        assert_took(elapsed_s(lambda: device.write("large", 10 * CHUNK_BYTES)), 0.04 + 0.4194304)
        small.result()


def test_an_empty_file_costs_its_round_trips_and_no_position(state_path: Path) -> None:
    """Neither link nor disk is booked."""
    device = Device(profile(position_s=1, round_trip_s=0.05, round_trips_per_file=4), state_path)
    written = device.write("empty", 0)
    assert written.acknowledged_s == written.durable_s == pytest.approx(written.start_s + 0.2, abs=1e-6)
    assert_took(device.read("empty", 0), 0.2)
    assert state_path.read_bytes() == b""


def test_without_commit_on_close_a_write_returns_at_once(state_path: Path) -> None:
    """The time at which it is durable is told all the same, and the next file queues behind."""
    device = Device(profile(commit_on_close=False, position_s=0.05), state_path)
    start_s = time.monotonic()
    first, second = device.write("a", 10_000_000), device.write("b", 10_000_000)
    assert time.monotonic() - start_s < LATE_S
    assert first.durable_s - first.start_s == pytest.approx(0.15, abs=1e-6)
    assert second.durable_s - first.durable_s == pytest.approx(0.15, abs=1e-6)


# ---- damage ----


@pytest.mark.parametrize(
    "damage", [b"garbage", b"\0" * 512, bytes(range(256)) * 40, b'{"disk_free_at_s": 1', b'{"disk_free_at_s": NaN}']
)
def test_a_damaged_state_is_an_idle_device(damage: bytes, state_path: Path) -> None:
    """It warns once and is mended."""
    device = Device(profile(), state_path)
    state_path.write_bytes(damage)
    with pytest.warns(UserWarning, match="damaged"):
        assert_took(elapsed_s(lambda: device.write("a", 1_000_000)), 0.01)
    assert_took(elapsed_s(lambda: device.write("a", 1_000_000)), 0.01)  # mended: warnings are errors here
    assert state_path.stat().st_size == emulated._RECORD_BYTES


def test_a_truncated_state_is_an_idle_device(state_path: Path) -> None:
    """A record of our own, cut."""
    device = Device(profile(), state_path)
    device.write("a", 1)
    os.truncate(state_path, 40)
    with pytest.warns(UserWarning, match="damaged"):
        assert_took(elapsed_s(lambda: device.write("a", 1_000_000)), 0.01)


@pytest.mark.parametrize(
    ("written_in_s", "free_in_s", "waited_s"),
    [(-1, 0.3, 0.31), (50, 60, 0.01), (50, 0.3, 0.01), (-1, 1e7, 0.01), (-1e-3, -100, 0.01)],
    ids=["a backlog is waited for", "earlier boot", "earlier boot, near", "insane future", "long idle"],
)
@pytest.mark.parametrize("part", ["uplink_free_at_s", "disk_free_at_s"])
def test_stale_state(part: str, written_in_s: float, free_in_s: float, waited_s: float, state_path: Path) -> None:
    """A real backlog counts; one from another boot or beyond sense doesn't."""
    now_s = time.monotonic()
    state_path.write_text(json.dumps({part: now_s + free_in_s, "last_stream": 1, "written_at_s": now_s + written_in_s}))
    device = Device(profile(link_bytes_per_s=100e6, commit_on_close=False), state_path)
    assert device.write("a", 1_000_000).durable_s - now_s == pytest.approx(waited_s, abs=0.03)


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_process_killed_while_it_holds_the_queue_blocks_nobody(state_path: Path) -> None:
    """The kernel takes the lock from the dead."""
    device = Device(profile(), state_path)
    holder = spawn(HOLDER, state_path)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(device.write, "a", 1_000_000)
        time.sleep(0.2)
        blocked = not waiting.done()
        holder.send_signal(signal.SIGKILL)
        assert blocked
        waiting.result(timeout=1)
    holder.communicate()


def test_a_fork_while_the_queue_is_held_blocks_nobody(state_path: Path) -> None:
    """The child has a copy of the locked file (PyTorch's data loaders fork at any moment)."""
    device = Device(profile(), state_path)
    with emulated._locked(state_path):
        child = os.fork()
        if child == 0:
            time.sleep(2)
            os._exit(0)
    assert_took(elapsed_s(lambda: device.write("a", 1_000_000)), 0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_process_killed_in_its_write_leaves_one_chunk_behind(state_path: Path) -> None:
    """Beside the writer one waits a turn; after its death at most for the chunk it had booked."""
    device = Device(profile(), state_path)
    writer = spawn(ACTOR, device.profile.model_dump_json(), state_path, "write", "a", 10_000_000_000, 1)
    writer.stdin.write("0\n")
    writer.stdin.flush()
    time.sleep(0.3)
    assert device.write("b", CHUNK_BYTES).acknowledged_s - time.monotonic() < 0.1
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert elapsed_s(lambda: device.write("b", 20_000_000)) < 0.2 + CHUNK_BYTES / 100e6 + LATE_S


def test_a_state_file_that_cannot_be_made_is_refused_early(tmp_path: Path) -> None:
    """When the device is made, not in the first save."""
    with pytest.raises(FileNotFoundError, match="missing"):
        Device(profile(), tmp_path / "missing" / "state")


# ---- profiles, memory below ----


def test_built_in_profiles() -> None:
    """The numbers that DESIGN gives."""
    slow, fast = PROFILES["hdd-nas-1gbe"], PROFILES["hdd-nas-10gbe"]
    assert slow.link_bytes_per_s == pytest.approx(117.7e6, rel=1e-3)
    assert slow.position_s == pytest.approx(12.17e-3, rel=1e-3)
    assert slow.server_cache_bytes == 400e6 and slow.cache_drain_s == 2
    assert (slow.sustained_bytes_per_s, fast.sustained_bytes_per_s) == (slow.link_bytes_per_s, 200e6)


def test_parse_profile() -> None:
    """A name alone, and with every kind of value."""
    assert parse_profile("hdd-nas-1gbe") == PROFILES["hdd-nas-1gbe"]
    asked = parse_profile("hdd-nas-1gbe?disk_bytes_per_s=1.5e+8&server_cache_bytes=0&commit_on_close=false")
    changes = {"disk_bytes_per_s": 1.5e8, "server_cache_bytes": 0, "commit_on_close": False}
    assert asked == PROFILES["hdd-nas-1gbe"].model_copy(update=changes)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ssd", "'ssd'; there are: hdd-nas-1gbe, hdd-nas-10gbe"),
        ("", "''; there are: hdd-nas-1gbe"),
        ("hdd-nas-1gbe?speed=1", "'speed'.*there are: disk_bytes_per_s, position_s"),
        ("hdd-nas-1gbe?position_s=1&position_s=2", "position_s.*twice"),
        ("hdd-nas-1gbe?disk_bytes_per_s=0", "disk_bytes_per_s = '0': .*greater than 0"),
        ("hdd-nas-1gbe?link_bytes_per_s=-1", "link_bytes_per_s = '-1': .*greater than 0"),
        ("hdd-nas-1gbe?position_s=-1", "position_s = '-1': .*greater than or equal to 0"),
        ("hdd-nas-1gbe?round_trip_s=nan", "round_trip_s = 'nan': .*finite"),
        ("hdd-nas-1gbe?server_cache_bytes", "server_cache_bytes = ''"),
        ("hdd-nas-1gbe?round_trips_per_file=1.5", "round_trips_per_file = '1.5'"),
        ("hdd-nas-1gbe?commit_on_close=perhaps", "commit_on_close = 'perhaps'"),
    ],
)
def test_parse_profile_refuses_in_one_line(text: str, named: str) -> None:
    """The line names the value and what there is."""
    with pytest.raises(ValueError, match=named) as refused:
        parse_profile(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("field", [name for name in Profile.model_fields if name != "commit_on_close"])
def test_a_profile_names_the_field_and_value_that_it_refuses(field: str) -> None:
    """As pydantic words it."""
    with pytest.raises(ValidationError, match=rf"{field}\n.*input_value=-3"):
        profile(**{field: -3})


def test_a_profile_beyond_half_of_the_memory_below_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half is allowed, more isn't."""
    monkeypatch.setattr(emulated, "probe_ceiling", lambda folder: 300e6)
    emulated.check_ceiling(profile(disk_bytes_per_s=150e6), tmp_path)
    with pytest.raises(ValueError, match=r"needs 151 MB/s .* half of the 300 MB/s .*; lower disk_bytes_per_s"):
        emulated.check_ceiling(profile(disk_bytes_per_s=151e6), tmp_path)


def test_probe_reports_the_slower_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a made-up clock: the median of each direction, then the lower."""
    clock_s = iter([0, 9, 0, 1, 0, 7, 0, 2, 0, 0.5, 0, 0.5, 0, 0.5])  # first touch; writes 1, 7, 2 s; reads 0.5 s
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock_s))
    assert emulated.probe_ceiling(tmp_path) == (64 << 20) / 2
    assert not list(tmp_path.iterdir())


def test_probe_on_this_machine(state_path: Path) -> None:
    """It runs where the emulated files lie."""
    assert emulated.probe_ceiling(state_path.parent) > 0


def test_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory if there is some, else the folder for temporary files."""
    folder, is_memory = emulated.default_folder()
    assert folder.is_dir() and is_memory == emulated._is_tmpfs(folder)
    monkeypatch.setattr(emulated, "_is_tmpfs", lambda folder: False)
    assert emulated.default_folder() == (Path(tempfile.gettempdir()), False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's mount table")
def test_tmpfs_is_told_from_other_file_systems() -> None:
    """Against the mount table's own words."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    visible = {where: kind for _, where, kind, *_ in mounts}  # of mounts on one folder the last is seen
    for where in {"/", "/proc", "/dev/shm"} & visible.keys():
        assert emulated._is_tmpfs(Path(where)) == (visible[where] == "tmpfs")
    assert not emulated._is_tmpfs(Path("/no such folder"))
