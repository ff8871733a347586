"""What the kernel tells of the storage below a path: its file system, its devices, and what of that can be believed.

Facts come from the mount table (proc_pid_mounts(5)) and from sysfs (Documentation/ABI/stable/sysfs-block of Linux);
where a system has neither, they are "unknown".
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

SYS = Path("/sys")
LABS = Path("/run/stallbench")  # where a running lab keeps its state, by the name of its device

_NETWORK = re.compile(
    r"nfs4?|cifs|smb3?|smbfs|lustre|ceph|glusterfs|beegfs|gpfs|9p|afs|afpfs|orangefs|pvfs2"
    r"|fuse\.(sshfs|s3fs|rclone|gcsfuse|blobfuse2?|goofys|mountpoint-s3|juicefs|ceph|ceph-fuse|glusterfs|davfs2?|moosefs)"
)
_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_OVERLAY = {"overlay", "aufs", "fuse.fuse-overlayfs"}
# Options that say how bytes travel; all others may carry a path, a server or a user name.
_OPTIONS = re.compile(
    r"(ro|rw|sync|async|dirsync|noatime|relatime|discard|barrier|nobarrier|hard|soft|nolock|noac|local"
    r"|(vers|proto|rsize|wsize|nconnect|data|compress|cache|commit|actimeo|size)(=[\w:.-]*)?)"
)
_QUOTA = re.compile(r"(usr|grp|prj)j?quota(=.*)?|[ugp]quota|[ugp]qnoenforce|quota")
_VIRTUAL = re.compile(r"QEMU|VMware|VBOX|Virtual|Elastic Block|PersistentDisk|nvme_card-pd|MSFT NVMe")


@dataclass(frozen=True)
class Storage:
    """What is known about a place, without its path.

    ``words`` says it in words; ``medium`` is ``emulated``, ``memory``, ``network``, ``nvme``, ``solid state``,
    ``rotational`` or ``unknown``, and never more than the device itself proves.
    """

    words: str
    medium: str
    file_system: str = "unknown"
    options: tuple[str, ...] = ()


class Device(NamedTuple):
    """A block device, or several below one file system.

    ``where`` is ``local``, ``network`` or ``unknown``; ``rotational`` is what the kernel says (``yes``, ``no``,
    ``mixed``, ``unknown``), and ``believed`` whether the device itself said so; ``write_cache`` is ``write back``,
    ``write through``, ``mixed`` or ``unknown``.
    """

    names: tuple[str, ...] = ()
    words: str = "a device of unknown medium"
    medium: str = "unknown"
    where: str = "unknown"
    rotational: str = "unknown"
    believed: bool = False
    write_cache: str = "unknown"


class Mount(NamedTuple):
    """A line of the mount table; ``options`` and ``quota`` hold nothing that may name a place or a user."""

    file_system: str
    source: str
    options: tuple[str, ...]
    quota: str


def mount_of(path: Path) -> Mount | None:
    """Give the mount that ``path`` lies on; None where the system doesn't say.

    A quota is known only from mount options (mount(8), xfs(5)): statvfs(3) doesn't tell of one, and quotas of ext4's
    feature, of btrfs, ZFS and servers show nowhere.
    """
    try:
        mounts = psutil.disk_partitions(all=True)
    except (OSError, RuntimeError):
        return None
    real = Path(os.path.realpath(path))
    below = [mount for mount in mounts if real.is_relative_to(mount.mountpoint)]
    if not below:
        return None
    found = max(reversed(below), key=lambda mount: len(mount.mountpoint))  # the last of those at one place is on top
    options = found.opts.split(",")
    quota = "on" if any(map(_QUOTA.fullmatch, options)) else "off" if "noquota" in options else "unknown"
    return Mount(found.fstype, found.device, tuple(filter(_OPTIONS.fullmatch, options)), quota)


def describe(path: Path) -> Storage:
    """Say what storage lies below ``path``, from the mount table and the device's own entries in sysfs."""
    mount = mount_of(path)
    if mount is None:
        return Storage("storage of unknown kind", "unknown")
    words, medium, _ = classify(mount, device_below(path, mount))
    return Storage(words, medium, mount.file_system, mount.options)


def classify(mount: Mount, device: Device) -> tuple[str, str, str]:
    """Say what a mount is, in words, its medium, and where it lies (``local``, ``network``, ``unknown``)."""
    kind = mount.file_system
    if kind in _MEMORY:
        return f"{kind}: this is memory, not storage", "memory", "local"
    if _NETWORK.fullmatch(kind):
        return f"{kind}: a network file system", "network", "network"
    if kind in _OVERLAY:
        return f"{kind}: file system of a container, medium unknown", "unknown", "unknown"
    if kind == "virtiofs":
        return "virtiofs: a folder that the virtual machine's host shares, medium unknown", "unknown", "unknown"
    if kind == "fuse" or kind.startswith("fuse."):
        return f"{kind}: a file system that a program serves, medium unknown", "unknown", "unknown"
    return f"{kind} on {device.words}", device.medium, device.where


def _block_device(path: Path, source: str = "") -> Path:
    """Give the sysfs folder of the whole device below ``path``; one that doesn't exist where there is none.

    Some file systems (btrfs) have a device number of their own: theirs is found by the name in the mount table.
    """
    number = path.stat().st_dev
    block = SYS / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if not block.exists() and source.startswith("/dev/"):
        block = SYS / "class" / "block" / Path(os.path.realpath(source)).name
    return _whole(block)


def _whole(block: Path) -> Path:
    block = Path(os.path.realpath(block))
    return block.parent if (block / "partition").exists() else block


def backing_file(path: Path) -> Path | None:
    """Give the file that a loop device below ``path`` keeps its bytes in: its pages are one more cache to drop."""
    return _backing_file(_block_device(path))


def _backing_file(block: Path) -> Path | None:
    found = Path(_read(block / "loop" / "backing_file"))
    return found if found.is_absolute() and found.is_file() else None


def _is_lab(block: Path) -> bool:
    beneath = _backing_file(block)
    return beneath is not None and (LABS / f"{beneath.name}.json").exists()


def _leaves(block: Path) -> list[Path]:
    """Give the devices at the bottom: below LVM, md, dm-crypt (``slaves`` in sysfs) and loops."""
    try:
        slaves = sorted((block / "slaves").iterdir())
    except OSError:
        slaves = []
    if slaves:
        found = [leaf for slave in slaves for leaf in _leaves(_whole(slave))]
        return list(dict.fromkeys(found))
    beneath = _backing_file(block)
    return _leaves(_block_device(beneath)) if beneath else [block]


def device_below(path: Path, mount: Mount) -> Device:
    """Say what device lies below ``path``: more than one where LVM or md joins several."""
    block = _block_device(path, mount.source)
    if not block.exists():
        return Device()
    leaves = _leaves(block)
    found = [_device(leaf) for leaf in leaves]
    names = tuple(dict.fromkeys([block.name, *(leaf.name for leaf in leaves if leaf.exists())]))
    words = "; ".join(dict.fromkeys(device.words for device in found))
    medium = _one(device.medium for device in found)
    if block.name.startswith("loop"):  # a file system, with a cache of its own, lies between it and the disk
        words, medium = f"a loop device, its bytes in a file elsewhere ({words})", "unknown"
        if _is_lab(block):
            words, medium = "a lab's device: emulated on real kernel I/O", "emulated"
    elif [block] != leaves:
        words = f"{'md RAID' if block.name.startswith('md') else 'device mapper'} over {words}"
    return Device(
        names,
        words,
        "unknown" if medium == "mixed" else medium,
        _one(device.where for device in found),
        _one(device.rotational for device in found),
        all(device.believed for device in found),
        _one(device.write_cache for device in found),
    )


def _one(values: Iterable[str]) -> str:
    found = set(values)
    return found.pop() if len(found) == 1 else "mixed"


def _device(block: Path) -> Device:
    rotational = {"0": "no", "1": "yes"}.get(_read(block / "queue" / "rotational"), "unknown")
    write_cache = _read(block / "queue" / "write_cache") or "unknown"
    words, medium, where = _kind(block, rotational)
    believed = medium in {"nvme", "solid state", "rotational"}
    return Device((block.name,), words, medium, where, rotational, believed, write_cache)


def _kind(block: Path, rotational: str) -> tuple[str, str, str]:
    model, vendor, transport = (_read(block / "device" / name) for name in ("model", "vendor", "transport"))
    name = block.name
    if re.match(r"(vd|xvd)[a-z]", name) or _VIRTUAL.search(model + vendor):
        return "a virtual disk, medium unknown", "unknown", "unknown"
    if re.match(r"(zram|ram|pmem)\d", name):
        return "a device in memory", "memory", "local"
    if re.match(r"(nbd|rbd|drbd)\d", name) or (name.startswith("nvme") and transport in {"tcp", "rdma", "fc"}):
        return "a block device across a network, medium unknown", "unknown", "network"
    if name.startswith("nvme") and transport == "pcie":
        return f"NVMe device ({model or 'model unknown'})", "nvme", "local"
    if re.match(r"sd[a-z]", name):
        return _scsi_kind(vendor, rotational)
    return "a device of unknown medium", "unknown", "unknown"


def _scsi_kind(vendor: str, rotational: str) -> tuple[str, str, str]:
    # Only an ATA drive, whose vendor the kernel writes as "ATA", is the medium itself: anything else may be a RAID
    # controller's or a SAN's volume. And "1" is what the kernel assumes of a device that says nothing.
    if rotational == "unknown":
        return "a disk of unknown medium", "unknown", "unknown"
    medium = "solid state" if rotational == "no" else "rotational"
    if vendor == "ATA":
        return f"a SATA disk that the kernel calls {medium}", medium, "local"
    return f"a SCSI disk or volume that the kernel calls {medium}, medium unknown", "unknown", "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
