"""Load studies: figures and verdicts on studies made so that the truth is known, and one real study by the CLI."""

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from typer.testing import CliRunner

from conftest import contents, foreign_files
from stallbench.commands.main import app
from stallbench.load import analysis as load_analysis
from stallbench.load import plots as load_plots
from stallbench.load import present as load_present
from stallbench.load import verdicts as load_verdicts
from stallbench.load.trial import KINDS, PHASES, REAL_MODEL
from stallbench.reporting import claims, digest, judging
from stallbench.reporting.page import _join
from stallbench.results import FAILURE, LOAD, METHOD_VERSION, SCHEMA_VERSION, SPANS, load_study, trial_id, write_json
from stallbench.spans import Timeline
from test_load import TINY_LOAD

BLOCKS, STEP_S = 3, 0.05
DRIFT = 1.02  # each block is slower by this: pairs must cancel it
# What a target does: seconds of a cold read, a save, a log line; factors together; how far 2 experiments slow down.
QUICK = {"read": 1e-4, "save": 0.5, "log": 1e-3, "together": 1.0, "wait": 1e-4, "crowd": 1.0, "reload": 0.1}
SLOW = {"read": 2e-2, "save": 2.0, "log": 1e-2, "together": 2.0, "wait": 0.05, "crowd": 3.0, "reload": 1.0}
MEMORY = {"read": 1e-6, "save": 0.1, "log": 1e-5, "together": 1.05, "wait": 1e-5, "crowd": 1.0}
ACCELERATORS = [{"name": "big", "step_s": 0.02, "batch": 40}, {"name": "small", "step_s": 0.5, "batch": 5}]


class Made:
    """Events and spans of one trial."""

    def __init__(self, factor: float) -> None:
        self.factor, self.rows, self.timeline = factor, [], Timeline()

    def events(self, phase: str, kind: str, latency_s: float, count: int = 20, worker: int = 0, epoch: int = 0) -> None:
        latency_s *= self.factor
        for number in range(count):
            row = {"phase": phase, "kind": kind, "start_s": number * latency_s, "latency_s": latency_s}
            self.rows.append(row | {"size_bytes": 4000, "worker": worker, "epoch": epoch, "stands_for": 1})

    def span(self, kind: str, seconds: float, **fields) -> None:
        span = self.timeline.begin(kind, **fields)
        span.start_s, span.end_s = 0.0, seconds * self.factor


def phases(made: Made, does: dict, where: str, lost: bool) -> list[dict]:
    """Make the phases of a place, alone, together and side by side; gives what became of the experiments."""
    for kind, phase in load_analysis.ALONE.items():
        made.events(phase + where, kind, does[kind])
        made.events(f"together{where}", kind, does[kind] * does["together"])
    # Later passes are as slow alone as together: they would hide the interference if they were mixed in.
    made.events(f"cold reads{where}", "read", 1.0, count=5, epoch=1)
    outcomes = []
    for count in (1, 2):
        name = f"{count} at once{where}"
        for number in range(count):
            gone = lost and count == 2 and number == 1
            outcome = {"phase": name, "experiments": count, "experiment": number, "lost": "killed" if gone else ""}
            outcomes.append(outcome | {"beside_lost": int(lost and count == 2), "samples": 0 if gone else 160})
            if not gone:
                crowd = does["crowd"] if count == 2 else 1.0
                made.events(name, "wait", does["wait"] * crowd, worker=number)
                made.events(name, "save", does["save"] * crowd, count=1, worker=number)
    return outcomes


def trial(folder: Path, target: str, does: dict, block: int, memory: dict, lost: bool) -> None:
    made = Made(DRIFT**block)
    outcomes = phases(made, does, "", lost) + phases(made, memory, ", memory", False)
    caches = {"cache_data": "cold", "cache_metadata": "cold", "cache_server": "unknown"}
    made.span("phase", 1.0, part="cold reads", **caches)
    made.span("phase", 1.0, part="arrow", **caches)
    made.events("arrow", "read", 2e-5)
    for one in ACCELERATORS:
        # What a step needs beyond its own time, at the rate of cold reads.
        wait_s = max(0.0, one["batch"] * does["read"] - one["step_s"]) / made.factor
        made.events(one["name"], "compute", one["step_s"] / made.factor)
        made.events(one["name"], "wait", wait_s)
    parts = {"reload": does["reload"], "process": 0.1, "train": 1.0, "evaluate": 0.1}
    for part, seconds in (parts | {"save": does["save"], "restore": does["save"]}).items():
        made.span("iteration", seconds, part=part, step=0, **caches)
    made.span("make_files", 2.0, files=100)
    out = folder / "trials" / trial_id(block, 1, target, "torch", "durable")
    out.mkdir(parents=True)
    pd.DataFrame(made.rows).to_parquet(out / LOAD)
    made.timeline.frame().to_parquet(out / SPANS)
    details = {"tables": [LOAD, SPANS], "accelerators": ACCELERATORS, "checks": {"neighbours": outcomes}}
    details["config"] = {"neighbour_step_s": STEP_S, "files": 100, "workers": 2}
    write_json(out / "trial.json", details)


def make(folder: Path, first: dict, second: dict, memory: dict = MEMORY, lost: str = "", **storage):
    places = []
    for name in ("disk", "nas"):
        what = {"words": "a made disk", "medium": "unknown", "file_system": "ext4", "options": []}
        places.append({"name": name, "storage": what | storage, "fingerprint": name, "device": name})
    request = {
        "schema_version": SCHEMA_VERSION, "method_version": METHOD_VERSION, "study_id": "made", "blocks": BLOCKS,
        "targets": places, "methods": ["torch"], "command": "stallbench run", "waits": ["durable"], "model": "m",
        "created_utc": "", "experiment": "load",
    }  # fmt: skip
    for block in range(1, BLOCKS + 1):
        for name, does in (("disk", first), ("nas", second)):
            trial(folder, name, does, block, memory, lost == name)
    write_json(folder / "study.json", request)
    write_json(folder / "environment.json", {})
    return load_study(folder)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"), QUICK, SLOW)


def verdict_of(study, claim: str) -> str:
    return claims.claims_table(study).set_index("id").verdict[claim]


def asked(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_figures_for_machines_and_for_people(study):
    found = json.loads(asked("report", study.folder, "--format", "json").stdout)
    rate = load_analysis.rates(study, "nas", "cold reads").samples_per_s
    cold = next(one for one in found["reads"] if (one["target"], one["phase"]) == ("nas", "cold reads"))
    assert cold["samples_per_s"]["mean"] == pytest.approx(rate.mean()) and found["experiment"] == "load"
    assert len(found["claims"]) == len(claims.CLAIMS) and found["headline"] == load_present.headline(study)
    text = asked("report", study.folder, "--format", "md").stdout
    assert load_present.headline(study) in text and "| 2.3 | " in text


def test_a_study_under_load_is_no_gate(study):
    refused = asked("compare", study.folder, study.folder)
    assert refused.exit_code == 2 and "only studies of saves are compared" in refused.stderr


def test_interference_is_what_the_numbers_say_and_the_targets_part_is_told_from_the_processors(study):
    found = {
        (one.target, one.kind): one for target in study.targets for one in load_analysis.interference(study, target)
    }
    assert set(found) == {(target, kind) for target in ("disk", "nas") for kind in ("read", "save", "log")}
    for kind in ("read", "save", "log"):
        assert found["nas", kind].factor.ratio == pytest.approx(2.0)
        assert found["nas", kind].memory.ratio == pytest.approx(1.05)
        assert found["nas", kind].storage.ratio == pytest.approx(2.0 / 1.05)
        assert found["disk", kind].factor.ratio == pytest.approx(1.0)
        assert found["nas", kind].factor.blocks == BLOCKS and found["nas", kind].events == 20 * BLOCKS


def test_reads_of_later_passes_are_compared_with_their_like_only():
    def part(latencies: list[float], epochs: list[int]) -> pd.DataFrame:
        return pd.DataFrame({"latency_s": latencies, "epoch": epochs})

    slow_first = part([9, 1, 1, 1], [0, 1, 1, 2]), part([9, 9, 2, 2, 2], [0, 0, 1, 1, 2])
    assert [list(kept.latency_s) for kept in load_analysis._like_with_like(*slow_first)] == [[1, 1, 1], [2, 2, 2]]
    never_through = part([9, 1, 1, 1], [0, 1, 1, 2]), part([9, 9, 9], [0, 0, 0])
    assert [list(kept.latency_s) for kept in load_analysis._like_with_like(*never_through)] == [[9], [9, 9, 9]]


def test_utilisation_is_compute_over_wall_time(study):
    use = {(target, one.accelerator): one.use for target in study.targets for one in load_analysis.fed(study, target)}
    assert use["disk", "big"].mean == pytest.approx(1.0) and use["nas", "small"].mean == pytest.approx(1.0)
    assert use["nas", "big"].mean == pytest.approx(0.02 / (40 * 0.02))


def test_neighbours_pace_fairness_and_saturation(study):
    found = {
        (one.target, one.experiments, one.memory): one
        for target in study.targets
        for one in load_analysis.neighbours(study, target)
    }
    alone, two = found["nas", 1, False], found["nas", 2, False]
    blocks = range(1, BLOCKS + 1)
    assert alone.step_s.mean == pytest.approx(sum(STEP_S + 0.05 * DRIFT**block for block in blocks) / BLOCKS)
    assert two.step_s.mean == pytest.approx(sum(STEP_S + 0.15 * DRIFT**block for block in blocks) / BLOCKS)
    assert two.fairness == 1.0 and two.lost == 0
    assert alone.samples_per_s.mean == pytest.approx(8 / alone.step_s.mean, rel=1e-3)  # 160 samples in 20 steps
    assert load_analysis.saturates_at(study, "nas") == 2 and load_analysis.saturates_at(study, "disk") is None
    assert load_analysis.kept_pace(study, "disk", 2).ratio == pytest.approx(1.0)
    kept = load_analysis.kept_pace(study, "nas", 2)
    assert kept.ratio == pytest.approx(0.1 / 0.2, rel=0.02) and kept.low < kept.ratio < kept.high < 0.9


def test_jains_index():
    assert load_analysis.jain(pd.Series([5, 5, 5, 5])) == 1.0
    assert load_analysis.jain(pd.Series([8, 0, 0, 0])) == 0.25
    assert load_analysis.jain(pd.Series([1, 2, 3])) == pytest.approx(36 / 42)


def test_the_loops_split_and_iterations_a_day(study):
    parts = load_analysis.loop_parts(study, "nas").loc[1]
    assert dict(parts / DRIFT) == pytest.approx(
        {"reload": 1.0, "process": 0.1, "train": 1.0, "evaluate": 0.1, "save": 2.0, "restore": 2.0}
    )
    assert load_analysis.storage_share(study, "nas").mean == pytest.approx(5.0 / 6.2)


def test_clear_differences_on_measured_storage_are_reproduced(study):
    table = claims.claims_table(study).set_index("id")
    for claim in load_verdicts.JUDGED_UNDER_LOAD:
        assert table.verdict[claim] == judging.REPRODUCED, (claim, table.figure[claim])
    assert set(table.verdict.drop(list(load_verdicts.JUDGED_UNDER_LOAD))) == {judging.NOT_TESTED}


def test_no_difference_is_not_reproduced_or_not_tested(tmp_path):
    found = claims.claims_table(make(tmp_path, QUICK, QUICK | {"read": 1.1e-4, "wait": 1.1e-4})).set_index("id")
    assert found.verdict["1.6"] == found.verdict["1.11"] == judging.NOT_REPRODUCED
    assert found.verdict["2.1"] == judging.NOT_TESTED and "slower storage here: 0" in found.figure["2.1"]
    assert found.verdict["2.3"] == judging.NOT_REPRODUCED
    assert found.verdict["2.4"] == judging.NOT_REPRODUCED


def test_what_the_processor_does_is_not_charged_to_the_storage(tmp_path):
    busy = MEMORY | {"together": 2.0, "crowd": 20_000.0}
    found = claims.claims_table(make(tmp_path, QUICK, SLOW, memory=busy)).set_index("id")
    assert found.verdict["2.3"] == judging.UNDECIDED  # twice as long in memory too: the storage's part can't be told
    assert found.verdict["2.4"] == judging.NOT_TESTED and "processor is part of" in found.figure["2.4"]


@pytest.mark.parametrize(("medium", "verdict"), [("emulated", judging.MODELLED), ("memory", judging.NOT_TESTED)])
def test_emulated_storage_is_modelled_and_memory_is_not_tested(tmp_path, medium, verdict):
    table = claims.claims_table(make(tmp_path, QUICK, SLOW, medium=medium)).set_index("id")
    assert set(table.verdict[list(load_verdicts.JUDGED_UNDER_LOAD)]) == {verdict}


def test_a_lost_neighbour_leaves_the_others_and_is_said(tmp_path):
    found = make(tmp_path, QUICK, SLOW, lost="nas")
    assert [(one.experiments, one.lost) for one in load_analysis.neighbours(found, "nas") if not one.memory] == [(1, 0)]
    assert load_analysis.counts(found, "nas") == [1] and load_analysis.counts(found, "disk") == [1, 2]
    assert verdict_of(found, "2.4") == verdict_of(found, "1.9") == judging.NOT_TESTED
    assert verdict_of(found, "2.3") == judging.REPRODUCED


def test_reads_that_were_not_cold_decide_nothing(study, tmp_path):
    warm = make(tmp_path, QUICK, SLOW)
    for path in (tmp_path / "trials").glob(f"*/{SPANS}"):
        spans = pd.read_parquet(path)
        spans.assign(cache_data=spans.cache_data.replace("cold", "warm")).to_parquet(path)
    warm = load_study(tmp_path)
    assert verdict_of(warm, "1.6") == verdict_of(warm, "2.2") == judging.NOT_TESTED
    assert any("could not be shown to be cold" in text for text in load_present.warnings(warm))


def test_figures_and_words_hold_every_target(study):
    for name in ("bursts", "interference", "utilisation", "neighbours", "loop"):
        figure = getattr(load_plots, name)(study)
        assert figure.axes
        plt.close(figure)
    words = load_present.headline(study)
    assert "disk (a made disk) gives" in words and "nas (a made disk) gives 48 small files" in words
    words = load_present.neighbours_words(study)
    assert "disk was not shown to slow any experiment down by a tenth. 2 experiments at once read 2.0" in words
    assert "nas slows experiments down by a tenth or more from 2 at once on. 2 experiments at once read 0.99" in words


def reads(rows: list[tuple[float, float, int]], block: int = 1, stands_for: int = 1) -> pd.DataFrame:
    """Make cold reads of 100 bytes from their begin, latency and worker."""
    frame = pd.DataFrame(rows, columns=["start_s", "latency_s", "worker"])
    return frame.assign(
        target="disk", phase="cold reads", kind="read", epoch=0, size_bytes=100, block=block, stands_for=stands_for
    )


def holding(study, events: pd.DataFrame):
    """Copy a study, with other events."""
    copy = dataclasses.replace(study)
    vars(copy)["load"] = events
    return copy


def test_a_rate_is_the_sum_of_what_each_worker_gave_while_it_was_at_work(study):
    even = [(index / 10, 0.1, 0) for index in range(10)]
    short = [(index / 10, 0.1, 1) for index in range(5)]  # its last batch went unrecorded
    rate = load_analysis.rates(holding(study, reads(even + short)), "disk", "cold reads").loc[1]
    assert dict(rate) == pytest.approx({"samples_per_s": 20.0, "bytes_per_s": 2000.0})
    thinned = holding(study, reads(even, stands_for=7))
    rate = load_analysis.rates(thinned, "disk", "cold reads").loc[1]
    assert dict(rate) == pytest.approx({"samples_per_s": 70.0, "bytes_per_s": 7000.0})


def test_a_percentile_with_too_few_reads_beyond_it_is_not_given(study):
    many = reads([(index, 0.1, 0) for index in range(500)])
    found = load_analysis.quantiles(holding(study, pd.concat([many, many.assign(block=2)])), "disk", "cold reads")
    assert (found == 0.1).all(axis=None)
    fewer = holding(study, pd.concat([many, many.iloc[:499].assign(block=2)]))
    found = load_analysis.quantiles(fewer, "disk", "cold reads")
    assert found[0.99].isna().all() and (found[[0.5, 0.95]] == 0.1).all(axis=None)
    assert load_present._milliseconds(found[0.99]) == "too few reads"


def test_a_trial_without_its_table_does_not_count(tmp_path):
    make(tmp_path, QUICK, SLOW)
    (tmp_path / "trials" / trial_id(1, 1, "nas", "torch", "durable") / LOAD).unlink()
    trials = load_study(tmp_path).trials
    assert list(trials[trials.status == "failed"].reason) == ["its load.parquet is gone"]


def test_a_target_whose_trials_all_failed_costs_the_page_nothing_else(tmp_path):
    make(tmp_path, QUICK, SLOW)
    for folder in (tmp_path / "trials").glob("*--nas"):
        (folder / "trial.json").unlink()
        write_json(folder / FAILURE, {"trial": folder.name, "reason": "the target is gone", "interrupted": False})
    found = load_study(tmp_path)
    words = digest.markdown(found)
    assert "disk (a made disk) gives 9613" in words and "nas (a made disk), load: 0 of 3 trials" in words
    assert "the target is gone" in load_present.warnings_html(found)
    for name in ("reads_table", "interference_table", "use_table", "neighbours_table"):
        rows = getattr(load_present, name)(found).index
        assert len(rows) and not any("on nas" in row or ", nas" in row for row in rows)
    for name in ("bursts", "interference", "utilisation", "neighbours", "loop"):
        plt.close(getattr(load_plots, name)(found))


@pytest.fixture
def command_load(command):
    """Build the arguments of a tiny load study."""
    base = command()
    model = next(part for part in base if part.startswith("model="))
    sets = [part for name, value in TINY_LOAD.items() for part in ("--set", f"{name}={value}")]
    return lambda *arguments: [
        *base[: base.index("run") + 1],
        "--experiment",
        "load",
        "--set",
        model,
        *sets,
        *arguments,
    ]


def run(arguments: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=200, env=os.environ)


def test_a_load_study_runs_on_two_directories_renders_its_page_and_leaves_them(tmp_path, command_load):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        foreign_files(tmp_path / name)
    before = contents(tmp_path / "a")
    arguments = command_load(
        "--target", f"a={tmp_path / 'a'}", "--target", f"b={tmp_path / 'b'}", "--blocks", "1", "--set", "neighbours=1"
    )
    arguments += ["--set", "neighbours=1", "--out", str(tmp_path / "out")]
    done = run(arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == before
    study = load_study(tmp_path / "out")
    assert study.experiment == "load" and list(study.trials.status) == ["complete"] * 2
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert page.count("data:image/png") == 5 and str(tmp_path) not in page
    assert "Both lie on one device" in (tmp_path / "out" / "report" / "summary.md").read_text()
    for detail in study.details.values():
        assert [one["lost"] for one in detail["checks"]["neighbours"]] == ["", ""]
    table = study.load[study.load.target == "a"]
    assert {*PHASES, "1 at once", "1 at once, memory", "together, memory", REAL_MODEL} <= set(table.phase)
    assert set(table[table.phase == "together"].kind) == {"read", "save", "log"}
    assert all(set(table[table.phase == phase].kind) == set(kinds) for phase, kinds in KINDS.items())
    # Three batches of 40 are all files once: one fills the pipe, one is warm-up, one is measured.
    assert (table[(table.phase == "ResNet-50, H100") & (table.kind == "compute")].groupby("trial").size() == 1).all()
    assert len(table[table.phase == "saves"]) >= 2 and (table.start_s >= 0).all()
    loop = study.spans[(study.spans.kind == "iteration") & (study.spans.target == "a")]
    assert list(loop.part) == list(load_analysis.LOOP)
    sizes = {path.stat().st_size for path in (tmp_path / "out" / "trials").glob(f"*/{LOAD}")}
    assert max(sizes) < 2_000_000
    again = run([*arguments, "--no-report"])
    assert again.returncode == 0 and "2 of 2 trials are there already." in again.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--experiment", "loads"), "experiment='loads' is unknown; choose one of: saves, load"),
        (("--set", "steps=4"), "unknown parameter steps='4'; known are: files,"),
        (("--method", "trainer"), "a load trial saves by one of torch, safetensors, dcp, fast"),
        (("--wait", "return"), "a load study waits until a save is durable; leave --wait out"),
        (("--target", "s3=s3://bucket/prefix"), "target s3 is a URL, whose files no process here can read in place"),
    ],
)
def test_a_load_study_refuses_in_one_line(tmp_path, command_load, arguments, words):
    done = run(command_load("--target", f"a={tmp_path}", "--out", str(tmp_path / "out"), *arguments))
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_study_of_saves_shows_the_load_study_in_its_folder(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "saves")
    make(tmp_path / "saves" / "load", QUICK, SLOW)
    saves = load_study(tmp_path / "saves")
    table = claims.claims_table(saves).set_index("id")
    assert table.verdict["2.3"] == judging.REPRODUCED and table.verdict["1.1"] == judging.MODELLED
    markdown = nbformat.v4.new_markdown_cell
    cells = [markdown("a"), markdown("b", metadata={"tags": ["cover"]})]
    other = nbformat.v4.new_notebook(cells=[])
    cover = nbformat.v4.new_notebook(cells=[markdown("x", metadata={"tags": ["sections"]})])
    notebooks = {"report": cover, "02_checkpoint_stalls": other, "03_compounding": other}
    joined = _join(notebooks | {"load_report": nbformat.v4.new_notebook(cells=cells)})
    assert [cell.source for cell in joined.cells] == ["a"]
    assert json.loads((tmp_path / "saves" / "load" / "study.json").read_text())["experiment"] == "load"
