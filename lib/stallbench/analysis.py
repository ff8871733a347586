"""From a study's tables to the figures of the report: block means, paired comparisons, projections."""

import math
from dataclasses import dataclass

import pandas as pd

from stallbench.results import Study
from stallbench.stats import (
    Equivalence,
    Interval,
    PairedRatio,
    equivalence,
    mean_interval,
    paired_difference,
    paired_ratio,
)

# How each measure is called, and the wait rule under which it is the figure that people mean.
MEASURES = {
    "step_s": ("training step, with its data wait", "return"),
    "returned_s": ("save, until the call returned", "return"),
    "durable_s": ("save, until its bytes were durable", "durable"),
    "restore_s": ("cold restore", "durable"),
    "reload_s": ("cold reload of the data", "durable"),
    "delete_s": ("deletion of an old checkpoint", "durable"),
}


def measured(study: Study, measure: str, wait: str | None = None) -> pd.DataFrame:
    """Give the counted values of one measure.

    Parameters
    ----------
    measure
        A key of ``MEASURES``, or ``stall_s``.
    wait
        The wait rule; by default the measure's own, or the study's only one.

    Returns
    -------
    pandas.DataFrame
        One row a value: ``target``, ``wait``, ``block``, ``trial``, ``value_s`` (seconds).
    """
    wait = wait or condition(study, MEASURES[measure][1])
    if measure == "restore_s":
        table = study.restores.rename(columns={"restore_s": "value_s"})
    elif measure in {"reload_s", "delete_s"}:
        kind = {"reload_s": "reload_data", "delete_s": "delete"}[measure]
        table = study.of_kind(kind).rename(columns={"duration_s": "value_s"})
    elif measure == "step_s":
        parts = pd.concat([study.of_kind("step"), study.of_kind("data_wait")])
        keys = ["trial", "target", "wait", "block", "step"]
        table = parts.groupby(keys, as_index=False).duration_s.sum().rename(columns={"duration_s": "value_s"})
    else:
        table = study.events[~study.events.warmup].rename(columns={measure: "value_s"})
    return table[table.wait == wait][["target", "wait", "block", "trial", "value_s"]].reset_index(drop=True)


def condition(study: Study, preferred: str) -> str:
    """Give the preferred wait rule if the study ran it, else the one it ran."""
    return preferred if preferred in study.waits else study.waits[0]


def block_means(study: Study, measure: str, target: str, wait: str | None = None) -> pd.Series:
    """Give the mean of one measure in seconds for each block that a target completed, indexed by block."""
    values = measured(study, measure, wait)
    return values[values.target == target].groupby("block").value_s.mean()


def compared_with(study: Study) -> list[str]:
    """Give the targets that the first is compared with: those that share a completed block under each wait rule."""
    first, *others = study.targets
    return [other for other in others if all(_shared(study, first, other, wait) for wait in study.waits)]


def _shared(study: Study, first: str, other: str, wait: str) -> set[int]:
    blocks = [
        set(study.counted[(study.counted.target == t) & (study.counted.wait == wait)].block) for t in (first, other)
    ]
    return blocks[0] & blocks[1]


@dataclass(frozen=True)
class Comparison:
    """One measure on the first target (``fast``) against another (``slow``), paired by block."""

    measure: str
    wait: str
    fast: str
    slow: str
    ratio: PairedRatio
    fast_s: Interval
    slow_s: Interval
    saved_s: Interval
    events: int


def compare(study: Study, measure: str, other: str, wait: str | None = None) -> Comparison:
    """Compare the first target with ``other`` over the blocks that both completed."""
    first = study.targets[0]
    wait = wait or condition(study, MEASURES[measure][1])
    fast, slow = (block_means(study, measure, target, wait) for target in (first, other))
    shared = fast.index.intersection(slow.index)
    fast, slow = fast[shared], slow[shared]
    values = measured(study, measure, wait)
    values = values[values.block.isin(shared)]
    return Comparison(
        measure=measure,
        wait=wait,
        fast=first,
        slow=other,
        ratio=paired_ratio(fast, slow),
        fast_s=mean_interval(fast),
        slow_s=mean_interval(slow),
        saved_s=paired_difference(fast, slow),
        events=int((values.target == first).sum()),
    )


def training_phase(study: Study, other: str, wait: str | None = None) -> Equivalence:
    """Test whether a training step takes as long on the first target as on ``other``, within 5 %."""
    fast, slow = (block_means(study, "step_s", target, wait) for target in (study.targets[0], other))
    return equivalence(fast, slow)


def comparison_table(study: Study, other: str) -> pd.DataFrame:
    """Give the side-by-side table of the report: each measure on both targets, and the time saved.

    A measure that no block has on both targets is left out: with few or slow saves nothing may have been deleted.
    """
    first = study.targets[0]
    columns = [first, other, "time saved", "blocks", "events", "detectable"]
    rows = {}
    for measure, (words, _) in MEASURES.items():
        if block_means(study, measure, first).index.intersection(block_means(study, measure, other).index).empty:
            continue
        one = compare(study, measure, other)
        rows[f"{words} (wait={one.wait})"] = [
            seconds(one.fast_s),
            seconds(one.slow_s),
            percent(one.ratio.time_saved, one.ratio.time_saved_low, one.ratio.time_saved_high),
            one.ratio.blocks,
            one.events,
            percent(one.ratio.smallest_detectable),
        ]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def share_of_limit(study: Study) -> pd.DataFrame:
    """Show each target's raw limit, and which share of it a durable save reaches, as bytes over time.

    Returns
    -------
    pandas.DataFrame
        Indexed by target: ``raw_write_bytes_per_s``, ``raw_read_bytes_per_s``, ``save_bytes_per_s``, ``share``; NaN
        where the path has no O_DIRECT.
    """
    rows = {}
    saves = study.events[~study.events.warmup]
    for target in study.targets:
        raw = _raw_limits(study, target)
        own = saves[(saves.target == target) & (saves.wait == condition(study, "durable"))]
        rate = own.size_bytes.sum() / own.durable_s.sum() if len(own) else math.nan
        rows[target] = raw | {"save_bytes_per_s": rate, "share": rate / raw["raw_write_bytes_per_s"]}
    return pd.DataFrame.from_dict(rows, orient="index")


def _raw_limits(study: Study, target: str) -> dict[str, float]:
    """Give what was probed, or what an emulated device's profile states: the slower of its link and its disk."""
    if study.emulated(target):
        profile = study.storage(target)["profile"]
        stated = min(profile["link_bytes_per_s"], profile["disk_bytes_per_s"])
        return {"raw_write_bytes_per_s": stated, "raw_read_bytes_per_s": stated}
    raw = {}
    for kind in ("raw_write", "raw_read"):
        spans = study.spans[(study.spans.kind == kind) & (study.spans.target == target)]
        raw[f"{kind}_bytes_per_s"] = spans.size_bytes.sum() / spans.duration_s.sum() if len(spans) else math.nan
    return raw


def seconds(interval: Interval) -> str:
    """Write a time with its 95 % interval, in the unit that suits its size."""
    unit, factor = ("ms", 1e3) if abs(interval.mean) < 0.1 else ("s", 1.0)
    low = 0.0 if interval.low < 0 else interval.low  # a t interval over few blocks may reach below 0, a time can't
    return span_text(interval.mean * factor, low * factor, interval.high * factor, unit)


def duration(wait_s: float, low_s: float = math.nan, high_s: float = math.nan, beside_s: float = 0.0) -> str:
    """Write a long time with its interval, in seconds, minutes or hours.

    ``beside_s`` is the longest time that it stands beside, whose unit it takes.
    """
    longest_s = max(abs(wait_s), beside_s)
    unit, factor = ("h", 3600.0) if longest_s >= 7200 else ("min", 60.0) if longest_s >= 120 else ("s", 1.0)
    return span_text(wait_s / factor, low_s / factor, high_s / factor, unit)


def percent(share: float, low: float = math.nan, high: float = math.nan) -> str:
    """Write a share in percent with its interval."""
    return span_text(share * 100, low * 100, high * 100, "%")


def span_text(value: float, low: float, high: float, unit: str) -> str:
    """Write ``value unit (low to high)`` with as many digits as the interval bears."""
    if not math.isfinite(value):
        return "unknown"
    half = (high - low) / 2 if math.isfinite(low) else abs(value) / 20
    digits = min(4, max(0, -math.floor(math.log10(half / 2)))) if half > 0 else 2
    if value == round(value) and not math.isfinite(low):
        digits = 0
    # Adding 0.0 turns a rounded -0 into 0.
    value, low, high = (round(number, digits) + 0.0 for number in (value, low, high))
    text = f"{value:.{digits}f} {unit}"
    return f"{text} ({low:.{digits}f} to {high:.{digits}f})" if math.isfinite(low) else text
