"""What a preflight says of a place, on trees like those of other machines and on real mounts."""

import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from conftest import contents, foreign_files
from stallbench.commands import targets as preflight_cli
from stallbench.config import Target
from stallbench.storage import medium as storage
from stallbench.storage import preflight
from stallbench.storage import probe as prober

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")


def at(location, name="t") -> Target:
    return Target(name=name, location=str(location))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Build a machine's /sys, /proc and mount table around one folder; call it to set them and examine the folder."""
    sys_root, proc, place = tmp_path / "sys", tmp_path / "proc", tmp_path / "place"
    for folder in (sys_root / "dev" / "block", proc / "sys" / "vm", place):
        folder.mkdir(parents=True)
    monkeypatch.setattr(storage, "SYS", sys_root)
    monkeypatch.setattr(preflight, "PROC", proc)

    def block(name, rotational="1", cache="write back", **device):
        folder = sys_root / "block" / name
        (folder / "queue").mkdir(parents=True)
        (folder / "device").mkdir()
        (folder / "queue" / "rotational").write_text(rotational + "\n")
        (folder / "queue" / "write_cache").write_text(cache + "\n")
        for key, value in device.items():
            (folder / "device" / key).write_text(value + "\n")
        return folder

    def partition(whole):
        part = whole / f"{whole.name}1"
        part.mkdir()
        (part / "partition").write_text("1\n")
        return part

    def joined(name, *parts):
        (sys_root / "block" / name / "slaves").mkdir(parents=True)
        for part in parts:
            (sys_root / "block" / name / "slaves" / part.name).symlink_to(part)
        return sys_root / "block" / name

    def examine(fstype, device="/dev/x", opts="rw", below=None):
        if below:
            number = place.stat().st_dev
            (sys_root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(below)
        mount = SimpleNamespace(fstype=fstype, device=device, opts=opts, mountpoint=str(place))
        monkeypatch.setattr(storage.psutil, "disk_partitions", lambda all: [mount])
        return preflight.examine(at(place), probe=False)

    return SimpleNamespace(block=block, partition=partition, joined=joined, examine=examine, proc=proc)


def test_nvme_and_its_partition(machine):
    whole = machine.block("nvme0n1", "0", "write through", model="Samsung SSD 990 PRO", transport="pcie")
    facts = machine.examine("xfs", opts="rw,usrquota", below=machine.partition(whole))
    assert (facts.medium, facts.sure, facts.where, facts.devices) == ("nvme", "certain", "local", ("nvme0n1",))
    assert (facts.rotational, facts.rotational_believed, facts.write_cache) == ("no", True, "write through")
    assert facts.quota == "on"
    assert "has a quota" in preflight.warnings([facts])[0]


@pytest.mark.parametrize(
    ("vendor", "model", "rotational", "medium"),
    [
        ("ATA", "ST8000NM0055", "1", "rotational"),
        ("ATA", "SAMSUNG MZ7LH960", "0", "solid state"),
        ("DELL", "PERC H740P", "0", "unknown"),
        ("ATA", "QEMU HARDDISK", "1", "unknown"),
    ],
)
def test_a_disk_is_what_an_ata_drive_says_and_a_controllers_volume_is_not(machine, vendor, model, rotational, medium):
    facts = machine.examine("ext4", below=machine.block("sda", rotational, vendor=vendor, model=model))
    assert (facts.medium, facts.rotational_believed) == (medium, medium != "unknown")


def test_a_virtual_disks_word_is_not_believed(machine):
    facts = machine.examine("ext4", below=machine.block("vda", "1", "write through"))
    assert (facts.medium, facts.where, facts.rotational, facts.rotational_believed) == ("unknown",) * 2 + ("yes", False)
    assert "not to be believed" in "\n".join(preflight.lines(facts))
    assert "host's cache mode" in preflight.warnings([facts])[0]


@pytest.mark.parametrize(
    ("fstype", "device", "opts"),
    [
        ("nfs4", "10.0.0.7:/export/mallory", "rw,vers=4.2,soft,addr=10.0.0.7,clientaddr=10.0.0.9"),
        ("lustre", "mgs@tcp:/scratch", "rw,flock"),
        ("cifs", "//nas/mallory", "rw,vers=3.1.1,username=mallory"),
        ("ceph", "mon:/", "rw,name=mallory"),
        ("fuse.sshfs", "mallory@nas:/data", "rw,user_id=0"),
    ],
)
def test_network_file_systems_tell_no_server_and_no_user(machine, fstype, device, opts):
    facts = machine.examine(fstype, device, opts)
    assert (facts.medium, facts.where, facts.devices) == ("network", "network", ())
    assert not re.search(r"mallory|10\.0|nas|mgs|mon:", str(asdict(facts)))
    assert any("soft" in text for text in preflight.warnings([facts])) == ("soft" in opts)


def test_an_overlay_and_a_fuse_without_a_device(machine):
    facts = machine.examine("overlay", "overlay", "rw,lowerdir=/home/mallory")
    assert facts.medium == "unknown" and "of a container" in facts.words
    assert "mount a volume" in preflight.warnings([facts])[0]
    facts = machine.examine("fuse.thing", "thing")
    assert (facts.medium, facts.where, facts.rotational) == ("unknown",) * 3
    assert "a program serves" in facts.words


def test_md_and_lvm_are_what_lies_below_them(machine):
    disks = [machine.block(name, "1", vendor="ATA", model="ST8000") for name in ("sda", "sdb")]
    array = machine.joined("md0", *(machine.partition(disk) for disk in disks))
    facts = machine.examine("xfs", "/dev/mapper/vg-mallory", below=machine.joined("dm-0", array))
    assert facts.devices == ("dm-0", "sda", "sdb")
    assert (facts.medium, facts.rotational, facts.write_cache) == ("rotational", "yes", "write back")


def test_unlike_devices_below_lvm_prove_no_medium(machine):
    disks = [
        machine.block("nvme0n1", "0", model="x", transport="pcie"),
        machine.block("sda", "1", "write through", vendor="ATA"),
    ]
    facts = machine.examine("xfs", below=machine.joined("dm-0", *disks))
    assert (facts.medium, facts.rotational, facts.write_cache) == ("unknown", "mixed", "mixed")


def test_without_proc_and_sysfs_all_is_unknown(machine, monkeypatch):
    def refused(all):
        raise FileNotFoundError("/proc/self/mounts")

    facts = machine.examine("apfs", "/dev/disk1s1")
    assert (facts.medium, facts.dirty_bytes, facts.write_cache) == ("unknown", None, "unknown")
    monkeypatch.setattr(storage.psutil, "disk_partitions", refused)
    monkeypatch.setattr(sys, "platform", "darwin")
    facts = preflight.examine(at(machine.proc), probe=False)
    assert (facts.file_system, facts.sure) == ("unknown", "a guess")
    text = "\n".join(preflight.lines(facts))
    assert "F_FULLFSYNC" in text and "sync mount unknown" in text


def test_dirty_limits_come_in_bytes(machine):
    (machine.proc / "vmstat").write_text("nr_dirty_threshold 1000\nnr_dirty_background_threshold 500\n")
    for name, value in {
        "dirty_ratio": 0, "dirty_bytes": 4096000, "dirty_background_ratio": 10, "dirty_background_bytes": 0
    }.items():  # fmt: skip
        (machine.proc / "sys" / "vm" / name).write_text(f"{value}\n")
    facts = machine.examine("ext4")
    assert (facts.dirty_bytes, facts.dirty_background_bytes) == (1000 * os.sysconf("SC_PAGE_SIZE"),
                                                                 500 * os.sysconf("SC_PAGE_SIZE"))  # fmt: skip
    assert facts.dirty_settings == "vm.dirty_bytes=4096000, vm.dirty_background_ratio=10"
    assert "4 MB of dirty pages" in preflight.warnings([facts])[0]


@pytest.mark.parametrize(
    ("rates", "fell"),
    [
        ([100] * 8, False),
        ([100, 100, 100, 100, 30, 30, 30, 30], True),
        ([100, 20, 100, 100, 100, 20, 100, 100], False),  # a slow chunk here and there
        ([100, 100, 100, 90, 80, 80, 80, 80], False),
        ([100, 40, 100, 100, 100, 40, 40, 100], False),  # slow ones more often at the end, fast ones too
        ([100, 30], None),
    ],
)
def test_a_fall_of_speed_is_told_from_noise(rates, fell):
    assert preflight._fall(rates)["fell"] is fell


def test_a_slowing_device_is_warned_about(tmp_path, monkeypatch):
    calls = []
    real = prober.sync_file

    def slower(path):
        calls.append(path)
        if path.name == "chunks.bin":
            time.sleep(0.05 if len(calls) < 5 else 0.4)
        real(path)

    monkeypatch.setattr(prober, "sync_file", slower)
    monkeypatch.setattr(prober, "raw_limits", lambda workspace, timeline: timeline.end(timeline.begin("raw_small")))
    facts = preflight.examine(at(tmp_path), probe=True)
    assert facts.fell and "burst credits" in "\n".join(preflight.warnings([facts]))


def test_targets_without_a_directory_say_what_they_are():
    for location, kind, words in (
        ("s3://mallory-bucket/models", "url", "s3://"),
        ("sftp://mallory@nas/x", "url", "sftp://"),
        ("emulated:hdd-nas-1gbe", "emulated", "emulated hdd-nas-1gbe"),
        ("lab:hdd", "lab", "block device"),
    ):
        facts = preflight.examine(at(location), probe=True)
        text = "\n".join(preflight.lines(facts))
        assert facts.kind == kind and words in text and "mallory" not in text
        assert preflight.warnings([facts]) == []
    assert "acknowledgement" in preflight.examine(at("s3://b"), probe=True).durable_by


def test_little_room_is_warned_about_with_both_figures(machine):
    facts = replace(machine.examine("ext4"), size_bytes=10**12, free_bytes=5 * 10**10, free_inodes=12)
    assert ["50.0 GB of 1,000.0 GB free" in text for text in preflight.warnings([facts])] == [True, False]
    assert "room for 12 files" in preflight.warnings([facts])[1]


def test_examining_and_cleaning_leave_foreign_files_as_they_are(tmp_path):
    foreign_files(tmp_path)
    before = contents(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    facts = preflight.examine(at(tmp_path), probe=True)
    assert facts.probed == "yes" and facts.small_files_per_s > 0 and facts.fell is not None
    assert str(tmp_path) not in str(facts)
    app = typer.Typer()
    app.command()(preflight_cli.targets)
    app.command()(preflight_cli.clean)
    for words in (["clean", f"t={tmp_path}", "--yes", "--include-foreign"], ["targets", "--no-probe", f"t={tmp_path}"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert CliRunner().invoke(app, ["targets", f"t={tmp_path}/missing"]).exit_code == 2


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no memory file system here")
def test_memory_is_warned_about(tmp_path):
    facts = preflight.examine(at("/dev/shm", "mem"), probe=False)
    assert facts.medium == "memory" and facts.durable_by.startswith("nothing")
    assert "memory, not storage" in preflight.warnings([facts])[0]
    one, other = (preflight.examine(at(tmp_path, name), probe=False) for name in "ab")
    assert any("a and b lie on one device" in text for text in preflight.warnings([one, other]))


@needs_root
def test_a_sync_mount_on_a_loop_device(tmp_path):
    image, mount = tmp_path / "disk.img", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop,sync", str(image), str(mount)]).returncode:
        pytest.skip("no loop device here")
    try:
        facts = preflight.examine(at(mount), probe=True)
        assert "sync" in facts.options and "remount,async" in preflight.warnings([facts])[0]
        assert facts.devices[0].startswith("loop") and len(facts.devices) == 2 and "loop device" in facts.words
        assert facts.probed.startswith("no: less than")
        assert sorted(path.name for path in mount.iterdir()) == ["lost+found"]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@needs_root
def test_a_real_overlay(tmp_path):
    base = tmp_path / "tmpfs"
    base.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(base)], check=True)
    try:
        for name in ("lower", "upper", "work", "merged"):
            (base / name).mkdir()
        options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
        if subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(base / "merged")]).returncode:
            pytest.skip("no overlay file system here")
        facts = preflight.examine(at(base / "merged"), probe=False)
        subprocess.run(["umount", str(base / "merged")], check=True)
        assert facts.file_system == "overlay" and facts.medium == "unknown"
        assert "lowerdir" not in str(facts)
        assert "container's own layer" in preflight.warnings([facts])[0]
    finally:
        subprocess.run(["umount", str(base)], check=True)


@needs_root
def test_a_real_fuse_mount_that_takes_no_folder(tmp_path):
    """Nbdfuse serves one file and makes no folder: what can't be probed is said, and nothing is left."""
    served = tmp_path / "served"
    served.mkdir()
    try:
        process = subprocess.Popen(["nbdfuse", str(served), "--command", "nbdkit", "-s", "memory", "1M"])
    except FileNotFoundError:
        pytest.skip("no nbdfuse here")
    try:
        for _ in range(50):
            if os.path.ismount(served):
                break
            time.sleep(0.1)
        else:
            pytest.skip("nbdfuse doesn't mount here")
        facts = preflight.examine(at(served), probe=True)
        assert facts.file_system.startswith("fuse") and facts.medium == "unknown" and facts.where == "unknown"
        assert "a program serves" in facts.words and facts.probed.startswith("no:")
    finally:
        subprocess.run(["umount", "--lazy", str(served)], check=False)
        process.wait(timeout=20)


@needs_root
def test_a_place_that_takes_no_files_is_described_all_the_same(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=2g", "tmpfs", str(tmp_path)], check=True)
    try:
        assert preflight.examine(at(tmp_path), probe=True).probed == "no: it takes no files"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_killed_study_is_cleaned_by_the_command_and_foreign_files_stay(tmp_path):
    foreign_files(tmp_path)
    before = contents(tmp_path)
    script = (
        "import os, signal, sys; from stallbench.storage import targets; from stallbench.config import Target\n"
        "with targets.claim(Target(name='t', location=sys.argv[1]), '0123456789ab-0') as folder:\n"
        "    (folder / 'link').symlink_to(folder.parent / 'checkpoint-2'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == -9
    left = tmp_path / "stallbench-0123456789ab-0"
    app = typer.Typer()
    app.command()(preflight_cli.clean)
    listed = CliRunner().invoke(app, [f"t={tmp_path}"]).output
    assert left.name in listed and "its study has ended" in listed and "add --yes" in listed and left.exists()
    assert ": removed" in CliRunner().invoke(app, [f"t={tmp_path}", "--yes"]).output
    assert not left.exists() and contents(tmp_path) == before


def test_a_mount_that_flushes_no_cache_is_warned_about_and_noquota_is_believed(machine):
    facts = machine.examine("xfs", opts="rw,nobarrier,noquota")
    assert facts.quota == "off"
    assert "durable is not" in "\n".join(preflight.warnings([facts]))
