"""What waiting costs, what faster storage must cost less than, and what to buy for: pure functions (claims 2.7, 2.8).

No price here is a fact. Every figure that comes out is as good as the prices that go in; those are a parameter set with
a date, and each of them says whether it is an assumption.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from stallbench.compounding.checks import (
    require_finite,
    require_not_negative,
    require_positive,
    require_whole,
    require_within,
)
from stallbench.compounding.models import MINUTES_PER_HOUR, SECONDS_PER_HOUR, SaveTime, Schedule
from stallbench.reporting.stats import Interval

MONTHS_PER_YEAR = 12
# Checkpoint sizes in bytes by model: MLPerf Storage v2.0 submission guidelines, weights and optimizer.
CHECKPOINT_BYTES = {"Llama 3 8B": 105e9, "Llama 3 70B": 912e9, "Llama 3 405B": 5.29e12, "1T": 18e12}
# The share of run time that a tuned checkpointer costs at most: CheckFreq, FAST '21.
STALL_SHARE = 0.035


@dataclass(frozen=True)
class Prices:
    """An example set of prices; give your own.

    Parameters
    ----------
    as_of
        When the set was put together: 2026-12. No price list was read for it.
    currency
        Only printed. Assumption.
    gpu_hour
        Price of one accelerator for an hour. Assumption: 3.
    gpus
        Accelerators that stand still while one run waits. Assumption: 8, one server.
    extra_price
        What the faster storage costs more than the slower one, once. Assumption: 5,000; 0 is allowed.
    extra_per_month
        What it costs more to run, a month. Assumption: 50; 0 is allowed.
    horizon_months
        By when it must have paid for itself. Assumption: 36, the usual time of depreciation.

    Raises
    ------
    ValueError
        In one line that names the field and its value, if it is out of range, or if both extra prices are 0.
    """

    as_of: str = "2026-12"
    currency: str = "USD"
    gpu_hour: float = 3.0
    gpus: int = 8
    extra_price: float = 5000.0
    extra_per_month: float = 50.0
    horizon_months: float = 36.0

    def __post_init__(self) -> None:
        """Refuse what can't be a price."""
        require_positive("gpu_hour", self.gpu_hour)
        require_whole("gpus", self.gpus)
        require_not_negative("extra_price", self.extra_price)
        require_not_negative("extra_per_month", self.extra_per_month)
        require_positive("horizon_months", self.horizon_months)
        if not self.extra_over_horizon:
            raise ValueError("extra_price=0 is refused: extra_per_month is 0 too, so that there is nothing to weigh")

    @property
    def extra_over_horizon(self) -> float:
        """What the faster storage costs more until the horizon, all told."""
        return self.extra_price + self.extra_per_month * self.horizon_months

    @property
    def per_waiting_second(self) -> float:
        """What the accelerators of one run cost in a second."""
        return self.gpu_hour * self.gpus / SECONDS_PER_HOUR


@dataclass(frozen=True)
class Payback:
    """Whether faster storage pays; money in the currency of the prices.

    ``saved_per_year``: price of the accelerators' time given back, with its interval. ``months``: until the extra price
    is earned; infinite where what is saved a month doesn't cover what it costs more to run. ``verdict``: ``pays`` if
    the whole interval lies within the horizon, ``does not pay`` if all of it lies beyond, else ``undecided``; without
    an interval ``undecided``. The interval is that of the measured time; the prices are taken as exact.
    """

    saved_per_year: Interval
    months: Interval
    verdict: str


def saves_per_year(schedule: Schedule) -> int:
    """Give the saves of the whole team in a year."""
    return schedule.saves * schedule.runs_per_day * schedule.workdays_per_year * schedule.team


def idle_cost(wait_s: Interval | float, prices: Prices) -> Interval:
    """Give what accelerators cost while they wait: seconds times accelerators times their price.

    It is worth that only if the time would have been used: an accelerator that idles anyway saves nothing.

    Parameters
    ----------
    wait_s
        Seconds that runs wait, for example the team-year of ``models.compounding``; below 0 where time is lost.
    prices
        What an hour costs, and how many accelerators wait.

    Returns
    -------
    Interval
        Money; NaN bounds where there is no interval.

    Raises
    ------
    ValueError
        If the mean is NaN or infinite.
    """
    wait = _as_interval("wait_s", wait_s)
    factor = prices.per_waiting_second
    return Interval(wait.mean * factor, wait.low * factor, wait.high * factor, wait.blocks)


def payback(saved_s: Interval | float, schedule: Schedule, prices: Prices) -> Payback:
    """Weigh the accelerators' time that faster storage gives back against its extra price.

    Parameters
    ----------
    saved_s
        Seconds saved by one save, faster storage against slower; may be negative.
    schedule
        How often is saved, and by whom.
    prices
        What is weighed.

    Raises
    ------
    ValueError
        If the mean is NaN or infinite.
    """
    one = _as_interval("saved_s", saved_s)
    n = saves_per_year(schedule)
    saved = idle_cost(Interval(one.mean * n, one.low * n, one.high * n, one.blocks), prices)
    months = Interval(
        _months(saved.mean, prices), _months(saved.high, prices), _months(saved.low, prices), saved.blocks
    )
    verdict = "undecided"
    if months.high <= prices.horizon_months:
        verdict = "pays"
    elif months.low > prices.horizon_months:
        verdict = "does not pay"
    return Payback(saved, months, verdict)


def break_even_gpu_hour(saved_s: float, schedule: Schedule, prices: Prices) -> float:
    """Give the price of an accelerator's hour from which faster storage pays within the horizon.

    Parameters
    ----------
    saved_s
        Seconds saved by one save.

    Returns
    -------
    float
        Money an hour; infinite where nothing is saved.

    Raises
    ------
    ValueError
        If ``saved_s`` is NaN or infinite.
    """
    require_finite("saved_s", saved_s)
    years = prices.horizon_months / MONTHS_PER_YEAR
    gpu_hours = saved_s * saves_per_year(schedule) * years * prices.gpus / SECONDS_PER_HOUR
    return prices.extra_over_horizon / gpu_hours if gpu_hours > 0 else math.inf


def break_even_interval_min(saved_s: float, schedule: Schedule, prices: Prices) -> float:
    """Give the longest interval between saves at which faster storage pays within the horizon.

    Parameters
    ----------
    saved_s
        Seconds saved by one save.

    Returns
    -------
    float
        Minutes, at most the run (one save a run); 0 where nothing is saved, so that no interval pays.

    Raises
    ------
    ValueError
        If ``saved_s`` is NaN or infinite.
    """
    require_finite("saved_s", saved_s)
    if saved_s <= 0:
        return 0.0
    runs = saves_per_year(schedule) / schedule.saves * prices.horizon_months / MONTHS_PER_YEAR
    saves_per_run = math.ceil(prices.extra_over_horizon / (saved_s * prices.per_waiting_second * runs) - 1e-9)
    return schedule.run_h * MINUTES_PER_HOUR / max(1, saves_per_run)


def break_even_bytes(fast: SaveTime, slow: SaveTime, schedule: Schedule, prices: Prices) -> float:
    """Give the checkpoint size from which faster storage pays within the horizon.

    Returns
    -------
    float
        Bytes; 0 where any size pays, infinite where none does.

    Notes
    -----
    What one save must save is the extra price over the saves until the horizon; the size at which the two lines lie so
    far apart follows. Where the faster store has the lower bandwidth and only the lower latency, small saves pay and
    large ones don't; that is not answered by one size, and refused.

    Raises
    ------
    ValueError
        If ``fast`` has a lower bandwidth than ``slow``.
    """
    if fast.bytes_per_s < slow.bytes_per_s:
        raise ValueError(
            f"fast={fast.bytes_per_s:g} bytes/s is refused: it has less bandwidth than slow ({slow.bytes_per_s:g}), so "
            "that it loses with every byte"
        )
    years = prices.horizon_months / MONTHS_PER_YEAR
    needed_s = prices.extra_over_horizon / (prices.per_waiting_second * saves_per_year(schedule) * years)
    missing_s = needed_s - (slow.latency_s - fast.latency_s)
    if missing_s <= 0:
        return 0.0
    per_byte_s = 1 / slow.bytes_per_s - 1 / fast.bytes_per_s
    return missing_s / per_byte_s if per_byte_s > 0 else math.inf


def planning_table(
    size_bytes: Mapping[str, float],
    interval_s: float,
    restore_s: float,
    stall_share: float = STALL_SHARE,
    kept: int = 2,
) -> pd.DataFrame:
    """Say which bandwidth and capacity a model's checkpoints need (claim 2.8); all ranks together.

    Parameters
    ----------
    size_bytes
        Bytes of one whole checkpoint by name, for example ``CHECKPOINT_BYTES``.
    interval_s
        Seconds of work between two saves.
    restore_s
        Seconds within which a checkpoint must be read back.
    stall_share
        Share of the wall time, interval and stall, that saves may take, without unit.
    kept
        Checkpoints that are kept.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``size_bytes``; ``stall_s``, what the share allows a save; ``sync_bytes_per_s``, the write
        bandwidth of a save that stalls until it is durable; ``async_bytes_per_s``, of one written beside the work,
        which must be durable before the next begins (its stall, the copy in memory, must keep within ``stall_s``
        too); ``restore_bytes_per_s``; ``capacity_bytes`` of the kept ones and the one that is being written. What a
        file system, replicas or parity take besides is not in it.

    Raises
    ------
    ValueError
        In one line that names the field and its value, if one is out of range, or no size is given.
    """
    if not size_bytes:
        raise ValueError("size_bytes={} is refused: name at least one checkpoint")
    for name, size in size_bytes.items():
        require_positive(f"size_bytes[{name!r}]", size)
    require_positive("interval_s", interval_s)
    require_positive("restore_s", restore_s)
    require_within("stall_share", stall_share, 0, 1)
    require_whole("kept", kept)
    sizes = pd.Series(dict(size_bytes), dtype=float)
    stall_s = interval_s * stall_share / (1 - stall_share)
    return pd.DataFrame(
        {
            "size_bytes": sizes,
            "stall_s": stall_s,
            "sync_bytes_per_s": sizes / stall_s,
            "async_bytes_per_s": sizes / interval_s,
            "restore_bytes_per_s": sizes / restore_s,
            "capacity_bytes": sizes * (kept + 1),
        }
    )


def _as_interval(name: str, value: Interval | float) -> Interval:
    one = value if isinstance(value, Interval) else Interval(value, math.nan, math.nan, 0)
    require_finite(name, one.mean)
    return one


def _months(saved_per_year: float, prices: Prices) -> float:
    if math.isnan(saved_per_year):
        return math.nan
    net = saved_per_year / MONTHS_PER_YEAR - prices.extra_per_month
    return prices.extra_price / net if net > 0 else math.inf
