"""The lab on the real kernel: its switches, and what `down` leaves behind."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stallbench import lab
from stallbench.lab_profile import PROFILES, is_lab, parse

needs_lab = pytest.mark.skipif(bool(lab.missing()), reason=f"skipped: {lab.missing()}")
pytestmark = pytest.mark.xdist_group("lab")


def silent(line: str) -> None:
    pass


@pytest.fixture
def fast():
    with lab.running(PROFILES["fast"], out=silent, check=False) as made:
        yield made


def durable(path: Path) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(number, os.urandom(1 << 20), 0)
        os.fsync(number)
    finally:
        os.close(number)


def test_profiles_and_their_fields():
    assert parse("lab:hdd-nas-1gbe?disk_bytes_per_s=1e8").disk_bytes_per_s == 1e8
    with pytest.raises(ValueError, match="disk"):
        parse("hdd?disk=1")
    assert is_lab("lab:hdd") and not is_lab("emulated:hdd")


@needs_lab
@pytest.mark.parametrize("name", ["eio-write", "eio-flush"])
def test_a_failing_device_fails_the_fsync(fast, name):
    durable(fast.mountpoint / "before")
    fast.fault(name)
    with pytest.raises(OSError) as caught:
        durable(fast.mountpoint / "file")
    assert caught.value.errno == errno.EIO


@needs_lab
def test_a_failing_read(fast):
    path = fast.mountpoint / "file"
    durable(path)
    number = os.open(path, os.O_RDONLY)
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    fast.fault("eio-read")
    with pytest.raises(OSError) as caught:
        os.pread(number, 4096, 0)
    assert caught.value.errno == errno.EIO
    fast.fault("restore")
    assert len(os.pread(number, 4096, 0)) == 4096
    os.close(number)


@needs_lab
def test_a_stall_holds_a_save_up_and_lets_it_finish(fast):
    fast.fault("stall", seconds=2)
    start_s = time.monotonic()
    durable(fast.mountpoint / "file")
    assert 1.9 < time.monotonic() - start_s < 6


@needs_lab
def test_read_only_and_full(fast):
    fast.fault("read-only")
    with pytest.raises(OSError) as caught:
        durable(fast.mountpoint / "file")
    assert caught.value.errno == errno.EROFS
    fast.fault("restore")
    number = os.open(fast.mountpoint / "file", os.O_WRONLY | os.O_CREAT, 0o600)
    with pytest.raises(OSError) as caught:
        os.posix_fallocate(number, 0, lab.SIZE_BYTES * 2)
    assert caught.value.errno == errno.ENOSPC
    os.close(number)


@needs_lab
def test_a_cut_link_holds_a_save_up_until_it_is_back():
    with lab.running(PROFILES["hdd-nas-1gbe"], out=silent, check=False) as made:
        made.fault("cut")
        script = f"import os; n = os.open({str(made.mountpoint / 'file')!r}, 65); os.write(n, b'x'); os.fsync(n)"
        with subprocess.Popen([sys.executable, "-c", script]) as saver:
            with pytest.raises(subprocess.TimeoutExpired):
                saver.wait(2)
            made.fault("restore")
            assert saver.wait(20) == 0


@needs_lab
def test_down_clears_up_after_a_killed_maker():
    script = (
        "from stallbench import lab; import time; lab.up(lab.PROFILES['hdd-nas-1gbe'], check=False); time.sleep(99)"
    )
    before = {row["lab_id"] for row in lab.status()}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as maker:
        deadline_s = time.monotonic() + 30
        while not any(row["mounted"] and row["owner"] == maker.pid for row in lab.status()):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        maker.send_signal(signal.SIGKILL)
    (row,) = (row for row in lab.status() if row["lab_id"] not in before and row["owner"] == maker.pid)
    assert len(row["processes"]) == 2 and len(row["loops"]) == 1
    lab.down(row["lab_id"])
    name = Path(row["mountpoint"]).parent.name
    assert not any(exists(pid) for pid in row["processes"])
    assert name not in Path("/proc/mounts").read_text()
    assert name not in subprocess.run(["losetup", "--all"], capture_output=True, text=True).stdout
    assert not list(Path("/run/netns").glob(f"{name}*")) and not Path(row["mountpoint"]).parent.exists()


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
