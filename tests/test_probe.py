"""The raw-limit probe, on real files."""

import errno
import json
import os
import shutil
import stat
import subprocess
import zlib
from pathlib import Path

import pandas as pd
import pytest

from stallbench.spans import Timeline
from stallbench.storage import emulated, probe
from stallbench.storage.targets import Storage, Workspace

SIZE_BYTES = 16 << 20
DIRECT = ("raw_write", "raw_random", "raw_read")
needs_fio = pytest.mark.skipif(not shutil.which("fio"), reason="needs fio")


@pytest.fixture(autouse=True)
def smaller(monkeypatch):
    monkeypatch.setattr(probe, "SIZE_BYTES", SIZE_BYTES)


@pytest.fixture
def without_fio(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)


def probed(folder: Path, device: emulated.Device | None = None) -> pd.DataFrame:
    """Probe a folder, and see to it that nothing is left in it."""
    timeline = Timeline()
    try:
        probe.raw_limits(Workspace(None, folder, Storage("a folder", "unknown"), device), timeline)
    finally:
        assert not list(folder.iterdir())
    spans = timeline.frame().set_index("kind")
    assert ((spans.end_s > spans.start_s) & (spans.start_s >= 0)).all()
    return spans


def check_sizes(spans: pd.DataFrame, kinds: tuple[str, ...]) -> None:
    assert sorted(spans.index) == sorted((*kinds, "raw_buffered", "raw_small"))
    for kind in {*kinds, "raw_buffered"} - {"raw_random"}:
        assert (spans.size_bytes[kind], spans.files[kind]) == (SIZE_BYTES, 1)
    assert (spans.size_bytes["raw_small"], spans.files["raw_small"]) == (16 * 4096, 16)
    if "raw_random" in kinds:
        assert (spans.size_bytes["raw_random"], spans.files["raw_random"]) == (64 * 4096, 64)


@pytest.fixture
def direct_path(tmp_path):
    try:
        os.close(os.open(tmp_path / "tried", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except (OSError, AttributeError):
        pytest.skip("no O_DIRECT here")
    finally:
        (tmp_path / "tried").unlink(missing_ok=True)
    return tmp_path


@needs_fio
def test_fio_measures_where_it_is_installed(direct_path):
    folder = direct_path / "a: b,ü"  # fio splits names at colons
    folder.mkdir()
    spans = probed(folder)
    check_sizes(spans, DIRECT)
    assert set(spans.part.drop("raw_small")) == {"fio"}
    assert spans.part["raw_small"] == "own"
    assert (spans.end_s - spans.start_s).raw_random < 0.25  # fio's start-up alone takes longer


def test_our_own_prober_measures_without_fio(direct_path, without_fio):
    spans = probed(direct_path)
    check_sizes(spans, DIRECT)
    assert set(spans.part) == {"own"}


def fake_fio(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "fio"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


NO_AIO = json.dumps({"jobs": [{"error": errno.EAGAIN}]})


@pytest.mark.parametrize("script", ["touch raw.bin; echo fio: engine libaio not loadable; exit 1", f"echo '{NO_AIO}'"])
def test_a_fio_that_cannot_is_replaced(direct_path, tmp_path_factory, monkeypatch, script):
    fake_fio(tmp_path_factory.mktemp("bin"), monkeypatch, script)
    spans = probed(direct_path)
    check_sizes(spans, DIRECT)
    assert set(spans.part) == {"own"}


@needs_fio
def test_the_same_file_is_written_by_both(direct_path):
    pattern, file = probe.PATTERNS[0], direct_path / "raw.bin"
    for measure in (probe._fio, probe._own):
        file.unlink(missing_ok=True)
        measure(file, pattern, SIZE_BYTES)
        data = file.read_bytes()
        assert len(data) == SIZE_BYTES
        assert len(zlib.compress(data[: 2 << 20], 1)) > 0.9 * (2 << 20)
        pages = {data[at : at + 4096] for at in range(0, SIZE_BYTES, 4096)}
        assert len(pages) == SIZE_BYTES // 4096


def test_an_emulated_device_is_not_probed(tmp_path, tmp_path_factory):
    device = emulated.Device(emulated.PROFILES["hdd-nas-1gbe"], tmp_path_factory.mktemp("device") / "queue")
    assert probed(tmp_path, device).empty


def test_a_path_without_direct_io_gives_the_other_two(tmp_path, monkeypatch):
    """As on macOS, where fio isn't asked either."""
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    spans = probed(tmp_path)
    check_sizes(spans, ())
    assert set(spans.part) == {"own"}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_only_a_refusal_of_direct_io_is_passed_over(tmp_path, tmp_path_factory, monkeypatch, number):
    answer = json.dumps({"jobs": [{"error": number}]})
    script = f"case \"$*\" in *--direct=1*) echo '{answer}';; esac"
    fake_fio(tmp_path_factory.mktemp("bin"), monkeypatch, script)
    if number == errno.EINVAL:
        check_sizes(probed(tmp_path), ())
    else:
        with pytest.raises(OSError) as caught:
            probed(tmp_path)
        assert caught.value.errno == number


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request, tmp_path):
    """A file system of its own with too little room."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4, to mount a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(12 << 20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        mount = ["mount", "-o", "loop", str(image), str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("can't mount a file system here")
    shutil.rmtree(folder / "lost+found", ignore_errors=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("tool", [pytest.param("fio", marks=needs_fio), "own"])
def test_a_full_disk_is_an_error_that_says_so(small_disk, monkeypatch, tool):
    if tool == "own":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(OSError) as caught:
        probed(small_disk)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("tool", [pytest.param("fio", marks=needs_fio), "own"])
def test_a_slow_disk_is_probed_with_fewer_bytes(direct_path, monkeypatch, tool):
    if tool == "own":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(probe, "SIZE_BYTES", 1 << 29)
    monkeypatch.setattr(probe, "LIMIT_S", 0.05)
    spans = probed(direct_path)
    assert probe.BLOCK_BYTES <= spans.size_bytes["raw_write"] < 1 << 29
    assert spans.size_bytes["raw_read"] <= spans.size_bytes["raw_write"]


@needs_fio
def test_both_tools_measure_side_by_side(direct_path):
    rows = probe.both(direct_path, rounds=1)
    assert not list(direct_path.iterdir())
    assert [row["kind"] for row in rows] == [pattern.kind for pattern in probe.PATTERNS]
    for row in rows:
        assert row["n"] == 1
        assert row["ratio"] == row["own_bytes_per_s"] / row["fio_bytes_per_s"] > 0
