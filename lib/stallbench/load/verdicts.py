"""Verdicts on the claims about reads, mixed load, neighbours and the reload loop; rules were fixed before any study."""

import math
from collections.abc import Callable

import pandas as pd

from stallbench.load import analysis as load
from stallbench.load.accelerators import REQUIRED_USE
from stallbench.reporting.analysis import percent, seconds, span_text
from stallbench.reporting.judging import (
    NOT_REPRODUCED,
    NOT_TESTED,
    REPRODUCED,
    UNDECIDED,
    Judgement,
    less_of,
    on_this_storage,
    within,
)
from stallbench.reporting.stats import OPEN_SPREAD, Interval, PairedRatio, mean_interval, paired_ratio
from stallbench.results import Study

# Claims 1.6 and 1.11: a difference that matters to the choice of storage, as for restores (claim 1.5).
DIFFERENCE = 0.05
# Claim 2.2: random reads of small files reach at most this share of the bytes per second of the same samples in shards.
RANDOM_SHARE = 0.5
# Claim 2.3: some kind of load takes at least this much longer together than alone, beyond what memory shows.
INTERFERENCE = 1.2
# Claim 1.9: k experiments lose at least this share of k times what one loses.
MULTIPLIES = 0.8
ANY = float("inf")


def _differs(ratio: PairedRatio) -> str:
    """Judge whether the first target takes less time, or more, by what matters."""
    low, high = ratio.time_saved_low, ratio.time_saved_high
    if not low <= high:
        return UNDECIDED
    if low >= DIFFERENCE or high <= -DIFFERENCE:
        return REPRODUCED
    return NOT_REPRODUCED if -DIFFERENCE < low and high < DIFFERENCE else UNDECIDED


def _each_of(count: int) -> float:
    """Give the confidence of each of some intervals, of which one may decide, so that all hold at 95 %: Bonferroni."""
    return 1 - 0.05 / count


def times(ratio: PairedRatio, by: float = 1.0) -> str:
    """Write a ratio, multiplied, with its interval, unless few blocks leave that all but open."""
    text = f"{by * ratio.ratio:.2f}"
    if ratio.blocks > 1 and ratio.high > OPEN_SPREAD * ratio.low:
        return f"{text} (open)"
    return f"{text} ({by * ratio.low:.2f} to {by * ratio.high:.2f})" if ratio.blocks > 1 else text


def share_text(share: Interval) -> str:
    """Write a share with its interval, which a t interval over few blocks may take beyond 0 or 1."""
    if share.blocks == 1:
        return percent(share.mean)
    low, high = max(0.0, share.low), min(1.0, share.high)
    digits = 1 if high - low < 0.05 else 0
    return f"{share.mean * 100:.{digits}f} % ({low * 100:.{digits}f} to {high * 100:.{digits}f})"


def number(value: Interval, unit: str) -> str:
    """Write what can't be below 0 or endless; an interval that reaches there is called open, as it says nothing."""
    if value.low <= 0 or math.isinf(value.high):
        return f"{float(f'{value.mean:.2g}'):,g} {unit} (open)"
    return span_text(value.mean, value.low, value.high, unit)


def _reload(study: Study, other: str) -> Judgement:
    parts = {target: load.loop_parts(study, target) for target in (study.targets[0], other)}
    first, second = (parts[target].reload for target in parts)
    ratio = paired_ratio(first, second)
    figure = "; ".join(
        f"{target}: {seconds(mean_interval(own.reload))} for "
        f"{percent(float((own.reload / own.sum(axis=1)).mean()))} of an iteration"
        for target, own in parts.items()
    )
    spans = study.spans[(study.spans.kind == "iteration") & (study.spans.part == "reload")]
    if set(spans.cache_data) != {"cold"}:
        return Judgement(NOT_TESTED, f"The reloads were not shown to be cold. {figure}.")
    return on_this_storage(study, other, _differs(ratio), f"{figure}; {less_of(ratio)} time.{_beneath(spans)}")


def _beneath(spans: pd.DataFrame) -> str:
    if "unknown" not in set(spans.cache_server):
        return ""
    return " Cold here means this machine's page cache; a cache beneath it (NAS, hypervisor) is unknown."


NONE_AT_ONCE = Judgement(NOT_TESTED, "No two experiments ran at once to their end on both.")


def _most_at_once(study: Study, first: str, other: str) -> int | None:
    """Give how many experiments at once can be compared with one alone, on both targets; None if none can."""
    common = [count for count in load.counts(study, other) if count in load.counts(study, first)]
    return common[-1] if len(common) > 1 and common[0] == 1 else None


def _developers(study: Study, other: str) -> Judgement:
    first = study.targets[0]
    most = _most_at_once(study, first, other)
    if most is None:
        return NONE_AT_ONCE
    gaps = {
        count: (load.lost_time(study, other, count) - load.lost_time(study, first, count)).dropna()
        for count in (1, most)
    }
    shared = gaps[1].index.intersection(gaps[most].index)
    one, many = gaps[1][shared], gaps[most][shared]
    words = (
        f"One experiment loses {seconds(mean_interval(one))} more to {other} than to {first} over "
        f"{load.STEPS_OF_LOSS} steps and a save, {most} at once {seconds(mean_interval(many))} between them"
    )
    if (one <= 0).any():
        return on_this_storage(study, other, UNDECIDED, f"{words}: one alone loses nothing in some block.")
    grows = paired_ratio(many, one) if (many > 0).all() else None
    if grows is None:
        return on_this_storage(study, other, UNDECIDED, f"{words}.")
    verdict = within(grows.low, grows.high, MULTIPLIES * most, ANY)
    return on_this_storage(study, other, verdict, f"{words}: {times(grows)} times as much.")


def _loop(study: Study, other: str) -> Judgement:
    first = study.targets[0]
    totals = {target: load.loop_parts(study, target).sum(axis=1) for target in (first, other)}
    ratio = paired_ratio(totals[first], totals[other])
    figure = "; ".join(_loop_words(study, target) for target in totals)
    return on_this_storage(study, other, _differs(ratio), f"{figure}; {less_of(ratio)} time.")


def _loop_words(study: Study, target: str) -> str:
    share, whole = load.storage_share(study, target), load.iteration(study, target)
    return (
        f"{target}: an iteration takes {seconds(whole)}, of which reload, save and restore are "
        f"{share_text(share)}: {number(load.iterations_a_day(study, target), 'iterations a day')}"
    )


def _idle(study: Study, other: str) -> Judgement:
    """Compare what each storage delivers with what each accelerator demands, and see whether it was kept busy."""
    answers, words, starved = [], [], 0
    for target in (study.targets[0], other):
        rate = mean_interval(load.rates(study, target, "cold reads").samples_per_s)
        low, high = (rate.low, rate.high) if rate.blocks > 1 else (rate.mean, rate.mean)
        for one in load.fed(study, target):
            if one.demand_per_s > high:
                starved += 1
                answers.append(within(max(0.0, one.use.low), one.use.high, 0.0, REQUIRED_USE))
            elif one.demand_per_s < low:
                answers.append(within(one.use.low, one.use.high, REQUIRED_USE, ANY))
        busiest = load.fed(study, target)[0]
        words.append(
            f"{target} gives {number(rate, 'samples a second')}, {busiest.accelerator} (emulated) could take "
            f"{busiest.demand_per_s:,.0f} and is busy {share_text(busiest.use)} "
            "of the time"
        )
    figure = f"{'; '.join(words)}. Pairs of an accelerator and a slower storage here: {starved}."
    if not starved:
        return Judgement(NOT_TESTED, figure)
    verdict = REPRODUCED if set(answers) == {REPRODUCED} else UNDECIDED
    if NOT_REPRODUCED in answers:
        verdict = NOT_REPRODUCED
    return on_this_storage(study, other, verdict, figure)


def _small_files(study: Study, other: str) -> Judgement:
    verdicts, words = [], []
    for target in (study.targets[0], other):
        small, shards = (load.rates(study, target, phase).bytes_per_s for phase in ("cold reads", "arrow"))
        ratio, sure = paired_ratio(small, shards), paired_ratio(small, shards, _each_of(2))
        verdicts.append(within(sure.low, sure.high, 0.0, RANDOM_SHARE))
        p50_s, _, p99_s = load.quantiles(study, target, "cold reads").mean()
        slowest = f"p99 {p99_s * 1e3:.2g} ms" if p99_s == p99_s else "too few reads for a p99"
        rate = mean_interval(load.rates(study, target, "cold reads").samples_per_s)
        words.append(
            f"{target}: {number(rate, 'small files a second')}, p50 {p50_s * 1e3:.2g} ms, {slowest}, "
            f"{percent(ratio.ratio, ratio.low, ratio.high)} of the bytes a second of the same samples in Arrow shards"
        )
    phases = study.spans[(study.spans.kind == "phase") & study.spans.part.isin(["cold reads", "arrow"])]
    figure = "; ".join(words) + "."
    if set(phases.cache_data) != {"cold"}:
        return Judgement(NOT_TESTED, f"The reads were not shown to be cold. {figure}")
    return on_this_storage(study, other, _either(verdicts), figure + _beneath(phases))


def _either(verdicts: list[str]) -> str:
    """Give *reproduced* if any storage shows it, *not reproduced* if none does for sure."""
    if REPRODUCED in verdicts:
        return REPRODUCED
    return NOT_REPRODUCED if set(verdicts) == {NOT_REPRODUCED} else UNDECIDED


def _mixed(study: Study, other: str) -> Judgement:
    """Ask for one kind of load that is slower both than alone and than it is in memory, where more can't be known."""
    verdicts, words = [], []
    for target in (study.targets[0], other):
        for one in load.interference(study, target, _each_of(2 * len(load.ALONE))):
            answers = [within(ratio.low, ratio.high, INTERFERENCE, ANY) for ratio in (one.factor, one.storage) if ratio]
            verdicts.append(UNDECIDED)
            if answers == [REPRODUCED, REPRODUCED] or answers[0] == NOT_REPRODUCED:
                verdicts[-1] = answers[0]
        for one in load.interference(study, target):
            memory = f", {times(one.memory)} in memory" if one.memory else ", not compared with memory"
            words.append(f"a {one.kind} on {target} takes {times(one.factor)} times as long{memory}")
    figure = f"All at once against alone: {'; '.join(words)}."
    return on_this_storage(study, other, _either(verdicts), figure)


def _shared(study: Study, other: str) -> Judgement:
    """Ask whether experiments at once keep their pace on the first target and not on the other one."""
    first = study.targets[0]
    most = _most_at_once(study, first, other)
    if most is None:
        return NONE_AT_ONCE
    kept = {target: load.kept_pace(study, target, most) for target in (first, other)}
    if None in kept.values():
        return Judgement(NOT_TESTED, "No two experiments ran at once to their end on both in one block.")
    words = "; ".join(
        f"{target}: each of {most} at once keeps {times(one)} of its pace alone, {_saturation(study, target)}"
        for target, one in kept.items()
    )
    memory = [load.kept_pace(study, target, most, memory=True) for target in (first, other)]
    if None in memory:
        return on_this_storage(study, other, UNDECIDED, f"{words}. Not compared with memory.")
    processor = min(one.ratio for one in memory)
    words += f". In memory they keep {percent(processor)}"
    if processor < load.KEPT_PACE:
        return Judgement(NOT_TESTED, f"{words}, so the processor is part of what holds them up.")
    words += ", so the processor is not what holds them up."
    good = within(kept[first].low, kept[first].high, load.KEPT_PACE, ANY)
    bad = within(kept[other].low, kept[other].high, 0.0, load.KEPT_PACE)
    verdict = REPRODUCED if good == bad == REPRODUCED else UNDECIDED
    if NOT_REPRODUCED in (good, bad):
        verdict = NOT_REPRODUCED
    return on_this_storage(study, other, verdict, words)


def _saturation(study: Study, target: str) -> str:
    count = load.saturates_at(study, target)
    return f"surely slowed down from {count} on" if count else "not surely slowed down here"


Judge = Callable[[Study, str], Judgement]
# By claim: its rule, the section that shows it, and its judge.
JUDGED_UNDER_LOAD: dict[str, tuple[str, str, Judge]] = {
    "1.6": ("The cold reload of the data differs by more than 5 %.", "The-loop-of-an-iteration", _reload),
    "1.9": (
        "k experiments at once lose at least 0.8 k times what one loses more to the slower storage.",
        "Neighbours", _developers,
    ),
    "1.11": ("A whole iteration takes at least 5 % less or more time.", "The-loop-of-an-iteration", _loop),
    "2.1": (
        "Every accelerator that could take more samples than the storage gives is busy less than 90 % of the time, and "
        "every other one at least 90 % (MLPerf Storage's own limit).",
        "Accelerators-that-wait", _idle,
    ),
    "2.2": (
        "Cold small files in random order give at most half the bytes a second of the same samples in shards, on one "
        "storage at least (intervals at 95 % for both together).",
        "Storage-under-load", _small_files,
    ),
    "2.3": (
        "Some kind of load takes at least 1.2 times as long with the others as alone, and 1.2 times what that is in "
        "memory (intervals at 95 % for all kinds together).",
        "All-at-once", _mixed,
    ),
    "2.4": (
        "Each of the most experiments at once keeps 90 % of its pace alone on the first storage, and not on the other.",
        "Neighbours", _shared,
    ),
}  # fmt: skip
