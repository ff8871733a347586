"""A study's figures in short, for people and for machines, on a study whose every number is known."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from made import BLOCKS, DRIFT, make
from stallbench.commands.main import app
from stallbench.reporting import claims, digest, verdicts
from stallbench.results import load_study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


def mean(value: float) -> float:
    return value * sum(DRIFT**block for block in range(1, BLOCKS + 1)) / BLOCKS


def asked(folder, form: str):
    return CliRunner().invoke(app, ["report", str(folder), "--format", form])


def test_the_figures_for_machines_are_those_of_the_spans(study):
    found = json.loads(asked(study.folder, "json").stdout)
    cell = next(one for one in found["conditions"] if (one["target"], one["method"]) == ("nas", "fast-async"))
    assert cell["stall_s"]["mean"] == pytest.approx(mean(0.02)) and cell["stall_s"]["blocks"] == BLOCKS
    assert cell["durable_s"]["mean"] == pytest.approx(mean(1.52))
    assert cell["restore_s"]["mean"] == pytest.approx(mean(0.4))
    durable = next(one for one in found["comparisons"] if one["measure"] == "durable_s")
    assert durable["time_saved"] == pytest.approx(0.75) and durable["against"] == "nas"
    assert {one["id"] for one in found["claims"]} == {claim.id for claim in claims.CLAIMS}
    assert found["trials"] == {"complete": len(study.trials)} and found["digest_version"] == digest.DIGEST_VERSION


def test_what_isnt_known_is_null_and_never_a_word_that_json_lacks(tmp_path):
    make(tmp_path, blocks=1)
    text = asked(tmp_path, "json").stdout
    assert "NaN" not in text and "Infinity" not in text
    cell = json.loads(text)["conditions"][0]
    assert cell["durable_s"]["low"] is None and cell["durable_s"]["mean"] > 0


def test_the_figures_for_people_hold_headline_cells_and_verdicts(study):
    text = asked(study.folder, "md").stdout
    assert verdicts.headline(study) in text
    row = next(line for line in text.splitlines() if line.startswith("| nas") and "fast-async" in line)
    assert row.count("|") == 8 and "20.4 ms" in row and "1.5" in row
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {8, 5}


def test_a_bar_in_a_name_breaks_no_table(tmp_path):
    make(tmp_path)
    request = json.loads((tmp_path / "study.json").read_text())
    request["targets"][1]["name"] = "n|as"
    (tmp_path / "study.json").write_text(json.dumps(request))
    for path in (tmp_path / "trials").glob("*--nas"):
        path.rename(path.with_name(path.name.replace("nas", "n|as")))
    rows = [line.replace(r"\|", "") for line in asked(tmp_path, "md").stdout.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {8, 5} and any(row.startswith("| nas ") for row in rows)


def test_what_cannot_be_shown_is_refused_in_one_line(study, tmp_path):
    unknown = asked(study.folder, "pdf")
    assert unknown.exit_code == 2 and "format='pdf' is unknown; choose one of: html, md, json" in unknown.stderr
    shutil.copytree(study.folder, tmp_path / "failed")
    for path in (tmp_path / "failed" / "trials").iterdir():
        (path / "trial.json").unlink()
    nothing = asked(tmp_path / "failed", "json")
    assert nothing.exit_code == 2 and nothing.stdout == "" and "measured nothing" in nothing.stderr


def test_one_target_is_described_and_compared_with_none(tmp_path):
    make(tmp_path)
    request = json.loads((tmp_path / "study.json").read_text())
    request["targets"] = request["targets"][:1]
    (tmp_path / "study.json").write_text(json.dumps(request))
    for path in (tmp_path / "trials").glob("*--nas"):
        shutil.rmtree(path)
    found = digest.values(load_study(tmp_path))
    assert found["comparisons"] == [] and {one["target"] for one in found["conditions"]} == {"disk"}
    assert "Nothing is compared" in digest.markdown(load_study(tmp_path))
