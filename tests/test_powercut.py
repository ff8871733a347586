"""The disk that forgets at a power cut, on the real device."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stallbench.proofs.powercut import PowerCutDisk, missing

pytestmark = [pytest.mark.xdist_group("powercut"), pytest.mark.skipif(bool(missing()), reason=missing() or "-")]
BLOCK = 4096
BLOCKS = 64
OLD, NEW = b"o" * BLOCK, b"n" * BLOCK


@pytest.fixture
def disk(tmp_path):
    fast = Path("/dev/shm")
    with PowerCutDisk(64 << 20, fast if fast.is_dir() else tmp_path) as disk:
        yield disk


def sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def save(path: Path, data: bytes) -> None:
    """Write a file and make it and its name durable."""
    path.write_bytes(data)
    sync(path)
    sync(path.parent)


def direct(path: Path, data: bytes, *, durable: bool) -> None:
    """Write past the page cache, so that the device has the bytes when this returns."""
    number = os.open(path, os.O_RDWR | os.O_DIRECT)
    with mmap.mmap(-1, len(data)) as aligned:
        aligned.write(data)
        assert os.pwrite(number, aligned, 0) == len(data)
        os.preadv(number, [aligned], 0)
        assert aligned[:] == data  # from the device
    if durable:
        os.fsync(number)
    os.close(number)


def traces(name: str) -> list[str]:
    """Mounts, loop devices and processes that have to do with a folder."""
    loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True, check=True).stdout
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(entry.read_text())
        except OSError:
            continue  # it ended meanwhile
    lines = [*Path("/proc/mounts").read_text().splitlines(), *loops.splitlines(), *commands]
    return [line for line in lines if name in line]


def test_what_was_synced_survives(disk):
    save(disk.mountpoint / "file", OLD * BLOCKS)
    folder = disk.mountpoint / "folder"
    folder.mkdir()
    save(folder / "file", NEW)
    sync(disk.mountpoint)
    disk.cut(None)
    disk.restart()
    assert (disk.mountpoint / "file").read_bytes() == OLD * BLOCKS
    assert (disk.mountpoint / "folder" / "file").read_bytes() == NEW


def test_what_was_not_synced_is_lost(disk):
    save(disk.mountpoint / "before", OLD)
    (disk.mountpoint / "file").write_bytes(NEW * BLOCKS)
    disk.cut(None)
    disk.restart()
    assert (disk.mountpoint / "before").exists()
    assert not (disk.mountpoint / "file").exists() or (disk.mountpoint / "file").read_bytes() == b""


def test_a_rename_needs_the_folder_synced(disk):
    for name in ("unsynced", "synced"):
        save(disk.mountpoint / f"{name}.tmp", NEW)
    (disk.mountpoint / "synced.tmp").rename(disk.mountpoint / "synced")
    sync(disk.mountpoint)
    (disk.mountpoint / "unsynced.tmp").rename(disk.mountpoint / "unsynced")
    disk.cut(None)
    disk.restart()
    assert sorted(path.name for path in disk.mountpoint.glob("*sync*")) == ["synced", "unsynced.tmp"]


def test_direct_writes_reach_the_device_and_need_a_flush_all_the_same(disk):
    for name in ("flushed", "dropped"):
        save(disk.mountpoint / name, OLD * BLOCKS)
    direct(disk.mountpoint / "flushed", NEW * BLOCKS, durable=True)
    direct(disk.mountpoint / "dropped", NEW * BLOCKS, durable=False)
    disk.cut(None)
    disk.restart()
    assert (disk.mountpoint / "flushed").read_bytes() == NEW * BLOCKS
    assert (disk.mountpoint / "dropped").read_bytes() == OLD * BLOCKS


def test_a_seed_keeps_some_of_the_blocks(disk):
    kept = []
    for seed in (1, 1, 2):
        save(disk.mountpoint / "file", OLD * BLOCKS)
        direct(disk.mountpoint / "file", NEW * BLOCKS, durable=False)
        disk.cut(seed)
        disk.restart()
        data = (disk.mountpoint / "file").read_bytes()
        kept.append([data[start : start + BLOCK] for start in range(0, len(data), BLOCK)])
    assert all(len(blocks) == BLOCKS and {*blocks} == {OLD, NEW} for blocks in kept)
    assert kept[0] == kept[1] != kept[2]


def test_a_writer_loses_nothing_that_it_was_promised_and_is_stopped(disk):
    path = disk.mountpoint / "counter"
    save(path, b"0" * 8)
    script = f"""
import os
number = os.open({str(path)!r}, os.O_RDWR)
for count in range(10**8):
    os.pwrite(number, b"%08d" % count, 0)
    os.fsync(number)
    print(count, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        promised = [writer.stdout.readline() for _ in range(20)]
        disk.cut(None)
        output, complaint = writer.communicate(timeout=30)
    promised += output.splitlines()
    assert b"OSError" in complaint
    disk.restart()
    # The last flush may have been done and not yet reported.
    assert int((disk.mountpoint / "counter").read_bytes()) - int(promised[-1]) in (0, 1)


def test_a_file_open_across_the_cut_never_reaches_the_next_life(disk):
    save(disk.mountpoint / "file", OLD)
    before = disk.mountpoint
    with (before / "file").open("r+b", buffering=0) as file:
        file.write(NEW)
        disk.cut(None)
        disk.restart()
        with pytest.raises(OSError):
            file.write(NEW)
        with pytest.raises(OSError):
            os.fsync(file)
        with pytest.raises(OSError):
            (before / "other").write_bytes(NEW)
    os.sync()
    assert (disk.mountpoint / "file").read_bytes() == OLD
    disk.cut(None)
    disk.restart()
    assert (disk.mountpoint / "file").read_bytes() == OLD


def test_nothing_stays_behind(tmp_path):
    with PowerCutDisk(64 << 20, tmp_path) as disk:
        (disk.mountpoint / "file").write_bytes(NEW)
        (home,) = tmp_path.iterdir()
        assert len(traces(home.name)) == 5  # two mounts, a loop device, nbdkit and nbdfuse
        disk.cut(None)
        assert not traces(home.name)
        disk.restart()
    assert not traces(home.name) and not list(tmp_path.iterdir())
    with pytest.raises(KeyError), PowerCutDisk(64 << 20, tmp_path):
        (home,) = tmp_path.iterdir()
        raise KeyError
    assert not traces(home.name) and not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match=r"mkfs\.ext4"), PowerCutDisk(BLOCK, tmp_path):
        pass
    assert not list(tmp_path.iterdir())
