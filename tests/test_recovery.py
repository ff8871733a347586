"""The renewal model against a job simulated event by event, and against formulas published by others."""

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
import simpy
from scipy import stats
from scipy.special import lambertw

from stallbench.compounding import recovery
from stallbench.compounding.recovery import Plan
from stallbench.reporting.stats import Interval

CHECKPOINTS = 4000
# Synchronous, asynchronous, durable just before the next save, a stall that outlasts durable, costly restores, no
# restore, no stall, failures that are rare and failures that hit most intervals.
PLANS = [
    Plan(interval_s=600, stall_s=30, durable_s=30, restore_s=60, mtbf_s=3600),
    Plan(interval_s=600, stall_s=30, durable_s=30, restore_s=60, mtbf_s=100_000),
    Plan(interval_s=600, stall_s=2, durable_s=400, restore_s=60, mtbf_s=3600),
    Plan(interval_s=600, stall_s=2, durable_s=602, restore_s=120, mtbf_s=1500),
    Plan(interval_s=300, stall_s=40, durable_s=25, restore_s=30, mtbf_s=900),
    Plan(interval_s=120, stall_s=0, durable_s=90, restore_s=0, mtbf_s=600),
    Plan(interval_s=60, stall_s=20, durable_s=30, restore_s=300, mtbf_s=400),
    Plan(interval_s=2000, stall_s=100, durable_s=900, restore_s=10, mtbf_s=1500),
]


def simulate(plan: Plan, seed: int) -> pd.DataFrame:
    """Run a job until so many checkpoints are durable; one row each, with what came since the last one.

    Columns ``wall_s``, ``failures``, ``lost_s``. It knows nothing of the formulas: a worker, writers beside it and a
    source of failures, each with a clock.
    """
    rng, env = np.random.default_rng(seed), simpy.Environment()
    rows, finished = [], env.event()
    state = {"kept_s": 0.0, "epoch": 0, "durable_at_s": 0.0, "failures": 0, "lost_s": 0.0}

    def writer(snapshot_s: float, epoch: int) -> Iterator[simpy.Event]:
        yield env.timeout(plan.durable_s)
        if epoch != state["epoch"]:  # a failure took the write with it
            return
        rows.append((env.now - state["durable_at_s"], state["failures"], state["lost_s"]))
        state.update(kept_s=snapshot_s, durable_at_s=env.now, failures=0, lost_s=0.0)
        if len(rows) > CHECKPOINTS and not finished.triggered:
            finished.succeed()

    def worker() -> Iterator[simpy.Event]:
        restoring, done_s, began_s = False, 0.0, None
        while True:
            try:
                if restoring:
                    yield env.timeout(plan.restore_s)
                    restoring = False
                while True:
                    began_s = env.now
                    yield env.timeout(plan.interval_s)
                    done_s, began_s = done_s + plan.interval_s, None
                    env.process(writer(done_s, state["epoch"]))
                    yield env.timeout(plan.stall_s)
            except simpy.Interrupt:
                done_s += 0.0 if began_s is None else env.now - began_s
                state["failures"] += 1
                state["lost_s"] += done_s - state["kept_s"]
                state["epoch"] += 1
                restoring, done_s, began_s = True, state["kept_s"], None

    def failures(job: simpy.Process) -> Iterator[simpy.Event]:
        while True:
            yield env.timeout(rng.exponential(plan.mtbf_s))
            job.interrupt()

    env.process(failures(env.process(worker())))
    env.run(until=finished)
    return pd.DataFrame(rows[1:], columns=["wall_s", "failures", "lost_s"])  # the first has none before it


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"M{plan.mtbf_s:g}-t{plan.interval_s:g}-d{plan.durable_s:g}")
def test_the_model_agrees_with_a_simulated_job(plan):
    runs = simulate(plan, seed=20261203)
    found = recovery.outcome(plan)
    low, high = stats.t.interval(0.99, len(runs) - 1, runs.wall_s.mean(), stats.sem(runs.wall_s))
    assert low <= found.wall_s <= high
    assert plan.interval_s / high <= found.goodput <= plan.interval_s / low
    # Lost work by failures is a ratio of two sums over renewals: its interval by linearisation.
    ratio = runs.lost_s.sum() / runs.failures.sum()
    half = 2.576 * stats.sem(runs.lost_s - ratio * runs.failures) / runs.failures.mean()
    assert abs(found.lost_work_s - ratio) <= half
    expected_failures = found.wall_s * found.failures_per_day / 86400
    low, high = stats.t.interval(0.99, len(runs) - 1, runs.failures.mean(), stats.sem(runs.failures))
    assert low <= expected_failures <= high


def test_the_interval_of_the_simulation_is_narrow_enough_to_tell_a_wrong_model():
    """Forgetting that an asynchronous save protects late, or failures in restores, must show."""
    plan = PLANS[2]
    runs = simulate(plan, seed=20261203)
    low, high = stats.t.interval(0.99, len(runs) - 1, runs.wall_s.mean(), stats.sem(runs.wall_s))
    forgotten = recovery.outcome(Plan(plan.interval_s, plan.stall_s, plan.stall_s, plan.restore_s, plan.mtbf_s))
    assert not low <= forgotten.wall_s <= high


def test_a_synchronous_save_gives_dalys_wall_time():
    plan = PLANS[0]
    expected = 3600 * math.exp(60 / 3600) * (math.exp(630 / 3600) - 1)
    assert recovery.outcome(plan).wall_s == pytest.approx(expected)


def test_without_failures_to_speak_of_the_stall_is_the_only_overhead():
    found = recovery.outcome(Plan(interval_s=600, stall_s=30, durable_s=200, restore_s=60, mtbf_s=1e12))
    assert found.overhead == pytest.approx(30 / 600, rel=1e-6)
    # A failure comes at any moment of a cycle alike: in the stall, beside the write, after it.
    by_hand_s = (30 * 600 + 170 * (600 + 770) / 2 + 430 * (170 + 600) / 2) / 630
    assert found.lost_work_s == pytest.approx(by_hand_s, rel=1e-6)
    assert found.worst_lost_work_s == 600 + 170
    assert found.recovery_window_s == found.lost_work_s + 60


@pytest.mark.parametrize("stall_s", [0.02, 1, 30, 600, 3000])
@pytest.mark.parametrize("mtbf_s", [3600, 11_140, 1e6])
def test_the_optimum_is_lambert_ws_and_no_other_interval_is_better(stall_s, mtbf_s):
    best_s = recovery.optimum_interval_s(stall_s, stall_s, mtbf_s)
    closed_form_s = mtbf_s * (1 + lambertw(-math.exp(-1 - stall_s / mtbf_s)).real)
    assert best_s == pytest.approx(closed_form_s, rel=1e-4)  # lambertw has few digits near its branch point
    plan = Plan(best_s, stall_s, stall_s, 60, mtbf_s)
    others = recovery.interval_table(plan, best_s * np.geomspace(0.3, 3, 61))
    assert others.goodput.max() <= recovery.outcome(plan).goodput * (1 + 1e-12)


def test_approximations_are_near_where_saves_are_short_and_daly_is_nearer():
    exact_s = recovery.optimum_interval_s(30, 30, 36_000)
    assert recovery.young_interval_s(30, 36_000) == pytest.approx(math.sqrt(2 * 30 * 36_000))
    assert recovery.daly_interval_s(30, 36_000) == pytest.approx(exact_s, rel=1e-4)
    assert abs(recovery.daly_interval_s(30, 36_000) - exact_s) < abs(recovery.young_interval_s(30, 36_000) - exact_s)


def test_no_interval_is_shorter_than_what_the_durable_time_allows():
    assert recovery.optimum_interval_s(0.01, 500, 36_000) == pytest.approx(499.99)
    table = recovery.optimum_table(Plan(900, 0.01, 500, 60, 36_000))
    assert list(table.index) == ["plan", "exact optimum", "Daly 2006", "Young 1974"]
    assert (table.interval_s >= 499.98).all()
    assert table.goodput.idxmax() != "plan"


def test_a_faster_save_allows_more_frequent_checkpoints_and_a_smaller_window():
    """Claim 1.8, as the model has it."""
    slow, fast = (recovery.optimum_table(Plan(600, s, s, 60, 11_140)).loc["exact optimum"] for s in (40.0, 30.0))
    assert fast.interval_s < slow.interval_s
    assert fast.recovery_window_s < slow.recovery_window_s
    assert fast.goodput > slow.goodput


def test_a_run_is_its_first_checkpoint_and_the_others():
    plan = PLANS[2]
    wall_s = recovery.outcome(plan).wall_s
    first_s = recovery.expected_run_s(plan, 1)
    # Work and save until it succeeds, with a restore before every try but the first.
    by_hand_s = 3600 * (1 - math.exp(-1000 / 3600)) * math.exp(1060 / 3600)
    assert first_s == pytest.approx(by_hand_s)
    assert recovery.expected_run_s(plan, 48) == pytest.approx(first_s + 47 * wall_s)


def test_llama_3_failed_as_often_as_its_accelerators_say():
    expected_s = 54 * 86400 / 419
    assert recovery.job_mtbf_s(16_384) == pytest.approx(expected_s, rel=0.02)
    per_accelerator_h = 54 * 24 * 16_384 / 419
    assert recovery.job_mtbf_s(16_384, per_accelerator_h) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("durable_s", "notice_s", "fits"),
    [
        (30.0, 30, "yes"),
        (30.1, 30, "no"),
        (Interval(20, 15, 25, 5), 30, "yes"),
        (Interval(29, 25, 33, 5), 30, "undecided"),
        (Interval(40, 31, 49, 5), 30, "no"),
        (Interval(40, 31, 49, 5), 120, "yes"),
        (Interval(20, math.nan, math.nan, 1), 30, "undecided"),
    ],
)
def test_whether_a_save_fits_a_notice(durable_s, notice_s, fits):
    assert recovery.fits_notice(durable_s, notice_s) == fits


GOOD = {"interval_s": 600, "stall_s": 30, "durable_s": 40, "restore_s": 60, "mtbf_s": 3600}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"interval_s": 0}, "interval_s=0 is refused: it must be a number above 0"),
        ({"stall_s": -1}, "stall_s=-1 is refused: it must be a number from 0 on"),
        ({"durable_s": math.nan}, "durable_s=nan is refused: it must be a number above 0"),
        ({"restore_s": math.inf}, "restore_s=inf is refused: it must be a number from 0 on"),
        ({"mtbf_s": -5}, "mtbf_s=-5 is refused: it must be a number above 0"),
        ({"mtbf_s": 35}, "mtbf_s=35 is refused: the job fails sooner than a save lasts (40 s)"),
        ({"durable_s": 640}, "durable_s=640 is refused: the next save would begin before this one is durable"),
        ({"interval_s": 200_000}, "interval_s=200000 is refused: at mtbf_s=3600 practically no checkpoint would ever"),
        ({"restore_s": 200_000}, "restore_s=200000 is refused: no restore ends at mtbf_s=3600"),
    ],
)
def test_a_plan_is_refused_by_name(values, message):
    with pytest.raises(ValueError) as error:
        Plan(**(GOOD | values))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: recovery.optimum_interval_s(0, 10, 100), "stall_s=0 is refused"),
        (lambda: recovery.optimum_interval_s(1, 1000, 100), "mtbf_s=100 is refused: the job fails sooner"),
        (lambda: recovery.young_interval_s(10, math.nan), "mtbf_s=nan is refused"),
        (lambda: recovery.daly_interval_s(200, 100), "mtbf_s=100 is refused: the job fails sooner"),
        (lambda: recovery.job_mtbf_s(0), "accelerators=0 is refused: it must be a whole number from 1 on"),
        (lambda: recovery.job_mtbf_s(8, -1), "accelerator_mttf_h=-1 is refused"),
        (lambda: recovery.expected_run_s(PLANS[0], 0), "saves=0 is refused"),
        (lambda: recovery.fits_notice(-1.0, 30), "durable_s=-1 is refused"),
        (lambda: recovery.fits_notice(10.0, 0), "notice_s=0 is refused"),
        (lambda: recovery.interval_table(PLANS[0], [math.nan]), "interval_s=nan is refused"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message)
