"""Methods x targets x wait rules: what faster storage gives back, what a better save does, and what each save is made of."""  # noqa: E501

from dataclasses import dataclass

import pandas as pd

from stallbench.config import ASYNCHRONOUS, PAST_THE_CACHE
from stallbench.reporting.analysis import Comparison, Condition, block_means, compare_conditions, condition
from stallbench.reporting.stats import Interval, PairedRatio, mean_interval, paired_ratio
from stallbench.results import TRIAL_KEYS, Study

# Which save is called the better one is fixed here, not chosen by its figures: the best of several that are measured
# looks better than it is.
BETTER = {
    "return": ("fast-async", "dcp-async", "staged", "dcp-async-process"),
    "durable": ("fast", "safetensors", "torch", "dcp"),
}
PHASES = ("queue", "snapshot", "serialize", "write", "sync", "commit")


def cells(study: Study, measure: str, wait: str) -> dict[tuple[str, str], Interval]:
    """Give the mean over blocks of one measure, by method and target, where trials completed."""
    found = {}
    for method in study.methods:
        for target in study.targets:
            means = block_means(study, measure, target, wait, method)
            if len(means):
                found[method, target] = mean_interval(means)
    return found


@dataclass(frozen=True)
class GivenBack:
    """Three comparisons of one wait rule with the save of today on the slower target, each with its words."""

    wait: str
    today: str
    better: str | None
    storage: Comparison
    software: Comparison | None
    both: Comparison | None


def given_back(study: Study, other: str, wait: str) -> GivenBack | None:
    """Compare faster storage, a better save, and both, with the study's first method on ``other``.

    The measure is the stall: what training waits for under this wait rule. None where no block is shared.
    """
    first, today = study.targets[0], study.methods[0]
    better = next((method for method in BETTER[wait] if method in study.methods and method != today), None)
    base = Condition(other, today, wait)

    def against(target: str, method: str | None) -> Comparison | None:
        if method is None:
            return None
        try:
            return compare_conditions(study, "stall_s", Condition(target, method, wait), base)
        except ValueError:  # no block in common: one of them failed
            return None

    storage = against(first, today)
    if storage is None:
        return None
    return GivenBack(wait, today, better, storage, against(other, better), against(first, better))


def phase_means(study: Study, wait: str) -> pd.DataFrame:
    """Give the mean seconds of each phase of a counted save.

    Returns
    -------
    pandas.DataFrame
        One row a target, method and phase, in the order in which they come: ``target``, ``method``, ``phase`` (with its
        part), ``kind``, ``mean_s``.
    """
    phases = study.phases[(study.phases.wait == wait) & ~study.phases.warmup]
    named = phases.assign(phase=phases.kind.where(phases.part == "", phases.kind + ", " + phases.part))
    each = named.groupby([*TRIAL_KEYS, "parent", "phase", "kind"], sort=False, as_index=False).duration_s.sum()
    saves = study.events[(study.events.wait == wait) & ~study.events.warmup]
    count = saves.groupby(["target", "method"]).size().rename("saves").reset_index()
    totals = each.groupby(["target", "method", "phase", "kind"], sort=False, as_index=False).duration_s.sum()
    merged = totals.merge(count, on=["target", "method"])
    return merged.assign(mean_s=merged.duration_s / merged.saves)[["target", "method", "phase", "kind", "mean_s"]]


@dataclass(frozen=True)
class Floor:
    """What of a durable save no storage can speed up: the same save to memory, beside the save itself."""

    target: str
    method: str
    durable_s: Interval
    memory_s: Interval
    at_most: PairedRatio


def floors(study: Study) -> list[Floor]:
    """Give the floor of each method on each target (Amdahl 1967: the part that isn't sped up bounds the whole).

    For an emulated device, whose bytes lie in memory, it is the save's own time without the device's; for a directory,
    the same save repeated on a memory file system, whose pages cost what those of the page cache do. A method that
    passes the page cache by has no such floor there. The ratio's ``time_saved`` is the most that storage could give.
    """
    wait = condition(study, "durable")
    found = []
    for method in study.methods:
        for target in study.targets:
            if method in PAST_THE_CACHE and not study.charged(target):
                continue
            durable = block_means(study, "durable_s", target, wait, method)
            memory = _memory_means(study, target, method, wait)
            shared = durable.index.intersection(memory.index)
            if len(shared):
                pair = memory[shared], durable[shared]
                found.append(Floor(target, method, mean_interval(pair[1]), mean_interval(pair[0]), paired_ratio(*pair)))
    return found


def _memory_means(study: Study, target: str, method: str, wait: str) -> pd.Series:
    spans = study.spans
    own = spans[(spans.target == target) & (spans.method == method) & (spans.wait == wait) & ~spans.warmup]
    if study.charged(target):
        own = own[own.kind.isin(["serialize", "snapshot"])]
        return own.groupby(["block", "parent"]).duration_s.sum().groupby("block").mean()
    return own[own.kind == "memory_save"].groupby("block").duration_s.mean()


@dataclass(frozen=True, eq=False)
class Beside:
    """What a save in the background takes from the steps after it.

    ``moved_by_block_s`` is what the steps up to the next save take longer than steps without a save beside them, in
    seconds a save, by block. A background that outlasts them may take more.
    """

    target: str
    method: str
    background_s: float
    steps: PairedRatio | None
    mock_steps: PairedRatio | None
    moved_by_block_s: pd.Series | None

    @property
    def moved_s(self) -> Interval | None:
        """Its mean over blocks, None where it isn't known."""
        return None if self.moved_by_block_s is None else mean_interval(self.moved_by_block_s)


def beside_saves(study: Study) -> list[Beside]:
    """Compare steps while a save is under way with steps without one, for the asynchronous methods of ``wait=return``.

    A step lies beside a save if its middle does. Real steps compete with the save for the processor's cores; mock steps
    are waits of the same length, as an emulated accelerator's would be.
    """
    found = []
    if "return" not in study.waits:
        return found
    for method in study.methods:
        for target in study.targets if method in ASYNCHRONOUS else ():
            own = study.spans[
                (study.spans.target == target) & (study.spans.method == method) & (study.spans.wait == "return")
            ]
            saves = study.events[
                (study.events.target == target) & (study.events.method == method) & (study.events.wait == "return")
            ]
            if len(own):
                mock, steps = own[own.kind == "mock_step"], own[(own.kind == "step") & ~own.warmup]
                background_s = float((saves.durable_end_s - saves.end_s)[~saves.warmup].mean())
                found.append(
                    Beside(
                        target,
                        method,
                        background_s,
                        _ratio(steps.assign(beside=_lies_beside(steps, saves))),
                        _ratio(mock.assign(beside=mock.part != "alone")),
                        _moved(steps.assign(beside=_lies_beside(steps, saves)), saves),
                    )
                )
    return found


def _lies_beside(steps: pd.DataFrame, saves: pd.DataFrame) -> pd.Series:
    middle = (steps.start_s + steps.end_s) / 2
    beside = pd.Series(False, index=steps.index)
    for save in saves.itertuples():
        beside |= (steps.trial == save.trial) & middle.between(save.end_s, save.durable_end_s)
    return beside


def _moved(steps: pd.DataFrame, saves: pd.DataFrame) -> pd.Series | None:
    alone_s = steps[~steps.beside].groupby("trial").duration_s.mean()
    excess = steps.assign(excess_s=steps.duration_s - steps.trial.map(alone_s)).dropna(subset="excess_s")
    rows = []
    for trial, own in saves.sort_values("step").groupby("trial"):
        for save, following in zip(own.itertuples(), own.step.iloc[1:], strict=False):
            after = excess[(excess.trial == trial) & (excess.step > save.step) & (excess.step <= following)]
            if not save.warmup and len(after):
                rows.append({"block": save.block, "moved_s": after.excess_s.sum()})
    if not rows:
        return None
    return pd.DataFrame(rows).groupby("block").moved_s.mean()


def _ratio(steps: pd.DataFrame) -> PairedRatio | None:
    """Give beside over alone, paired by block; None where no block has both."""
    means = steps.groupby(["block", "beside"]).duration_s.mean().unstack()
    if set(means.columns) != {False, True} or means.dropna().empty:
        return None
    means = means.dropna()
    return paired_ratio(means[True], means[False])
