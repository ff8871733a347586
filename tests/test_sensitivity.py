"""The heat map's and the tornado's numbers, by hand."""

import math

import pytest

from stallbench.compounding import sensitivity
from stallbench.compounding.models import SaveTime, Schedule

SAVE = SaveTime(latency_s=0.5, bytes_per_s=1e8)
BASE = {
    "latency_s": 0.5, "bytes_per_s": 1e8, "size_bytes": 1e9, "interval_min": 10, "run_h": 8, "runs_per_day": 1,
    "team": 5, "workdays_per_year": 230,
}  # fmt: skip


def test_a_cell_is_saves_times_seconds():
    grid = sensitivity.waiting_grid(SAVE, Schedule(), [5, 10, 480], [1e8, 1e10])
    assert grid.loc[5, 1e8] == pytest.approx(96 * 1.5)
    assert grid.loc[10, 1e10] == pytest.approx(48 * 100.5)
    assert grid.loc[480, 1e8] == pytest.approx(1.5)
    assert (grid.index.name, grid.columns.name) == ("interval_min", "size_bytes")


def test_a_teams_year_by_hand():
    assert sensitivity.team_year_wait_h(**BASE) == pytest.approx(10.5 * 48 * 230 * 5 / 3600)


def test_the_largest_effect_comes_first():
    ranges = {"latency_s": (0.1, 1), "bytes_per_s": (5e7, 2e8), "interval_min": (5, 30), "team": (5, 5)}
    table = sensitivity.tornado(sensitivity.team_year_wait_h, BASE, ranges)
    year = 48 * 230 * 5 / 3600
    assert list(table.assumption) == ["interval_min", "bytes_per_s", "latency_s", "team"]
    row = table.set_index("assumption").loc["bytes_per_s"]
    assert (row.at_low, row.at_base, row.at_high) == pytest.approx((20.5 * year, 10.5 * year, 5.5 * year))
    assert row.effect == pytest.approx(15 * year)
    assert table.effect.iloc[-1] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sensitivity.waiting_grid(SAVE, Schedule(), [481], [1e8]), "run_h=8 is refused: the run is shorter"),
        (lambda: sensitivity.waiting_grid(SAVE, Schedule(), [math.nan], [1e8]), "interval_min=nan is refused"),
        (lambda: sensitivity.waiting_grid(SAVE, Schedule(), [10], [-1]), "size_bytes=-1 is refused"),
        (lambda: sensitivity.team_year_wait_h(**(BASE | {"team": 0})), "team=0 is refused"),
        (lambda: sensitivity.tornado(sensitivity.team_year_wait_h, BASE, {}), "ranges={} is refused"),
        (lambda: sensitivity.tornado(sensitivity.team_year_wait_h, BASE, {"gpus": (1, 2)}), "ranges['gpus'] is"),
        (lambda: sensitivity.tornado(sensitivity.team_year_wait_h, BASE, {"team": (6, 9)}), "team=5 is refused: it"),
        (lambda: sensitivity.tornado(sensitivity.team_year_wait_h, BASE, {"team": (math.nan, 9)}), "team=5 is refused"),
        (lambda: sensitivity.tornado(sensitivity.team_year_wait_h, BASE, {"team": (0, 9)}), "team=0 is refused"),
        (lambda: sensitivity.tornado(lambda x: math.inf, {"x": 1}, {"x": (1, 2)}), "outcome of x=inf is refused"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message)
