"""What is known of a target before anything is measured, what can't be known, and what should be mended first."""

import mmap
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from uuid import uuid4

from stallbench.config import EMULATED, ConfigError, Target
from stallbench.spans import Timeline
from stallbench.storage import probe as prober
from stallbench.storage import remote, targets
from stallbench.storage.medium import classify, device_below, mount_of

PROC = Path("/proc")
# A fall of speed within the probe: all of the last third slower than all of the first, and by this much in the middle.
FALL_RATIO = 0.6
SEEKS_S = 2e-3  # a random read of a turning disk takes at least half a turn: 2 ms at 15,000 a minute
LOW_SHARE = 0.1
LOW_INODES = 10_000
_NEEDED_BYTES = 2 * prober.SIZE_BYTES


@dataclass(frozen=True)
class Facts:
    """What is known of one target, as plain values: no path, no host, no user.

    ``kind`` is ``directory``, ``emulated``, ``lab`` or ``url``. ``None`` and ``"unknown"`` mean that this system
    doesn't say. ``sure`` says how sure ``words`` are: ``certain``, ``likely``, ``a guess``. ``dirty_bytes`` and
    ``dirty_background_bytes`` are the kernel's limits now, ``dirty_settings`` what they come from. Rates are in
    bytes/s, but ``small_files_per_s``; they are None where nothing was probed, and ``probed`` says why.
    """

    name: str
    kind: str
    words: str
    sure: str
    medium: str = "unknown"
    where: str = "unknown"
    durable_by: str = "unknown"
    file_system: str = "unknown"
    options: tuple[str, ...] = ()
    quota: str = "unknown"
    devices: tuple[str, ...] = ()
    device_number: str = "unknown"
    rotational: str = "unknown"
    rotational_believed: bool = False
    write_cache: str = "unknown"
    size_bytes: int | None = None
    free_bytes: int | None = None
    inodes: int | None = None
    free_inodes: int | None = None
    dirty_bytes: int | None = None
    dirty_background_bytes: int | None = None
    dirty_settings: str = "unknown"
    probed: str = "not asked for"
    write_bytes_per_s: float | None = None
    buffered_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    random_read_s: float | None = None
    small_files_per_s: float | None = None
    first_bytes_per_s: float | None = None
    last_bytes_per_s: float | None = None
    fell: bool | None = None


def examine(target: Target, probe: bool) -> Facts:
    """Say what a target is, without writing to it unless ``probe`` asks for it.

    Parameters
    ----------
    probe
        Measure what it takes and gives back, in our own marked folder, which is removed: at most 340 MB; a second on a
        fast disk, about 25 s on a very slow one.

    Raises
    ------
    ConfigError
        If a directory is missing or none.
    """
    own_limits = "no: its limits are its profile's"
    if target.emulated:
        return Facts(
            target.name, "emulated", f"emulated {target.location.removeprefix(EMULATED)}: its time is computed",
            "certain", "emulated", durable_by="the emulated device's acknowledgement", probed=own_limits,
        )  # fmt: skip
    if target.remote:
        sftp = target.scheme in remote.SFTP
        durable_by = "the server's fsync, where it offers one" if sftp else "the store's acknowledgement"
        return Facts(
            target.name, "url", f"remote, {target.scheme}://, medium unknown", "certain",
            where="network", durable_by=durable_by, probed="no: a remote target",
        )  # fmt: skip
    if target.lab:
        return Facts(
            target.name, "lab", "lab: a real block device with an emulated disk's mechanics", "certain", "emulated",
            "local", durable_by="fsync", probed=own_limits,
        )  # fmt: skip
    facts = _of_directory(target)
    return _probed(target, facts) if probe else facts


def _of_directory(target: Target) -> Facts:
    folder = targets.directory(target)
    mount, space, number = mount_of(folder), os.statvfs(folder), folder.stat().st_dev
    facts = Facts(
        target.name, "directory", "storage of unknown kind", "a guess",
        durable_by="F_FULLFSYNC (fsync leaves the drive's cache)" if sys.platform == "darwin" else "fsync",
        device_number=f"{os.major(number)}:{os.minor(number)}",
        size_bytes=space.f_blocks * space.f_frsize, free_bytes=space.f_bavail * space.f_frsize,
        # A file system without a fixed number of inodes (btrfs) says 0.
        inodes=space.f_files or None, free_inodes=space.f_favail if space.f_files else None,
        **_dirty_limits(),
    )  # fmt: skip
    if mount is None:
        return facts
    device = device_below(folder, mount)
    words, medium, where = classify(mount, device)
    sure = "certain" if medium in {"memory", "network", "nvme"} else "likely"
    if medium == "memory":
        facts = replace(facts, durable_by="nothing: it is memory")
    return replace(
        facts, words=words, medium=medium, where=where, sure=sure, file_system=mount.file_system,
        options=mount.options, quota=mount.quota, devices=device.names, rotational=device.rotational,
        rotational_believed=device.believed, write_cache=device.write_cache,
    )  # fmt: skip


def _dirty_limits() -> dict[str, int | str | None]:
    """Read the kernel's limits of dirty pages.

    ``/proc/vmstat`` has the thresholds in pages, as the kernel computes them from ``vm.dirty_*`` and the memory that is
    available now (Documentation/admin-guide/sysctl/vm.rst). A control group may have lower ones.
    """
    found = dict(line.split()[:2] for line in _text("vmstat").splitlines() if len(line.split()) > 1)
    pages = [found.get(f"nr_dirty{name}_threshold", "") for name in ("", "_background")]
    limits = [int(text) * mmap.PAGESIZE if text.isdigit() else None for text in pages]
    settings = []
    for name in ("dirty", "dirty_background"):
        size, ratio = (_text(f"sys/vm/{name}_{unit}") for unit in ("bytes", "ratio"))
        if size not in {"", "0"}:
            settings.append(f"vm.{name}_bytes={size}")
        elif ratio:
            settings.append(f"vm.{name}_ratio={ratio}")
    return {
        "dirty_bytes": limits[0], "dirty_background_bytes": limits[1],
        "dirty_settings": ", ".join(settings) or "unknown",
    }  # fmt: skip


def _text(name: str) -> str:
    try:
        return (PROC / name).read_text().strip()
    except OSError:
        return ""


def _probed(target: Target, facts: Facts) -> Facts:
    if facts.free_bytes is not None and facts.free_bytes < _NEEDED_BYTES + targets.MARGIN_BYTES:
        return replace(facts, probed=f"no: less than {_size(_NEEDED_BYTES + targets.MARGIN_BYTES)} are free")
    timeline = Timeline()
    try:
        with targets.claim(target, uuid4().hex[:12]) as owned:
            rates = prober.chunk_rates(owned)
            prober.raw_limits(targets.open_workspace(target, owned, "preflight"), timeline)
    except ConfigError:
        return replace(facts, probed="no: it takes no files")
    except OSError as error:
        return replace(facts, probed=f"no: {error.strerror}")
    spans = {span.kind: span for span in timeline.spans}
    speed = {kind: span.size_bytes / span.duration_s for kind, span in spans.items()}
    random, small = spans.get("raw_random"), spans["raw_small"]
    facts = replace(
        facts, probed="yes",
        write_bytes_per_s=speed.get("raw_write"), buffered_bytes_per_s=speed.get("raw_buffered"),
        read_bytes_per_s=speed.get("raw_read"), random_read_s=random.duration_s / random.files if random else None,
        small_files_per_s=small.files / small.duration_s, **_fall(rates),
    )  # fmt: skip
    return _guessed(facts)


def _fall(rates: list[float]) -> dict[str, float | bool | None]:
    """Compare the last third of a probe's chunks with the first; one slow chunk is no fall."""
    third = (len(rates) + 1) // 3
    if third < 2:
        return {"first_bytes_per_s": None, "last_bytes_per_s": None, "fell": None}
    first, last = rates[:third], rates[-third:]
    fell = max(last) < min(first) and median(last) < FALL_RATIO * median(first)
    return {"first_bytes_per_s": median(first), "last_bytes_per_s": median(last), "fell": fell}


def _guessed(facts: Facts) -> Facts:
    if facts.medium != "unknown" or facts.random_read_s is None:
        return facts
    like = "a turning disk" if facts.random_read_s > SEEKS_S else "solid state, or a cache before anything else"
    return replace(
        facts, words=f"{facts.words}; by its random reads ({facts.random_read_s * 1e3:.2g} ms) {like}", sure="a guess"
    )


def lines(facts: Facts) -> list[str]:
    """Say the facts in words, for a terminal."""
    found = [f"{facts.name}: {facts.words} ({facts.sure})"]
    if facts.kind != "directory":
        return [*found, f"  durable by {facts.durable_by}; all else unknown"]
    believed = "the drive says so" if facts.rotational_believed else "not to be believed: nothing proves it"
    rotational = facts.rotational + ("" if facts.rotational == "unknown" else f" ({believed})")
    sync = "unknown" if facts.file_system == "unknown" else "yes" if _is_sync(facts) else "no"
    found += [
        f"  file system {facts.file_system}, options {','.join(facts.options) or 'unknown'}; sync mount {sync}; "
        f"quota {facts.quota}; {facts.where if facts.where != 'unknown' else 'local or network unknown'}",
        f"  device {', '.join(facts.devices) or 'unknown'}; rotational {rotational}; write cache {facts.write_cache}; "
        f"durable by {facts.durable_by}",
        f"  free {_size(facts.free_bytes)} of {_size(facts.size_bytes)}; "
        f"files {_count(facts.free_inodes)} of {_count(facts.inodes)}",
        f"  dirty pages: flushed from {_size(facts.dirty_background_bytes)}, writers held up at "
        f"{_size(facts.dirty_bytes)} ({facts.dirty_settings})",
    ]
    return found + _probe_lines(facts)


def _probe_lines(facts: Facts) -> list[str]:
    if facts.probed != "yes":
        return [f"  probed: {facts.probed}"]
    random = "unknown" if facts.random_read_s is None else f"{facts.random_read_s * 1e3:.2g} ms"
    fall = "too slow to tell whether it falls"
    if facts.fell is not None:
        fall = f"{_rate(facts.first_bytes_per_s)} at first, {_rate(facts.last_bytes_per_s)} at last"
        fall += ": IT FELL" if facts.fell else ": no fall beyond its own spread within 64 MiB"
    return [
        f"  probed: write {_rate(facts.write_bytes_per_s)}, buffered with fsync {_rate(facts.buffered_bytes_per_s)}, "
        f"read {_rate(facts.read_bytes_per_s)}, random 4 KiB read {random}, "
        f"{facts.small_files_per_s:,.0f} small files/s",
        f"  speed while writing: {fall}",
    ]


def warnings(found: list[Facts]) -> list[str]:
    """Say what makes a figure mean less than it seems: the number, why it matters, and what mends it."""
    warned = [text for facts in found for text in _warnings_of(facts)]
    first: dict[str, Facts] = {}
    for facts in (facts for facts in found if facts.kind == "directory"):
        other = first.setdefault(facts.device_number, facts)
        if other is not facts:
            warned.append(
                f"{other.name} and {facts.name} lie on one device ({facts.device_number}): they share its speed and "
                "can show no difference; name a directory on another device"
            )
    cached = [facts for facts in found if facts.kind == "directory" and facts.medium != "memory" and facts.dirty_bytes]
    if cached:
        warned.append(
            f"this machine holds up to {_size(cached[0].dirty_bytes)} of dirty pages before writers wait: a smaller "
            "save returns at the speed of memory; compare durable times, or lower vm.dirty_bytes by sysctl"
        )
    return warned


def _warnings_of(facts: Facts) -> list[str]:
    name, found = facts.name, []
    if facts.medium == "memory":
        found.append(
            f"{name} has {_size(facts.free_bytes)} of memory, not storage: a restart loses all of it, and no figure is "
            "a disk's; name a directory on a disk"
        )
    if _is_sync(facts):
        found.append(
            f"{name} is mounted with sync: each write waits for the device, which slows every method; "
            "mount -o remount,async"
        )
    if "nobarrier" in facts.options:
        found.append(
            f"{name} is mounted with nobarrier: an fsync flushes no drive cache, and durable is not; "
            "mount -o remount,barrier"
        )
    if "soft" in facts.options:
        found.append(
            f"{name} is mounted with soft: a server that is late loses writes instead of delaying them; mount it hard"
        )
    if facts.file_system in {"overlay", "aufs", "fuse.fuse-overlayfs"}:
        found.append(
            f"{name} is a container's own layer ({facts.file_system}): it goes with the container, and its speed is "
            "not a mounted volume's; mount a volume and name it"
        )
    if facts.medium == "unknown" and facts.write_cache == "write through" and "virtual" in facts.words:
        found.append(
            f"{name} has 0 volatile caches by its virtual disk's word: fsync sends no flush, so that durable is what "
            "the host makes of it; look up the host's cache mode"
        )
    if facts.fell:
        found.append(
            f"{name} fell from {_rate(facts.first_bytes_per_s)} to {_rate(facts.last_bytes_per_s)} within 64 MiB: "
            "burst credits or a small fast region end, and early saves flatter it; wait until they refill, and run a "
            "study long enough to use them up"
        )
    if facts.quota == "on":
        found.append(
            f"{name} has a quota, and the {_size(facts.free_bytes)} free don't count it: a save may fail before the "
            "disk is full; look with quota -s"
        )
    return found + _room_warnings(facts)


def _room_warnings(facts: Facts) -> list[str]:
    found = []
    if facts.size_bytes and facts.free_bytes is not None and facts.free_bytes < LOW_SHARE * facts.size_bytes:
        found.append(
            f"{facts.name} has {_size(facts.free_bytes)} of {_size(facts.size_bytes)} free: nearly full storage writes "
            "slower, and less evenly; free some, or use another"
        )
    if facts.free_inodes is not None and facts.free_inodes < LOW_INODES:
        found.append(
            f"{facts.name} has room for {facts.free_inodes:,} files more: a save of many files fails though bytes are "
            "free; delete small files"
        )
    return found


def _is_sync(facts: Facts) -> bool:
    return "sync" in facts.options


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "unknown"
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.0f} MB"


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _rate(bytes_per_s: float | None) -> str:
    return "unknown" if bytes_per_s is None else f"{bytes_per_s / 1e6:,.0f} MB/s"
