"""From a study's tables to the figures of the report: block means, paired comparisons, projections."""

import math
from dataclasses import dataclass

import pandas as pd

from stallbench.reporting.stats import (
    Equivalence,
    Interval,
    PairedRatio,
    equivalence,
    mean_interval,
    paired_difference,
    paired_ratio,
)
from stallbench.results import TRIAL_KEYS, Study

# How each measure is called, and the wait rule under which it is the figure that people mean.
MEASURES = {
    "step_s": ("training step, with its data wait", "return"),
    "returned_s": ("save, until the call returned", "return"),
    "durable_s": ("save, until its bytes were durable", "durable"),
    "stall_s": ("stall of a save", "return"),
    "local_s": ("staged save, until durable on the local folder", "return"),
    "restore_s": ("cold restore", "durable"),
    "reload_s": ("cold reload of the data", "durable"),
    "delete_s": ("deletion of an old checkpoint", "durable"),
}
# Shown side by side; the stall is one of the two saves, depending on the wait rule.
OPEN_SHARE = -10.0  # ten times as slow: an interval that reaches further says nothing on that side
SIDE_BY_SIDE = ("step_s", "returned_s", "durable_s", "restore_s", "reload_s", "delete_s")


@dataclass(frozen=True)
class Condition:
    """What the trials of one cell of the matrix share."""

    target: str
    method: str
    wait: str


def measured(study: Study, measure: str, wait: str | None = None, method: str | None = None) -> pd.DataFrame:
    """Give the counted values of one measure.

    Parameters
    ----------
    measure
        A key of ``MEASURES``.
    wait
        The wait rule; by default the measure's own, or the study's only one.
    method
        The method; by default the study's first.

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
        table = parts.groupby([*TRIAL_KEYS, "step"], as_index=False).duration_s.sum()
        table = table.rename(columns={"duration_s": "value_s"})
    else:
        table = study.events[~study.events.warmup].rename(columns={measure: "value_s"})
    chosen = table[(table.wait == wait) & (table.method == (method or study.methods[0]))]
    return chosen.dropna(subset="value_s")[["target", "wait", "block", "trial", "value_s"]].reset_index(drop=True)


def condition(study: Study, preferred: str) -> str:
    """Give the preferred wait rule if the study's first method ran under it, else the one it ran under."""
    waits = waits_of_first(study)
    return preferred if preferred in waits else waits[0]


def waits_of_first(study: Study) -> list[str]:
    """Give the wait rules of the study's first method: an asynchronous one has no ``durable``."""
    own = set(study.counted[study.counted.method == study.methods[0]].wait)
    return [wait for wait in study.waits if wait in own]


def block_means(
    study: Study, measure: str, target: str, wait: str | None = None, method: str | None = None
) -> pd.Series:
    """Give the mean of one measure in seconds for each block that a target completed, indexed by block."""
    values = measured(study, measure, wait, method)
    return values[values.target == target].groupby("block").value_s.mean()


def compared_with(study: Study) -> list[str]:
    """Give the targets that the first is compared with: those that share a completed block in each condition.

    A target whose server can't say when bytes are durable is compared with none.
    """
    first, *others = study.targets
    if never_durable(study, first):
        return []
    return [
        other
        for other in others
        if not never_durable(study, other) and all(_shared(study, first, other, wait) for wait in waits_of_first(study))
    ]


def never_durable(study: Study, target: str) -> bool:
    """Whether a target made saves, and none of them has a durable time."""
    durable_s = study.events[study.events.target == target].durable_s
    return len(durable_s) > 0 and bool(durable_s.isna().all())


def _shared(study: Study, first: str, other: str, wait: str) -> set[int]:
    own = study.counted[(study.counted.wait == wait) & (study.counted.method == study.methods[0])]
    blocks = [set(own[own.target == target].block) for target in (first, other)]
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
    """Compare the first target with ``other`` over the blocks that both completed, with the study's first method."""
    wait = wait or condition(study, MEASURES[measure][1])
    first, method = study.targets[0], study.methods[0]
    return compare_conditions(study, measure, Condition(first, method, wait), Condition(other, method, wait))


def compare_conditions(study: Study, measure: str, fast: Condition, slow: Condition) -> Comparison:
    """Compare two conditions, whatever they differ in, over the blocks that both completed.

    Raises
    ------
    ValueError
        If they share no block.
    """
    means = [block_means(study, measure, one.target, one.wait, one.method) for one in (fast, slow)]
    shared = means[0].index.intersection(means[1].index)
    fast_means, slow_means = (one[shared] for one in means)
    values = measured(study, measure, fast.wait, fast.method)
    values = values[values.block.isin(shared)]
    return Comparison(
        measure=measure,
        wait=fast.wait,
        fast=fast.target,
        slow=slow.target,
        ratio=paired_ratio(fast_means, slow_means),
        fast_s=mean_interval(fast_means),
        slow_s=mean_interval(slow_means),
        saved_s=paired_difference(fast_means, slow_means),
        events=int((values.target == fast.target).sum()),
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
    for measure in SIDE_BY_SIDE:
        words = MEASURES[measure][0]
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
    """Show each target's raw limits, and which share of the write limit a durable save of the first method reaches.

    Returns
    -------
    pandas.DataFrame
        Indexed by target: ``raw_write_bytes_per_s``, ``raw_buffered_bytes_per_s``, ``raw_read_bytes_per_s``,
        ``raw_random_s`` (a random 4 KiB read), ``raw_small_s`` (a small file made durable), ``save_bytes_per_s``,
        ``share``; NaN where a limit wasn't probed, for example without O_DIRECT.
    """
    rows = {}
    events = study.events
    saves = events[~events.warmup & (events.method == study.methods[0]) & events.durable_s.notna()]
    for target in study.targets:
        raw = _raw_limits(study, target)
        own = saves[(saves.target == target) & (saves.wait == condition(study, "durable"))]
        rate = own.size_bytes.sum() / own.durable_s.sum() if len(own) else math.nan
        rows[target] = raw | {"save_bytes_per_s": rate, "share": rate / raw["raw_write_bytes_per_s"]}
    return pd.DataFrame.from_dict(rows, orient="index")


def _raw_limits(study: Study, target: str) -> dict[str, float]:
    """Give what was probed; for an in-process emulated device what its profile states, the slower of link and disk."""
    if study.charged(target):
        profile = study.storage(target)["profile"]
        stated = min(profile["link_bytes_per_s"], profile["disk_bytes_per_s"])
        round_trips_s = profile["round_trip_s"] * profile["round_trips_per_file"]
        random_s = round_trips_s + profile["position_s"] + 4096 / stated
        rates = dict.fromkeys(("raw_write_bytes_per_s", "raw_buffered_bytes_per_s", "raw_read_bytes_per_s"), stated)
        return rates | {"raw_random_s": random_s, "raw_small_s": random_s}
    raw = {}
    spans = study.spans[study.spans.target == target]
    totals = spans.groupby("kind")[["size_bytes", "files", "duration_s"]].sum()
    for kind in ("raw_write", "raw_buffered", "raw_read"):
        found = kind in totals.index
        raw[f"{kind}_bytes_per_s"] = totals.size_bytes[kind] / totals.duration_s[kind] if found else math.nan
    for kind in ("raw_random", "raw_small"):
        raw[f"{kind}_s"] = totals.duration_s[kind] / totals.files[kind] if kind in totals.index else math.nan
    return raw


def raw_against(study: Study, other: str) -> dict[str, PairedRatio]:
    """Compare the probed raw limits of the first target with another's, paired by block.

    Returns
    -------
    dict
        By kind, ``raw_write`` and ``raw_read`` (seconds per byte) and ``raw_random`` (seconds per read of 4 KiB): what
        was probed on both in a block.
    """
    found = {}
    for kind in ("raw_write", "raw_read", "raw_random"):
        of = "files" if kind == "raw_random" else "size_bytes"
        own = study.spans[study.spans.kind == kind].groupby(["target", "block"])[["duration_s", of]].sum()
        each_s = own.duration_s / own[of]
        pair = [each_s[each_s.index.get_level_values("target") == target] for target in (study.targets[0], other)]
        first, second = (part.droplevel("target") for part in pair)
        if len(first.index.intersection(second.index)):
            found[kind] = paired_ratio(first, second)
    return found


def seconds(interval: Interval) -> str:
    """Write a time with its 95 % interval, in the unit that suits its size."""
    unit, factor = ("ms", 1e3) if abs(interval.mean) < 0.1 else ("s", 1.0)
    mean, low, high = no_less_than_0(interval)  # a t interval over few blocks may reach below 0, a time can't
    return span_text(mean * factor, low * factor, high * factor, unit)


def no_less_than_0(interval: Interval) -> tuple[float, float, float]:
    """Give mean, low and high of what can't be below 0, as ``duration`` and ``percent`` take them."""
    return interval.mean, (0.0 if interval.low < 0 else interval.low), interval.high  # NaN stays


def duration(wait_s: float, low_s: float = math.nan, high_s: float = math.nan, beside_s: float = 0.0) -> str:
    """Write a long time with its interval, in seconds, minutes or hours.

    ``beside_s`` is the longest time that it stands beside, whose unit it takes.
    """
    longest_s = max(abs(wait_s), beside_s)
    unit, factor = ("h", 3600.0) if longest_s >= 7200 else ("min", 60.0) if longest_s >= 120 else ("s", 1.0)
    return span_text(wait_s / factor, low_s / factor, high_s / factor, unit)


def percent(share: float, low: float = math.nan, high: float = math.nan) -> str:
    """Write a share in percent with its interval; a bound that few blocks leave all but open is said as such."""
    if low < OPEN_SHARE or high > -OPEN_SHARE:
        least = f"below {OPEN_SHARE * 100:.0f}" if low < OPEN_SHARE else f"{low * 100:.0f}"
        most = f"above {-OPEN_SHARE * 100:.0f}" if high > -OPEN_SHARE else f"{high * 100:.0f}"
        return f"{share * 100:.0f} % ({least} to {most})"
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
