"""The lab on the real kernel: its switches, and what `down` leaves behind."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import contents, foreign_files
from stallbench import lab
from stallbench.config import ConfigError
from stallbench.lab_profile import PROFILES, parse
from stallbench.results import load_study

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
    assert row["lab_id"] in lab.down()  # kept by nobody who lives
    name = Path(row["mountpoint"]).parent.name
    assert not any(exists(pid) for pid in row["processes"])
    assert name not in Path("/proc/mounts").read_text()
    assert name not in subprocess.run(["losetup", "--all"], capture_output=True, text=True).stdout
    assert not list(Path("/run/netns").glob(f"{name}*")) and not Path(row["mountpoint"]).parent.exists()


@needs_lab
def test_a_killed_studys_lab_goes_when_the_next_begins_and_a_running_ones_stays():
    script = (
        "from stallbench import lab\nimport time\n"
        "with lab.running(lab.PROFILES['fast'], check=False): print(flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        owner.stdout.readline()
        (row,) = (row for row in lab.status() if row["owner"] == owner.pid)
        assert row["lab_id"] not in lab.down()
        with lab.running(PROFILES["fast"], out=silent, check=False):
            assert row["lab_id"] in {other["lab_id"] for other in lab.status()}
        owner.send_signal(signal.SIGKILL)
    with lab.running(PROFILES["fast"], out=silent, check=False):
        assert row["lab_id"] not in {other["lab_id"] for other in lab.status()}


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


SLOW = "lab:hdd-nas-1gbe?disk_bytes_per_s=5e7"  # what the chain can do at any time


def start(command, folder: Path, out: Path, *settings: str) -> subprocess.Popen:
    (folder / "disk").mkdir()
    foreign_files(folder / "disk")
    places = ["--target", f"disk={folder / 'disk'}", "--target", f"nas={SLOW}"]
    arguments = command(*places, "--blocks", "1", "--wait", "durable", "--out", str(out), *settings)
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def labs_of(study: subprocess.Popen) -> list[dict]:
    """The labs that this study brought up: another test's may stand beside them."""
    return [row for row in lab.status() if row["owner"] == study.pid]


@needs_lab
def test_a_study_brings_its_lab_up_and_down_and_calls_it_emulated(command, tmp_path):
    process = start(command, tmp_path, tmp_path / "out")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    study = load_study(tmp_path / "out")
    assert study.emulated("nas") and not study.charged("nas")
    assert "modelled, not measured on such a device" in output
    assert {"raw_write", "raw_read"} <= set(study.spans[study.spans.target == "nas"].kind)  # real I/O, really probed
    assert "/dev/shm/lab-" not in "".join(path.read_text() for path in (tmp_path / "out").rglob("*.json"))
    assert not labs_of(process)


def begun(process: subprocess.Popen) -> list[Path]:
    """The checkpoints that lie on the study's lab now."""
    try:
        return [path for one in labs_of(process) for path in Path(one["mountpoint"]).glob("*/*/checkpoints/*")]
    except FileNotFoundError:  # a folder of the lab's probe went while it was looked into
        return []


def fault_at_first_save(process: subprocess.Popen, name: str) -> None:
    """Turn a switch of the study's lab once a checkpoint's folder is there."""
    deadline_s = time.monotonic() + 100
    while not (found := begun(process)):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    home = found[0].parents[4]
    lab.Lab(home.name.removeprefix("lab-"), parse(SLOW), home).fault(name)


@needs_lab
@pytest.mark.parametrize("fault", ["eio-write", "eio-flush", "eio-read"])
def test_a_failing_device_in_the_middle_costs_the_labs_trials_only(command, tmp_path, fault):
    process = start(command, tmp_path, tmp_path / "out")
    before = contents(tmp_path / "disk")
    fault_at_first_save(process, fault)
    output, _ = process.communicate(timeout=200)
    assert_only_the_lab_failed(process, output, tmp_path, before)


@needs_lab
def test_a_cut_link_holds_a_trial_no_longer_than_its_time_limit(command, tmp_path):
    process = start(command, tmp_path, tmp_path / "out", "--set", "trial_limit_s=40")
    before = contents(tmp_path / "disk")
    fault_at_first_save(process, "cut")
    output, _ = process.communicate(timeout=200)
    assert_only_the_lab_failed(process, output, tmp_path, before)


def assert_only_the_lab_failed(process: subprocess.Popen, output: str, folder: Path, before: dict) -> None:
    assert process.returncode == 1, output
    found = load_study(folder / "out").trials.set_index("target")
    assert (found.status["disk"], found.status["nas"]) == ("complete", "failed")
    assert found.reason["nas"] in output and "\n" not in found.reason["nas"]
    assert contents(folder / "disk") == before
    assert not labs_of(process)


def test_a_lab_that_cannot_be_is_refused_before_anything_runs(monkeypatch):
    with pytest.raises(ConfigError, match="unknown emulated profile 'tape'"):
        lab.require("lab:tape")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root"):
        lab.require("lab:hdd")
