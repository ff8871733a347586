"""Real studies are counted against a truth that is right, and a wrong one is found out."""

import json
import math
import os
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest

from stallbench.proofs import calibration
from stallbench.storage.emulated import default_folder, parse_profile
from stallbench.storage.ownership import MARKER

OWN_S, FAST_S, SLOW_S = 0.010, 0.020, 0.030


@pytest.fixture(scope="module")
def real() -> tuple[calibration.Calibration, list[str]]:
    """Two studies of two blocks, and the folders that they left in memory; others' tests may run meanwhile."""
    found = calibration.real_coverage(studies=2, blocks=2)
    left = []
    for marker in default_folder()[0].glob(f"stallbench-*/{MARKER}"):
        with suppress(OSError):  # gone by now: another test's
            if json.loads(marker.read_text())["pid"] == os.getpid():
                left.append(marker.parent.name)
    return found, left


def invented(
    studies: int = 400, blocks: int = 3, spread_s: float = 0.002, shared_by_study: bool = False
) -> pd.DataFrame:
    """Saves as ``measure`` gives them, whose own part is normal with a mean of 10 ms."""
    rng = np.random.default_rng(4)
    rows = pd.MultiIndex.from_product(
        [range(studies), range(blocks), ["fast", "slow"], range(3)], names=["study", "block", "target", "save"]
    ).to_frame(index=False)
    own_s = rng.normal(OWN_S, spread_s, len(rows))
    device_s = rows.target.map({"fast": FAST_S, "slow": SLOW_S})
    if shared_by_study:  # what a whole study shares
        own_s += rng.normal(0, 0.005, studies)[rows.study] * np.where(rows.target == "fast", 1, -1)
    return rows.assign(device_s=device_s, durable_s=device_s + own_s)


def test_real_studies_run_and_leave_nothing_behind(real):
    found, left = real
    coverage, control = found.rows
    assert (coverage["noise"], coverage["blocks"], coverage["studies"]) == ("real saves, emulated", 2, 2)
    assert coverage["coverage"] in (0, 0.5, 1) and math.isnan(coverage["false_alarms"])
    assert control["false_alarms"] in (0, 0.5, 1) and math.isnan(control["coverage"])
    assert control["studies"] == 2  # one of each device
    assert (coverage["required"], control["required"]) == (False, False)
    assert left == []


def test_the_truth_of_real_studies_is_the_hand_arithmetic_for_the_tiny_checkpoint(real):
    figures = real[0].doubts
    assert all(math.isfinite(value) for value in figures.values())
    assert 0.001 < figures["own_s"] < 0.2  # 10 ms in quiet
    # 6.036 MB in 7 files, each with four round trips and a position.
    fast_s, slow_s = (6.036e6 / rate + 7 * (4 * 0.2e-3 + 0.5e-3) for rate in (6e8, 3e8))
    expected = (figures["own_s"] + fast_s) / (figures["own_s"] + slow_s)
    assert figures["true_ratio"] == pytest.approx(expected, rel=1e-3)


def test_the_devices_part_by_hand():
    slow = parse_profile(calibration.DEVICES["slow"])
    # Four round trips of 0.2 ms and a position of 0.5 ms a file, then 300 MB/s; an empty file has no position to take.
    assert calibration.device_s(slow, [3_000_000]) == pytest.approx(0.0008 + 0.0005 + 0.010)
    assert calibration.device_s(slow, [30_000_000, 0, 300]) == pytest.approx(3 * 0.0008 + 2 * 0.0005 + 0.100001)
    fast = parse_profile(calibration.DEVICES["fast"])
    assert calibration.device_s(fast, [3_000_000]) == pytest.approx(0.0008 + 0.0005 + 0.005)


def test_the_truth_by_hand():
    truth = calibration.true_ratio(invented())
    assert truth.ratio == pytest.approx(30 / 40, rel=1e-3)
    assert truth.low < 30 / 40 < truth.high and truth.high - truth.low < 0.001


def test_the_truth_is_covered_and_one_that_is_off_by_30_percent_is_not():
    saves = invented()
    right = calibration.coverage_row(saves, 0.75)
    assert right["coverage"] == pytest.approx(0.95, abs=0.03) and right["passed"]
    for wrong in (0.75 * 1.3, 0.75 / 1.3):
        row = calibration.coverage_row(saves, wrong)
        assert row["coverage"] < 0.1 and not row["passed"]


def test_a_device_that_is_not_as_its_profile_says_is_found_out():
    saves = invented()
    saves.loc[saves.target == "slow", "durable_s"] += 0.015  # the arithmetic knows nothing of it
    assert not calibration.coverage_row(saves, calibration.true_ratio(saves).ratio)["passed"]
    assert calibration.doubts(saves, calibration.true_ratio(saves))["own_slow_minus_fast_low_s"] > 0


def test_neighbouring_trials_of_one_device_make_the_control():
    row = calibration.control_row(invented(), np.random.default_rng(0))
    assert row["studies"] == 400 and row["passed"]
    assert row["false_alarms"] == pytest.approx(0.05, abs=0.03)
    odd = calibration.control_row(invented(studies=5), np.random.default_rng(0))
    assert odd["studies"] == 4


def test_blocks_that_are_not_independent_are_seen():
    saves = invented()
    quiet = calibration.doubts(saves, calibration.true_ratio(saves))
    assert quiet["study_p_value"] > 0.01 and abs(quiet["lag1"]) < 3 / math.sqrt(1200)
    saves = invented(shared_by_study=True)
    truth = calibration.true_ratio(saves)
    shared = calibration.doubts(saves, truth)
    assert shared["study_p_value"] < 1e-6 and shared["lag1"] > 0.2
    assert not calibration.coverage_row(saves, truth.ratio)["passed"]


@pytest.mark.parametrize(("field", "value"), [("studies", 1), ("blocks", 1)])
def test_too_few_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}={value} is refused: at least two are needed$"):
        calibration.real_coverage(**{"studies": 2, "blocks": 2} | {field: value})
