"""The prediction of a run's total: by hand, and how often it holds the truth in simulated studies."""

import math

import numpy as np
import pytest
from scipy import stats

from stallbench.compounding import recovery
from stallbench.compounding.prediction import predict_total

STUDIES = 1500
CONFIDENCE = 0.9


def noise(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Give noise of mean 0 and variance 1: normal, skewed, or autocorrelated along the last axis."""
    if kind == "skewed":
        spread = 0.8
        values = rng.lognormal(0, spread, shape)
        return (values - math.exp(spread**2 / 2)) / math.sqrt((math.exp(spread**2) - 1) * math.exp(spread**2))
    values = rng.standard_normal(shape)
    if kind == "autocorrelated":
        for j in range(1, shape[-1]):
            values[..., j] = 0.6 * values[..., j - 1] + 0.8 * values[..., j]
    return values


def coverage(kind: str, blocks: int, saves: int, run: int, between: float) -> int:
    """Count the studies whose interval holds the total of a further run."""
    rng = np.random.default_rng([blocks, saves, run, int(10 * between)])
    effects = between * rng.standard_normal((STUDIES, blocks + 1))
    measured = 20 + effects[:, :blocks, None] + noise(rng, kind, (STUDIES, blocks, saves))
    totals = (20 + effects[:, blocks, None] + noise(rng, kind, (STUDIES, run))).sum(axis=1)
    found = [predict_total(dict(enumerate(trials)), run, CONFIDENCE) for trials in measured]
    return sum(one.low <= total <= one.high for one, total in zip(found, totals, strict=True))


@pytest.mark.parametrize("kind", ["normal", "skewed", "autocorrelated"])
@pytest.mark.parametrize(("blocks", "saves"), [(3, 6), (4, 8), (5, 10)])
@pytest.mark.parametrize(("run", "between"), [(48, 0.0), (48, 0.5), (48, 2.0), (1, 0.5)])
def test_nine_runs_of_ten_lie_within(kind, blocks, saves, run, between):
    """At least: where trials hardly differ, the interval is wider than it need be (see the docstring)."""
    held = coverage(kind, blocks, saves, run, between)
    assert held >= stats.binom.ppf(0.005, STUDIES, CONFIDENCE)


@pytest.mark.parametrize(("blocks", "saves", "between"), [(3, 6, 0.0), (4, 8, 0.5), (5, 10, 2.0)])
def test_a_run_as_long_as_a_trial_is_covered_exactly(blocks, saves, between):
    held = coverage("normal", blocks, saves, saves, between)
    least, most = stats.binom.ppf([0.005, 0.995], STUDIES, CONFIDENCE)
    assert least <= held <= most


def test_by_hand():
    found = predict_total({1: [1.0, 3.0], 2: [2.0, 4.0], 3: [4.0, 4.0]}, 10)
    # Means 2, 3, 4: variance 1, so that the error is sqrt(4/3); t(0.95) of 2 degrees of freedom is 2.919986.
    half = 2.919986 * math.sqrt(4 / 3)
    assert found.mean == pytest.approx(30)
    assert (found.low, found.high) == (0, pytest.approx(10 * (3 + half)))
    # One save: the variance within is (2 + 2 + 0) / 3, and 1 - 1/2 of it comes on top.
    one = predict_total({1: [1.0, 3.0], 2: [2.0, 4.0], 3: [4.0, 4.0]}, 1)
    assert one.high == pytest.approx(3 + 2.919986 * math.sqrt(4 / 3 + 4 / 3 / 2))


def test_unequal_trials_count_by_their_harmonic_mean():
    found = predict_total({1: [2.0], 2: [1.0, 3.0, 4.0, 4.0]}, 1)
    within = ((1 - 3) ** 2 + (3 - 3) ** 2 + 1 + 1) / 3
    error = math.sqrt(0.5 * 1.5 + within * (1 - (1 + 1 / 4) / 2))
    assert found.high == pytest.approx(2.5 + 6.313752 * error)


def test_one_save_a_trial_needs_no_variance_within():
    assert predict_total({1: [2.0], 2: [3.0]}, 1).high == pytest.approx(2.5 + 6.313752 * math.sqrt(0.5 * 1.5))


def test_one_block_has_no_interval():
    found = predict_total({1: [2.0, 3.0]}, 4)
    assert found.mean == 10 and math.isnan(found.low) and math.isnan(found.high)
    assert recovery.fits_notice(found, 30) == "undecided"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, 4), "save_s_by_block={} is refused"),
        (({1: []}, 4), "save_s_by_block[1]=[] is refused"),
        (({1: [1.0], 2: [math.nan]}, 4), "save_s_by_block[2]=nan is refused"),
        (({1: [1.0], 2: [-1.0]}, 4), "save_s_by_block[2]=-1 is refused"),
        (({1: [1.0]}, 0), "saves=0 is refused"),
        (({1: [1.0]}, 1.5), "saves=1.5 is refused"),
        (({1: [1.0]}, 4, 1.0), "confidence=1 is refused"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError) as error:
        predict_total(*arguments)
    assert str(error.value).startswith(message)
