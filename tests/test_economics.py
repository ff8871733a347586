"""Money: against numbers worked out by hand, and break-evens against the payback that they must give."""

import math
from dataclasses import replace

import pytest

from stallbench.compounding import economics
from stallbench.compounding.economics import CHECKPOINT_BYTES, Prices
from stallbench.compounding.models import SaveTime, Schedule, compounding
from stallbench.reporting.stats import Interval

PRICES = Prices(gpu_hour=2, gpus=4, extra_price=3000, extra_per_month=20, horizon_months=36)
SCHEDULE = Schedule()  # 48 saves a run, 230 days, a team of 5: 55,200 saves a year


def test_an_hour_of_waiting_costs_its_accelerators():
    assert economics.idle_cost(3600.0, PRICES).mean == pytest.approx(8)
    cost = economics.idle_cost(Interval(7200, 3600, 10_800, 5), PRICES)
    assert (cost.mean, cost.low, cost.high, cost.blocks) == (pytest.approx(16), pytest.approx(8), pytest.approx(24), 5)


def test_the_articles_ten_seconds_in_money():
    year = compounding(10.0, SCHEDULE).set_index("scope").wait_s["team-year"]
    assert economics.saves_per_year(SCHEDULE) == 55_200
    assert economics.idle_cost(year, PRICES).mean == pytest.approx(55_200 * 10 / 3600 * 8)


def test_payback_by_hand():
    found = economics.payback(Interval(10, 5, 15, 5), SCHEDULE, PRICES)
    per_year = 55_200 * 10 / 3600 * 8
    assert found.saved_per_year.mean == pytest.approx(per_year)
    assert found.months.mean == pytest.approx(3000 / (per_year / 12 - 20))
    assert found.months.low == pytest.approx(3000 / (per_year * 1.5 / 12 - 20))
    assert found.months.high == pytest.approx(3000 / (per_year * 0.5 / 12 - 20))
    assert found.verdict == "undecided"


@pytest.mark.parametrize(
    ("saved_s", "verdict"),
    [
        (Interval(60, 50, 70, 5), "pays"),
        (Interval(0.1, 0.05, 0.2, 5), "does not pay"),
        (Interval(-3, -4, -2, 5), "does not pay"),
        (Interval(10, -5, 60, 5), "undecided"),
        (60.0, "undecided"),
        (Interval(60, math.nan, math.nan, 1), "undecided"),
    ],
)
def test_the_verdict_needs_the_whole_interval(saved_s, verdict):
    assert economics.payback(saved_s, SCHEDULE, PRICES).verdict == verdict


def test_what_never_pays_takes_for_ever():
    assert economics.payback(-1.0, SCHEDULE, PRICES).months.mean == math.inf
    assert economics.break_even_gpu_hour(-1.0, SCHEDULE, PRICES) == math.inf
    assert economics.break_even_interval_min(0.0, SCHEDULE, PRICES) == 0


def test_at_the_break_even_price_it_pays_exactly_at_the_horizon():
    price = economics.break_even_gpu_hour(10, SCHEDULE, PRICES)
    found = economics.payback(10.0, SCHEDULE, replace(PRICES, gpu_hour=price))
    assert found.months.mean == pytest.approx(PRICES.horizon_months)


def test_at_the_break_even_interval_it_still_pays_and_one_save_fewer_does_not():
    interval_min = economics.break_even_interval_min(1.0, SCHEDULE, PRICES)
    at = replace(SCHEDULE, interval_min=interval_min)
    beyond = replace(SCHEDULE, interval_min=at.run_h * 60 / (at.saves - 1))
    assert at.saves > 2
    assert economics.payback(1.0, at, PRICES).months.mean <= PRICES.horizon_months
    assert economics.payback(1.0, beyond, PRICES).months.mean > PRICES.horizon_months
    assert economics.break_even_interval_min(1e6, SCHEDULE, PRICES) == SCHEDULE.run_h * 60


def test_at_the_break_even_size_it_pays_exactly_at_the_horizon():
    fast, slow = SaveTime(0.01, 2e9), SaveTime(0.05, 1e8)
    size_bytes = economics.break_even_bytes(fast, slow, SCHEDULE, PRICES)
    saved_s = slow.seconds(size_bytes) - fast.seconds(size_bytes)
    assert economics.payback(saved_s, SCHEDULE, PRICES).months.mean == pytest.approx(PRICES.horizon_months)
    assert economics.break_even_bytes(fast, SaveTime(1000, 1e8), SCHEDULE, PRICES) == 0
    assert economics.break_even_bytes(fast, SaveTime(0.01, 2e9), SCHEDULE, PRICES) == math.inf


def test_the_plan_for_growth_by_hand():
    table = economics.planning_table(CHECKPOINT_BYTES | {"this study's": 273e6}, 600, 300, stall_share=0.04, kept=3)
    row = table.loc["Llama 3 405B"]
    assert row.stall_s == pytest.approx(25)  # 25 s of every 625
    assert row.sync_bytes_per_s == pytest.approx(5.29e12 / 25)
    assert row.async_bytes_per_s == pytest.approx(5.29e12 / 600)
    assert row.restore_bytes_per_s == pytest.approx(5.29e12 / 300)
    assert row.capacity_bytes == pytest.approx(4 * 5.29e12)
    assert list(table.index) == ["Llama 3 8B", "Llama 3 70B", "Llama 3 405B", "1T", "this study's"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu_hour": 0}, "gpu_hour=0 is refused: it must be a number above 0"),
        ({"gpu_hour": math.nan}, "gpu_hour=nan is refused"),
        ({"gpus": 0}, "gpus=0 is refused: it must be a whole number from 1 on"),
        ({"gpus": 1.5}, "gpus=1.5 is refused"),
        ({"extra_price": -1}, "extra_price=-1 is refused: it must be a number from 0 on"),
        ({"extra_per_month": math.inf}, "extra_per_month=inf is refused"),
        ({"horizon_months": 0}, "horizon_months=0 is refused"),
        ({"extra_price": 0, "extra_per_month": 0}, "extra_price=0 is refused: extra_per_month is 0 too"),
    ],
)
def test_prices_are_refused_by_name(values, message):
    with pytest.raises(ValueError) as error:
        Prices(**values)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: economics.idle_cost(math.nan, PRICES), "wait_s=nan is refused"),
        (lambda: economics.payback(math.inf, SCHEDULE, PRICES), "saved_s=inf is refused"),
        (lambda: economics.break_even_gpu_hour(math.nan, SCHEDULE, PRICES), "saved_s=nan is refused"),
        (lambda: economics.break_even_interval_min(math.nan, SCHEDULE, PRICES), "saved_s=nan is refused"),
        (
            lambda: economics.break_even_bytes(SaveTime(0, 1e8), SaveTime(1, 2e8), SCHEDULE, PRICES),
            "fast=1e+08 bytes/s is refused: it has less bandwidth",
        ),
        (lambda: economics.planning_table({}, 600, 300), "size_bytes={} is refused"),
        (lambda: economics.planning_table({"x": -1}, 600, 300), "size_bytes['x']=-1 is refused"),
        (lambda: economics.planning_table({"x": 1}, 0, 300), "interval_s=0 is refused"),
        (lambda: economics.planning_table({"x": 1}, 600, math.nan), "restore_s=nan is refused"),
        (lambda: economics.planning_table({"x": 1}, 600, 300, stall_share=1), "stall_share=1 is refused"),
        (lambda: economics.planning_table({"x": 1}, 600, 300, kept=0), "kept=0 is refused"),
        (lambda: SaveTime(-1, 1e8), "latency_s=-1 is refused"),
        (lambda: SaveTime(0, 0), "bytes_per_s=0 is refused"),
        (lambda: SaveTime(0, 1e8).seconds(0), "size_bytes=0 is refused"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message)
