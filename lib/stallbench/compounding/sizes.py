"""Save time against checkpoint size: a line, where it bends, and what it says of sizes never measured (claim 1.10).

The line is ``save_s = latency_s + size_bytes / bytes_per_s``. Sizes span orders of magnitude and a save's time varies
by a share of itself, so that plain least squares would see the largest size only. Least squares on *relative* errors,
each size weighted by 1 / its mean time squared, gives every size the same say and stays linear, which a fit of
logarithms would not.

The unit of the fit is a size, not a save: repetitions of a size share what the line doesn't explain. With S sizes the
scatter about the line has S - 2 degrees of freedom, however many repetitions there were. Few sizes may lie on a line by
chance: the scatter is never taken as less than what the repetitions themselves show.

A prediction's interval also carries what the line takes for granted, that time grows with the first power of size: the
exponent is let free in the covariance (its derivative, size * ln(size), is a third column), not in the line itself. So
the interval widens with the logarithm of the distance from the measured sizes. It doesn't hold a cliff further out: a
cache, a burst buffer, a quota or a second server that no measured size has reached.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from stallbench.compounding.checks import require_positive, require_within
from stallbench.compounding.economics import CHECKPOINT_BYTES
from stallbench.compounding.models import SaveTime
from stallbench.reporting.stats import Interval

LEAST_SIZES = 4
BEND_ALPHA = 0.05
EXACT = 1e-20  # a sum of squared relative errors that rounding leaves where times follow from arithmetic (emulated)


@dataclass(frozen=True)
class SizeFit:
    """A line through the mean save times of several sizes.

    ``latency_s`` and ``bytes_per_s`` with their intervals (``blocks`` counts the sizes); a line through saves that a
    cache absorbed in part may have a latency below 0. ``scatter`` is the relative standard deviation of a size's mean
    about the line, without unit. ``sizes_bytes`` and ``means_s`` are what was fitted.
    """

    latency_s: Interval
    bytes_per_s: Interval
    scatter: float
    sizes_bytes: tuple[float, ...]
    means_s: tuple[float, ...]

    @property
    def save_time(self) -> SaveTime:
        """The line for ``models``, ``economics`` and ``sensitivity``; a latency below 0 is taken as 0."""
        return SaveTime(max(0.0, self.latency_s.mean), self.bytes_per_s.mean)


@dataclass(frozen=True)
class Bend:
    """The best break of the line at a measured size, against none.

    ``found`` if it explains more than chance would, at ``BEND_ALPHA``. ``p_value`` holds for the best of all possible
    breaks. ``before_bytes_per_s`` and ``beyond_bytes_per_s`` are the bandwidths on its two sides, infinite where time
    doesn't grow. Slower beyond it: a cache or burst buffer that is full is the usual cause, and no proof of one.
    """

    found: bool
    at_bytes: float
    p_value: float
    before_bytes_per_s: float
    beyond_bytes_per_s: float


@dataclass(frozen=True)
class HeldOut:
    """The largest size, predicted from the others: ``predicted_s`` with its interval, ``measured_s``, ``within`` it."""

    size_bytes: float
    predicted_s: Interval
    measured_s: float
    within: bool


def fit(table: pd.DataFrame, confidence: float = 0.95) -> SizeFit:
    """Fit latency and bandwidth.

    Parameters
    ----------
    table
        Columns ``size_bytes`` and ``save_s`` (seconds, returned or durable, but one of them); one row a repetition,
        best a block's mean.
    confidence
        Coverage of the intervals, without unit.

    Raises
    ------
    ValueError
        In one line that names it: a column that is missing, a value that isn't a positive number, fewer than 4 sizes,
        or times that don't grow with size.
    """
    require_within("confidence", confidence, 0, 1)
    means = _means(table)
    if len(means) < LEAST_SIZES:
        raise ValueError(
            f"size_bytes={_named(means.index)} is refused: a line needs at least {LEAST_SIZES} sizes, measure "
            f"{LEAST_SIZES - len(means)} more"
        )
    size, time_s = means.index.to_numpy(), means.to_numpy()
    design = np.column_stack([np.ones_like(size), size]) / time_s[:, None]
    found, squares = _least_squares(design, np.ones_like(size))  # of relative times, which are all 1
    scatter = math.sqrt(max(squares / (len(size) - 2), _variance_of_means(table, means)))
    if found[1] <= 0:
        raise ValueError(
            f"save_s={time_s[0]:g} to {time_s[-1]:g} is refused: it doesn't grow with size_bytes, so that there is no "
            "bandwidth; measure larger sizes"
        )
    half = stats.t.ppf((1 + confidence) / 2, len(size) - 2) * scatter * np.sqrt(np.diag(_covariance(design)))
    slow, fast = found[1] + half[1], found[1] - half[1]
    return SizeFit(
        latency_s=Interval(float(found[0]), float(found[0] - half[0]), float(found[0] + half[0]), len(size)),
        bytes_per_s=Interval(
            1 / float(found[1]), 1 / float(slow), 1 / float(fast) if fast > 0 else math.inf, len(size)
        ),
        scatter=scatter,
        sizes_bytes=tuple(map(float, size)),
        means_s=tuple(map(float, time_s)),
    )


def predict(line: SizeFit, size_bytes: float, confidence: float = 0.95) -> Interval:
    """Predict the mean of as many repetitions of one size as the others had; a single save scatters more.

    Parameters
    ----------
    line
        A fit.
    size_bytes
        Bytes of a save, any; beyond the measured ones the interval widens (see the module's docstring).
    confidence
        Coverage of the interval, without unit.

    Returns
    -------
    Interval
        Seconds, on a scale of ratios: ``high / mean`` is ``mean / low``.

    Raises
    ------
    ValueError
        If ``size_bytes`` isn't a positive number, or the line is below 0 s there.
    """
    require_positive("size_bytes", size_bytes)
    require_within("confidence", confidence, 0, 1)
    time_s = line.latency_s.mean + size_bytes / line.bytes_per_s.mean
    if time_s <= 0:
        raise ValueError(f"size_bytes={size_bytes:g} is refused: the line is below 0 s there; it is no use so far down")
    size = np.array(line.sizes_bytes)
    design = _with_exponent(size, size) / np.array(line.means_s)[:, None]
    point = _with_exponent(np.array([size_bytes]), size)[0] / time_s
    spread = line.scatter * math.sqrt(1 + float(point @ _covariance(design) @ point))
    factor = math.exp(min(700.0, float(stats.t.ppf((1 + confidence) / 2, len(size) - 2)) * spread))
    return Interval(time_s, time_s / factor, time_s * factor, len(size))


def hold_out_largest(table: pd.DataFrame, confidence: float = 0.95) -> HeldOut:
    """Fit without the largest size, and predict it: a check of the line where it is used, beyond what was measured.

    Raises
    ------
    ValueError
        As ``fit`` does; it takes 5 sizes, as the fit without the largest needs 4.
    """
    means = _means(table)
    largest = float(means.index[-1])
    rest = table[table.size_bytes < largest]
    if len(means) <= LEAST_SIZES:
        raise ValueError(
            f"size_bytes={_named(means.index)} is refused: to hold out the largest takes {LEAST_SIZES + 1} sizes"
        )
    predicted = predict(fit(rest, confidence), largest, confidence)
    measured_s = float(means.iloc[-1])
    return HeldOut(largest, predicted, measured_s, predicted.low <= measured_s <= predicted.high)


def bend(table: pd.DataFrame) -> Bend:
    """Look for a bend: the best break at a measured size, against none.

    Rows are weighted as in ``fit``. For each size but the first and the last, the line may change its slope there; an F
    test of that one more parameter gives a p-value, and the smallest counts, times the number of tries (Bonferroni). A
    table in which a size's repetitions are alike for reasons of their own (a trial's saves instead of blocks' means)
    finds bends that aren't there. Any other departure from a line is found as a bend too, at the best place for one.

    Raises
    ------
    ValueError
        As ``fit`` does.
    """
    fit(table)
    means = _means(table)
    size, time_s = (table[column].to_numpy(dtype=float) for column in ("size_bytes", "save_s"))
    weight = 1 / means.loc[size].to_numpy()
    straight = np.column_stack([np.ones_like(size), size]) * weight[:, None]
    _, plain = _least_squares(straight, time_s * weight)
    breaks = means.index[1:-1]
    tests = []
    for at in breaks:
        hinge = np.maximum(0.0, size - at) * weight
        found, rest = _least_squares(np.column_stack([straight, hinge]), time_s * weight)
        left = len(size) - 3
        ratio = (plain - rest) / max(rest, EXACT) * left if plain > EXACT else 0.0
        tests.append((float(stats.f.sf(ratio, 1, left)), float(at), found))
    p_value, at, found = min(tests, key=lambda test: test[0])
    p_value = min(1.0, p_value * len(breaks))
    rates = [1 / float(slope) if slope > 0 else math.inf for slope in (found[1], found[1] + found[2])]
    return Bend(p_value < BEND_ALPHA, at, p_value, *rates)


def extrapolate(
    table: pd.DataFrame, sizes_bytes: Mapping[str, float] = CHECKPOINT_BYTES, confidence: float = 0.95
) -> pd.DataFrame:
    """Say what the line gives for larger models, with the interval, and how far beyond the measured sizes they are.

    Where the line bends, only the sizes from the bend on are fitted.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: ``size_bytes``, ``save_s``, ``low_s``, ``high_s``, ``times_largest`` (the size over the largest
        measured one, without unit).

    Raises
    ------
    ValueError
        As ``fit`` and ``predict`` do; also if fewer than 4 sizes lie from the bend on.
    """
    found = bend(table)
    used = table[table.size_bytes >= found.at_bytes] if found.found else table
    sizes = used.size_bytes.nunique()
    if sizes < LEAST_SIZES:
        raise ValueError(
            f"size_bytes={_named(sorted(used.size_bytes.unique()))} is refused: the line bends at {found.at_bytes:g} "
            f"bytes, and beyond it are too few sizes to extrapolate from; measure {LEAST_SIZES - sizes} larger ones"
        )
    line = fit(used, confidence)
    rows = {}
    for name, size in sizes_bytes.items():
        one = predict(line, size, confidence)
        rows[name] = (size, one.mean, one.low, one.high, size / line.sizes_bytes[-1])
    columns = ["size_bytes", "save_s", "low_s", "high_s", "times_largest"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def _means(table: pd.DataFrame) -> pd.Series:
    for column in ("size_bytes", "save_s"):
        if column not in table:
            raise ValueError(f"{column} is missing; give columns size_bytes and save_s")
        for value in table[column]:
            require_positive(column, value)
    return table.groupby(table.size_bytes.astype(float)).save_s.mean()


def _named(sizes: pd.Index | list) -> str:
    return ", ".join(f"{size:g}" for size in sizes)


def _with_exponent(size: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Add to latency and bandwidth a column for an exponent other than 1; about the middle, as numbers stay small."""
    middle = math.exp(float(np.log(measured).mean()))
    return np.column_stack([np.ones_like(size), size, size * np.log(size / middle)])


def _variance_of_means(table: pd.DataFrame, means: pd.Series) -> float:
    """Give the relative variance of a size's mean as its repetitions show it; 0 without repetitions."""
    if len(table) == len(means):
        return 0.0
    relative = table.save_s / means.loc[table.size_bytes].to_numpy() - 1
    within = float((relative**2).sum()) / (len(table) - len(means))
    return within * float((1 / table.size_bytes.value_counts()).mean())


def _least_squares(design: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, float]:
    """Give the coefficients, and the sum of squares that they leave."""
    scale = np.abs(design).max(axis=0)  # seconds beside bytes: one column 1e9 times the other
    found = np.linalg.lstsq(design / scale, target, rcond=None)[0] / scale
    return found, float(((target - design @ found) ** 2).sum())


def _covariance(design: np.ndarray) -> np.ndarray:
    scale = np.abs(design).max(axis=0)
    scaled = design / scale
    return np.linalg.pinv(scaled.T @ scaled, hermitian=True) / np.outer(scale, scale)
