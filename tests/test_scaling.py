"""What a sweep says, on lines that are known."""

import pytest

from made import LINES, SWEPT_BYTES, make, make_sweep
from stallbench.compounding import scaling
from stallbench.compounding.models import SaveTime


@pytest.fixture
def study(tmp_path):
    return make(tmp_path)


def saved_s(model: str) -> float:
    disk, nas = (SaveTime(*LINES[target]).seconds(SWEPT_BYTES[model]) for target in ("disk", "nas"))
    return nas - disk


def test_a_study_without_a_sweep_has_none(study):
    assert scaling.load(study) is None


def test_a_sweep_that_was_cut_short_counts_as_none(study):
    make_sweep(study)
    (study.folder / "sizes" / "sweep.json").unlink()
    assert scaling.load(study) is None


def test_the_lines_are_found_again_without_the_warm_up_saves(study):
    make_sweep(study)
    for one in scaling.findings(scaling.load(study)):
        latency_s, bytes_per_s = LINES[one.target]
        assert one.line.latency_s.mean == pytest.approx(latency_s, rel=1e-6)
        assert one.line.bytes_per_s.mean == pytest.approx(bytes_per_s, rel=1e-6)
        assert not one.bend.found and one.held_out.within and abs(scaling.error_of(one.held_out)) < 0.01


def test_a_bend_is_said_with_its_place(study):
    make_sweep(study, bent=True)
    table = scaling.lines_table(scaling.load(study))
    assert table.bend.str.startswith("at 130 MB").all() and table.iloc[:, 3].str.contains("missed").all()
    projected = scaling.projection_table(scaling.load(study))
    assert projected["trainer on nas"].str.startswith("not said: ").all()


def test_the_projection_names_how_far_it_reaches_and_its_interval(study):
    make_sweep(study)
    table = scaling.projection_table(scaling.load(study))
    assert table.loc["Llama 3 8B", "times the largest measured"] == "131"
    assert table.loc["Llama 3 8B", "checkpoint"] == "105 GB"
    assert table.loc["Llama 3 8B", "trainer on nas"].startswith("17.5 min (")


def test_too_few_sizes_are_said_and_not_fitted(study):
    make_sweep(study, models=("bert-tiny", "bert-mini", "bert-small"))
    table = scaling.lines_table(scaling.load(study))
    assert table.latency.str.contains("a line needs at least 4 sizes").all()


def test_four_sizes_give_a_line_and_no_check_of_it(study):
    make_sweep(study, models=("bert-tiny", "bert-mini", "bert-small", "distilbert"))
    table = scaling.lines_table(scaling.load(study))
    assert table.bandwidth.str.contains("MB/s").all() and table.iloc[:, 3].str.contains("takes 5 sizes").all()


def test_what_is_saved_is_compared_between_the_smallest_and_the_largest_size(study):
    make_sweep(study)
    found = scaling.growth(study, scaling.load(study), "nas")
    assert found.saved_small_s.mean == pytest.approx(saved_s("nanogpt-cpu"))
    assert found.more_s.mean == pytest.approx(saved_s("distilbert") - saved_s("nanogpt-cpu"))
    assert found.more_s.low > 0


def test_the_sizes_are_set_beside_the_write_back_limits(study):
    make_sweep(study)
    assert "3 and 1 of the 5 sizes lie above" in scaling.dirty_words(scaling.load(study))
