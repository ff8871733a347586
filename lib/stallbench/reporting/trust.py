"""How far a study's own figures can be trusted: its determinism, its machine's noise, and what the noise hides."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
from scipy import stats as scipy_stats

from stallbench.config import LAB
from stallbench.lab import profile as lab_profile
from stallbench.reporting.analysis import (
    MEASURES,
    Comparison,
    Condition,
    block_means,
    compare,
    compared_with,
    percent,
    share_of_limit,
)
from stallbench.reporting.stats import POWER, paired_ratio
from stallbench.results import TRIAL_KEYS, Study

LAB_TOLERANCE = 0.15  # between an emulation and its arithmetic


def determinism(study: Study) -> tuple[int, int]:
    """Count the groups of trials that trained the same thing, and those whose losses are equal, bit for bit.

    Trials of one block share their seed, so that each must reach the same losses, wherever and however it is saved. A
    LoRA adapter trains something else, and is compared with its like.
    """
    groups: dict[tuple[int, bool], set[tuple[float, ...]]] = {}
    for row in study.counted.itertuples():
        key = row.block, row.method == "adapter-only"
        if losses := study.details[row.trial]["losses"]:  # a watched training keeps none
            groups.setdefault(key, set()).add(tuple(losses))
    return len(groups), sum(len(losses) == 1 for losses in groups.values())


def controls(study: Study) -> pd.DataFrame:
    """Compare what ought to be alike: restores and reloads under both wait rules, which they know nothing of.

    A study's own A/A controls: same target, same method, trials of the same block. About 5 % of them ought to be false
    alarms.

    Returns
    -------
    pandas.DataFrame
        One row a control: ``what``, ``target``, ``method``, ``difference`` with ``low`` and ``high`` (relative, without
        unit), ``blocks``, ``alarm``.
    """
    rows = []
    both = {"return", "durable"} <= set(study.waits)
    cells = itertools.product(study.targets, study.methods, ("restore_s", "reload_s")) if both else ()
    for target, method, measure in cells:
        pair = [Condition(target, method, wait) for wait in ("return", "durable")]
        means = [block_means(study, measure, one.target, one.wait, one.method) for one in pair]
        if len(means[0].index.intersection(means[1].index)) > 1:
            ratio = paired_ratio(*means)
            row = {"what": MEASURES[measure][0], "target": target, "method": method, "difference": ratio.ratio - 1}
            row |= {"low": ratio.low - 1, "high": ratio.high - 1, "blocks": ratio.blocks}
            rows.append(row | {"alarm": not ratio.low <= 1 <= ratio.high})
    return pd.DataFrame(rows)


def noise(study: Study) -> pd.DataFrame:
    """Say how much the machine itself varied over the study.

    Returns
    -------
    pandas.DataFrame
        Indexed by what was repeated in each trial of a target: ``trials``, ``spread`` (coefficient of variation of the
        trials' means, without unit), ``worst`` (the largest over the smallest).
    """
    rows = {}
    kinds = {"raw_write": "raw write", "raw_read": "raw cold read", "step": "training step"}
    spans = study.spans[~study.spans.warmup & (study.spans.method != "adapter-only")]
    for target in study.targets:
        for kind, words in kinds.items():
            own = spans[(spans.target == target) & (spans.kind == kind)]
            means = own.groupby(list(TRIAL_KEYS)).duration_s.mean()
            if len(means) > 1:
                spread, worst = means.std() / means.mean(), means.max() / means.min()
                rows[f"{words}, {target}"] = {"trials": len(means), "spread": spread, "worst": worst}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["trials", "spread", "worst"])


@dataclass(frozen=True)
class Hidden:
    """A comparison whose interval holds "no difference", and the blocks that would show the difference found."""

    comparison: Comparison
    blocks_needed: int

    @property
    def words(self) -> str:
        """The number, the reason and the remedy, in one line."""
        ratio = self.comparison.ratio
        found = percent(ratio.time_saved, ratio.time_saved_low, ratio.time_saved_high)
        return (
            f"Until durable, {self.comparison.fast} against {self.comparison.slow}: {found} less time. Blocks "
            "differ more from each other than the targets do, so no difference is shown. If there is one of this size, "
            f"--blocks {self.blocks_needed} would show it four times in five; so might a quieter machine."
        )


def shortfalls(study: Study) -> Iterator[tuple[str, float, float]]:
    """Give each lab that fell short in the trials: its name, the bytes per second that it reached, and those stated.

    Reached: the lower of its raw write and raw cold read. What falls short by less than `LAB_TOLERANCE` doesn't count.
    """
    limits = share_of_limit(study)
    for target in study.targets:
        _, lab, named = study.storage(target)["words"].partition(LAB)
        if not lab or not study.emulated(target) or lab_profile.parse(named).unlimited:
            continue
        stated = lab_profile.parse(named).sustained_bytes_per_s
        reached = float(limits.loc[target, ["raw_write_bytes_per_s", "raw_read_bytes_per_s"]].min())
        if reached < (1 - LAB_TOLERANCE) * stated:
            yield target, reached, stated


def hidden_by_noise(study: Study) -> list[Hidden]:
    """Give the comparisons until durable that noise leaves open; an A/A control, which should be, is none of them."""
    found = []
    for other in compared_with(study):
        one = compare(study, "durable_s", other)
        if study.same_place(one.fast, other) or not one.ratio.low <= 1 <= one.ratio.high:
            continue
        found.append(Hidden(one, _blocks_needed(one)))
    return found


def _blocks_needed(one: Comparison) -> int:
    """Give the blocks that would show a difference of the size found, with this spread, in four of five studies.

    n = ((z of 0.975 + z of 0.80) x s / difference)^2 on the log ratio (Cohen 1988, chapter 2), and 2 for Student's t.
    """
    half = math.log(one.ratio.high / one.ratio.low) / 2
    blocks = one.ratio.blocks
    spread = half * math.sqrt(blocks) / scipy_stats.t.ppf(0.975, blocks - 1)
    difference = max(abs(math.log(one.ratio.ratio)), 0.01)  # below 1 % nobody would ask
    quantiles = scipy_stats.norm.ppf(0.975) + scipy_stats.norm.ppf(POWER)
    return max(blocks + 1, math.ceil((quantiles * spread / difference) ** 2) + 2)
