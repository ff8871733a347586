"""How often to save: what failures cost between checkpoints, and which interval costs least (claim 1.8).

The model
---------
A job works; after every ``interval_s`` of work it begins a save, which holds it up for ``stall_s``. ``durable_s`` after
its beginning the checkpoint is on stable storage, and only from then on does it protect: a failure before that falls
back to the checkpoint before. After a failure the job takes ``restore_s`` until it works again, from the newest
durable checkpoint. A synchronous save has ``durable_s == stall_s``; of an asynchronous one, or of one that returns from
the page cache, ``durable_s`` is larger and the job works beside it.

Failures come at random with a mean time ``mtbf_s`` between them, as a Poisson process does, at any moment: in work, in
a save, in a restore (which then starts again). As such failures have no memory, every moment at which a checkpoint
becomes durable is a renewal: what comes after doesn't depend on what came before. Without a failure, the next
checkpoint is durable ``interval_s + stall_s`` later. With one, it takes an undisturbed ``restore_s + interval_s +
durable_s``, tried until it succeeds. With M for the mean time between failures that gives, from one durable checkpoint
to the next,

    wall = M * exp((restore + interval + durable) / M) * (1 - exp(-(interval + stall) / M)),

which for ``durable_s == stall_s`` is M * exp(restore / M) * (exp((interval + stall) / M) - 1), as in Daly 2006.

What is exact and what is assumed
---------------------------------
Given the assumptions, wall time, goodput and lost work are exact, for a long run or for one that ends when its last
checkpoint is durable. Assumed are: exponential failures (real ones come in bursts, and early in a job's life); the same
interval, stall, durable and restore time in every cycle; a restore that always finds the newest durable checkpoint
whole; no time in a queue or for replacing a machine, unless ``restore_s`` holds it; a save that is durable before the
next begins; a background write that takes nothing from the steps beside it (what it takes belongs to ``stall_s``).

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974. J. T. Daly, A
higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22(3),
2006.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal

import pandas as pd
from scipy import optimize

from stallbench.compounding.checks import require_not_negative, require_positive, require_whole
from stallbench.compounding.models import SECONDS_PER_HOUR
from stallbench.reporting.stats import Interval

SECONDS_PER_DAY = 86400.0
# Mean time to failure of one accelerator, about: MLCommons, 2025-08-04 (MLPerf Storage v2.0).
ACCELERATOR_MTTF_H = 50_000.0
# Unexpected interruptions, days and accelerators: The Llama 3 Herd of Models, 2024, section 3.3.4 and table 5.
LLAMA_3_INTERRUPTIONS, LLAMA_3_DAYS, LLAMA_3_ACCELERATORS = 419, 54, 16_384
# What a machine is told before it is taken away: Google Cloud Spot VMs 30 s, Amazon EC2 Spot Instances 120 s, by the
# providers' documentation.
NOTICES_S = (30.0, 120.0)
# exp() of more than this is no number that anybody acts on: such a job practically never saves anything.
LONGEST_IN_MTBF = 50.0

Fits = Literal["yes", "no", "undecided"]


@dataclass(frozen=True)
class Plan:
    """How a job saves, and how often it fails; all in seconds.

    Parameters
    ----------
    interval_s
        Work between two saves.
    stall_s
        What a save holds the work up for; 0 is allowed.
    durable_s
        From the beginning of a save until its checkpoint protects.
    restore_s
        From a failure until the job works again: notice it, start again, read the checkpoint; 0 is allowed.
    mtbf_s
        Mean time between failures of the whole job.

    Raises
    ------
    ValueError
        In one line that names the field and its value: if it isn't a number in its range, if a save isn't durable
        before the next begins, or if failures come so often that hardly anything is ever saved.
    """

    interval_s: float
    stall_s: float
    durable_s: float
    restore_s: float
    mtbf_s: float

    def __post_init__(self) -> None:
        """Refuse what can't be a plan."""
        for name in ("interval_s", "durable_s", "mtbf_s"):
            require_positive(name, getattr(self, name))
        for name in ("stall_s", "restore_s"):
            require_not_negative(name, getattr(self, name))
        _require_survivable(self.durable_s, self.stall_s, self.mtbf_s)
        if self.durable_s > self.interval_s + self.stall_s:
            raise ValueError(
                f"durable_s={self.durable_s:g} is refused: the next save would begin before this one is durable "
                f"(interval_s={self.interval_s:g}, stall_s={self.stall_s:g})"
            )
        if self.restore_s >= self.mtbf_s * LONGEST_IN_MTBF:
            raise ValueError(f"restore_s={self.restore_s:g} is refused: no restore ends at mtbf_s={self.mtbf_s:g}")
        if self.restore_s + self.interval_s + self.durable_s > self.mtbf_s * LONGEST_IN_MTBF:
            raise ValueError(
                f"interval_s={self.interval_s:g} is refused: at mtbf_s={self.mtbf_s:g} practically no checkpoint would "
                "ever be reached"
            )


@dataclass(frozen=True)
class Outcome:
    """What a plan comes to in the long run.

    ``wall_s``: expected seconds from one durable checkpoint to the next, failures included. ``goodput``: the share of
    the wall time that is work which stays. ``overhead``: wall time over work, less 1. ``lost_work_s``: expected work
    that a failure loses, over all failures. ``worst_lost_work_s``: the most that one can lose.
    ``recovery_window_s``: from a failure until the job is where it was, without a further failure and without
    the stalls of saves done again: lost work and restore. ``failures_per_day``: of wall time.
    """

    wall_s: float
    goodput: float
    overhead: float
    lost_work_s: float
    worst_lost_work_s: float
    recovery_window_s: float
    failures_per_day: float


def outcome(plan: Plan) -> Outcome:
    """Work out what a plan comes to in the long run, by the exact renewal model (see the module's docstring)."""
    wall_s = _wall_s(plan)
    lost_s = _lost_work_s(plan)
    return Outcome(
        wall_s=wall_s,
        goodput=plan.interval_s / wall_s,
        overhead=wall_s / plan.interval_s - 1,
        lost_work_s=lost_s,
        worst_lost_work_s=plan.interval_s + max(0.0, plan.durable_s - plan.stall_s),
        recovery_window_s=lost_s + plan.restore_s,
        failures_per_day=SECONDS_PER_DAY / plan.mtbf_s,
    )


def expected_run_s(plan: Plan, saves: int) -> float:
    """Give the expected wall seconds of a run of ``saves`` intervals, until its last checkpoint is durable.

    The first checkpoint has none before it: a failure until then restores the initial state, in ``restore_s`` as well.

    Parameters
    ----------
    plan
        How the run saves and fails.
    saves
        Intervals of the run, each with a save at its end (``models.Schedule.saves``).

    Raises
    ------
    ValueError
        If ``saves`` isn't a whole number above 0.
    """
    require_whole("saves", saves)
    first_s = _tried_until_durable_s(plan, plan.interval_s + plan.durable_s)
    return first_s + (saves - 1) * _wall_s(plan)


def optimum_interval_s(stall_s: float, durable_s: float, mtbf_s: float) -> float:
    """Give the interval of work whose goodput is best, by the exact model.

    The derivative of the wall time per work is 0 where interval = M * (1 - exp(-(interval + stall) / M)), which has one
    root, between 0 and M (``scipy.optimize.brentq`` finds it). Neither the restore nor the durable time is in it: both
    multiply the wall time by what no interval changes. They bound it from below: a save must be durable before the
    next begins.

    Parameters
    ----------
    stall_s
        What a save holds the work up for, in seconds; above 0, as saves that cost nothing are best made all the time.
    durable_s
        From the beginning of a save until it protects, in seconds.
    mtbf_s
        Mean time between failures of the whole job, in seconds.

    Raises
    ------
    ValueError
        If a time isn't a positive number, or the job fails sooner than a save lasts.
    """
    _require_job(stall_s, durable_s, mtbf_s)

    def slope(share: float) -> float:  # of the interval in mtbf_s; expm1 keeps digits where saves are short
        return share + math.expm1(-share - stall_s / mtbf_s)

    best_s = mtbf_s * optimize.brentq(slope, 0.0, 1.0, xtol=1e-15)
    return max(best_s, durable_s - stall_s)


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Give Young's first-order optimum interval of work: sqrt(2 * stall * M) (Young 1974)."""
    _require_job(stall_s, stall_s, mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Give Daly's higher-order optimum interval of work (Daly 2006).

    sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for a stall d, which holds for d below 2M.
    """
    _require_job(stall_s, stall_s, mtbf_s)
    part = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - stall_s


def optimum_table(plan: Plan) -> pd.DataFrame:
    """Set the plan's own interval beside the optimum and the two approximations, each by the exact model.

    An approximation that lies below what the durable time allows is lifted to it.

    Returns
    -------
    pandas.DataFrame
        Indexed by ``plan``, ``exact optimum``, ``Daly 2006``, ``Young 1974``: ``interval_s`` and the fields of
        ``Outcome``.
    """
    least_s = plan.durable_s - plan.stall_s
    intervals = {
        "plan": plan.interval_s,
        "exact optimum": optimum_interval_s(plan.stall_s, plan.durable_s, plan.mtbf_s),
        "Daly 2006": max(daly_interval_s(plan.stall_s, plan.mtbf_s), least_s),
        "Young 1974": max(young_interval_s(plan.stall_s, plan.mtbf_s), least_s),
    }
    return interval_table(plan, intervals.values()).set_index(pd.Index(intervals))


def interval_table(plan: Plan, intervals_s: Iterable[float]) -> pd.DataFrame:
    """Give the outcome at each interval, all else as in the plan.

    Returns
    -------
    pandas.DataFrame
        One row an interval: ``interval_s`` and the fields of ``Outcome``.

    Raises
    ------
    ValueError
        If an interval isn't one that ``Plan`` takes.
    """
    plans = [replace(plan, interval_s=float(interval_s)) for interval_s in intervals_s]
    return pd.DataFrame([{"interval_s": one.interval_s} | asdict(outcome(one)) for one in plans])


def job_mtbf_s(accelerators: int, accelerator_mttf_h: float = ACCELERATOR_MTTF_H) -> float:
    """Give the mean seconds between failures of a job that any of its accelerators stops.

    The failures of n independent accelerators add up to M / n (50,000 hours each by default, see the constant). Llama 3
    had 419 interruptions in 54 days on 16,384: 50,677 hours an accelerator, of all causes.

    Raises
    ------
    ValueError
        If ``accelerators`` isn't a whole number above 0, or the hours aren't a positive number.
    """
    require_whole("accelerators", accelerators)
    require_positive("accelerator_mttf_h", accelerator_mttf_h)
    return accelerator_mttf_h * SECONDS_PER_HOUR / accelerators


def fits_notice(durable_s: Interval | float, notice_s: float) -> Fits:
    """Say whether a save that begins with the notice is durable before the machine is taken away.

    Parameters
    ----------
    durable_s
        Seconds until durable. It is *one* save that must fit: give the prediction interval of one save
        (``prediction.predict_total`` with one save), not the interval of a mean, which says less than it seems to. A
        plain number is taken as exact.
    notice_s
        Seconds between notice and end (``NOTICES_S``).

    Returns
    -------
    str
        ``yes`` if the whole interval fits, ``no`` if none of it does, else ``undecided``, as without an interval.

    Raises
    ------
    ValueError
        If a time isn't a positive number.
    """
    require_positive("notice_s", notice_s)
    if not isinstance(durable_s, Interval):
        require_positive("durable_s", durable_s)
        return "yes" if durable_s <= notice_s else "no"
    require_positive("durable_s", durable_s.mean)
    if durable_s.high <= notice_s:
        return "yes"
    return "no" if durable_s.low > notice_s else "undecided"


def _require_job(stall_s: float, durable_s: float, mtbf_s: float) -> None:
    for name, value in (("stall_s", stall_s), ("durable_s", durable_s), ("mtbf_s", mtbf_s)):
        require_positive(name, value)
    _require_survivable(durable_s, stall_s, mtbf_s)


def _require_survivable(durable_s: float, stall_s: float, mtbf_s: float) -> None:
    longest_s = max(durable_s, stall_s)
    if mtbf_s < longest_s:
        raise ValueError(f"mtbf_s={mtbf_s:g} is refused: the job fails sooner than a save lasts ({longest_s:g} s)")


def _tried_until_durable_s(plan: Plan, first_try_s: float) -> float:
    """Give the expected time until durable: a first try of this length, and after failures restore, work and save.

    A try of length L takes M * (1 - exp(-L / M)) on average, however it ends; tries of length L until one succeeds
    take M * (exp(L / M) - 1).
    """
    again_s = plan.restore_s + plan.interval_s + plan.durable_s
    return -math.expm1(-first_try_s / plan.mtbf_s) * plan.mtbf_s * math.exp(again_s / plan.mtbf_s)


def _wall_s(plan: Plan) -> float:
    return _tried_until_durable_s(plan, plan.interval_s + plan.stall_s)


def _lost_work_s(plan: Plan) -> float:
    """Give the expected work lost by a failure: over one renewal, what all its failures lose by how many there are.

    In the first try work beyond the newest durable snapshot is there from the beginning, as the job worked beside the
    write; in the tries after a failure it is not.
    """
    beside_s = max(0.0, plan.durable_s - plan.stall_s)
    stall_left_s = max(0.0, plan.stall_s - plan.durable_s)
    save = [(plan.durable_s - beside_s, False), (beside_s, True)]  # from a save's beginning until durable
    first = [(stall_left_s, False), (plan.interval_s - beside_s, True), *save]
    again = [(plan.restore_s, False), (plan.interval_s, True), *save]
    length_s = plan.interval_s + plan.stall_s
    again_s = plan.restore_s + plan.interval_s + plan.durable_s
    failed = -math.expm1(-length_s / plan.mtbf_s)  # probability that the first try fails
    tries = math.exp(again_s / plan.mtbf_s)  # expected tries after it, of which all but the last one fail
    lost_s = _lost_in_try_s(first, plan.mtbf_s, beside_s) + failed * tries * _lost_in_try_s(again, plan.mtbf_s)
    return lost_s / (failed * tries)


def _lost_in_try_s(parts: list[tuple[float, bool]], mtbf_s: float, begun_with_s: float = 0.0) -> float:
    """Integrate the work that a failure would lose over when it comes: parts of a try, in each of which is work or not.

    By parts: the integral of l(t) exp(-t/M) / M from 0 to L is l(0) - l(L) exp(-L/M) plus that of l'(t) exp(-t/M).
    """
    begin_s, work_s, total_s = 0.0, begun_with_s, begun_with_s
    for length_s, works in parts:
        end_s = begin_s + length_s
        if works:
            total_s += mtbf_s * math.exp(-begin_s / mtbf_s) * -math.expm1(-length_s / mtbf_s)
            work_s += length_s
        begin_s = end_s
    return total_s - work_s * math.exp(-begin_s / mtbf_s)
