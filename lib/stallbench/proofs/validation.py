"""Does the instrument's arithmetic keep its word? Synthetic studies with a known truth, judged by ``stats``."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import signal
from scipy import stats as scipy_stats

from stallbench.reporting import stats

BLOCKS = (3, 5, 8)
RATIO = 0.75  # fast / slow, as in the article's 30 s and 40 s
BASE_S = 40.0  # the slow target's expected time; intervals of ratios do not depend on it
COVERAGE_LIMITS = (0.93, 0.97)  # around the stated 95 %
FALSE_ALARM_LIMITS = (0.03, 0.07)  # around the stated 5 %
RESAMPLES = 999
BOOTSTRAP_BLOCKS = 3

Means = tuple[np.ndarray, np.ndarray]  # seconds of fast and slow, each of shape (studies, blocks)


@dataclass(frozen=True)
class Noise:
    """How the times of one kind of event spread: what an event's expected time is multiplied by.

    Every factor has expectation 1, but for the drift, which a block's two trials share, so that it cancels in their
    ratio. The defaults are for saves. They are assumptions, set for what disks and shared stores do, not for what
    passes: the times of single saves get a coefficient of variation of 0.5, a skewness of 5, and a 99th percentile 4
    times the median.

    Parameters
    ----------
    cv_fast, cv_slow
        Coefficient of variation of the lognormal body on each target, without unit.
    autocorrelation
        Correlation of the log of one event's time with the next one's, in the study's order in time: a queue, a
        throttled writer or a neighbour outlives a single save.
    rare_share, rare_factor
        This share of events takes this many times as long: a flush, a garbage collection, a retry.
    trial_cv
        Coefficient of variation of what all events of one trial share: placement on the disk, memory layout.
    drift
        Standard deviation of the step from block to block of a random walk in the log that both trials of a block
        share: a filling disk, a warming machine, the hour of the day.
    """

    cv_fast: float = 0.3
    cv_slow: float = 0.3
    autocorrelation: float = 0.5
    rare_share: float = 0.02
    rare_factor: float = 4.0
    trial_cv: float = 0.05
    drift: float = 0.1


@dataclass(frozen=True)
class Setting:
    """A kind of measurement: its noise, how many events a trial counts, and whether its rows must pass."""

    noise: Noise
    events: int
    required: bool


# Steps compute, and so are taken to spread about a sixth as much as saves: an assumption like the rest.
STEP_NOISE = Noise(cv_fast=0.05, cv_slow=0.05, rare_share=0.01, rare_factor=2.0, trial_cv=0.01, drift=0.02)

# Events as in a trial with default settings: 30 steps, 2 of them warm-up; a save every 5, the first 3 not counted.
SETTINGS = {
    "saves": Setting(Noise(), events=3, required=True),
    "steps": Setting(STEP_NOISE, events=28, required=True),
    "saves, unlike": Setting(Noise(cv_fast=0.1, cv_slow=0.6), events=3, required=False),
}


def synthetic_studies(
    rng: np.random.Generator, studies: int, blocks: int, events: int, ratio: float, noise: Noise
) -> pd.DataFrame:
    """Invent the events of studies whose true ratio of expected times is known.

    Parameters
    ----------
    rng
        Source of randomness.
    studies, blocks, events
        Independent studies; blocks of a study; counted events in each of a block's two trials.
    ratio
        Expected time on the fast target over that on the slow one, without unit.
    noise
        How times spread about their expectation.

    Returns
    -------
    pandas.DataFrame
        One row an event, in the order in time: ``study``, ``block``, ``target`` (fast or slow, in random order within a
        block) and ``event_s`` (seconds).
    """
    shape = studies, blocks, 2, events
    fast_first = rng.random((studies, blocks, 1)) < 0.5
    fast = np.broadcast_to(np.concatenate([fast_first, ~fast_first], axis=2)[..., None], shape)
    normal = _autocorrelated(rng, (studies, blocks * 2 * events), noise.autocorrelation).reshape(shape)
    body = _lognormal(normal, np.where(fast, noise.cv_fast, noise.cv_slow))
    rare = np.where(rng.random(shape) < noise.rare_share, noise.rare_factor, 1.0)
    rare /= 1 + noise.rare_share * (noise.rare_factor - 1)
    trial = _lognormal(rng.normal(size=(studies, blocks, 2, 1)), noise.trial_cv)
    drift = np.exp(np.cumsum(rng.normal(0, noise.drift, (studies, blocks, 1, 1)), axis=1))
    event_s = BASE_S * np.where(fast, ratio, 1.0) * body * rare * trial * drift
    study, block, _, _ = np.indices(shape, sparse=True)
    columns = {"study": study, "block": block, "target": np.where(fast, "fast", "slow"), "event_s": event_s}
    return pd.DataFrame({name: np.broadcast_to(values, shape).ravel() for name, values in columns.items()})


def coverage_table(studies: int = 1000, seed: int = 20261201) -> pd.DataFrame:
    """Count how often the intervals hold the truth over synthetic studies.

    Each row judges ``studies`` studies whose targets differ by ``RATIO`` and as many A/A studies, whose targets don't
    differ. *saves* are save times. *steps* are step times: far steadier, so that the equivalence test has something to
    say. *saves, unlike* spreads the slow target's times six times as much as the fast one's (so there is no A/A): the
    log of a mean over few skewed saves is biased then, by 0.07 here. More saves a trial lessen the bias; more blocks
    only narrow the interval around it, so that it covers less. The percentile bootstrap shows why it isn't used.

    Parameters
    ----------
    studies
        Synthetic studies for each share.
    seed
        Seed of all of them.

    Returns
    -------
    pandas.DataFrame
        ``method``, ``noise``, ``blocks``, ``studies``; then shares with their 95 % Wilson interval (``_low``,
        ``_high``): ``coverage`` and ``false_alarms`` (A/A intervals without 1); the shares of A/A answers of the
        equivalence test: ``equivalent``, ``different``, ``undecided``; ``passed`` (both shares within their limits);
        ``required`` (whether the row must pass). What doesn't apply to a row is NaN.

    Raises
    ------
    ValueError
        If ``studies`` is below 1.
    """
    if studies < 1:
        raise ValueError(f"studies={studies} is refused: at least one is needed")
    rows = []
    for index, (name, setting) in enumerate(SETTINGS.items()):
        for blocks in BLOCKS:
            rng = np.random.default_rng([seed, index, blocks])
            differing = _block_means(rng, studies, blocks, RATIO, setting)
            alike = setting.noise.cv_fast == setting.noise.cv_slow
            control = _block_means(rng, studies if alike else 0, blocks, 1.0, setting)
            label = {"noise": name, "blocks": blocks, "studies": studies}
            judged = _paired_t_row(differing, control)
            rows.append({"method": "paired t", **label, **judged, "required": setting.required})
            if name == "saves" and blocks == BOOTSTRAP_BLOCKS:
                judged = _bootstrap_row(differing, control, rng)
                rows.append({"method": "percentile bootstrap", **label, **judged, "required": False})
    return pd.DataFrame(rows).sort_values("method", kind="stable", ignore_index=True)


def _block_means(rng: np.random.Generator, studies: int, blocks: int, ratio: float, setting: Setting) -> Means:
    events = synthetic_studies(rng, studies, blocks, setting.events, ratio, setting.noise)
    means = events.groupby(["target", "study", "block"])["event_s"].mean().to_numpy()
    fast, slow = means.reshape(2, studies, blocks)
    return fast, slow


def _paired_t_row(differing: Means, control: Means) -> dict[str, Any]:
    found, false = ([stats.paired_ratio(*pair) for pair in _pairs(means)] for means in (differing, control))
    answers = pd.Series([stats.equivalence(*pair).verdict for pair in _pairs(control)], dtype=object)
    shares = {verdict: (answers == verdict).mean() for verdict in ("equivalent", "different", "undecided")}
    return _row([r.low <= RATIO <= r.high for r in found], [not r.low <= 1 <= r.high for r in false]) | shares


def _pairs(means: Means) -> Iterator[tuple[pd.Series, pd.Series]]:
    return ((pd.Series(fast), pd.Series(slow)) for fast, slow in zip(*means, strict=True))


def _bootstrap_row(differing: Means, control: Means, rng: np.random.Generator) -> dict[str, Any]:
    found, false = (_bootstrap(means, rng) for means in (differing, control))
    return _row((found.low <= RATIO) & (RATIO <= found.high), (false.low > 1) | (false.high < 1))


def _bootstrap(means: Means, rng: np.random.Generator) -> pd.DataFrame:
    logs = np.log(means[0] / means[1])
    result = scipy_stats.bootstrap((logs,), np.mean, axis=1, method="percentile", n_resamples=RESAMPLES, rng=rng)
    return np.exp(pd.DataFrame({"low": result.confidence_interval.low, "high": result.confidence_interval.high}))


def _row(covered: Any, alarmed: Any) -> dict[str, Any]:
    row: dict[str, Any] = share("coverage", covered) | share("false_alarms", alarmed)
    limits = {"coverage": COVERAGE_LIMITS, "false_alarms": FALSE_ALARM_LIMITS}
    row["passed"] = all(low <= row[name] <= high for name, (low, high) in limits.items() if not np.isnan(row[name]))
    return row


def share(name: str, hits: Any) -> dict[str, float]:
    """Give the share of hits with its 95 % Wilson interval, ``_low`` and ``_high``; NaN if there is none to count."""
    if not len(hits):
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"), float("nan"))
    result = scipy_stats.binomtest(int(np.sum(hits)), len(hits))
    interval = result.proportion_ci(method="wilson")
    return {name: result.statistic, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _autocorrelated(rng: np.random.Generator, shape: tuple[int, int], correlation: float) -> np.ndarray:
    shocks = rng.normal(size=shape)
    shocks[:, 1:] *= np.sqrt(1 - correlation**2)  # unit variance from the first value on
    return signal.lfilter([1], [1, -correlation], shocks, axis=1)


def _lognormal(normal: np.ndarray, cv: float | np.ndarray) -> np.ndarray:
    variance = np.log1p(np.square(cv))
    return np.exp(np.sqrt(variance) * normal - variance / 2)
