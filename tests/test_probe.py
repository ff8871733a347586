"""The raw limits, on real files."""

import errno
import os
import shutil
import subprocess

import pytest

from stallbench import emulated, probe
from stallbench.spans import Timeline
from stallbench.targets import Storage, Workspace

ALL = {"raw_buffered", "raw_write", "raw_read", "raw_random", "raw_small"}


def workspace(folder, device=None) -> Workspace:
    return Workspace(None, folder, Storage("a folder", "unknown"), device)


@pytest.mark.parametrize("tool", ["fio", "own"])
def test_every_limit_is_probed_and_nothing_is_left(tmp_path, monkeypatch, tool):
    if tool == "own":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif not shutil.which("fio"):
        pytest.skip("fio is not installed")
    timeline = Timeline()
    probe.raw_limits(workspace(tmp_path), timeline)
    spans = timeline.frame().set_index("kind")
    assert set(spans.index) == ALL
    assert list(tmp_path.iterdir()) == []
    assert set(spans.part) == {tool, "own"} and spans.part["raw_small"] == "own"
    assert (spans.end_s > spans.start_s).all()
    assert spans.size_bytes["raw_write"] == 128 << 20 and spans.files["raw_random"] == 64


def test_an_emulated_device_is_not_probed(tmp_path):
    timeline = Timeline()
    device = emulated.Device(emulated.PROFILES["hdd-nas-1gbe"], tmp_path / "queue")
    probe.raw_limits(workspace(tmp_path, device), timeline)
    assert timeline.spans == []


def test_without_direct_io_the_buffered_limits_stay(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(os, "open", refuse)
    timeline = Timeline()
    probe.raw_limits(workspace(tmp_path), timeline)
    assert {span.kind for span in timeline.spans} == {"raw_buffered", "raw_small"}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("tool", ["fio", "own"])
def test_a_full_disk_is_raised_as_such_and_the_files_go(tmp_path, monkeypatch, tool):
    if tool == "own":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif not shutil.which("fio"):
        pytest.skip("fio is not installed")
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(mount)], check=True)
    try:
        with pytest.raises(OSError) as caught:
            probe.raw_limits(workspace(mount), Timeline())
        assert caught.value.errno == errno.ENOSPC
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_both_probers_are_timed_side_by_side(tmp_path, monkeypatch):
    if not shutil.which("fio"):
        pytest.skip("fio is not installed")
    monkeypatch.setattr(probe, "ROUNDS", 1)
    table = probe.both(tmp_path)
    assert set(table.index) == ALL - {"raw_small"}
    assert (table.own_over_fio > 0).all() and list(tmp_path.iterdir()) == []
