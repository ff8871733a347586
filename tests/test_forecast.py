"""Predicted and measured totals: on studies with known times, and really run, small."""

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from conftest import FAST_NAS
from made import make
from stallbench.commands.main import app
from stallbench.compounding import forecast
from stallbench.compounding.prediction import predict_total
from stallbench.config import ConfigError, parse_target
from stallbench.proofs import validate48
from stallbench.reporting import claims, judging, proofs
from stallbench.results import load_study, write_json


@pytest.fixture
def short(tmp_path):
    return make(tmp_path / "short", "short")


def long_of(tmp_path, factor: float = 1.0, trend: float = 0.0):
    """Give a study of one block whose saves take ``factor`` times as long, and grow by ``trend`` from save to save."""
    study = make(tmp_path / "long", "long", blocks=1)
    for path in study.folder.glob("trials/*/spans.parquet"):
        spans = pd.read_parquet(path)
        saves = spans[spans.kind == "save"].iloc[:1]
        copies = []
        for number in range(40):
            begin_s = 100.0 * (number + 10)
            length_s = float((saves.end_s - saves.start_s).iloc[0]) * factor * (1 + trend * number)
            save = saves.assign(id=1000 + 10 * number, step=100 + number, start_s=begin_s, end_s=begin_s + length_s)
            call = save.assign(id=1001 + 10 * number, kind="call", parent=1000 + 10 * number)
            sync = call.assign(id=1002 + 10 * number, kind="sync" if "trainer" in path.parent.name else "commit")
            copies += [save, call, sync]
        rest = spans[~spans.kind.isin(["save", "call", "write", "sync", "snapshot", "commit"])]
        pd.concat([rest, *copies], ignore_index=True).to_parquet(path, index=False)
    return load_study(study.folder)


def test_totals_are_predicted_from_the_short_study_alone(short, tmp_path):
    rows = forecast.rows_of(short, long_of(tmp_path), "here")
    assert {(row["target"], row["method"], row["wait"]) for row in rows} == {
        (target, method, wait)
        for target in ("disk", "nas")
        for method, wait in (("trainer", "return"), ("trainer", "durable"), ("fast-async", "return"))
    }
    row = next(row for row in rows if (row["target"], row["wait"]) == ("nas", "durable"))
    blocks = {block: [2.0 * 1.01**block] * 2 for block in (1, 2, 3)}
    found = predict_total(blocks, 40, 0.9)
    assert (row["predicted_s"], row["low_s"], row["high_s"]) == pytest.approx((found.mean, found.low, found.high))
    assert row["measured_s"] == pytest.approx(40 * 2.0 * 1.01) and row["saves"] == 40
    assert row["error"] == pytest.approx(found.mean / (40 * 2.0 * 1.01) - 1)
    assert row["met"] and row["within"] and row["drift"] == pytest.approx(0) and row["drift_p"] == 1
    assert row["gap_s"] == pytest.approx(100 - 2.0 * 1.01)


def test_a_run_that_took_longer_is_missed_and_said_so(short, tmp_path):
    rows = forecast.rows_of(short, long_of(tmp_path, factor=1.3), "here")
    assert not any(row["met"] or row["within"] for row in rows)
    lines = forecast.lines(rows)
    assert all(line.endswith("missed") for line in lines[:-1])
    assert "0 of 6 prediction intervals hold the measured total" in lines[-1] and ", not the stated 90%" in lines[-1]


def test_a_drift_within_the_run_is_found(short, tmp_path):
    rows = forecast.rows_of(short, long_of(tmp_path, trend=0.01), "here")
    assert all(row["drift_p"] < forecast.DRIFT_ALPHA for row in rows)
    first, last = np.mean(1 + 0.01 * np.arange(10)), np.mean(1 + 0.01 * np.arange(30, 40))
    assert all(row["drift"] == pytest.approx(last / first - 1) for row in rows)


def test_one_short_block_predicts_without_an_interval(tmp_path):
    rows = forecast.rows_of(make(tmp_path / "one", "one", blocks=1), long_of(tmp_path), "here")
    assert all(row["low_s"] is None and row["within"] is None for row in rows)
    json.dumps(rows, allow_nan=False)
    assert forecast.coverage_words(rows) == "No prediction has an interval: one block only."


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, judging.REPRODUCED),
        ({"met": False}, judging.UNDECIDED),
        ({"met": False, "within": False}, judging.NOT_REPRODUCED),
        ({"within": False}, judging.REPRODUCED),
    ],
)
def test_claim_1_3_is_judged_by_the_runs(short, tmp_path, changes, verdict):
    assert claims.claims_table(short).set_index("id").loc["1.3"].verdict == judging.MODELLED
    assert "Not run for this page" in proofs.forecast_html(short)
    rows = forecast.rows_of(short, long_of(tmp_path), "here")
    rows[0] |= changes
    write_json(short.folder / "validate48.json", {"rows": rows})
    path = short.folder / "study.json"
    request = json.loads(path.read_text())
    for target, device in zip(request["targets"], "ab", strict=True):
        target["device"] = device
    write_json(path, request)
    study = load_study(short.folder)
    row = claims.claims_table(study).set_index("id").loc["1.3"]
    assert row.verdict == verdict and "Checked against 6 runs of 40 saves" in row.figure
    assert "48 saves, predicted and run" in proofs.forecast_html(study)


SMALL = (validate48.Part("short", 2, 1, 2), (validate48.Part("every step", 4, 1, 1),))


def small(folder, tiny, **changes):
    settings = tiny | {"save_limit_s": 60}
    for name in ("steps", "every_steps", "warmup_saves"):
        settings.pop(name)
    lines = []
    rows = validate48.run(
        [parse_target(f"nas={FAST_NAS}")], ("trainer", "dcp-async"), folder,
        lambda planned, reason, *_: lines.append(reason), *SMALL, settings=settings | changes,
    )  # fmt: skip
    return rows, lines


def test_saves_are_really_run_and_a_second_call_runs_nothing_again(tmp_path, tiny):
    rows, lines = small(tmp_path / "out", tiny)
    assert [(row["method"], row["wait"], row["saves"], row["from_blocks"]) for row in rows] == [
        ("trainer", "durable", 4, 2),
        ("dcp-async", "return", 4, 2),
    ]
    assert lines == [""] * 6 and all(row["emulated"] and row["goal"] == 0.03 for row in rows)
    again, lines = small(tmp_path / "out", tiny)
    assert lines == [] and again == rows
    json.dumps(rows, allow_nan=False)


def test_a_failed_trial_is_not_compared(tmp_path, tiny):
    with pytest.raises(ConfigError, match="a trial failed, and nothing is compared"):
        small(tmp_path / "out", tiny, save_limit_s=1e-9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "disk=/none/of/these"), "is missing"),
        (("--target", "nas=emulated:hdd-nas-1gbe", "--method", "floppy"), "methods"),
        (("--target", "nas=emulated:hdd-nas-1gbe", "--study", "/none"), "holds no study.json"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(tmp_path, arguments, words):
    done = CliRunner().invoke(app, ["validate48", "--out", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
