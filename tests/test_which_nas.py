"""The map of NASes: its line, its answer and its words, on rows whose truth is known; and the sweep on real labs."""

import json
import math
import shutil

import pandas as pd
import pytest

from stallbench.config import ROOT
from stallbench.lab import building as lab
from stallbench.lab import sweep as lab_sweep
from stallbench.lab.profile import PROFILES
from stallbench.reporting import plots, present, which_nas
from stallbench.results import LAB_SWEEP, load_study

SIZE_BYTES = 200e6


def rows(disk_s: float, own_s: float = 0.1, factor: float = 1.0, noise: tuple[float, ...] = (1, 1.01, 0.99)):
    """Each save takes its own work and what its bytes take; rounds differ by a factor that all places share."""
    found = []
    for number, level in enumerate(noise):
        found += [
            {"round": number, "place": "disk", "durable_s": disk_s * level},
            {"round": number, "place": "chain", "durable_s": 0.2 * level},
        ]
        for rate, memory in ((50e6, False), (100e6, False), (200e6, False), (1000e6, True)):
            durable_s = (own_s + factor * SIZE_BYTES / rate) * level
            found.append(
                {
                    "round": number, "place": "nas", "link": "10 GbE", "array_bytes_per_s": min(rate, 200e6),
                    "memory": memory, "rate_bytes_per_s": rate, "durable_s": durable_s,
                }
            )  # fmt: skip
    return pd.DataFrame(found)


def test_the_line_finds_what_made_the_times():
    a, b = which_nas.line(rows(0.3, own_s=0.2, factor=1.1, noise=(1,)), SIZE_BYTES)
    assert (a, b) == (pytest.approx(0.2), pytest.approx(1.1))


@pytest.mark.parametrize(("rate", "extrapolated"), [(80e6, False), (400e6, True)])
def test_the_rate_for_the_claim_is_where_the_disk_takes_a_quarter_less(rate, extrapolated):
    disk_s = 0.75 * (0.1 + SIZE_BYTES / rate)
    answer = which_nas.rate_for_claim(rows(disk_s), SIZE_BYTES)
    assert answer.rate.mean == pytest.approx(rate, rel=1e-6)
    assert answer.rate.low <= rate * 1.000001 and rate * 0.999999 <= answer.rate.high
    assert answer.extrapolated == extrapolated


def test_no_rate_is_named_where_the_saves_own_work_takes_too_long():
    answer = which_nas.rate_for_claim(rows(0.07, own_s=0.1), SIZE_BYTES)
    assert math.isnan(answer.rate.mean) and answer.extrapolated


def test_two_rates_make_no_line():
    few = rows(0.3)
    with pytest.raises(ValueError, match="three rates"):
        which_nas.line(few[few.rate_bytes_per_s != 50e6], SIZE_BYTES)


def test_a_nas_that_the_chain_bounds_is_marked():
    found = which_nas.swept(rows(0.3))
    assert [one.at_ceiling for one in found] == [False, False, False, True]
    assert found[0].saved.time_saved == pytest.approx(1 - 0.3 / 4.1, rel=1e-6)


@pytest.mark.parametrize(
    ("rate", "words"),
    [(50e6, "1 GbE with one 7200 rpm drive"), (800e6, "10 GbE with 4 striped"), (1e12, "faster than 400 GbE")],
)
def test_a_nas_is_named_by_its_link_and_drives(rate, words):
    assert words in which_nas.which(rate)


@pytest.fixture
def study(tmp_path):
    shutil.copytree(ROOT / "results" / "reference", tmp_path / "study")
    (tmp_path / "study" / LAB_SWEEP).unlink(missing_ok=True)
    return load_study(tmp_path / "study")


def keep(study, table: pd.DataFrame) -> None:
    kept = {"size_bytes": SIZE_BYTES, "rows": json.loads(table.to_json(orient="records"))}
    (study.folder / LAB_SWEEP).write_text(json.dumps(kept))


def test_a_study_without_a_sweep_says_how_to_make_one(study):
    assert "stallbench lab sweep" in present.nas_html(study)
    assert which_nas.words(study) == "" and plots.saved_over_rate(study) is None


def test_the_page_names_the_nas_and_the_nearest_emulated_one(study):
    keep(study, rows(0.75 * (0.1 + SIZE_BYTES / 80e6)))
    words = which_nas.words(study)
    assert "than a NAS of 80.00 MB/s" in words and "within the 50 to 200 MB/s" in words
    assert "an array of 100 MB/s" in words
    assert present.nas_html(study).count("<tr>") == 4
    assert plots.saved_over_rate(study) is not None
    keep(study, rows(0.07))
    assert "No array's rate can be named" in which_nas.words(study) and "a real NAS" in which_nas.words(study)


def test_a_lab_that_fell_short_of_its_stated_rate_is_named_on_the_page(study):
    raw = study.spans[study.spans.kind.isin(("raw_write", "raw_read")) & (study.spans.target == "hdd-nas-1gbe")]
    spans = study.spans.assign()
    spans.loc[raw.index, "duration_s"] = raw.size_bytes / 60e6
    study.__dict__["spans"] = spans
    found = [text for text in present.warnings(study) if text.startswith("hdd-nas-1gbe reached ")]
    assert found and "reached 60 of the 118 MB/s" in found[0]
    spans.loc[raw.index, "duration_s"] = raw.size_bytes / 110e6
    assert not [text for text in present.warnings(study) if text.startswith("hdd-nas-1gbe reached ")]


@pytest.mark.skipif(bool(lab.missing()), reason=f"skipped: {lab.missing()}")
@pytest.mark.xdist_group("lab")
def test_a_sweep_visits_the_disk_the_chain_and_every_nas(tmp_path, monkeypatch):
    points = (lab_sweep.Point("1 GbE", 100e6, False), lab_sweep.Point("1 GbE", 50e6, True))
    monkeypatch.setattr(lab_sweep, "POINTS", points)
    monkeypatch.setattr(lab, "check_ceiling", lambda profile: None)  # other tests run beside this one
    (tmp_path / "foreign").write_text("mine")
    found = lab_sweep.measure(tmp_path, 1, told=lambda line: None)
    by_place = {(row["place"], row.get("memory")): row for row in found["rows"]}
    assert by_place.keys() == {("disk", None), ("chain", None), ("nas", False), ("nas", True)}
    for memory in (False, True):  # the emulation takes no less than its stated rate
        row = by_place["nas", memory]
        assert row["durable_s"] > found["size_bytes"] / row["rate_bytes_per_s"]
    assert by_place["nas", True]["rate_bytes_per_s"] == PROFILES["hdd-nas-1gbe"].link_bytes_per_s
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]
