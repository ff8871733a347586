"""Synthetic studies have the truth they claim, and the coverage table would catch a worse interval."""

import numpy as np
import pandas as pd
import pytest

from stallbench.proofs import validation
from stallbench.proofs.validation import Noise
from stallbench.reporting import stats

NO_NOISE = Noise(cv_fast=0, cv_slow=0, autocorrelation=0, rare_share=0, trial_cv=0, drift=0)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return validation.coverage_table(studies=300)


def percentile_bootstrap(fast: pd.Series, slow: pd.Series) -> stats.PairedRatio:
    """Stand in for ``stats.paired_ratio`` as it would be with a percentile bootstrap over blocks."""
    logs = np.log(fast / slow).to_numpy()
    picks = np.random.default_rng(0).integers(len(logs), size=(999, len(logs)))
    low, high = np.exp(np.percentile(logs[picks].mean(axis=1), [2.5, 97.5]))
    return stats.PairedRatio(np.exp(logs.mean()), low, high, len(logs), 0, 0, 0, 0, 0)


def required_rows_hold(table: pd.DataFrame) -> bool:
    """Whether coverage is about 95 % and false alarms about 5 %, within 3 standard errors of 300 studies."""
    rows = table[table["required"]]
    return bool(rows["coverage"].between(0.912, 0.988).all() and rows["false_alarms"].between(0.012, 0.088).all())


def synthetic(noise: Noise, studies=400, blocks=5, events=5, ratio=0.75) -> pd.DataFrame:
    return validation.synthetic_studies(np.random.default_rng(3), studies, blocks, events, ratio, noise)


def test_the_paired_t_interval_keeps_its_word(table):
    assert required_rows_hold(table)


def test_a_change_back_to_the_bootstrap_would_be_caught(monkeypatch):
    monkeypatch.setattr(stats, "paired_ratio", percentile_bootstrap)
    changed = validation.coverage_table(studies=300)
    assert not required_rows_hold(changed)
    assert not changed.loc[changed["required"] & (changed["blocks"] == 3), "passed"].any()


def test_the_percentile_bootstrap_row_fails_and_is_not_required(table):
    (row,) = table[table["method"] == "percentile bootstrap"].to_dict("records")
    assert row["blocks"] == 3
    assert 0.65 < row["coverage"] < 0.85
    assert 0.15 < row["false_alarms"] < 0.35
    assert (row["passed"], row["required"]) == (False, False)


def test_rows_and_what_must_pass(table):
    rows = table[table["method"] == "paired t"]
    assert sorted(zip(rows["noise"], rows["blocks"], rows["required"], strict=True)) == [
        (noise, blocks, noise != "saves, unlike")
        for noise in ("saves", "saves, unlike", "steps")
        for blocks in (3, 5, 8)
    ]
    assert (table["studies"] == 300).all()


def test_equivalence_answers_add_up_and_grow_surer_with_blocks(table):
    answers = table[(table["method"] == "paired t") & (table["noise"] != "saves, unlike")]
    assert (answers["equivalent"] + answers["different"] + answers["undecided"]).to_numpy() == pytest.approx(1.0)
    steps = answers[answers["noise"] == "steps"].set_index("blocks")["equivalent"]
    assert steps[3] < steps[5] < steps[8]
    assert steps[8] > 0.8


def test_unlike_noise_has_no_control(table):
    unlike = table[table["noise"] == "saves, unlike"]
    assert unlike[["false_alarms", "equivalent", "different", "undecided"]].isna().all(axis=None)


def test_unlike_noise_costs_some_coverage_and_not_all(table):
    unlike = table[table["noise"] == "saves, unlike"]
    assert unlike["coverage"].between(0.88, 0.98).all()  # 0.93 to 0.95 over 20,000 studies


@pytest.mark.parametrize(
    ("covered", "alarms", "passed"),
    [(950, 50, True), (925, 50, False), (975, 50, False), (950, 25, False), (950, 75, False), (950, None, True)],
)
def test_both_shares_must_lie_within_their_limits(covered, alarms, passed):
    alarmed = [] if alarms is None else np.arange(1000) < alarms
    row = validation._row(np.arange(1000) < covered, alarmed)
    assert (row["coverage"], row["passed"]) == (covered / 1000, passed)


def test_intervals_that_are_too_wide_do_not_pass(monkeypatch):
    def boundless(fast: pd.Series, slow: pd.Series) -> stats.PairedRatio:
        return stats.PairedRatio(1, 0, np.inf, len(fast), 0, 0, 0, 0, 0)

    monkeypatch.setattr(stats, "paired_ratio", boundless)
    row = validation.coverage_table(studies=20).iloc[0]
    assert (row["coverage"], row["false_alarms"], row["passed"]) == (1.0, 0.0, False)
    z2 = 1.959964**2  # Wilson's interval of 20 in 20 and 0 in 20
    assert (row["coverage_low"], row["coverage_high"]) == pytest.approx((20 / (20 + z2), 1.0))
    assert (row["false_alarms_low"], row["false_alarms_high"]) == pytest.approx((0.0, z2 / (20 + z2)))


def test_the_seed_decides():
    first, again, other = (validation.coverage_table(studies=20, seed=seed) for seed in (1, 1, 2))
    pd.testing.assert_frame_equal(first, again)
    assert not first.equals(other)


def test_no_studies_are_refused():
    with pytest.raises(ValueError, match=r"^studies=0 is refused: at least one is needed$"):
        validation.coverage_table(studies=0)


@pytest.mark.parametrize("setting", validation.SETTINGS.values(), ids=validation.SETTINGS)
def test_the_true_ratio_is_the_ratio_of_expected_times(setting):
    events = synthetic(setting.noise, studies=20_000, blocks=1)
    means = events.groupby("target")["event_s"].mean()
    assert means["fast"] / means["slow"] == pytest.approx(0.75, rel=0.01)


def test_trials_are_whole_and_in_random_order():
    events = synthetic(NO_NOISE)
    trials = events.groupby(["study", "block"])["target"].agg("-".join)
    assert set(trials) == {"-".join(["fast"] * 5 + ["slow"] * 5), "-".join(["slow"] * 5 + ["fast"] * 5)}
    assert trials.str.startswith("fast").mean() == pytest.approx(0.5, abs=0.04)
    assert events.groupby("target")["event_s"].unique().map(list).to_dict() == {"fast": [30.0], "slow": [40.0]}


def test_drift_is_shared_by_a_block():
    drifting = synthetic(Noise(**{**vars(NO_NOISE), "drift": 0.1}))
    means = drifting.groupby(["study", "block", "target"])["event_s"].mean().unstack("target")
    assert (means["fast"] / means["slow"]).to_numpy() == pytest.approx(0.75)
    steps = np.log(means["slow"].unstack("block")).diff(axis=1).iloc[:, 1:].to_numpy()
    assert steps.std() == pytest.approx(0.1, rel=0.05)


def test_trial_noise_is_shared_by_a_trial():
    shared = synthetic(Noise(**{**vars(NO_NOISE), "trial_cv": 0.05}))
    trials = shared.groupby(["study", "block", "target"])["event_s"]
    assert trials.nunique().eq(1).all()
    slow = trials.mean().xs("slow", level="target")
    assert slow.std() / slow.mean() == pytest.approx(0.05, rel=0.05)


def test_events_spread_and_follow_each_other_as_stated():
    body = synthetic(Noise(**{**vars(NO_NOISE), "cv_fast": 0.1, "cv_slow": 0.6, "autocorrelation": 0.5}), events=20)
    times = body.groupby("target")["event_s"]
    assert (times.std() / times.mean()).to_dict() == pytest.approx({"fast": 0.1, "slow": 0.6}, rel=0.05)
    assert times.skew()["slow"] > 1
    trials = np.log(body["event_s"]).to_numpy().reshape(-1, 20)
    trials = trials[body["target"].to_numpy().reshape(-1, 20)[:, 0] == "slow"]
    assert np.corrcoef(trials[:, :-1].ravel(), trials[:, 1:].ravel())[0, 1] == pytest.approx(0.5, abs=0.02)


def test_rare_events_are_as_rare_and_as_long_as_stated():
    events = synthetic(Noise(**{**vars(NO_NOISE), "rare_share": 0.02, "rare_factor": 4.0}))
    slow_s = events.loc[events["target"] == "slow", "event_s"]
    usual_s, rare_s = sorted(slow_s.unique())
    assert rare_s / usual_s == pytest.approx(4.0)
    assert (slow_s == rare_s).mean() == pytest.approx(0.02, abs=0.005)
    assert slow_s.mean() == pytest.approx(validation.BASE_S, rel=0.02)
