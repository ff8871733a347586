"""Decisions as a page shows them: tables and words over ``planning``."""

import math

import pandas as pd

from stallbench.compounding import planning, recovery
from stallbench.compounding.assumptions import Assumptions
from stallbench.compounding.economics import Payback
from stallbench.compounding.recovery import NOTICES_S
from stallbench.compounding.scaling import size_text
from stallbench.reporting.analysis import compared_with, duration, no_less_than_0, percent
from stallbench.reporting.stats import Interval, mean_interval
from stallbench.reporting.tables import called
from stallbench.results import Study


def recovery_table(study: Study, assumed: Assumptions) -> pd.DataFrame:
    """Give how often to save, what a failure then costs, and whether a save fits a preemption notice."""
    jobs = planning.job_mtbfs_s(assumed)
    rows = {}
    for cost in planning.costs(study):
        row = {(job, what): text for job, mtbf_s in jobs.items() for what, text in _job_texts(cost, mtbf_s).items()}
        one_save = planning.one_save(study, cost)
        row |= {("fits a notice of", f"{s:g} s"): recovery.fits_notice(one_save, s) for s in NOTICES_S}
        rows[f"{cost.method} on {called(study, cost.target)}"] = row
    return pd.DataFrame.from_dict(rows, orient="index")


def _job_texts(cost: planning.Cost, mtbf_s: float) -> dict[str, str]:
    names = ("save every", "recovery window", "time lost")
    try:
        best_s = mean_interval(planning.over_blocks(cost, mtbf_s, lambda plan: plan.interval_s))
        window_s = mean_interval(planning.over_blocks(cost, mtbf_s, planning.window_s))
        lost = mean_interval(planning.over_blocks(cost, mtbf_s, lambda plan: 1 - recovery.outcome(plan).goodput))
    except ValueError as error:
        return dict.fromkeys(names, f"not said: {error}")
    texts = [duration(*no_less_than_0(one)) for one in (best_s, window_s)]
    return dict(zip(names, [*texts, percent(*no_less_than_0(lost))], strict=True))


def recovery_words(study: Study, assumed: Assumptions) -> str:
    """Say what the table and the figure rest on."""
    found = planning.job_mtbfs_s(assumed)
    jobs = " and ".join(f"{duration(mtbf_s)} between failures ({name})" for name, mtbf_s in found.items())
    far = planning.approximations(study, min(found.values()))
    near = ", ".join(f"{name} {share:.1%}" for name, share in far.items())
    return (
        f"Assumed: {jobs}; exponential failures, at any moment, each followed by this study's cold restore. Save "
        "every: the interval of work whose goodput is best, by the exact renewal model (farthest from it, of all rows, "
        f"for the larger job: {near}). Recovery window: work lost on average, and the restore. Time lost: to saves, "
        "failures and restores together. An asynchronous save costs its stall and what it takes from the steps beside "
        "it, and protects from its durable time on. Fits a notice: whether one save that begins with it is durable in "
        f"time, by the 90 % prediction interval of one save. All for saves of {size_text(planning.own_bytes(study))}: "
        "a job on that many accelerators saves more, and longer. Intervals: 95 % over blocks."
    )


def money_table(study: Study, assumed: Assumptions) -> pd.DataFrame:
    """Give what waiting costs a year and when faster storage pays, one column for each target compared."""
    columns = {}
    for other in compared_with(study):
        found = planning.bill(study, other, assumed)
        columns[f"{study.targets[0]} instead of {called(study, other)}"] = {
            "idle accelerators a year on the slower": money(found.idle_slow, assumed.currency),
            "of which given back": money(found.payback.saved_per_year, assumed.currency),
            "extra price until the horizon": f"{assumed.prices.extra_over_horizon:,.0f} {assumed.currency}",
            "paid back after": months(found.payback),
            "verdict": found.payback.verdict,
            "pays from an accelerator price of": _open(found.gpu_hour, f"{assumed.currency} an hour"),
            "pays up to an interval of": f"{found.interval_min:,.3g} min" if found.interval_min else "none",
            "pays from a checkpoint of": "not said" if found.size_bytes is None else _size(found.size_bytes),
        }
    return pd.DataFrame(columns)


def money(interval: Interval, currency: str) -> str:
    """Write an amount with its interval."""
    if not math.isfinite(interval.low):
        return f"{interval.mean:,.0f} {currency}"
    return f"{interval.mean:,.0f} {currency} ({interval.low:,.0f} to {interval.high:,.0f})"


def months(payback: Payback) -> str:
    """Write when the extra price is earned."""
    low, mean, high = (
        f"{value:,.0f}" if math.isfinite(value) else "never"
        for value in (payback.months.low, payback.months.mean, payback.months.high)
    )
    if low == mean == high == "never":
        return "never"
    unit = "" if mean == "never" else " months"
    return f"{mean}{unit}" if math.isnan(payback.months.low) else f"{mean}{unit} ({low} to {high})"


def _open(value: float, unit: str) -> str:
    return f"{value:,.3g} {unit}" if math.isfinite(value) else "none"


def _size(size_bytes: float) -> str:
    if not math.isfinite(size_bytes):
        return "none"
    return size_text(size_bytes) if size_bytes else "any size"


def money_words(study: Study, assumed: Assumptions) -> str:
    """Say which prices are assumed; none of them is a fact."""
    prices = assumed.prices
    return (
        f"Prices are assumptions of {prices.as_of}, no vendor's: {prices.gpu_hour:g} {prices.currency} for an "
        f"accelerator's hour, {prices.gpus} of them waiting in each run of {assumed.team} developers, faster storage "
        f"{prices.extra_price:,.0f} {prices.currency} dearer at once and {prices.extra_per_month:,.0f} a month, to be "
        f"paid back in {prices.horizon_months:g} months. Saves until durable, wait=durable, every "
        f"{assumed.interval_min:g} min. Time given back is worth that only where it is used. The size from which it "
        f"pays is read off the line of {_line_words(study)}. Your own: stallbench report DIR --assume gpu_hour=2.5 "
        "--assume extra_price=800."
    )


def _line_words(study: Study) -> str:
    lines = [line for target in study.targets if (line := planning.line_of(study, target))]
    return "the size sweep" if lines and all(line.fit for line in lines) else "one size, with its latency taken as 0"


def needs_table(study: Study, assumed: Assumptions) -> pd.DataFrame:
    """Give the bandwidth and capacity that models' checkpoints need, as texts."""
    table = planning.needs(study, assumed)
    rate = {name: table[f"{name}_bytes_per_s"].map(lambda value: f"{size_text(value)}/s")
            for name in ("sync", "async", "restore")}  # fmt: skip
    return pd.DataFrame(
        {
            "checkpoint": table.size_bytes.map(size_text),
            "a save may take": table.stall_s.map(duration),
            "write, save that waits": rate["sync"],
            "write, beside training": rate["async"],
            "read, restore": rate["restore"],
            "capacity": table.capacity_bytes.map(size_text),
        }
    )


def needs_words(assumed: Assumptions) -> str:
    """Say what the planning table assumes."""
    return (
        f"Arithmetic, all ranks together: a save every {assumed.interval_min:g} min, at most {assumed.stall_share:.1%} "
        "of the time spent on saves (CheckFreq, FAST '21), a save beside training durable before the next begins, a "
        f"restore within {assumed.restore_limit_s:g} s, {assumed.kept} checkpoints kept and one being written. Sizes: "
        "MLPerf Storage v2.0."
    )


def assumed_words(assumed: Assumptions) -> str:
    """Name the assumptions that differ from the defaults; empty where none does."""
    changed = ", ".join(f"{name}={value}" for name, value in assumed.overridden.items())
    return f" Not the defaults: {changed}." if changed else ""


def heat_caption(study: Study, target: str) -> str:
    """Say what the heat map shows, and which of its cells are extrapolated."""
    largest = planning.own_bytes(study)
    line = planning.line_of(study, target)
    if line is not None and line.fit is not None:
        largest = line.fit.sizes_bytes[-1]
    return (
        f"Minutes waited in a run until durable, by interval and checkpoint size, from the line of "
        f"{_line_words(study)}; sizes above {size_text(largest)} (in italics) were not measured. Tornado: hours that "
        f"the team waits in a year on {target}, with one assumption after the other at a low and a high value. "
        "Measured ones vary over their 95 % interval, the others over plausible values, fixed in code."
    )
