import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import contents, foreign_files
from stallbench.config import ConfigError, Target
from stallbench.storage import medium as storage
from stallbench.storage import ownership, targets

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def owned(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("stallbench-*"))


def test_a_claim_leaves_nothing_and_touches_nobody_elses_files(tmp_path):
    foreign_files(tmp_path)
    before = contents(tmp_path)
    with targets.claim(Target(name="t", location=str(tmp_path)), "0123456789ab-0") as folder:
        assert json.loads((folder / ownership.MARKER).read_text())["study_id"] == "0123456789ab-0"
        (folder / "link").symlink_to(tmp_path / "checkpoint-2", target_is_directory=True)
    assert contents(tmp_path) == before
    assert owned(tmp_path) == ["stallbench-000000000000-0", "stallbench-link"]


def test_a_killed_run_is_cleaned_up_at_the_next_start_and_a_living_one_is_not(tmp_path):
    script = (
        "import os, sys; from stallbench.storage import targets; from stallbench.config import Target\n"
        "with targets.claim(Target(name='t', location=sys.argv[1]), sys.argv[2]) as folder:\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    processes = []
    for study_id in ("killed", "living"):
        arguments = [sys.executable, "-c", script, str(tmp_path), study_id]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "held\n"
        processes.append(process)
    processes[0].kill()
    processes[0].communicate()
    assert owned(tmp_path) == ["stallbench-killed", "stallbench-living"]
    with targets.claim(Target(name="t", location=str(tmp_path)), "next"):
        assert owned(tmp_path) == ["stallbench-living", "stallbench-next"]
    processes[1].communicate("", timeout=30)
    assert owned(tmp_path) == []


@pytest.mark.parametrize("marker", ['{"study_id": "other", "machine": "x"}', "no json", "[]"])
def test_a_folder_whose_marker_does_not_match_is_never_removed(tmp_path, marker):
    folder = tmp_path / "stallbench-mine"
    folder.mkdir()
    (folder / ownership.MARKER).write_text(marker)
    ownership.sweep(tmp_path)
    assert not ownership.remove(folder)
    assert (folder / ownership.MARKER).read_text() == marker


def test_a_folder_that_another_machine_marked_is_left_to_it(tmp_path):
    folder = tmp_path / "stallbench-mine"
    folder.mkdir()
    (folder / ownership.MARKER).write_text('{"study_id": "mine", "machine": "elsewhere"}')
    ownership.sweep(tmp_path)
    assert folder.exists()


def test_a_link_to_a_marked_folder_is_not_ours(tmp_path):
    real = tmp_path / "elsewhere" / "stallbench-mine"
    real.mkdir(parents=True)
    (real / ownership.MARKER).write_text('{"study_id": "mine"}')
    link = tmp_path / "stallbench-mine"
    link.symlink_to(real, target_is_directory=True)
    assert not ownership.remove(link)
    assert real.exists()


def check(*locations: str, needed_bytes: int = 0, control: bool = False) -> list[str]:
    places = [Target(name=f"t{number}", location=location) for number, location in enumerate(locations)]
    return targets.check(places, needed_bytes, control)


def test_a_place_that_cannot_serve_is_refused_with_its_name_and_the_way_out(tmp_path):
    (tmp_path / "file").touch()
    for location, words in (
        (str(tmp_path / "missing"), "t0=.*is missing; make the directory"),
        (str(tmp_path / "file"), "is not a directory"),
        ("emulated:floppy", "unknown emulated profile 'floppy'; there are: hdd-nas-1gbe"),
        ("emulated:hdd-nas-1gbe?disk_bytes_per_s=1e15&link_bytes_per_s=1e15", "more than half of"),
        ("/proc", "t0='/proc' is not writable|t0='/proc' is too full"),
    ):
        with pytest.raises(ConfigError, match=words):
            check(location)


@needs_root
def test_a_target_too_full_for_the_planned_checkpoints_is_refused_with_both_figures(small_disk):
    with pytest.raises(ConfigError, match=r"too full: the checkpoints need 567 MB and 1 MB are free"):
        check(str(small_disk), needed_bytes=500_000_000)
    assert list(small_disk.iterdir()) == []


@needs_root
def test_a_read_only_target_is_refused(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ConfigError, match="is not writable"):
        check(str(small_disk))


def test_one_directory_twice_is_refused_unless_it_is_a_control(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="same place as t0; give another one, or --control"):
        check(str(tmp_path), str(tmp_path / "link"))
    assert check(str(tmp_path), str(tmp_path), control=True) == []


def test_paths_may_be_relative_or_hold_a_home_a_variable_or_a_link(tmp_path, monkeypatch):
    place = tmp_path / "a b"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", "a b")
    for location in ("a b", "~/a b", "$HOME/$PLACE", "link", "./link/"):
        assert os.path.samefile(targets.directory(Target(name="t", location=location)), place)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory file system here")
def test_memory_is_called_memory():
    assert storage.describe(Path("/dev/shm")).medium == "memory"


@pytest.mark.parametrize(
    ("model", "transport", "words"),
    [
        ("Samsung SSD 990 PRO", "pcie", "NVMe device (Samsung SSD 990 PRO)"),
        ("Amazon Elastic Block Store", "pcie", "a virtual disk, medium unknown"),
        ("nvme_card-pd", "pcie", "a virtual disk, medium unknown"),
        ("Linux", "tcp", "a block device across a network, medium unknown"),
        ("", "", "a device of unknown medium"),
    ],
)
def test_nvme_needs_a_pcie_controller_that_is_no_clouds_network_disk(tmp_path, model, transport, words):
    block = tmp_path / "nvme0n1"
    (block / "device").mkdir(parents=True)
    (block / "device" / "model").write_text(model + "\n")
    (block / "device" / "transport").write_text(transport + "\n")
    assert storage._kind(block, "no")[0] == words


def test_a_left_over_of_the_same_study_does_not_block_it(tmp_path):
    left = tmp_path / "stallbench-same"
    left.mkdir()
    (left / ownership.MARKER).write_text(json.dumps({"study_id": "same", "machine": "elsewhere", "pid": 1}))
    with targets.claim(Target(name="t", location=str(tmp_path)), "same") as folder:
        assert folder == left
    assert owned(tmp_path) == []


def test_a_disk_is_called_nvme_only_by_its_own_evidence(tmp_path):
    found = storage.describe(tmp_path)
    assert found.file_system != "unknown"
    block = Path("/sys/block")
    if block.is_dir() and not any(path.name.startswith("nvme") for path in block.iterdir()):
        assert "nvme" not in found.words.lower()


@needs_root
def test_the_file_below_a_loop_device_is_made_cold_too(tmp_path, tiny):
    """Otherwise a "cold" restore would come from memory: the loop's backing file has pages of its own."""
    from stallbench.config import TrialConfig
    from stallbench.storage.pagecache import resident_pages
    from stallbench.trial import Trial

    image, mount = tmp_path / "disk.img", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)]).returncode:
        pytest.skip("no loop device here")
    try:
        assert storage.backing_file(mount) == image
        assert "loop device" in storage.describe(mount).words
        trial = Trial(TrialConfig.parse(**tiny, target=str(mount), out=str(tmp_path / "out")))
        trial.put_data()
        trial.train()
        assert resident_pages(image) > 1000
        assert trial.workspace.drop(trial.workspace.folder / "checkpoints") | {"cache_metadata": ""} == {
            "cache_data": "cold", "cache_metadata": "", "cache_server": "cold"
        }  # fmt: skip
        assert resident_pages(image) < 100  # the mounted file system reads a few of its own
        trial.restore()
        trial.control()
        trial.finish()
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_mount_options_that_may_name_a_server_or_a_user_are_left_out():
    kept = [
        option
        for option in "rw,vers=4.1,addr=10.0.0.1,username=eve,lowerdir=/home/eve,hard".split(",")
        if storage._OPTIONS.fullmatch(option)
    ]
    assert kept == ["rw", "vers=4.1", "hard"]


def marked(root: Path, study_id: str, **marker) -> Path:
    folder = root / f"stallbench-{study_id}"
    folder.mkdir()
    (folder / ownership.MARKER).write_text(json.dumps({"study_id": study_id} | marker))
    return folder


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def states(root: Path) -> dict[str, str]:
    return {left.folder.name.removeprefix("stallbench-"): left.state for left in ownership.left_overs(root)}


def test_clean_takes_only_what_nobody_can_be_using(tmp_path):
    foreign_files(tmp_path)
    before = contents(tmp_path)
    gone = marked(tmp_path, "gone", machine=ownership.machine_id(), pid=ended_pid())
    (gone / "link").symlink_to(tmp_path / "checkpoint-2", target_is_directory=True)
    running = marked(tmp_path, "running", machine=ownership.machine_id(), pid=os.getpid())
    elsewhere = marked(tmp_path, "elsewhere", machine="other", pid=ended_pid())
    odd = marked(tmp_path, "odd", machine=ownership.machine_id(), pid="1; x")
    assert states(tmp_path) == {"gone": "gone", "running": "running", "elsewhere": "elsewhere", "odd": "running"}
    assert [left.folder for left in ownership.left_overs(tmp_path) if left.removable] == [gone]
    assert [ownership.clean(folder) for folder in (gone, running, elsewhere, odd)] == [True, False, False, False]
    assert not ownership.clean(running, include_foreign=True)
    assert ownership.clean(elsewhere, include_foreign=True)
    for folder in (running, odd):
        ownership.remove(folder)
    assert contents(tmp_path) == before


def test_a_folder_killed_before_its_marker_is_removed_only_if_empty_old_and_of_our_name(tmp_path):
    names = ("0123456789ab", "0123456789ab-0", "fresh6789abc", "0123456789ac", "0123456789ad", "mine")
    folders = {name: tmp_path / f"stallbench-{name}" for name in names}
    for folder in folders.values():
        folder.mkdir()
    (folders["0123456789ac"] / "notes.txt").write_text("somebody's")
    link = tmp_path / "stallbench-0123456789ae"
    link.symlink_to(folders["mine"], target_is_directory=True)
    for name, folder in folders.items():
        if name != "0123456789ad":
            os.utime(folder, (0, 0))
    assert states(tmp_path) == {"0123456789ab": "unmarked", "0123456789ab-0": "unmarked"}
    ownership.sweep(tmp_path)
    kept = ["0123456789ac", "0123456789ad", "0123456789ae", "fresh6789abc", "mine"]
    assert owned(tmp_path) == [f"stallbench-{name}" for name in kept]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "huge", "deep", "garbage", "other study", "no text"])
def test_a_marker_that_lies_protects_its_folder(tmp_path, kind):
    folder = marked(tmp_path, "0123456789ab", machine=ownership.machine_id(), pid=ended_pid())
    marker = folder / ownership.MARKER
    honest = marker.read_text()
    marker.unlink()
    if kind == "link":
        (tmp_path / "real.json").write_text(honest)
        marker.symlink_to(tmp_path / "real.json")
    elif kind == "pipe":
        os.mkfifo(marker)
    elif kind == "folder":
        marker.mkdir()
    else:
        lies = {"huge": honest + " " * 10_000, "deep": "[" * 4000, "garbage": "\x00{", "no text": "[null]"}
        marker.write_text(lies.get(kind, honest.replace("0123456789ab", "ffffffffffff")))
    os.utime(folder, (0, 0))
    ownership.sweep(tmp_path)
    assert ownership.left_overs(tmp_path) == []
    assert not ownership.clean(folder, include_foreign=True) and not ownership.remove(folder)
    assert os.path.lexists(marker)


def test_what_comes_into_an_unmarked_folder_at_the_last_moment_keeps_it(tmp_path, monkeypatch):
    folder = tmp_path / "stallbench-0123456789ab"
    folder.mkdir()
    (folder / "notes.txt").write_text("somebody's")
    monkeypatch.setattr(ownership, "_is_unmarked", lambda folder: True)
    assert not ownership.clean(folder)
    assert (folder / "notes.txt").exists()


def test_two_studies_on_one_target_do_not_see_each_other(tmp_path):
    one = Target(name="t", location=str(tmp_path))
    with targets.claim(one, "0123456789ab-0") as first:
        with targets.claim(one, "0123456789ac-0") as second:
            assert not any(left.removable for left in ownership.left_overs(tmp_path))
            assert not ownership.clean(first, include_foreign=True) and not ownership.clean(
                second, include_foreign=True
            )
        assert owned(tmp_path) == [first.name]
