"""The claims on compounding, recovery, size, money and growth: their thresholds and their judges."""

from stallbench.compounding import economics, planning, scaling
from stallbench.compounding.assumptions import of
from stallbench.compounding.models import SECONDS_PER_MINUTE
from stallbench.compounding.scaling import size_text
from stallbench.compounding.tables import money, months
from stallbench.reporting.analysis import compare, duration, no_less_than_0, percent, seconds
from stallbench.reporting.judging import (
    MODELLED,
    NOT_REPRODUCED,
    NOT_TESTED,
    REPRODUCED,
    UNDECIDED,
    Judgement,
    called,
    on_this_storage,
    within,
)
from stallbench.reporting.stats import Interval
from stallbench.results import Study

# Claim 2.5: what saves may take of the time before they slow training: CheckFreq, FAST '21.
SLOWED_SHARE = economics.STALL_SHARE
# Claim 2.8: the models whose needs the figure names.
GROWN_MODELS = ("Llama 3 8B", "Llama 3 70B")


def smaller_windows(study: Study, other: str) -> Judgement:
    """Judge claim 1.8: recovery windows at each target's own best interval, under modelled failures."""
    assumed = of(study)
    name, mtbf_s = next(iter(planning.job_mtbfs_s(assumed).items()))
    first, method = study.targets[0], study.methods[0]
    try:
        ratio, fast, slow = planning.window_ratio(study, other, mtbf_s)
    except ValueError as error:
        return Judgement(NOT_TESTED, f"Not said: {error}.")
    figure = (
        f"{method}, {name}: at its best interval a failure costs {_time(fast)} of work and restore on {first}, "
        f"{_time(slow)} on {other}: {percent(ratio.time_saved, ratio.time_saved_low, ratio.time_saved_high)} less. "
        "Saves and restores are measured, failures are a model."
    )
    judged = on_this_storage(study, other, within(ratio.low, ratio.high, 0.0, 1.0), figure)
    return Judgement(MODELLED if judged.verdict == REPRODUCED else judged.verdict, judged.figure)


def _time(interval: Interval) -> str:
    return duration(*no_less_than_0(interval))


def grows_with_size(study: Study, other: str) -> Judgement:
    """Judge claim 1.10: what the first target saves, at the largest and at the smallest checkpoint, paired by block."""
    sweep = scaling.load(study)
    found = scaling.growth(study, sweep, other) if sweep else None
    if found is None:
        return Judgement(NOT_TESTED, "")
    figure = (
        f"{found.method}, until durable: {seconds(found.saved_small_s)} saved a save at "
        f"{size_text(found.smallest_bytes)}, {seconds(found.saved_large_s)} at {size_text(found.largest_bytes)}, "
        f"{seconds(found.more_s)} more. Random weights, no training between saves; the dataset's size was not varied."
    )
    more = found.more_s
    verdict = UNDECIDED
    if more.low > 0:
        verdict = REPRODUCED
    elif more.high < 0:
        verdict = NOT_REPRODUCED
    return on_this_storage(study, other, verdict, figure)


def frequent_without_slowing(study: Study, other: str) -> Judgement:
    """Judge claim 2.5: the share that saves take of the time on the first target, by the save of today."""
    assumed = of(study)
    interval_s = assumed.interval_min * SECONDS_PER_MINUTE
    first, today = study.targets[0], study.methods[0]
    found = planning.shown_costs(study)
    own = next((cost for cost in found if (cost.target, cost.method) == (first, today)), None)
    if own is None:
        return Judgement(NOT_TESTED, "")
    share = planning.overhead(own, interval_s)
    verdict = within(share.low, share.high, -1.0, SLOWED_SHARE)
    texts = [
        f"{cost.method} on {cost.target} {percent(*no_less_than_0(one))}, from every "
        f"{duration(planning.shortest_interval_s(cost, SLOWED_SHARE))} on"
        for cost in found
        if cost.target in (first, other) and (one := planning.overhead(cost, interval_s))
    ]
    figure = (
        f"A save every {assumed.interval_min:g} min takes of the time, and stays within {SLOWED_SHARE:.1%}: "
        f"{'; '.join(texts)}. Saves of {size_text(planning.own_bytes(study))}; asynchronous ones with what they take "
        "from the steps beside them."
    )
    if study.emulated(first):
        return Judgement(MODELLED, figure)
    if study.storage(first)["medium"] == "memory":
        return Judgement(NOT_TESTED, f"The first target is memory, not storage. {figure}")
    return Judgement(verdict, f"{figure} Judged: {today} on {called(study, first)}.")


def worth_its_price(study: Study, other: str) -> Judgement:
    """Judge claim 2.7: payback under assumed prices, which is a model whatever the storage."""
    if study.same_place(study.targets[0], other):
        return Judgement(NOT_TESTED, "A/A control, one storage against itself.")
    assumed = of(study)
    found = planning.bill(study, other, assumed)
    figure = (
        f"Under the assumed prices of {assumed.prices_as_of}: waiting given back is worth "
        f"{money(found.payback.saved_per_year, assumed.currency)} a year; {assumed.prices.extra_over_horizon:,.0f} "
        f"{assumed.currency} more for faster storage is paid back: {months(found.payback)}. It "
        f"{found.payback.verdict} within {assumed.horizon_months:g} months."
    )
    return Judgement(MODELLED, figure)


def plan_for_growth(study: Study, other: str) -> Judgement:
    """Judge claim 2.8: arithmetic on published sizes, beside what the first target's save reaches."""
    assumed = of(study)
    table = planning.needs(study, assumed)
    rates = " and ".join(
        f"{size_text(table.sync_bytes_per_s[name])}/s for {name} ({size_text(table.size_bytes[name])})"
        for name in GROWN_MODELS
    )
    one = compare(study, "durable_s", other)
    reached = planning.own_bytes(study) / one.fast_s.mean
    enough = reached * float(table.stall_s.iloc[0])
    figure = (
        f"A save that waits, every {assumed.interval_min:g} min within {assumed.stall_share:.1%} of the time, needs "
        f"{rates}. {study.methods[0]} on {one.fast} reaches {size_text(reached)}/s here, from end to end: enough up to "
        f"{size_text(enough)}, if larger saves kept that rate."
    )
    return Judgement(MODELLED, figure)
