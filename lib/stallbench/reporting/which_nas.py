"""The map behind claim 1.2: how much time this machine's disk saves against NASes of many kinds, and where it is 25 %.

Durable times only. A lab is a block device, so that a save *returns* from this machine's own memory; a NAS that commits
on close holds the call until its server has all.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stallbench.compounding.models import ARTICLE_FAST_S, ARTICLE_SLOW_S, time_saved
from stallbench.reporting.analysis import percent, span_text
from stallbench.reporting.stats import Interval, PairedRatio, mean_interval, paired_ratio
from stallbench.results import LAB_SWEEP, Study, read_json
from stallbench.storage.emulated import PROFILES, TCP_SHARE

CLAIMED_TIME_SAVED = time_saved(ARTICLE_FAST_S, ARTICLE_SLOW_S)
ETHERNET_GBIT_PER_S = (1, 2.5, 5, 10, 25, 40, 100, 200, 400)  # IEEE 802.3


@dataclass(frozen=True)
class Swept:
    """One NAS of the map: how fast it is, how long a save took until durable, and what the disk saves against it.

    ``rate_bytes_per_s`` is what the NAS takes from end to end, by its stated rates; ``at_ceiling``: the emulation's own
    chain takes more than half of the time, so that a real NAS of these rates may be faster.
    """

    link: str
    array_bytes_per_s: float
    memory: bool
    rate_bytes_per_s: float
    durable_s: Interval
    saved: PairedRatio
    at_ceiling: bool


@dataclass(frozen=True)
class Answer:
    """The end-to-end rate of the NAS against which the disk saves the claimed time, in bytes per second.

    ``rate`` is NaN where none can be named: by the line a save takes longer than that at any rate. The emulation's own
    chain is in the line, so that a real NAS may do with less. ``extrapolated``: faster than every measured one.
    """

    rate: Interval
    fastest_bytes_per_s: float

    @property
    def extrapolated(self) -> bool:
        """Whether it lies beyond what was measured."""
        return not self.rate.mean <= self.fastest_bytes_per_s


def load(study: Study) -> tuple[pd.DataFrame, float] | None:
    """Give the sweep's rows and the bytes of a save, or None where the study has no sweep."""
    path = study.folder / LAB_SWEEP
    if not path.exists():
        return None
    kept = read_json(path)
    return pd.DataFrame(kept["rows"]), float(kept["size_bytes"])


def swept(rows: pd.DataFrame) -> list[Swept]:
    """Compare the disk with every NAS, paired by round; the slowest NAS first."""
    by_round = rows.set_index("round")
    disk_s, chain_s = (by_round.durable_s[by_round.place == place] for place in ("disk", "chain"))
    found = []
    for (rate, link, array, memory), own in by_round[by_round.place == "nas"].groupby(
        ["rate_bytes_per_s", "link", "array_bytes_per_s", "memory"]
    ):
        durable_s = mean_interval(own.durable_s)
        at_ceiling = bool(chain_s.mean() > durable_s.mean / 2)
        saved = paired_ratio(disk_s, own.durable_s)
        found.append(Swept(link, array, bool(memory), rate, durable_s, saved, at_ceiling))
    return found


def line(rows: pd.DataFrame, size_bytes: float) -> tuple[float, float]:
    """Fit durable seconds = a + b x bytes / rate over the NASes without memory, by least squares of relative errors.

    Returns
    -------
    tuple of float
        ``a`` in seconds: what no rate shortens, the emulation's own chain included; ``b`` without unit: 1 where a save
        takes what its bytes take.

    Raises
    ------
    ValueError
        If there are fewer than three rates.
    """
    own = _without_memory(rows)
    if own.rate_bytes_per_s.nunique() < 3:
        raise ValueError("a line over the NAS's rate needs three rates at least")
    seconds, transfer_s = own.durable_s.to_numpy(float), size_bytes / own.rate_bytes_per_s.to_numpy(float)
    design = np.column_stack([np.ones(len(own)), transfer_s]) / seconds[:, None]
    (a, b), *_ = np.linalg.lstsq(design, np.ones(len(own)), rcond=None)
    return float(a), float(b)


def rate_for_claim(rows: pd.DataFrame, size_bytes: float) -> Answer:
    """Solve the line of each round for the rate at which the disk takes 25 % less; its interval is over the rounds.

    Notes
    -----
    Student's t over the rounds' logarithms, as rates are positive and their errors relative.
    """
    logs = {}
    for number, own in rows.groupby("round"):
        a, b = line(own, size_bytes)
        left_s = float(own.durable_s[own.place == "disk"].iloc[0]) / (1 - CLAIMED_TIME_SAVED) - a
        logs[number] = math.log(b * size_bytes / left_s) if left_s > 0 and b > 0 else math.nan
    fastest = float(_without_memory(rows).rate_bytes_per_s.max())
    if any(math.isnan(value) for value in logs.values()):
        return Answer(Interval(math.nan, math.nan, math.nan, len(logs)), fastest)
    over = mean_interval(pd.Series(logs))
    return Answer(Interval(math.exp(over.mean), math.exp(over.low), math.exp(over.high), over.blocks), fastest)


def which(rate_bytes_per_s: float) -> str:
    """Name a NAS that takes so much from end to end: the slowest Ethernet that carries it, and how many drives."""
    drives = math.ceil(rate_bytes_per_s / PROFILES["hdd-nas-1gbe"].disk_bytes_per_s)
    for gbit_per_s in ETHERNET_GBIT_PER_S:
        if gbit_per_s * 125e6 * TCP_SHARE >= rate_bytes_per_s:
            many = "one 7200 rpm drive" if drives == 1 else f"{drives} striped 7200 rpm drives"
            return (
                f"a NAS behind {gbit_per_s:g} GbE with {many}, or with stable memory (battery-backed) for a checkpoint"
            )
    return f"a NAS faster than {ETHERNET_GBIT_PER_S[-1]} GbE"


def words(study: Study) -> str:
    """Say which NAS would give the claimed saving; empty where nothing was swept."""
    kept = load(study)
    if kept is None:
        return ""
    rows, size_bytes = kept
    answer, claimed = rate_for_claim(rows, size_bytes), percent(CLAIMED_TIME_SAVED)
    rates = _without_memory(rows).rate_bytes_per_s / 1e6
    between = f"the {rates.min():,.0f} to {rates.max():,.0f} MB/s that were emulated"
    chain_s = rows.durable_s[rows.place == "chain"].mean()
    chain = f"a lab without any limit takes {chain_s:.2f} s itself, so that a real NAS of that rate may be faster"
    if math.isnan(answer.rate.mean):
        a, _ = line(rows, size_bytes)
        found = (
            f"No array's rate can be named for the claimed {claimed}: by a line through {between}, what no rate "
            f"shortens (the save's own work, positions, the emulation) takes {a:.2f} s; {chain}."
        )
    else:
        rate = span_text(answer.rate.mean / 1e6, answer.rate.low / 1e6, answer.rate.high / 1e6, "MB/s")
        found = (
            f"This disk takes the claimed {claimed} less time than a NAS of {rate} from end to end, "
            f"{'beyond' if answer.extrapolated else 'within'} {between}: {which(answer.rate.mean)}; {chain}."
        )
    return f"{found} {_nearest(rows)}"


def _nearest(rows: pd.DataFrame) -> str:
    """Name the NAS of the map against which the disk saves nearest to the claimed share."""
    one = min(swept(rows), key=lambda one: abs(one.saved.time_saved - CLAIMED_TIME_SAVED))
    behind = "stable memory" if one.memory else f"an array of {one.array_bytes_per_s / 1e6:,.0f} MB/s"
    saved = percent(one.saved.time_saved, one.saved.time_saved_low, one.saved.time_saved_high)
    limit = ", where the emulation itself takes more than half of the time" if one.at_ceiling else ""
    return f"The nearest emulated one: {one.link} and {behind}, {saved} less time{limit}."


def _without_memory(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.memory.eq(False)]  # the disk and the chain have neither
