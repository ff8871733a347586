"""How long all saves of one run will take: an interval for a run, not for a mean."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from stallbench.compounding.checks import require_positive, require_whole, require_within
from stallbench.reporting.stats import Interval


def predict_total(save_s_by_block: Mapping[int, Sequence[float]], saves: int, confidence: float = 0.9) -> Interval:
    """Predict the total of ONE further run of ``saves`` saves from a few trials with a few saves each.

    The interval of a mean (``models.compounding``) says how well the mean is known; this one says where a run will lie.
    Saves of a trial are alike for reasons of their own, so that a run differs from the next one by more than its saves
    differ within: both count.

    Parameters
    ----------
    save_s_by_block
        The counted saves of each trial in seconds, by block; one trial a block, all of one condition.
    saves
        Saves of the run; 1 gives the prediction of one save, as ``recovery.fits_notice`` needs it.
    confidence
        Share of runs that lie within, without unit.

    Returns
    -------
    Interval
        Of the total in seconds: a *prediction* interval, cut off at 0; NaN bounds with one block.

    Raises
    ------
    ValueError
        In one line that names it: no block, a block without saves, a time that isn't a positive number, ``saves`` that
        isn't a whole number above 0, or ``confidence`` not between 0 and 1.

    Notes
    -----
    Random effects: save j of trial i is mu + b_i + e_ij, with variances B between trials and W within. A run of n saves
    has the mean mu + b + mean(e), of variance B + W / n; mu is estimated by the mean of k trials' means, of variance
    (B + W / m) / k, where m is the harmonic mean of the trials' numbers of saves. What is observed is V, the variance
    of the trials' means, which estimates B + W / m, and the pooled variance within, which estimates W. The variance of
    the prediction error is taken as

        V * (1 + 1 / k) + W * max(0, 1 / n - 1 / m),

    with Student's t of k - 1 degrees of freedom: those of V, which carries what matters. For n = m that is exact: the
    run is one more trial. For n above m, W / m stays in where W / n would do: subtracting it (a method of moments) came
    out at 0.85 for a nominal 0.90 in simulation, with 5 trials of 6 saves. What stays in is small where trials differ,
    and makes the interval too wide, up to 0.98, where they don't. It also covers noise that is autocorrelated within a
    trial, as the mean of a longer run varies less. Textbook: Searle, Casella, McCulloch, Variance Components, 1992,
    chapter 3.

    Not in it: whatever changes beyond the measured trials, such as a disk that fills up, or other hours of the day.
    """
    require_whole("saves", saves)
    require_within("confidence", confidence, 0, 1)
    blocks = _checked(save_s_by_block)
    k, means = len(blocks), np.array([values.mean() for values in blocks])
    mean_s = float(means.mean())
    if k == 1:
        return Interval(saves * mean_s, math.nan, math.nan, 1)
    counts = np.array([len(values) for values in blocks])
    shorter = max(0.0, 1 / saves - float((1 / counts).mean()))
    within = 0.0
    if shorter:  # never where every trial has one save
        within = sum(((values - values.mean()) ** 2).sum() for values in blocks) / (counts.sum() - k)
    error_s = math.sqrt(means.var(ddof=1) * (1 + 1 / k) + within * shorter)
    half_s = float(stats.t.ppf((1 + confidence) / 2, k - 1)) * error_s
    return Interval(saves * mean_s, saves * max(0.0, mean_s - half_s), saves * (mean_s + half_s), k)


def _checked(save_s_by_block: Mapping[int, Sequence[float]]) -> list[np.ndarray]:
    if not save_s_by_block:
        raise ValueError("save_s_by_block={} is refused: at least one block is needed")
    for block, values in save_s_by_block.items():
        if not len(values):
            raise ValueError(f"save_s_by_block[{block}]=[] is refused: a block needs at least one save")
        for value in values:
            require_positive(f"save_s_by_block[{block}]", value)
    return [np.asarray(values, dtype=float) for values in save_s_by_block.values()]
