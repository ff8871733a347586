"""The lab on the real kernel: its switches, and what `down` leaves behind."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import contents, foreign_files
from stallbench.checkpointing.checkpointer import load
from stallbench.checkpointing.commit import complete_checkpoints
from stallbench.config import ConfigError
from stallbench.lab import building as lab
from stallbench.lab.profile import PROFILES, parse
from stallbench.results import load_study
from stallbench.storage.ownership import sweep
from stallbench.storage.pagecache import drop_tree, sync_tree

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
        "from stallbench.lab import building as lab; import time; "
        "lab.up(lab.PROFILES['hdd-nas-1gbe'], check=False); time.sleep(99)"
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
        "from stallbench.lab import building as lab\nimport time\n"
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


def start(command, folder: Path, nas: str, *settings: str) -> subprocess.Popen:
    """Begin a study of one block: first the trial on ``nas``, then one on a disk that stays well."""
    (folder / "disk").mkdir()
    foreign_files(folder / "disk")
    places = ["--target", f"nas={nas}", "--target", f"disk={folder / 'disk'}"]
    arguments = command(*places, "--blocks", "1", "--wait", "durable", "--out", str(folder / "out"), *settings)
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def labs_of(study: subprocess.Popen) -> list[dict]:
    """The labs that this study brought up: another test's may stand beside them."""
    return [row for row in lab.status() if row["owner"] == study.pid]


@needs_lab
def test_a_study_brings_its_lab_up_and_down_and_calls_it_emulated(command, tmp_path):
    process = start(command, tmp_path, SLOW)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    study = load_study(tmp_path / "out")
    assert study.emulated("nas") and not study.charged("nas")
    assert "modelled, not measured on such a device" in output
    assert {"raw_write", "raw_read"} <= set(study.spans[study.spans.target == "nas"].kind)  # real I/O, really probed
    assert "/dev/shm/lab-" not in "".join(path.read_text() for path in (tmp_path / "out").rglob("*.json"))
    assert not labs_of(process)


def wait_for_a_save(process: subprocess.Popen, places: Callable[[], list[Path]]) -> Path:
    """Give the first checkpoint's folder, whole or not, once it is there."""
    deadline_s = time.monotonic() + 100
    while True:
        assert process.poll() is None and time.monotonic() < deadline_s
        with suppress(FileNotFoundError):  # a folder of the probe went while it was looked into
            if found := [path for place in places() for path in place.glob("*/*/checkpoints/*")]:
                return found[0]
        time.sleep(0.005)


def fault_the_studys_lab(process: subprocess.Popen, name: str) -> None:
    """Turn a switch of the study's lab in the middle of a trial."""
    found = wait_for_a_save(process, lambda: [Path(one["mountpoint"]) for one in labs_of(process)])
    home = found.parents[4]
    lab.Lab(home.name.removeprefix("lab-"), parse(SLOW), home).fault(name)


@needs_lab
def test_a_failing_device_in_the_middle_costs_the_labs_trials_only(command, tmp_path):
    process = start(command, tmp_path, SLOW, "--no-report")
    before = contents(tmp_path / "disk")
    fault_the_studys_lab(process, "read-only")
    output, _ = process.communicate(timeout=200)
    assert assert_only_the_lab_failed(process, output, tmp_path, before).endswith("the target is read-only now")


@needs_lab
def test_a_cut_link_holds_a_trial_no_longer_than_its_time_limit(command, tmp_path):
    process = start(command, tmp_path, SLOW, "--no-report", "--set", "trial_limit_s=40")
    before = contents(tmp_path / "disk")
    fault_the_studys_lab(process, "cut")
    output, _ = process.communicate(timeout=200)
    reason = assert_only_the_lab_failed(process, output, tmp_path, before)
    assert "timed out" in reason and "trial_limit_s=40" in reason


def assert_only_the_lab_failed(process: subprocess.Popen, output: str, folder: Path, before: dict) -> str:
    assert process.returncode == 1, output
    found = load_study(folder / "out").trials.set_index("target")
    assert (found.status["disk"], found.status["nas"]) == ("complete", "failed")
    assert found.reason["nas"] in output and "\n" not in found.reason["nas"]
    assert contents(folder / "disk") == before
    assert not labs_of(process)
    return found.reason["nas"]


def take_all_room(path: Path) -> None:
    """Fill a file system with a file of somebody else's."""
    with path.open("wb") as file:
        file.write(b"somebody's data")
        with pytest.raises(OSError, match="No space left"):
            os.posix_fallocate(file.fileno(), 0, lab.SIZE_BYTES * 2)


OUTLIVED = ""
BELOW = {  # by fault: the method that meets it, and what the trial's reason says
    "eio-write": ("fast", "."),
    "eio-flush": ("safetensors", "."),
    "eio-read": ("trainer", "."),
    "read-only": ("torch", "the target is read-only now$"),
    "full": ("fast", r"^disk full: the checkpoints need 6 MB, \d MB are free$"),
    "stall": ("fast", OUTLIVED),
    "cut": ("trainer", OUTLIVED),
}


@needs_lab
@pytest.mark.parametrize("fault", BELOW)
def test_a_fault_below_a_mount_costs_its_own_trial_and_no_foreign_file(command, tmp_path, fault):
    """Study and strangers share the file system; a fault that ends by itself costs nothing but time."""
    method, reason = BELOW[fault]
    with lab.running(PROFILES["hdd-nas-1gbe"], out=silent, check=False) as made:
        ours, theirs, somebody = (made.mountpoint / name for name in ("ours", "theirs", "somebody"))
        for folder in (ours, theirs):
            folder.mkdir()
            foreign_files(folder)
        (theirs / "photos").write_bytes(os.urandom(8 << 20))
        sync_tree(made.mountpoint)
        before = {folder: contents(folder) for folder in (ours, theirs)}
        process = start(command, tmp_path, str(ours), "--no-report", "--method", method)
        disk = contents(tmp_path / "disk")
        wait_for_a_save(process, lambda: [ours])
        if fault == "full":
            take_all_room(somebody)
        else:
            made.fault(fault)
        if fault == "cut":
            time.sleep(5)
            made.fault("restore")
        output, _ = process.communicate(timeout=200)
        if reason != OUTLIVED:
            assert re.search(reason, assert_only_the_lab_failed(process, output, tmp_path, disk))
        else:
            assert process.returncode == 0, output
        if fault == "stall":
            saves = load_study(tmp_path / "out").spans.query("kind == 'save' and target == 'nas'")
            assert (saves.end_s - saves.start_s).max() > 25  # it was held up, not let go

        made.fault("restore")
        for parent in ours.glob("*/*/checkpoints"):  # where it couldn't be removed, what looks complete is
            for checkpoint in complete_checkpoints(parent):
                assert load(checkpoint)
        sweep(ours)
        for folder, files in before.items():
            assert drop_tree(folder) == "cold"  # what is read now comes from the device
            assert contents(folder) == files
        if fault == "full":
            with somebody.open("rb") as file:
                assert file.read(15) == b"somebody's data"


def test_a_lab_that_cannot_be_is_refused_before_anything_runs(monkeypatch):
    with pytest.raises(ConfigError, match="unknown emulated profile 'tape'"):
        lab.require("lab:tape")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root"):
        lab.require("lab:hdd")
