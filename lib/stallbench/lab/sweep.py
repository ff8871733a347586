"""Which NAS would give the claimed saving: one checkpoint saved on labs of many kinds, and on this machine's disk."""

import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from transformers import Trainer

from stallbench.checkpointing.state import capture, flatten, size_bytes
from stallbench.config import ConfigError, Target
from stallbench.lab import building as lab
from stallbench.lab.profile import PROFILES, LabProfile
from stallbench.proofs.race import make_state
from stallbench.storage import emulated, targets
from stallbench.storage.pagecache import sync_tree

ARRAYS_BYTES_PER_S = (50e6, 100e6, 200e6, 400e6)
LINKS = {"1 GbE": "hdd-nas-1gbe", "10 GbE": "hdd-nas-10gbe"}
MEMORY_BYTES = 4e9  # takes every checkpoint of a round
WARMUP_SAVES = 2
SAVES, SAVES_S = 2, 3.0  # counted: at least so many, and all that begin within so many seconds
DISK, CHAIN = "disk", "chain"


class Point(NamedTuple):
    """A NAS of the map, in the words and numbers that the table shows."""

    link: str
    array_bytes_per_s: float
    memory: bool

    @property
    def profile(self) -> LabProfile:
        """Give the lab's profile."""
        changes: dict[str, Any] = {
            "disk_bytes_per_s": self.array_bytes_per_s,
            "link_bytes_per_s": emulated.PROFILES[LINKS[self.link]].link_bytes_per_s,
        }
        if self.memory:
            changes |= {"server_cache_bytes": MEMORY_BYTES, "stable_cache": True}
        return PROFILES["hdd-nas-1gbe"].model_copy(update=changes)


# Behind 1 GbE an array of 400 MB/s is one of 200 MB/s; and memory that takes all hides the array.
POINTS = (
    *(Point(link, rate, False) for link in LINKS for rate in ARRAYS_BYTES_PER_S if (link, rate) != ("1 GbE", 400e6)),
    *(Point(link, 200e6, True) for link in LINKS),
)


def measure(folder: Path, rounds: int, told: Callable[[str], object] = print) -> dict[str, Any]:
    """Save the default model's full state by the Trainer as shipped, then fsync, on every point and on the disk.

    Parameters
    ----------
    folder
        On the disk that the labs are compared with.
    rounds
        Each visits every place once, in random order; a place's saves of one round are one observation.
    told
        Is given a line a place.

    Returns
    -------
    dict
        ``size_bytes`` of a save and ``rows``, one a place and round: ``round``, ``place`` (``disk``, ``chain``: a lab
        without limits, or ``nas`` with ``link``, ``array_bytes_per_s``, ``rate_bytes_per_s``, ``memory``),
        ``durable_s``: the mean of the counted saves.

    Raises
    ------
    ConfigError
        If there can be no lab here, or the chain is too slow for the fastest array.
    """
    if reason := lab.missing():
        raise ConfigError(reason)
    lab.check_ceiling(max((point.profile for point in POINTS if not point.memory), key=_rate))
    rows = []
    order = random.Random(0)
    with targets.claim(Target(name=DISK, location=str(folder)), uuid4().hex[:12]) as ours:
        trainer = make_state("0.27 GB", ours / "trainer")
        for number in range(rounds):
            places: list[Point | str] = [DISK, CHAIN, *POINTS]
            order.shuffle(places)
            for one in places:
                row = {"round": number, **_described(one), "durable_s": _on(one, trainer, ours)}
                rows.append(row)
                told(", ".join(f"{name} {value}" for name, value in row.items()))
        return {"size_bytes": size_bytes(flatten(capture(trainer))), "rows": rows}


def _rate(profile: LabProfile) -> float:
    return profile.sustained_bytes_per_s


def _described(one: Point | str) -> dict[str, Any]:
    if not isinstance(one, Point):
        return {"place": one}
    rate = one.profile.link_bytes_per_s if one.memory else _rate(one.profile)
    return {"place": "nas", **one._asdict(), "rate_bytes_per_s": rate}


def _on(one: Point | str, trainer: Trainer, disk: Path) -> float:
    if one == DISK:
        return _save(trainer, disk / "saved")
    profile = one.profile if isinstance(one, Point) else PROFILES["fast"]
    with lab.running(profile, out=lambda line: None, check=False) as made:
        return _save(trainer, made.mountpoint / "saved")


def _save(trainer: Trainer, folder: Path) -> float:
    """Give the mean seconds of the counted saves, until durable."""
    trainer.args.output_dir = str(folder)
    taken_s: list[float] = []
    while len(taken_s) < WARMUP_SAVES + SAVES or sum(taken_s[WARMUP_SAVES:]) < SAVES_S:
        start_s = time.monotonic()
        Trainer._save_checkpoint(trainer, trainer.model, None)
        sync_tree(folder)
        taken_s.append(time.monotonic() - start_s)
        shutil.rmtree(folder)
    return statistics.fmean(taken_s[WARMUP_SAVES:])
