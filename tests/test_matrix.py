"""The matrix, its floors and what saves take from steps, on a study whose every number is known."""

import math
import re
from dataclasses import asdict, replace

import pandas as pd
import pytest

from made import BESIDE_S, BLOCKS, DRIFT, MEMORY_S, STEP_S, make
from stallbench.config import ConfigError
from stallbench.reporting import analysis, matrix, present, proofs, tables, trust, verdicts
from stallbench.results import SCHEMA_VERSION, load_study, slowest_rank, trial_id
from stallbench.spans import Span


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


def mean(value: float) -> float:
    return value * sum(DRIFT**block for block in range(1, BLOCKS + 1)) / BLOCKS


def test_stall_and_durable_are_told_apart_in_every_cell(study):
    stalls, durable = (matrix.cells(study, measure, "return") for measure in ("stall_s", "durable_s"))
    assert stalls["trainer", "nas"].mean == pytest.approx(mean(1.6))
    assert stalls["fast-async", "nas"].mean == pytest.approx(mean(0.02))
    assert durable["trainer", "nas"].mean == pytest.approx(mean(2.0))
    assert durable["fast-async", "disk"].mean == pytest.approx(mean(0.2))
    assert set(matrix.cells(study, "stall_s", "durable")) == {("trainer", "disk"), ("trainer", "nas")}


def test_what_storage_software_and_both_give_back_is_what_the_numbers_say(study):
    found = matrix.given_back(study, "nas", "return")
    assert (found.today, found.better) == ("trainer", "fast-async")
    assert found.storage.ratio.time_saved == pytest.approx(1 - 0.4 / 1.6)
    assert found.software.ratio.time_saved == pytest.approx(1 - 0.02 / 1.6)
    assert found.both.ratio.time_saved == pytest.approx(1 - 0.02 / 1.6)
    durable = matrix.given_back(study, "nas", "durable")
    assert durable.software is None and durable.storage.ratio.time_saved == pytest.approx(0.75)
    words = present.given_back_words(study, "nas")
    assert "Faster storage, the same save on disk: " in words
    assert "A better save on the same storage (fast-async on nas): " in words
    assert "On nas as it is, a save by fast-async holds training up for" in verdicts.headline(study)


def test_the_better_save_is_not_chosen_by_its_figures(study):
    assert all(matrix.BETTER["return"].index(name) >= 0 for name in ("fast-async", "dcp-async", "staged"))
    assert set(matrix.BETTER["durable"]) == {"fast", "safetensors", "torch", "dcp"}


def test_no_storage_saves_more_than_what_isnt_memory(study):
    floors = {(floor.method, floor.target): floor for floor in matrix.floors(study)}
    assert set(floors) == {("trainer", "disk"), ("trainer", "nas")}
    assert floors["trainer", "disk"].at_most.time_saved == pytest.approx(1 - MEMORY_S / 0.5)
    assert floors["trainer", "nas"].at_most.time_saved == pytest.approx(1 - MEMORY_S / 2.0)


def test_a_stall_that_only_moved_is_counted(study):
    found = {one.target: one for one in matrix.beside_saves(study)}
    nas = found["nas"]
    assert nas.steps.ratio == pytest.approx(BESIDE_S / STEP_S)
    assert nas.background_s == pytest.approx(mean(1.5))
    # A background of 1.5 s holds the ten steps up to the next save, each 0.02 s longer.
    assert nas.moved_s.mean == pytest.approx(mean(10 * (BESIDE_S - STEP_S)))
    assert nas.mock_steps.ratio == pytest.approx(1)
    assert "and takes 0.20" in present.given_back_words(study, "nas")
    assert found["disk"].moved_s.mean == pytest.approx(mean(0.02))


def test_the_phases_of_a_mean_save_add_up_to_its_durable_time(study):
    phases = matrix.phase_means(study, "return")
    sums = phases.groupby(["target", "method"]).mean_s.sum()
    assert sums["nas", "fast-async"] == pytest.approx(mean(1.52))
    assert sums["disk", "trainer"] == pytest.approx(mean(0.5))


def test_a_save_whose_last_phase_never_came_is_not_durable(study):
    other = load_study(study.folder)
    spans = other.spans.copy()
    cut = (spans.kind == "commit") & (spans.target == "nas") & (spans.block == 1)
    spans.loc[cut, ["end_s", "duration_s"]] = math.nan
    spans = spans[
        ~((spans.kind == "sync") & (spans.method == "trainer") & (spans.target == "disk") & (spans.block == 1))
    ]
    object.__setattr__(other, "spans", spans)
    events = other.events.set_index(["target", "method", "wait", "block"]).sort_index()
    assert events.durable_s["nas", "fast-async", "return", 1].isna().all()
    assert events.durable_s["disk", "trainer", "return", 1].isna().all()
    assert events.durable_s.isna().sum() == 2 * 3  # two saves each of three trials


def test_trials_of_one_seed_must_reach_the_same_losses(study):
    assert trust.determinism(study) == (BLOCKS, BLOCKS)
    other = load_study(study.folder)
    name = trial_id(2, 1, "nas", "trainer", "return")
    other.details[name] = other.details[name] | {"losses": [0.5, 0.1250001]}
    assert trust.determinism(other) == (BLOCKS, BLOCKS - 1)
    assert "only 2 of them" in proofs.determinism_words(other)


def test_noise_larger_than_the_effect_is_said_with_its_number_and_remedy(study):
    assert trust.hidden_by_noise(study) == []
    noisy = load_study(study.folder)
    spans = noisy.spans.copy()
    slower = (spans.target == "disk") & (spans.block == 2) & spans.kind.isin(["write", "sync"])
    spans.loc[slower, "end_s"] += 20
    object.__setattr__(noisy, "spans", spans)
    [hidden] = trust.hidden_by_noise(noisy)
    assert "no difference is shown" in hidden.words and f"--blocks {hidden.blocks_needed}" in hidden.words
    assert hidden.blocks_needed > BLOCKS
    assert hidden.words in list(present.warnings(noisy))


def test_the_tables_of_the_page_hold_the_same_numbers(study):
    table = tables.matrix_table(study, "return")
    assert list(table.index) == ["trainer", "fast-async"] and table.shape == (2, 6)
    assert table.loc["fast-async", ("nas", "stall")].startswith("20.")
    durable = tables.matrix_table(study, "durable")
    assert list(durable.index) == ["trainer"] and ("nas", "stall") not in durable.columns
    assert "90" in tables.floors_table(study).loc["trainer on disk", "storage saves at most"]
    assert tables.beside_table(study).loc["fast-async on nas", "moved to real steps"].startswith("0.20")
    share = analysis.share_of_limit(study)
    assert share.raw_write_bytes_per_s["disk"] == pytest.approx(2e9)
    assert share.share["disk"] == pytest.approx(100e6 / mean(0.5) / 2e9)


def test_the_slowest_rank_counts_step_by_step():
    def rank(*rows: tuple) -> pd.DataFrame:
        return pd.DataFrame([asdict(Span(number, *row)) for number, row in enumerate(rows)])

    first = rank(("step", 0, 1, "", 1), ("save", 1, 2, "", 1), ("sync", 2, 9, "", 1, 0, 0, 1), ("step", 9, 10, "", 2))
    second = rank(("step", 0, 3, "", 1), ("save", 3, 5, "", 1), ("sync", 5, 6, "", 1, 0, 0, 1), ("step", 9, 9.5, "", 2))
    joined = slowest_rank([first, second])
    lengths = {(row.kind, row.step): row.end_s - row.start_s for row in joined.itertuples()}
    assert lengths == {("step", 1): 3, ("save", 1): 1, ("sync", 1): 7, ("step", 2): 1}
    [sync], [saved] = (joined[joined.kind == kind].itertuples() for kind in ("sync", "save"))
    assert sync.parent == saved.id and joined.id.is_unique
    assert slowest_rank([first]) is first


def test_a_study_of_another_schema_is_refused(study, tmp_path):
    import shutil

    copy = tmp_path / "old"
    shutil.copytree(study.folder, copy)
    text = (copy / "study.json").read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 1')
    (copy / "study.json").write_text(text)
    with pytest.raises(ConfigError, match="has schema 1, this version reads 2; render it with the version that wrote"):
        load_study(copy)


def test_a_first_target_that_is_slower_is_said_to_take_more(study):
    turned = replace(study, request=study.request | {"targets": study.request["targets"][::-1]})
    words = verdicts.headline(turned)
    assert "300.0000) more time. " in words and "300.0000) more. 48 saves in 8 hours would take " in words
    assert not re.search(r"-\d", words.replace("fast-", ""))
