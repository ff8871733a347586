"""Whether a target got slower between two studies: independent samples, unlike machines refused."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats

from stallbench.compounding.checks import require_positive
from stallbench.reporting.analysis import MEASURES, Condition, block_means
from stallbench.reporting.stats import Interval, mean_interval
from stallbench.results import Study

THRESHOLD = 0.1
CONFIDENCE = 0.95
# A virtual machine's memory, and a checkpoint's bytes, differ a little from one start to the next.
_ALIKE = 0.02
_HARDWARE = ("cpu", "cores", "accelerator", "virtual_machine")
# What a save's time depends on, besides where it goes.
_WORKLOAD = ("model", "dataset", "every_steps", "every_s", "keep", "settle", "warmup_saves", "batch_size", "max_tokens")

Answer = Literal["slower", "not slower", "undecided"]


@dataclass(frozen=True)
class Change:
    """One condition in two studies; ``ratio`` is new / old of the geometric means over blocks, with its 95 % interval.

    ``old_s`` and ``new_s`` are seconds, None where nothing was counted; ``ratio`` and its bounds are NaN where a study
    has fewer than two blocks.
    """

    condition: Condition
    old_s: Interval | None
    new_s: Interval | None
    ratio: float
    low: float
    high: float
    answer: Answer


def unlike(old: Study, new: Study) -> list[str]:
    """Name what makes two studies ones that say nothing about each other: field, old value, new value.

    Software versions and the commit are not among it: a comparison is often made because of them.
    """
    return [f"{field}: {one!r} and {other!r}" for field, one, other in _facts(old, new) if not _same(one, other)]


def _facts(old: Study, new: Study) -> Iterator[tuple[str, Any, Any]]:
    yield "method_version", old.request["method_version"], new.request["method_version"]
    for field in (*_HARDWARE, "memory_bytes"):
        yield field, old.environment.get(field), new.environment.get(field)
    for field in _WORKLOAD:
        yield field, old.request.get(field), new.request.get(field)
    for field in ("targets", "methods"):
        yield field, sorted(getattr(old, field)), sorted(getattr(new, field))
    for target in (name for name in old.targets if name in new.targets):
        yield f"storage of {target}", old.storage(target), new.storage(target)
    sizes = [study.events[~study.events.warmup].groupby("method").size_bytes.mean() for study in (old, new)]
    for method in sizes[0].index.intersection(sizes[1].index):
        yield f"bytes of a save by {method}", float(sizes[0][method]), float(sizes[1][method])


def _same(one: Any, other: Any) -> bool:
    numbers = all(isinstance(value, int | float) and abs(value) > 1e5 for value in (one, other))
    return math.isclose(one, other, rel_tol=_ALIKE) if numbers else one == other


def changes(old: Study, new: Study, measure: str = "durable_s", threshold: float = THRESHOLD) -> list[Change]:
    """Compare each target and method that both studies asked for.

    Per condition Welch's t on the logs of block means (B. L. Welch, Biometrika 34, 1947): the two studies share no
    block, so that nothing is paired, and need not scatter alike.

    The rule: *slower* if the interval excludes that it got no slower and the ratio passes 1 + threshold; *not slower*
    if the interval's upper end lies below 1 + threshold; else *undecided*, as where a study has fewer than two blocks.

    Parameters
    ----------
    old, new
        Two studies.
    measure
        A key of ``analysis.MEASURES``; its own wait rule where both studies have it, else the one they share.
    threshold
        Share by which a time may grow, without unit.

    Raises
    ------
    ValueError
        In one line that names it: an unknown measure, a threshold that isn't a positive number, a load study, one study
        given twice, or two without a condition in common.

    Notes
    -----
    The interval holds the scatter of blocks within a study. Two studies are two occasions: what else differs between
    them (neighbours, temperature, how full a disk is) is in the ratio, not in the interval.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure={measure!r} is unknown; choose one of: {', '.join(MEASURES)}")
    require_positive("threshold", threshold)
    if "load" in (old.experiment, new.experiment):
        raise ValueError("experiment='load' is refused: only studies of saves are compared")
    if old.study_id == new.study_id:
        raise ValueError(f"study={old.study_id!r} is given twice; compare two studies")
    found = [_change(old, new, measure, one, threshold) for one in _shared(old, new, MEASURES[measure][1])]
    if not any(change.old_s and change.new_s for change in found):
        raise ValueError(f"measure={measure!r} is refused: the two studies have no counted value of it in common")
    return found


def _shared(old: Study, new: Study, preferred: str) -> Iterator[Condition]:
    for target in (name for name in old.targets if name in new.targets):
        for method in (name for name in old.request["methods"] if name in new.request["methods"]):
            waits = [_waits(study, method) for study in (old, new)]
            both = [wait for wait in waits[0] if wait in waits[1]]
            if both:
                yield Condition(target, method, preferred if preferred in both else both[0])


def _waits(study: Study, method: str) -> list[str]:
    counted = study.counted[study.counted.method == method]
    return [wait for wait in study.request["waits"] if (counted.wait == wait).any()]


def _change(old: Study, new: Study, measure: str, one: Condition, threshold: float) -> Change:
    means = [block_means(study, measure, one.target, one.wait, one.method) for study in (old, new)]
    old_s, new_s = (mean_interval(blocks) if len(blocks) else None for blocks in means)
    ratio = low = high = math.nan
    if min(map(len, means)) > 1 and min(blocks.min() for blocks in means) > 0:
        ratio, low, high = _welch(*means)
    answer: Answer = "undecided"
    if low > 1 and ratio >= 1 + threshold:
        answer = "slower"
    elif high < 1 + threshold:
        answer = "not slower"
    return Change(one, old_s, new_s, ratio, low, high, answer)


def _welch(old: pd.Series, new: pd.Series) -> tuple[float, float, float]:
    logs = [np.log(blocks.to_numpy()) for blocks in (new, old)]
    ratio = math.exp(logs[0].mean() - logs[1].mean())
    if max(np.ptp(one) for one in logs) == 0:  # emulated storage may be exact: an interval without width
        return ratio, ratio, ratio
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Precision loss", category=RuntimeWarning)
        interval = stats.ttest_ind(*logs, equal_var=False).confidence_interval(CONFIDENCE)
    return ratio, math.exp(interval.low), math.exp(interval.high)
