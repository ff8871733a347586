"""Save time against size: known lines found again, bends told from none, intervals that hold what they claim."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from stallbench.compounding import sizes
from stallbench.compounding.economics import CHECKPOINT_BYTES

SIZES = (1e6, 1e7, 1e8, 3e8, 1e9)
STUDIES = 200
NOISE = 0.05
REPETITIONS = 5


def straight(size):
    return 0.05 + size / 4e8


def knee(size, at=1e8):
    """A cache of 100 MB before a store of a third of its speed."""
    return straight(size) + np.maximum(0.0, size - at) / 2e8


def study(truth, seed: int, of=SIZES, spread: float = NOISE) -> pd.DataFrame:
    size = np.repeat(of, REPETITIONS)
    noise = spread * np.random.default_rng(seed).standard_normal(len(size))
    return pd.DataFrame({"size_bytes": size, "save_s": truth(size) * (1 + noise)})


def at_least(held: int, tries: int = STUDIES, share: float = 0.95) -> bool:
    return held >= stats.binom.ppf(0.005, tries, share)


def test_a_line_without_noise_is_found_again():
    line = sizes.fit(study(straight, 0, spread=0))
    assert line.latency_s.mean == pytest.approx(0.05) and line.bytes_per_s.mean == pytest.approx(4e8)
    assert line.save_time.seconds(1e9) == pytest.approx(2.55)
    assert sizes.predict(line, 2e9).mean == pytest.approx(5.05)
    assert sizes.bend(study(straight, 0, spread=0)).found is False


def test_the_small_sizes_count_as_much_as_the_large():
    """Plain least squares would leave the latency, a 50th of the largest time, anywhere."""
    latencies = [sizes.fit(study(straight, seed)).latency_s for seed in range(STUDIES)]
    assert np.std([one.mean for one in latencies]) < 0.1 * 0.05
    assert at_least(sum(one.low <= 0.05 <= one.high for one in latencies))


@pytest.mark.parametrize("size_bytes", [5e7, 1e9, 1e10, *CHECKPOINT_BYTES.values()])
def test_predictions_hold_what_a_further_measurement_gives(size_bytes):
    held = 0
    for seed in range(STUDIES):
        found = sizes.predict(sizes.fit(study(straight, seed)), size_bytes)
        noise = np.random.default_rng([seed, 1]).standard_normal(REPETITIONS).mean()
        held += found.low <= straight(size_bytes) * (1 + NOISE * noise) <= found.high
    assert at_least(held)


def test_the_interval_widens_with_the_distance_from_what_was_measured():
    line = sizes.fit(study(straight, 1))
    widths = [(one := sizes.predict(line, size)).high / one.low for size in (1e9, 1e10, 1e11, 1e12, 1e13)]
    assert widths == sorted(widths) and math.log(widths[-1]) > 2 * math.log(widths[0])
    # From there on by the same factor for each power of ten, on a logarithmic scale of sizes.
    logs = np.log(widths)
    assert logs[4] - logs[3] == pytest.approx(logs[3] - logs[2], rel=0.1)


def test_sizes_that_lie_on_a_line_by_chance_are_not_taken_as_exact():
    table = study(straight, 1)
    relative = table.save_s / table.groupby("size_bytes").save_s.transform("mean")
    lucky = sizes.fit(table.assign(save_s=relative * straight(table.size_bytes)))
    assert lucky.scatter == pytest.approx(math.sqrt(((relative - 1) ** 2).sum() / 20 / REPETITIONS))
    alone = sizes.fit(table.groupby("size_bytes", as_index=False).save_s.mean())
    assert alone.bytes_per_s.mean == sizes.fit(table).bytes_per_s.mean


def test_the_largest_size_is_predicted_from_the_others():
    held = [sizes.hold_out_largest(study(straight, seed)) for seed in range(STUDIES)]
    assert at_least(sum(one.within for one in held))
    assert held[0].size_bytes == 1e9 and held[0].predicted_s.blocks == 4
    missed = [sizes.hold_out_largest(study(lambda size: knee(size, at=3e8), seed)).within for seed in range(STUDIES)]
    assert sum(missed) < STUDIES / 2


def test_a_straight_line_is_seldom_said_to_bend():
    alarms = sum(sizes.bend(study(straight, seed)).found for seed in range(STUDIES))
    assert alarms <= stats.binom.ppf(0.995, STUDIES, sizes.BEND_ALPHA)


def test_a_bend_is_found_where_it_is():
    for seed in range(20):
        found = sizes.bend(study(knee, seed))
        assert found.found and found.at_bytes == 1e8
        assert found.before_bytes_per_s == pytest.approx(4e8, rel=0.2)
        assert found.beyond_bytes_per_s == pytest.approx(4e8 / 3, rel=0.2)


def test_beyond_a_bend_only_the_sizes_from_it_on_are_fitted():
    table = study(knee, 3, of=(1e6, 1e7, 1e8, 3e8, 1e9, 3e9))
    found = sizes.extrapolate(table).loc["1T"]
    assert found.low_s < knee(18e12) < found.high_s
    assert found.save_s == pytest.approx(knee(18e12), rel=0.2)
    assert found.times_largest == pytest.approx(6000)
    with pytest.raises(ValueError, match=r"^size_bytes=1e\+08, 3e\+08, 1e\+09 is refused: the line bends at 1e\+08 "):
        sizes.extrapolate(study(knee, 3))


def test_sizes_of_the_study_itself_can_be_asked_for():
    table = sizes.extrapolate(study(straight, 1), {"ours": 273e6})
    assert table.loc["ours", "times_largest"] == pytest.approx(0.273)
    assert list(table.columns) == ["size_bytes", "save_s", "low_s", "high_s", "times_largest"]
    assert list(sizes.extrapolate(study(straight, 1)).index) == list(CHECKPOINT_BYTES)


def test_a_line_below_zero_seconds_is_of_no_use_so_far_down():
    table = study(lambda size: (size - 5e7) / 1e8, 1, of=(1e8, 3e8, 1e9, 3e9), spread=0)
    line = sizes.fit(table)
    assert line.latency_s.mean == pytest.approx(-0.5) and line.save_time.latency_s == 0
    with pytest.raises(ValueError, match=r"^size_bytes=1e\+06 is refused: the line is below 0 s there"):
        sizes.predict(line, 1e6)


GOOD = study(straight, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sizes.fit(study(straight, 1, of=SIZES[:3])), "size_bytes=1e+06, 1e+07, 1e+08 is refused: a line need"),
        (lambda: sizes.bend(study(straight, 1, of=SIZES[:2])), "size_bytes=1e+06, 1e+07 is refused"),
        (lambda: sizes.extrapolate(study(straight, 1, of=SIZES[:3])), "size_bytes=1e+06, 1e+07, 1e+08 is refused"),
        (lambda: sizes.hold_out_largest(study(straight, 1, of=SIZES[:4])), "size_bytes=1e+06, 1e+07, 1e+08, 3e+08 is"),
        (lambda: sizes.fit(GOOD.drop(columns="save_s")), "save_s is missing"),
        (lambda: sizes.fit(GOOD.iloc[:0]), "size_bytes= is refused: a line needs at least 4 sizes"),
        (lambda: sizes.fit(GOOD.assign(save_s=math.nan)), "save_s=nan is refused"),
        (lambda: sizes.fit(GOOD.assign(save_s=-GOOD.save_s)), "save_s=-0.0"),
        (lambda: sizes.fit(GOOD.assign(size_bytes=0.0)), "size_bytes=0 is refused"),
        (
            lambda: sizes.fit(study(lambda size: 1 / size, 1)),
            "save_s=1.011e-06 to 9.93222e-10 is refused: it doesn't grow",
        ),
        (lambda: sizes.fit(GOOD, confidence=1), "confidence=1 is refused"),
        (lambda: sizes.predict(sizes.fit(GOOD), 0), "size_bytes=0 is refused"),
        (lambda: sizes.predict(sizes.fit(GOOD), 1e9, 0), "confidence=0 is refused"),
        (lambda: sizes.extrapolate(GOOD, {"x": math.inf}), "size_bytes=inf is refused"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
