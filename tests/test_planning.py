"""Decisions from a study whose every number is known."""

import dataclasses
import json
import math
import warnings

import matplotlib.pyplot as plt
import pytest

from made import BESIDE_S, BLOCKS, DRIFT, LINES, STEP_S, make, make_sweep
from stallbench.compounding import economics, planning, recovery, whatif
from stallbench.compounding import plots as plots_planning
from stallbench.compounding import tables as planned
from stallbench.compounding.assumptions import Assumptions, parse
from stallbench.compounding.models import SaveTime
from stallbench.reporting import claims, judging

DAY_S = 86400.0
ASSUMED = Assumptions()


@pytest.fixture
def study(tmp_path):
    return make(tmp_path)


def mean(value: float) -> float:
    return value * sum(DRIFT**block for block in range(1, BLOCKS + 1)) / BLOCKS


def cost_of(study, target: str, method: str) -> planning.Cost:
    return next(one for one in planning.costs(study) if (one.target, one.method) == (target, method))


def test_a_synchronous_save_costs_its_durable_time_and_an_asynchronous_one_what_it_takes_from_steps(study):
    trainer, beside = cost_of(study, "nas", "trainer"), cost_of(study, "nas", "fast-async")
    assert (trainer.wait, beside.wait) == ("durable", "return")
    assert trainer.stall_s.mean() == pytest.approx(mean(2.0)) == pytest.approx(trainer.durable_s.mean())
    assert beside.stall_s.mean() == pytest.approx(mean(0.02 + 10 * (BESIDE_S - STEP_S)))
    assert beside.durable_s.mean() == pytest.approx(mean(1.52))
    assert trainer.restore_s.mean() == pytest.approx(mean(0.4))


def test_the_best_interval_is_the_recovery_models(study):
    cost = cost_of(study, "nas", "trainer")
    plan = cost.plan(DAY_S)
    assert plan.interval_s == pytest.approx(recovery.optimum_interval_s(mean(2.0), mean(2.0), DAY_S))
    lost = [planning.lost_share(cost, DAY_S, plan.interval_s * factor) for factor in (0.5, 1.0, 2.0)]
    assert min(lost) == lost[1]
    assert math.isnan(planning.lost_share(cost_of(study, "nas", "fast-async"), DAY_S, 0.5))


def test_recovery_windows_are_paired_by_block(study):
    ratio, fast, slow = planning.window_ratio(study, "nas", DAY_S)
    assert ratio.ratio == pytest.approx(fast.mean / slow.mean, rel=1e-3)
    assert ratio.high < 0.52  # sqrt(0.5 / 2) = 0.5 of the interval, and the same restore
    row = claims.claims_table(study).set_index("id").loc["1.8"]
    assert row.verdict == judging.MODELLED and "failures are a model" in row.figure


def test_a_first_target_whose_windows_are_longer_does_not_reproduce_the_claim(tmp_path):
    study = make(tmp_path, slower={"disk": 8.0})
    assert claims.claims_table(study).set_index("id").loc["1.8"].verdict == judging.NOT_REPRODUCED


def test_overhead_and_the_shortest_interval_are_two_sides_of_one_sum(study):
    cost = cost_of(study, "nas", "trainer")
    shortest_s = planning.shortest_interval_s(cost, 0.035)
    assert planning.overhead(cost, shortest_s).mean == pytest.approx(0.035, rel=1e-3)


@pytest.mark.parametrize(
    ("interval_min", "verdict"),
    [(10.0, judging.REPRODUCED), (0.1, judging.NOT_REPRODUCED)],
)
def test_claim_2_5_is_judged_by_the_share_that_saves_take(study, interval_min, verdict):
    study = dataclasses.replace(study, assumed={"interval_min": interval_min})
    row = claims.claims_table(study).set_index("id").loc["2.5"]
    assert row.verdict == verdict and "fast-async on nas" in row.figure


def test_one_block_gives_no_interval_and_decides_nothing(tmp_path):
    study = make(tmp_path, blocks=1)
    table = claims.claims_table(study).set_index("id")
    assert table.loc["1.8"].verdict == table.loc["2.5"].verdict == judging.UNDECIDED
    texts = planned.recovery_table(study, ASSUMED).to_numpy().ravel()
    assert not any(" to " in text for text in texts)
    assert set(planned.recovery_table(study, ASSUMED)["fits a notice of"].to_numpy().ravel()) == {"undecided"}


def test_a_job_that_fails_sooner_than_it_saves_is_not_reckoned_with(study):
    table = planned.recovery_table(study, parse(["mtbf_h=0.0001"]))
    row = table.loc["trainer on nas"]
    assert row.iloc[0].startswith("not said: mtbf_s=0.36 is refused")


def test_the_bill_is_economics_on_the_measured_times(study):
    found = planning.bill(study, "nas", ASSUMED)
    saved = economics.payback(mean(1.5), ASSUMED.schedule, ASSUMED.prices).saved_per_year.mean
    assert found.payback.saved_per_year.mean == pytest.approx(saved)
    assert found.gpu_hour == pytest.approx(economics.break_even_gpu_hour(mean(1.5), ASSUMED.schedule, ASSUMED.prices))
    make_sweep(study)
    lines = [SaveTime(*LINES[target]) for target in ("disk", "nas")]
    size = economics.break_even_bytes(*lines, ASSUMED.schedule, ASSUMED.prices)
    assert planning.bill(study, "nas", ASSUMED).size_bytes == pytest.approx(size, rel=1e-3)
    assert "the line of the size sweep" in planned.money_words(study, ASSUMED)


def test_without_a_sweep_a_line_rests_on_one_size_and_says_so(study):
    line = planning.line_of(study, "nas")
    assert line.fit is None and line.save.latency_s == 0
    assert line.save.bytes_per_s == pytest.approx(1e8 / mean(2.0))
    assert "one size, with its latency taken as 0" in planned.money_words(study, ASSUMED)


@pytest.mark.parametrize("swept", [False, True])
def test_the_heat_map_and_the_tornado_follow_the_line(study, swept):
    if swept:
        make_sweep(study)
    seconds = planning.line_of(study, "nas").save.seconds(1e9)
    grid = planning.waiting(study, "nas", ASSUMED)
    assert grid.loc[10.0, 1e9] == pytest.approx(48 * seconds / 60)
    assert grid.loc[5.0, 1e9] == pytest.approx(2 * grid.loc[10.0, 1e9])
    table = planning.tornado(study, "nas", ASSUMED).set_index("assumption")
    own_s = planning.line_of(study, "nas").save.seconds(1e8)
    assert table.at_base.iloc[0] == pytest.approx(own_s * 48 * 230 * 5 / 3600)
    assert table.loc["interval_min"].at_low == pytest.approx(2 * table.at_base.iloc[0])
    assert ("latency_s" in table.index) == swept


@pytest.mark.parametrize("pair", ["interval_min=480", "interval_min=0.5", "run_h=100", "team=1", "runs_per_day=3"])
def test_the_tornado_takes_any_base(study, pair):
    assert planning.tornado(study, "nas", parse([pair])) is not None


def test_growth_is_judged_on_the_sweep_and_not_tested_without(study):
    assert claims.claims_table(study).set_index("id").loc["1.10"].verdict == judging.NOT_TESTED
    make_sweep(study)
    row = claims.claims_table(study).set_index("id").loc["1.10"]
    assert row.verdict == judging.REPRODUCED and "10 MB" in row.figure and "800 MB" in row.figure


def test_what_is_emulated_is_modelled_by_these_judges_too(tmp_path):
    make(tmp_path)
    request = json.loads((tmp_path / "study.json").read_text())
    for target, device in zip(request["targets"], "ab", strict=True):
        target["storage"]["medium"] = "emulated"
        target["device"] = device
    (tmp_path / "study.json").write_text(json.dumps(request))
    from stallbench.results import load_study

    study = load_study(tmp_path)
    make_sweep(study)
    table = claims.claims_table(study).set_index("id")
    assert set(table.loc[["1.3", "1.8", "1.10", "2.5", "2.7", "2.8"]].verdict) == {judging.MODELLED}


def test_every_figure_is_drawn_with_and_without_a_sweep(study):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for swept in (False, True):
            if swept:
                make_sweep(study)
            for figure in (
                plots_planning.heat_maps(study, ASSUMED),
                plots_planning.tornado(study, "nas", ASSUMED),
                plots_planning.time_lost(study, ASSUMED),
            ):
                figure.canvas.draw()
                assert all(axes.get_xlabel() for axes in figure.axes[-1:])
                plt.close(figure)


def test_the_planning_table_begins_with_the_studys_own_checkpoint(study):
    table = planned.needs_table(study, ASSUMED)
    assert table.index[0] == "this study's own" and table.checkpoint.iloc[0] == "100 MB"
    assert table.loc["Llama 3 8B", "write, beside training"] == "175 MB/s"


def test_memory_is_no_storage_to_judge(study):
    request = json.loads(json.dumps(study.request))
    request["targets"][0]["storage"]["medium"] = "memory"
    table = claims.claims_table(dataclasses.replace(study, request=request)).set_index("id")
    assert (table.loc["1.8"].verdict, table.loc["2.5"].verdict) == (judging.NOT_TESTED,) * 2


def test_one_device_under_two_names_shows_nothing(study):
    request = json.loads(json.dumps(study.request))
    request["targets"][1]["device"] = request["targets"][0]["device"]
    table = claims.claims_table(dataclasses.replace(study, request=request)).set_index("id")
    assert table.loc["1.8"].verdict == judging.NOT_TESTED and "one device" in table.loc["1.8"].figure


def test_a_slider_redraws_the_table_at_once(study):
    box = whatif.sliders(study, Assumptions())
    *controls, shown = box.children
    assert "48 saves" in shown.value and "team of 5" in shown.value
    by_name = {control.description: control for control in controls}
    by_name["team"].value = 12
    by_name["interval, min"].value = 20
    assert "24 saves" in shown.value and "team of 12" in shown.value
    by_name["run, h"].value = 1
    by_name["interval, min"].value = 100  # longer than the run: one save
    assert "1 saves" in shown.value
