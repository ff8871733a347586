"""What a lab can be: profiles of emulated storage on real kernel I/O."""

from pydantic import Field

from stallbench.config import LAB
from stallbench.storage import emulated


class LabProfile(emulated.Profile):
    """What a lab's device can do, in the fields of `emulated.Profile`.

    Parameters
    ----------
    disk_bytes_per_s
        Rate of each spindle.
    server_cache_bytes
        Of a disk alone: its own volatile cache. It acknowledges writes; a flush waits until the disk has them.
    round_trip_s
        Added to each request to the device. ``round_trips_per_file`` has no effect: there are no files on NBD.
    stable_cache
        Whether the cache counts as stable, and a flush doesn't wait for the disk: battery-backed memory, or a server
        that says so (an NFS export with ``async``).
    spindles
        Striped drives, 512 KiB a stripe.
    network
        Whether a shaped link of ``link_bytes_per_s`` lies between client and server.
    unlimited
        No mechanics at all: the control, whose rate is that of the chain.
    """

    stable_cache: bool = False
    spindles: int = Field(default=1, ge=1, le=64)
    network: bool = False
    unlimited: bool = False

    @property
    def sustained_bytes_per_s(self) -> float:
        """Bytes per second once no cache absorbs any more: the slower of link and all spindles."""
        return min(self.link_bytes_per_s, self.disk_bytes_per_s * self.spindles)


_NAS = emulated.PROFILES["hdd-nas-1gbe"].model_dump() | {"network": True}
_SATA_BYTES_PER_S = 600e6  # 6 Gbit/s, 8b/10b: SATA 3.0
_HDD = _NAS | {
    "link_bytes_per_s": _SATA_BYTES_PER_S,
    "network": False,
    "round_trip_s": 0.0,
    "server_cache_bytes": 256e6,  # datasheets of 7200 rpm NAS drives
}
PROFILES: dict[str, LabProfile] = {
    "hdd": LabProfile(**_HDD),
    "hdd-nas-1gbe": LabProfile(**_NAS),
    # Four drives in RAID 10 write as two: a striped pair, mirrored.
    "raid-nas-10gbe": LabProfile(
        **_NAS | {"link_bytes_per_s": emulated.PROFILES["hdd-nas-10gbe"].link_bytes_per_s, "spindles": 2}
    ),
    "fast": LabProfile(**_HDD | {"unlimited": True}),
}


def parse(text: str) -> LabProfile:
    """Return the profile that ``name`` or ``name?field=value`` asks for, with or without ``lab:`` before it.

    Raises
    ------
    ValueError
        One line that names the unknown profile or field, or the refused value.
    """
    return emulated.parse_profile(text.removeprefix(LAB), PROFILES)
