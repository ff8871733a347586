"""Intervals, ratios and equivalence against numbers worked out by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from stallbench.reporting import stats

T_975_DF2 = 4.302653  # quantiles of Student's t with 2 degrees of freedom, from printed tables
T_95_DF2 = 2.919986
T_80_DF2 = 1.060660


def pair(*ratios: float, slow_s: float = 40.0) -> tuple[pd.Series, pd.Series]:
    """Give per-block means whose ratios fast / slow are ``ratios``; the slow target drifts from block to block."""
    slow = pd.Series([slow_s * (1 + block) for block in range(len(ratios))])
    return slow * list(ratios), slow


def random_pair(seed: int, blocks: int = 5) -> tuple[pd.Series, pd.Series]:
    rng = np.random.default_rng(seed)
    return pd.Series(rng.lognormal(3.4, 0.3, blocks)), pd.Series(rng.lognormal(3.7, 0.3, blocks))


def test_mean_interval_is_students_t():
    interval = stats.mean_interval(pd.Series([1.0, 2.0, 3.0]))
    half = T_975_DF2 / math.sqrt(3)
    assert (interval.mean, interval.blocks) == (2.0, 3)
    assert (interval.low, interval.high) == pytest.approx((2 - half, 2 + half), rel=1e-6)


def test_mean_interval_follows_confidence():
    interval = stats.mean_interval(pd.Series([1.0, 2.0, 3.0]), confidence=0.9)
    assert interval.high == pytest.approx(2 + T_95_DF2 / math.sqrt(3), rel=1e-6)


def test_one_block_has_a_mean_and_no_interval():
    interval = stats.mean_interval(pd.Series([7.0]))
    assert (interval.mean, interval.blocks) == (7.0, 1)
    assert math.isnan(interval.low) and math.isnan(interval.high)


@pytest.mark.parametrize("value", [0.0, 0.1, 40.0])
def test_identical_blocks_give_an_interval_without_width(value):
    interval = stats.mean_interval(pd.Series([value] * 3))
    assert (interval.low, interval.high) == pytest.approx((value, value), abs=1e-12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "block_means is empty; at least one block is needed"),
        ([1.0, math.nan], "block_means holds nan; every block needs a finite mean"),
        ([-math.inf, 1.0], "block_means holds -inf; every block needs a finite mean"),
    ],
)
def test_mean_interval_refuses(values, message):
    with pytest.raises(ValueError) as error:
        stats.mean_interval(pd.Series(values, dtype=float))
    assert str(error.value) == message


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0, math.nan])
@pytest.mark.parametrize("function", [stats.paired_ratio, stats.paired_difference])
def test_confidence_must_be_a_share(function, confidence):
    with pytest.raises(ValueError, match=rf"^confidence={confidence:g} is refused: it must lie between 0 and 1$"):
        function(*pair(0.7, 0.8), confidence=confidence)


def test_paired_ratio_by_hand():
    # log ratios -ln 2, 0, ln 2: mean 0, standard deviation ln 2
    result = stats.paired_ratio(*pair(0.5, 1.0, 2.0))
    error = math.log(2) / math.sqrt(3)
    assert result.ratio == pytest.approx(1.0)
    assert result.high == pytest.approx(math.exp(T_975_DF2 * error), rel=1e-5)
    assert result.low == pytest.approx(math.exp(-T_975_DF2 * error), rel=1e-5)
    assert result.smallest_detectable == pytest.approx(1 - math.exp(-(T_975_DF2 + T_80_DF2) * error), rel=1e-5)
    assert result.p_value == pytest.approx(1.0)
    assert result.blocks == 3


def test_p_value_by_hand():
    # log ratios 0, -ln 2, -2 ln 2: t = -ln 2 / (ln 2 / sqrt 3) = -sqrt 3
    # 2 degrees of freedom: P(|T| > t) = 1 - t / sqrt(2 + t^2)
    assert stats.paired_ratio(*pair(1.0, 0.5, 0.25)).p_value == pytest.approx(1 - math.sqrt(3 / 5))


def test_time_saved_mirrors_the_ratio():
    result = stats.paired_ratio(*pair(0.70, 0.75, 0.80))
    assert result.time_saved == pytest.approx(1 - (0.70 * 0.75 * 0.80) ** (1 / 3))
    assert (result.time_saved_low, result.time_saved_high) == pytest.approx((1 - result.high, 1 - result.low))
    assert result.time_saved_low < result.time_saved < result.time_saved_high


def test_paired_ratio_without_spread():
    result = stats.paired_ratio(*pair(0.75, 0.75, 0.75))
    assert (result.ratio, result.low, result.high) == pytest.approx((0.75, 0.75, 0.75))
    assert result.smallest_detectable == pytest.approx(0.0, abs=1e-12)
    assert result.p_value < 1e-6


def test_the_same_numbers_twice_are_no_evidence_of_a_difference():
    same = pd.Series([30.0, 40.0, 50.0])
    assert stats.paired_ratio(same, same).p_value == 1.0


def test_paired_ratio_of_one_block():
    result = stats.paired_ratio(*pair(0.75))
    assert (result.ratio, result.time_saved, result.blocks) == pytest.approx((0.75, 0.25, 1))
    rest = (result.low, result.high, result.time_saved_low, result.time_saved_high)
    assert all(math.isnan(value) for value in (*rest, result.smallest_detectable, result.p_value))


def test_only_common_blocks_count_and_their_order_does_not():
    fast = pd.Series({7: 30.0, 2: 10.0, 1: 99.0})
    slow = pd.Series({2: 20.0, 7: 40.0, 9: 1.0})
    assert vars(stats.paired_ratio(fast, slow)) == pytest.approx(vars(stats.paired_ratio(*pair(0.5, 0.75))))


@pytest.mark.parametrize("function", [stats.paired_ratio, stats.paired_difference, stats.equivalence])
@pytest.mark.parametrize(
    ("fast", "slow", "message"),
    [
        ({0: 1.0}, {1: 1.0}, "fast and slow have no block in common; nothing can be paired"),
        ({}, {1: 1.0}, "fast and slow have no block in common; nothing can be paired"),
        ({0: math.nan}, {0: 1.0}, "fast holds nan; every block needs a finite mean"),
        ({0: 1.0}, {0: math.inf}, "slow holds inf; every block needs a finite mean"),
    ],
)
def test_unpairable_input_is_refused(function, fast, slow, message):
    with pytest.raises(ValueError) as error:
        function(pd.Series(fast, dtype=float), pd.Series(slow, dtype=float))
    assert str(error.value) == message


def test_a_block_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"^fast holds block 3 twice; give one mean per block$"):
        stats.paired_ratio(pd.Series([1.0, 2.0], index=[3, 3]), pd.Series([1.0], index=[3]))


@pytest.mark.parametrize("function", [stats.paired_ratio, stats.equivalence])
@pytest.mark.parametrize("bad", [0.0, -2.0])
def test_a_ratio_needs_positive_times(function, bad):
    with pytest.raises(ValueError, match=rf"^slow holds {bad:g}; a ratio needs times above 0 s$"):
        function(pd.Series([1.0, 1.0]), pd.Series([1.0, bad]))


@pytest.mark.parametrize("seed", range(10))
def test_swapping_the_targets_inverts_the_ratio(seed):
    fast, slow = random_pair(seed)
    there, back = stats.paired_ratio(fast, slow), stats.paired_ratio(slow, fast)
    assert (back.ratio, back.low, back.high) == pytest.approx((1 / there.ratio, 1 / there.high, 1 / there.low))
    assert (back.p_value, back.smallest_detectable) == pytest.approx((there.p_value, there.smallest_detectable))


@pytest.mark.parametrize("seed", range(10))
def test_ratios_do_not_depend_on_the_unit_or_on_drift_between_blocks(seed):
    fast, slow = random_pair(seed)
    drift = pd.Series([1e3, 2e3, 5e3, 1e-3, 7.0])
    plain, scaled = stats.paired_ratio(fast, slow), stats.paired_ratio(fast * drift, slow * drift)
    assert vars(scaled) == pytest.approx(vars(plain))


def test_paired_difference_is_slow_less_fast_in_seconds():
    result = stats.paired_difference(pd.Series([30.0, 31.0, 32.0]), pd.Series([40.0, 42.0, 44.0]))
    half = T_975_DF2 / math.sqrt(3)
    assert (result.mean, result.blocks) == (11.0, 3)
    assert (result.low, result.high) == pytest.approx((11 - half, 11 + half), rel=1e-6)


def test_the_smallest_detectable_effect_is_seen_with_80_percent_power():
    spread = 0.1
    logs = np.array([-1, -1, 0, 1, 1]) * spread  # standard deviation: exactly the spread
    detectable = stats.paired_ratio(*pair(*np.exp(logs))).smallest_detectable
    rng = np.random.default_rng(1)
    effects = math.log(1 - detectable) + rng.normal(0, spread, (1000, 5))
    seen = [stats.paired_ratio(*pair(*np.exp(effect))).p_value < 0.05 for effect in effects]
    assert np.mean(seen) == pytest.approx(0.79, abs=0.04)


def test_equivalence_by_hand():
    result = stats.equivalence(*pair(*np.exp([-0.01, 0.0, 0.01])))
    error = 0.01 / math.sqrt(3)
    # The nearer bound decides; 2 degrees of freedom: P(T > t) = 1/2 - t / (2 sqrt(2 + t^2)).
    t = math.log(1.05) / error
    assert result.verdict == "equivalent"
    assert result.p_value == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)))
    assert (result.low, result.high) == pytest.approx((math.exp(-T_95_DF2 * error), math.exp(T_95_DF2 * error)))
    assert (result.low_95, result.high_95) == pytest.approx((math.exp(-T_975_DF2 * error), math.exp(T_975_DF2 * error)))
    assert (result.ratio, result.margin, result.blocks) == pytest.approx((1.0, 0.05, 3))


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((0.74, 0.75, 0.76), "different"),
        ((1.30, 1.31, 1.32), "different"),
        ((0.80, 1.00, 1.25), "undecided"),
        ((0.95, 0.94, 0.96), "undecided"),
        ((0.9217, 0.9310, 0.9404), "undecided"),  # the 90 % interval lies outside the margin, the 95 % one does not
        ((1.030, 1.031, 1.032), "equivalent"),  # a significant difference, and yet within the margin
        ((1.0, 1.0, 1.0), "equivalent"),
        ((0.75, 0.75, 0.75), "different"),
    ],
)
def test_verdicts(ratios, verdict):
    assert stats.equivalence(*pair(*ratios)).verdict == verdict


def test_a_wider_margin_makes_a_difference_equivalent():
    assert stats.equivalence(*pair(0.90, 0.91, 0.92)).verdict == "different"
    assert stats.equivalence(*pair(0.90, 0.91, 0.92), margin=0.2).verdict == "equivalent"


def test_alpha_sets_both_tests():
    # error 0.0133: p is 0.03 against the bounds; the two-sided intervals move with alpha, the 95 % one does not
    ratios = np.exp([-0.023, 0.0, 0.023])
    loose, strict = stats.equivalence(*pair(*ratios)), stats.equivalence(*pair(*ratios), alpha=0.01)
    assert (loose.verdict, strict.verdict) == ("equivalent", "undecided")
    assert strict.high > loose.high
    assert strict.high_95 == loose.high_95


def test_one_block_decides_nothing():
    result = stats.equivalence(*pair(0.5))
    assert (result.verdict, result.ratio, result.blocks) == ("undecided", 0.5, 1)
    rest = (result.low, result.high, result.low_95, result.high_95, result.p_value)
    assert all(math.isnan(value) for value in rest)


def test_targets_that_differ_by_the_margin_are_rarely_called_equivalent():
    rng = np.random.default_rng(2)
    logs = math.log(0.95) + rng.normal(0, 0.005, (1000, 5))
    called = [stats.equivalence(*pair(*np.exp(log))).verdict == "equivalent" for log in logs]
    assert np.mean(called) == pytest.approx(0.05, abs=0.021)  # 3 standard errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": 0.0}, "margin=0 is refused: it must lie between 0 and 1"),
        ({"margin": 5.0}, "margin=5 is refused: it must lie between 0 and 1"),
        ({"alpha": 0.5}, "alpha=0.5 is refused: it must lie between 0 and 0.5"),
    ],
)
def test_equivalence_refuses(options, message):
    with pytest.raises(ValueError) as error:
        stats.equivalence(*pair(0.9, 1.0), **options)
    assert str(error.value) == message
