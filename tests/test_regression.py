"""Whether a target got slower between two studies, with exit codes that a CI job can act on."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

from made import make
from stallbench.commands.main import app
from stallbench.reporting import regression
from stallbench.results import METHOD_VERSION


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return make(tmp_path_factory.mktemp("old"), "old")


def compare(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def altered(folder, name: str, **values):
    content = json.loads((folder / name).read_text()) | values
    (folder / name).write_text(json.dumps(content))


def test_two_runs_of_one_study_show_no_slowdown(old, tmp_path):
    make(tmp_path, "new", slower={"nas": 1.01})
    found = compare(old.folder, tmp_path)
    assert found.exit_code == 0 and "not slower, by 10 %" in found.stdout
    assert {one.answer for one in regression.changes(old, make(tmp_path / "again", "again"))} == {"not slower"}


def test_a_target_slowed_by_a_known_factor_is_found_with_the_factor_inside(old, tmp_path):
    new = make(tmp_path, "new", slower={"nas": 1.3})
    assert compare(old.folder, tmp_path).exit_code == 1
    for one in regression.changes(old, new):
        slowed = one.condition.target == "nas"
        assert one.answer == ("slower" if slowed else "not slower")
        assert one.low < (1.3 if slowed else 1.0) < one.high
        assert one.ratio == pytest.approx(1.3 if slowed else 1.0)


def test_the_interval_is_welchs_on_logs(old, tmp_path):
    new = make(tmp_path, "new", blocks=5, slower={"nas": 1.3})
    one = next(one for one in regression.changes(old, new) if one.condition.target == "nas")
    logs = [np.log([2.0 * 1.01**block * slower for block in blocks]) for blocks, slower in
            ((range(1, 6), 1.3), (range(1, 4), 1.0))]  # fmt: skip
    interval = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    assert (one.low, one.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))


@pytest.mark.parametrize("factors", [(1.0, 3.0), (0.6, 1.5)])
def test_a_study_whose_blocks_differ_widely_cannot_tell(old, tmp_path, factors):
    """Neither where the mean passes the threshold, nor where it doesn't."""
    make(tmp_path, "new", blocks=2)
    for path in (tmp_path / "trials").glob("*--nas"):
        spans = pd.read_parquet(path / "spans.parquet")
        factor = factors[int(path.name[1:3]) - 1]
        spans.assign(start_s=spans.start_s * factor, end_s=spans.end_s * factor).to_parquet(path / "spans.parquet")
    found = compare(old.folder, tmp_path)
    assert found.exit_code == 2 and found.stdout.count("undecided, by 10 %") == 2


def test_one_block_cannot_tell(old, tmp_path):
    make(tmp_path, "new", blocks=1)
    found = compare(old.folder, tmp_path)
    assert found.exit_code == 2 and "undecided" in found.stdout and "unknown" in found.stdout


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        ("environment.json", {"cpu": "another"}, "cpu: None and 'another'"),
        ("environment.json", {"memory_bytes": 8e9}, "memory_bytes"),
        ("study.json", {"model": "n"}, "model: 'm' and 'n'"),
        ("study.json", {"method_version": 1}, f"method_version: {METHOD_VERSION} and 1"),
        ("study.json", {"methods": ["trainer"]}, "methods"),
    ],
)
def test_unlike_studies_are_refused_unless_forced(old, tmp_path, file, values, words):
    make(tmp_path, "new")
    altered(tmp_path, file, **values)
    refused = compare(old.folder, tmp_path)
    assert refused.exit_code == 2 and words in refused.stderr and refused.stdout == ""
    forced = compare(old.folder, tmp_path, "--force")
    assert forced.exit_code == 0 and f"unlike: {words}" in forced.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--measure", "size_s"), "measure='size_s' is unknown"),
        (("--threshold", "0"), "threshold=0"),
        (("--threshold", "-0.1"), "threshold=-0.1"),
        (("--threshold", "nan"), "threshold=nan"),
        (("--measure", "local_s"), "no counted value of it in common"),
    ],
)
def test_bad_requests_are_refused_by_name(old, tmp_path, arguments, words):
    make(tmp_path, "new")
    found = compare(old.folder, tmp_path, *arguments)
    assert found.exit_code == 2 and words in found.stderr and len(found.stderr.splitlines()) == 1


def test_studies_that_cannot_be_read_are_refused(old, tmp_path):
    assert "is given twice" in compare(old.folder, old.folder).stderr
    make(tmp_path / "new", "new")
    altered(tmp_path / "new", "study.json", schema_version=1)
    assert "has schema 1, this version reads" in compare(old.folder, tmp_path / "new").stderr
    make(tmp_path / "failed", "failed")
    for path in (tmp_path / "failed" / "trials").iterdir():
        (path / "trial.json").unlink()
    found = compare(tmp_path / "failed", old.folder)
    assert found.exit_code == 2 and "measured nothing" in found.stderr
    assert compare(tmp_path / "none", old.folder).exit_code == 2


def test_the_stall_is_compared_under_the_wait_rule_that_both_have(old, tmp_path):
    new = make(tmp_path, "new")
    found = {one.condition.method: one.condition.wait for one in regression.changes(old, new)}
    assert found == {"trainer": "durable", "fast-async": "return"}
    assert {one.condition.wait for one in regression.changes(old, new, "stall_s")} == {"return"}
