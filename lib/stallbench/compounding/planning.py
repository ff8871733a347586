"""From measured saves to decisions: how often to save, what it costs, what to buy for."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd

from stallbench.compounding import economics, recovery, scaling, sensitivity, sizes
from stallbench.compounding.assumptions import Assumptions
from stallbench.compounding.models import SECONDS_PER_HOUR, SECONDS_PER_MINUTE, SaveTime, compounding
from stallbench.compounding.prediction import predict_total
from stallbench.config import ASYNCHRONOUS
from stallbench.reporting.analysis import block_means, compare, measured
from stallbench.reporting.matrix import BETTER, beside_saves
from stallbench.reporting.stats import Interval, PairedRatio, mean_interval, paired_ratio
from stallbench.results import Study

# From these no training can be resumed as it was.
PARTIAL = ("model-only", "adapter-only")
INTERVALS_MIN = (1.0, 5.0, 10.0, 30.0, 60.0)
HEAT_BYTES = (1e9, 4e9, 14e9, 105e9)  # besides the study's own; 14 GB: a 1.2B model, 105 GB: Llama 3 8B
# How far the tornado varies what nobody measured: plausible values, not intervals.
SIZE_FACTORS, TEAM_FACTORS = (0.5, 2.0), (0.5, 2.0)
PLAUSIBLE = {"interval_min": (5, 30), "run_h": (4, 12), "runs_per_day": (1, 2), "workdays_per_year": (200, 250)}


@dataclass(frozen=True, eq=False)
class Cost:
    """What a save by one method costs on one target: means by block in seconds, over the blocks that have them all.

    ``stall_s`` of an asynchronous method holds what it takes from the steps beside it, in a block where that came out
    below 0 nothing: no save makes steps faster.
    """

    target: str
    method: str
    wait: str
    stall_s: pd.Series
    durable_s: pd.Series
    restore_s: pd.Series

    def plan(self, mtbf_s: float, block: int | None = None, interval_s: float | None = None) -> recovery.Plan:
        """Give the plan of one block, or of the means; at its own optimum interval unless one is given.

        Raises
        ------
        ValueError
            As ``recovery`` refuses.
        """
        times = self.stall_s, self.durable_s, self.restore_s
        stall_s, durable_s, restore_s = (float(one.mean() if block is None else one[block]) for one in times)
        best_s = recovery.optimum_interval_s(stall_s, durable_s, mtbf_s)
        return recovery.Plan(interval_s or best_s, stall_s, durable_s, restore_s, mtbf_s)


def costs(study: Study) -> list[Cost]:
    """Give the cost of each full save: synchronous methods as they wait until durable, where that was measured."""
    moved = {(one.method, one.target): one.moved_by_block_s for one in beside_saves(study)}
    found = []
    for method in (name for name in study.methods if name not in PARTIAL):
        for target in study.targets:
            own = set(study.counted[(study.counted.method == method) & (study.counted.target == target)].wait)
            wait = "durable" if "durable" in own else "return"
            measures = ("stall_s", "durable_s", "restore_s")
            times = [block_means(study, measure, target, wait, method) for measure in measures]
            blocks = times[0].index.intersection(times[1].index).intersection(times[2].index)
            beside_s = moved.get((method, target))
            if method in ASYNCHRONOUS and beside_s is not None:
                times[0] = (times[0] + beside_s.clip(lower=0)).dropna()
                blocks = blocks.intersection(times[0].index)
            if len(blocks):
                found.append(Cost(target, method, wait, *(one[blocks] for one in times)))
    return found


def approximations(study: Study, mtbf_s: float) -> dict[str, float]:
    """Give how far Young's and Daly's intervals lie from the exact optimum at most, without unit.

    Costs that ``recovery`` refuses are left out; empty if all are.
    """
    far: dict[str, list[float]] = {}
    for cost in costs(study):
        try:
            table = recovery.optimum_table(cost.plan(mtbf_s)).interval_s
        except ValueError:
            continue
        for name in ("Young 1974", "Daly 2006"):
            far.setdefault(name, []).append(abs(table[name] / table["exact optimum"] - 1))
    return {name: max(values) for name, values in far.items()}


def shown_costs(study: Study) -> list[Cost]:
    """Give those that figures show: the save of today and the better one, which is fixed in ``matrix.BETTER``."""
    better = next((name for name in BETTER["return"] if name in study.methods and name != study.methods[0]), None)
    return [one for one in costs(study) if one.method in (study.methods[0], better)]


def over_blocks(cost: Cost, mtbf_s: float, figure: Callable[[recovery.Plan], float]) -> pd.Series:
    """Work a figure out for each block, at the block's own optimum interval; refuses as ``recovery`` does."""
    return pd.Series({block: figure(cost.plan(mtbf_s, block)) for block in cost.stall_s.index})


def window_s(plan: recovery.Plan) -> float:
    """Give the recovery window of a plan, in seconds."""
    return recovery.outcome(plan).recovery_window_s


def window_ratio(study: Study, other: str, mtbf_s: float) -> tuple[PairedRatio, Interval, Interval]:
    """Compare the recovery windows of the first target and another, each at its own best interval, paired by block.

    Raises
    ------
    ValueError
        If a target has no full save with a restore, they share no block, or ``recovery`` refuses.
    """
    own = {one.target: one for one in costs(study) if one.method == study.methods[0]}
    missing = [target for target in (study.targets[0], other) if target not in own]
    if missing:
        raise ValueError(f"{missing[0]} has no full save with a restore")
    windows = [over_blocks(own[target], mtbf_s, window_s) for target in (study.targets[0], other)]
    shared = windows[0].index.intersection(windows[1].index)
    fast, slow = (one[shared] for one in windows)
    return paired_ratio(fast, slow), mean_interval(fast), mean_interval(slow)


def overhead(cost: Cost, interval_s: float) -> Interval:
    """Give the share of the wall time that saves take, without failures: stall / (interval + stall), over blocks."""
    return mean_interval(cost.stall_s / (cost.stall_s + interval_s))


def shortest_interval_s(cost: Cost, share: float) -> float:
    """Give the shortest interval at which saves take no more than ``share`` of the wall time, and are durable in time.

    From overhead = stall / (interval + stall); a save must be durable before the next begins.
    """
    stall_s, durable_s = float(cost.stall_s.mean()), float(cost.durable_s.mean())
    return max(stall_s * (1 - share) / share, durable_s - stall_s)


def one_save(study: Study, cost: Cost) -> Interval:
    """Predict when one more save is durable, with its 90 % prediction interval."""
    values = measured(study, "durable_s", cost.wait, cost.method)
    own = values[values.target == cost.target]
    return predict_total({block: list(group.value_s) for block, group in own.groupby("block")}, saves=1)


@dataclass(frozen=True)
class Line:
    """Save time by size for one target, the study's first method, with what it rests on."""

    save: SaveTime
    fit: sizes.SizeFit | None
    size_bytes: float


def own_bytes(study: Study) -> float:
    """Give the mean bytes of a save by the study's first method."""
    events = study.events[~study.events.warmup & (study.events.method == study.methods[0])]
    return float(events.size_bytes.mean())


def line_of(study: Study, target: str) -> Line | None:
    """Give the line that the sweep fits; without one, the one measured size with a latency taken as 0.

    None where no durable time is known.
    """
    size_bytes = own_bytes(study)
    sweep = scaling.load(study)
    if sweep and (target, study.methods[0]) in sweep.cells:
        try:
            fit = sizes.fit(sweep.means(target, study.methods[0]))
            return Line(fit.save_time, fit, size_bytes)
        except ValueError:
            pass  # too few sizes
    means = block_means(study, "durable_s", target)
    return Line(SaveTime(0.0, size_bytes / means.mean()), None, size_bytes) if len(means) else None


def waiting(study: Study, target: str, assumed: Assumptions) -> pd.DataFrame | None:
    """Give a heat map's table of one target, minutes a run: intervals by sizes; None without a durable time."""
    line = line_of(study, target)
    if line is None:
        return None
    intervals = [one for one in sorted({*INTERVALS_MIN, assumed.interval_min}) if one <= assumed.run_h * 60]
    columns = sorted({line.size_bytes, *HEAT_BYTES})
    return sensitivity.waiting_grid(line.save, assumed.schedule, intervals, columns) / SECONDS_PER_MINUTE


def tornado(study: Study, target: str, assumed: Assumptions) -> pd.DataFrame | None:
    """Vary each assumption behind a team's waiting in a year on one target, in hours; None without a durable time."""
    line = line_of(study, target)
    if line is None:
        return None
    base = {"latency_s": line.save.latency_s, "bytes_per_s": line.save.bytes_per_s, "size_bytes": line.size_bytes}
    base |= {name: getattr(assumed, name) for name in ("interval_min", "run_h", "runs_per_day", "team")}
    base["workdays_per_year"] = assumed.workdays_per_year
    ranges = {"size_bytes": tuple(line.size_bytes * factor for factor in SIZE_FACTORS)}
    team = [max(1, round(assumed.team * factor)) for factor in TEAM_FACTORS]
    ranges |= {"team": tuple(team)} | PLAUSIBLE
    if line.fit is not None:
        low, high = line.fit.latency_s.low, line.fit.latency_s.high
        ranges["latency_s"] = (max(0.0, low), max(0.0, high))
        rate = line.fit.bytes_per_s
        ranges["bytes_per_s"] = (rate.low, rate.high if math.isfinite(rate.high) else 2 * rate.mean)
    else:
        means = mean_interval(block_means(study, "durable_s", target))
        if math.isfinite(means.low) and means.low > 0:
            ranges["bytes_per_s"] = (line.size_bytes / means.high, line.size_bytes / means.low)
    held = {name: (min(low, base[name]), max(high, base[name])) for name, (low, high) in ranges.items()}
    held["interval_min"] = (held["interval_min"][0], min(held["interval_min"][1], assumed.run_h * 60))
    held["run_h"] = (max(held["run_h"][0], assumed.interval_min / 60), held["run_h"][1])
    return sensitivity.tornado(sensitivity.team_year_wait_h, base, held)


@dataclass(frozen=True)
class Bill:
    """Whether the first target pays against another, and from where on it does."""

    payback: economics.Payback
    idle_slow: Interval
    gpu_hour: float
    interval_min: float
    size_bytes: float | None


def bill(study: Study, other: str, assumed: Assumptions) -> Bill:
    """Weigh the time that the first target saves until durable against its extra price."""
    one = compare(study, "durable_s", other)
    schedule, prices = assumed.schedule, assumed.prices
    year = compounding(one.slow_s, schedule).set_index("scope").loc["team-year"]
    lines = [line_of(study, target) for target in (study.targets[0], other)]
    size_bytes = None
    if all(lines) and lines[0].save.bytes_per_s >= lines[1].save.bytes_per_s:
        size_bytes = economics.break_even_bytes(lines[0].save, lines[1].save, schedule, prices)
    return Bill(
        payback=economics.payback(one.saved_s, schedule, prices),
        idle_slow=economics.idle_cost(Interval(year.wait_s, year.low_s, year.high_s, one.ratio.blocks), prices),
        gpu_hour=economics.break_even_gpu_hour(one.saved_s.mean, schedule, prices),
        interval_min=economics.break_even_interval_min(one.saved_s.mean, schedule, prices),
        size_bytes=size_bytes,
    )


def needs(study: Study, assumed: Assumptions) -> pd.DataFrame:
    """Give what models' checkpoints need, this study's own first: ``economics.planning_table``."""
    models = {"this study's own": own_bytes(study), **economics.CHECKPOINT_BYTES}
    return economics.planning_table(
        models, assumed.interval_min * SECONDS_PER_MINUTE, assumed.restore_limit_s, assumed.stall_share, assumed.kept
    )


def job_mtbfs_s(assumed: Assumptions) -> dict[str, float]:
    """Give the mean seconds between failures of the small job and of the large one, by name."""
    return {
        f"one failure in {assumed.mtbf_h:g} h": assumed.mtbf_h * SECONDS_PER_HOUR,
        f"{assumed.accelerators:,} accelerators": recovery.job_mtbf_s(assumed.accelerators),
    }


def lost_share(cost: Cost, mtbf_s: float, interval_s: float) -> float:
    """Give the share of the wall time that is no lasting work at this interval: 1 - goodput; NaN where refused."""
    try:
        return 1 - recovery.outcome(replace(cost.plan(mtbf_s), interval_s=interval_s)).goodput
    except ValueError:  # the next save would begin before this one is durable
        return math.nan
