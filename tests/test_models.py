"""The compounding arithmetic against the article's figures and numbers worked out by hand."""

import math

import pandas as pd
import pytest

from stallbench.compounding import models
from stallbench.compounding.models import Schedule
from stallbench.reporting.stats import Interval

SAVE_S = Interval(mean=2.0, low=1.5, high=2.5, blocks=5)


def test_default_schedule_saves_48_times():
    assert Schedule().saves == 48


@pytest.mark.parametrize(
    ("run_h", "interval_min", "saves"),
    [(8, 7, 68), (0.5, 30, 1), (0.08, 0.1, 48), (24, 0.5, 2880), (1, 59.9, 1)],
)
def test_whole_intervals_are_counted(run_h, interval_min, saves):
    assert Schedule(run_h=run_h, interval_min=interval_min).saves == saves


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"interval_min": 0}, "interval_min=0 is refused: it must be a number above 0"),
        ({"interval_min": -10}, "interval_min=-10 is refused: it must be a number above 0"),
        ({"interval_min": math.nan}, "interval_min=nan is refused: it must be a number above 0"),
        ({"run_h": math.inf}, "run_h=inf is refused: it must be a number above 0"),
        ({"team": 0}, "team=0 is refused: it must be a number above 0"),
        ({"team": 2.5}, "team=2.5 is refused: it must be a whole number"),
        ({"runs_per_day": 0.5}, "runs_per_day=0.5 is refused: it must be a whole number"),
        ({"workdays_per_week": 8}, "workdays_per_week=8 is refused: it must be at most 7"),
        ({"workdays_per_year": 367}, "workdays_per_year=367 is refused: it must be at most 366"),
        (
            {"run_h": 0.1, "interval_min": 10},
            "run_h=0.1 is refused: the run is shorter than one interval (interval_min=10); nothing would be saved",
        ),
    ],
)
def test_schedule_refuses(values, message):
    with pytest.raises(ValueError) as error:
        Schedule(**values)
    assert str(error.value) == message


def test_compounding_of_the_default_schedule():
    table = models.compounding(SAVE_S, Schedule()).set_index("scope")
    assert table["events"].to_dict() == {
        "save": 1, "run": 48, "day": 48, "developer-week": 240, "team-week": 1200, "team-year": 55200,
    }  # fmt: skip
    assert table["wait_s"].to_dict() == {
        "save": 2.0, "run": 96.0, "day": 96.0, "developer-week": 480.0, "team-week": 2400.0, "team-year": 110400.0,
    }  # fmt: skip
    assert list(table.columns) == ["events", "wait_s", "low_s", "high_s"]


def test_compounding_uses_every_field_of_the_schedule():
    four_saves = {"interval_min": 30, "run_h": 2}
    schedule = Schedule(**four_saves, runs_per_day=3, team=7, workdays_per_week=4, workdays_per_year=100)
    assert models.compounding(1.0, schedule)["events"].tolist() == [1, 4, 12, 48, 336, 8400]


def test_the_interval_scales_with_the_mean():
    table = models.compounding(SAVE_S, Schedule())
    assert table["low_s"].tolist() == [1.5 * events for events in table["events"]]
    assert table["high_s"].tolist() == [2.5 * events for events in table["events"]]


def test_a_plain_number_has_no_interval():
    table = models.compounding(10.0, Schedule())
    assert table["low_s"].isna().all() and table["high_s"].isna().all()
    assert table["wait_s"].notna().all()


def test_time_saved_may_be_negative():
    lost = Interval(mean=-1.0, low=-3.0, high=1.0, blocks=3)
    run = models.compounding(lost, Schedule()).set_index("scope").loc["run"]
    assert (run["low_s"], run["wait_s"], run["high_s"]) == (-144.0, -48.0, 48.0)


@pytest.mark.parametrize("function", [models.compounding, models.cumulative_wait])
@pytest.mark.parametrize("mean", [math.nan, math.inf])
def test_an_unknown_save_time_is_refused(function, mean):
    for save_s in (mean, Interval(mean, mean, mean, 1)):
        with pytest.raises(ValueError, match=rf"^save_s={mean:g} is refused: it must be a finite number$"):
            function(save_s, Schedule())


def test_cumulative_wait_is_a_step_a_save():
    table = models.cumulative_wait(SAVE_S, Schedule(interval_min=15, run_h=1))
    expected = {
        "hour": [0.25, 0.5, 0.75, 1.0],
        "wait_s": [2.0, 4.0, 6.0, 8.0],
        "low_s": [1.5, 3.0, 4.5, 6.0],
        "high_s": [2.5, 5.0, 7.5, 10.0],
    }
    pd.testing.assert_frame_equal(table, pd.DataFrame(expected))


def test_cumulative_wait_ends_where_compounding_says():
    schedule = Schedule()
    steps = models.cumulative_wait(SAVE_S, schedule)
    run = models.compounding(SAVE_S, schedule).set_index("scope").loc["run"]
    assert len(steps) == schedule.saves
    assert steps.iloc[-1][["wait_s", "low_s", "high_s"]].tolist() == run[["wait_s", "low_s", "high_s"]].tolist()
    assert steps["hour"].iloc[-1] == 8.0


def test_worked_example_is_the_articles():
    example = models.worked_example()
    assert (example.slow_s, example.fast_s, example.saves) == (40.0, 30.0, 48)
    assert example.time_saved == pytest.approx(0.25)
    assert example.faster == pytest.approx(1 / 3)
    assert example.saved_per_run_min == pytest.approx(8.0)
    saved_s = example.compounding.set_index("scope")["wait_s"]
    assert saved_s["developer-week"] == pytest.approx(40 * 60)
    assert saved_s["team-week"] / 3600 == pytest.approx(10 / 3)
    assert saved_s["team-year"] / 3600 == pytest.approx(153 + 1 / 3)


def test_time_saved_is_not_speedup():
    assert models.time_saved(30, 40) == pytest.approx(0.25)
    assert models.speedup(30, 40) == pytest.approx(1 / 3)
    assert models.time_saved(40, 30) == pytest.approx(-1 / 3)
    assert models.speedup(40, 30) == pytest.approx(-0.25)


@pytest.mark.parametrize("function", [models.time_saved, models.speedup])
@pytest.mark.parametrize(("times", "name"), [((0, 40), "fast_s"), ((30, 0), "slow_s")])
def test_a_comparison_needs_positive_times(function, times, name):
    with pytest.raises(ValueError, match=rf"^{name}=0 is refused: it must be a number above 0$"):
        function(*times)
