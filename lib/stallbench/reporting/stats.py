"""How sure a comparison is: intervals, ratios and equivalence over blocks (DESIGN part 4).

The unit is the block, never the single save: the saves of a trial are alike for reasons of their own (queues, caches,
neighbours), and an interval over them would be far too narrow. Every function takes one mean per block.

Student's t, and no bootstrap: over 3 blocks a percentile bootstrap that claims 95 % covers about 75 %
(``validation.coverage_table`` shows both).
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats

from stallbench.compounding.checks import require_within

POWER = 0.8  # the customary one: Cohen, Statistical Power Analysis for the Behavioral Sciences, 2nd ed. 1988, chapter 2
NAN = float("nan")

Verdict = Literal["equivalent", "different", "undecided"]

OPEN_SPREAD = 100.0  # an interval wider than this factor says nothing


@dataclass(frozen=True)
class Interval:
    """A mean over blocks with its confidence interval, all in the unit of what was averaged.

    ``low`` and ``high`` are NaN with one block, which has no interval.
    """

    mean: float
    low: float
    high: float
    blocks: int


@dataclass(frozen=True)
class PairedRatio:
    """How the fast target's time relates to the slow one's, paired by block; everything without unit.

    ``ratio`` is fast / slow with its interval ``low`` to ``high``, and ``time_saved`` is 1 - ratio with its own.
    ``smallest_detectable`` is the smallest time saved that this many blocks with this spread would have shown with
    80 % power. Interval, ``smallest_detectable`` and ``p_value`` (of "the ratio is 1") are NaN with one block.
    """

    ratio: float
    low: float
    high: float
    blocks: int
    time_saved: float
    time_saved_low: float
    time_saved_high: float
    smallest_detectable: float
    p_value: float


@dataclass(frozen=True)
class Equivalence:
    """Whether two targets take the same time within ``margin``; ratios are fast / slow, without unit.

    ``low`` to ``high`` is the interval that belongs to the two one-sided tests: at alpha = 0.05 the 90 % one, which
    lies within the margin exactly where both tests reject. ``low_95`` to ``high_95`` is the 95 % interval, the one to
    print beside other results. ``p_value`` is the larger of the two tests' p-values.
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    low_95: float
    high_95: float
    margin: float
    p_value: float
    blocks: int


def mean_interval(block_means: pd.Series, confidence: float = 0.95) -> Interval:
    """Average per-block means, with Student's t interval over the blocks (``scipy.stats.ttest_1samp``).

    Parameters
    ----------
    block_means
        One mean per block, in any unit.
    confidence
        Coverage of the interval, without unit.

    Returns
    -------
    Interval
        In the unit of ``block_means``; without an interval (NaN) where there is one block.

    Raises
    ------
    ValueError
        If there is no block, a value is NaN or infinite, or ``confidence`` isn't between 0 and 1.
    """
    require_within("confidence", confidence, 0, 1)
    values = _finite("block_means", block_means)
    low = high = NAN
    if len(values) > 1:
        low, high = map(float, _t_test(values).confidence_interval(confidence))
    return Interval(float(values.mean()), low, high, len(values))


def paired_difference(fast: pd.Series, slow: pd.Series, confidence: float = 0.95) -> Interval:
    """Give the time that a save takes longer on the slow target: the mean of slow - fast over blocks.

    Parameters
    ----------
    fast, slow
        One mean per block in seconds, indexed by block; blocks that only one of them has are left out.
    confidence
        Coverage of the interval, without unit.

    Returns
    -------
    Interval
        In seconds.

    Raises
    ------
    ValueError
        As ``paired_ratio`` does.
    """
    fast_s, slow_s = _paired(fast, slow)
    return mean_interval(slow_s - fast_s, confidence)


def paired_ratio(fast: pd.Series, slow: pd.Series, confidence: float = 0.95) -> PairedRatio:
    """Compare two targets: per block the log of fast / slow, over blocks its mean and Student's t interval.

    The ratio is the geometric mean of the blocks' ratios. It estimates the ratio of expected times; where the two
    targets' times spread very differently, the log of a mean over few saves is biased (by about half its variance),
    and ``validation.coverage_table`` shows what that costs.

    Parameters
    ----------
    fast, slow
        One mean per block in seconds, indexed by block; blocks that only one of them has are left out.
    confidence
        Coverage of the intervals, without unit.

    Returns
    -------
    PairedRatio
        Ratios, without unit.

    Raises
    ------
    ValueError
        If the two have no block in common or a block twice, a value isn't positive and finite, or ``confidence`` isn't
        between 0 and 1.

    Notes
    -----
    The smallest detectable effect is (t(1 - alpha/2) + t(power)) standard errors on the log scale: Bloom, Minimum
    detectable effects, Evaluation Review 19(5), 1995. By the noncentral t distribution its true power is 0.73 with
    2 blocks, 0.77 with 3, and 0.79 to 0.80 from 5 on.
    """
    require_within("confidence", confidence, 0, 1)
    logs = _log_ratios(fast, slow)
    blocks = len(logs)
    ratio = math.exp(logs.mean())
    low = high = detectable = p_value = NAN
    if blocks > 1:
        test = _t_test(logs)
        low, high = map(math.exp, test.confidence_interval(confidence))
        p_value = _p_value(test)
        quantiles = stats.t.ppf([(1 + confidence) / 2, POWER], blocks - 1)
        detectable = 1 - math.exp(-quantiles.sum() * logs.std(ddof=1) / math.sqrt(blocks))
    return PairedRatio(ratio, low, high, blocks, 1 - ratio, 1 - high, 1 - low, detectable, p_value)


def equivalence(fast: pd.Series, slow: pd.Series, margin: float = 0.05, alpha: float = 0.05) -> Equivalence:
    """Test whether two targets take the same time, within a margin: two one-sided paired t tests on log ratios.

    *equivalent*: both tests reject at ``alpha`` that the ratio lies beyond their bound, 1 - margin or 1 + margin.
    *different*: the two-sided interval (of coverage 1 - alpha) lies wholly outside these bounds. *undecided*: neither,
    or there is only one block.

    Parameters
    ----------
    fast, slow
        One mean per block in seconds, indexed by block; blocks that only one of them has are left out.
    margin
        Relative difference that still counts as the same, without unit.
    alpha
        Level of each test, without unit.

    Returns
    -------
    Equivalence
        The verdict and the ratio with its intervals, without unit.

    Raises
    ------
    ValueError
        As ``paired_ratio`` does, and if ``margin`` isn't between 0 and 1 or ``alpha`` not between 0 and 0.5.

    Notes
    -----
    Schuirmann, A comparison of the two one-sided tests procedure and the power approach for assessing the equivalence
    of average bioavailability, Journal of Pharmacokinetics and Biopharmaceutics 15(6), 1987.
    """
    require_within("margin", margin, 0, 1)
    require_within("alpha", alpha, 0, 0.5)
    logs = _log_ratios(fast, slow)
    ratio, blocks = math.exp(logs.mean()), len(logs)
    if blocks == 1:
        return Equivalence("undecided", ratio, NAN, NAN, NAN, NAN, margin, NAN, blocks)
    least, most = math.log1p(-margin), math.log1p(margin)
    p_value = max(_p_value(_t_test(logs, least, "greater")), _p_value(_t_test(logs, most, "less")))
    test = _t_test(logs)
    low, high = test.confidence_interval(1 - alpha)
    verdict: Verdict = "undecided"
    if p_value < alpha:
        verdict = "equivalent"
    elif low > most or high < least:
        verdict = "different"
    bounds = [math.exp(bound) for share in (1 - 2 * alpha, 0.95) for bound in test.confidence_interval(share)]
    return Equivalence(verdict, ratio, *bounds, margin, p_value, blocks)


def _t_test(values: np.ndarray, null: float = 0.0, alternative: str = "two-sided") -> Any:
    with warnings.catch_warnings():
        # Blocks that are all alike are legal (emulated storage is exact): an interval without width, no cause to warn.
        warnings.filterwarnings("ignore", message="Precision loss", category=RuntimeWarning)
        return stats.ttest_1samp(values, null, alternative=alternative)


def _p_value(test: Any) -> float:
    # Blocks that are all alike and exactly on the null give 0/0, which is no evidence against it.
    return 1.0 if math.isnan(test.pvalue) else float(test.pvalue)


def _log_ratios(fast: pd.Series, slow: pd.Series) -> np.ndarray:
    fast_s, slow_s = _paired(fast, slow)
    for name, values in (("fast", fast_s), ("slow", slow_s)):
        if (values <= 0).any():
            raise ValueError(f"{name} holds {values.min():g}; a ratio needs times above 0 s")
    return np.log(fast_s / slow_s)


def _paired(fast: pd.Series, slow: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    for name, series in (("fast", fast), ("slow", slow)):
        if not series.index.is_unique:
            twice = series.index[series.index.duplicated()][0]
            raise ValueError(f"{name} holds block {twice} twice; give one mean per block")
    common = fast.index.intersection(slow.index)
    if common.empty:
        raise ValueError("fast and slow have no block in common; nothing can be paired")
    return _finite("fast", fast.loc[common]), _finite("slow", slow.loc[common])


def _finite(name: str, values: pd.Series) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if not array.size:
        raise ValueError(f"{name} is empty; at least one block is needed")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds {array[~np.isfinite(array)][0]:g}; every block needs a finite mean")
    return array
