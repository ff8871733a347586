import copy
import dataclasses
import re
import shutil
import subprocess

import nbformat
import pandas as pd
import pytest
from typer.testing import CliRunner

from made import make_sweep
from stallbench.commands.main import app
from stallbench.reporting import analysis, claims, judging, present, verdicts
from stallbench.reporting.page import ReportError, render
from stallbench.results import Study, load_study

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def page(finished) -> str:
    return (finished.folder / "report" / "index.html").read_text()


def test_the_page_needs_nothing_from_outside(page):
    assert "<script" not in page
    assert re.findall(r'(?:src|href)\s*=\s*"(?!#|data:image/png;base64,)[^"]*"', page) == []
    assert "@import" not in page and "url(" not in page


def test_every_figure_is_there_although_the_study_ran_under_a_backend_without_any(page):
    assert page.count("data:image/png;base64,") == 8


def test_every_claim_has_a_verdict_and_every_link_a_place_to_go(page):
    tables = page.partition('class="claims"')[2].partition("</details>")[0]
    rows = re.findall(r"<tr><td.*?</tr>", tables, re.S)
    assert len(rows) == len(claims.CLAIMS) == 19
    words = (judging.REPRODUCED, judging.NOT_REPRODUCED, judging.UNDECIDED, judging.MODELLED, judging.NOT_TESTED)
    assert all(any(f"<td>{word}</td>" in row for word in words) for row in rows)
    anchors = set(re.findall(r'id="([^"]+)"', page))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= anchors


def test_emulated_storage_is_called_so_and_never_reproduces_a_claim(finished, page):
    study = load_study(finished.folder)
    assert "nas is emulated" in page and "One of the two is emulated" in page
    table = claims.claims_table(study).set_index("id")
    assert set(table.loc[["1.1", "1.2", "1.3", "1.4", "1.5", "2.7", "2.8"], "verdict"]) == {judging.MODELLED}
    later = ["1.6", "1.7", "1.9", "1.10", "1.11", "2.1", "2.2", "2.3", "2.4", "2.6"]
    assert set(table.loc[later, "verdict"]) == {judging.NOT_TESTED}
    assert table.loc["1.8"].verdict != judging.REPRODUCED  # failures are a model
    assert "Judged: trainer on disk" in table.loc["2.5"].figure  # which is real
    assert list(table.index) == sorted(table.index, key=lambda id: [int(part) for part in id.split(".")])


def test_the_code_stays_out_of_the_page_and_the_command_that_made_it_is_in(page):
    assert "load_study" not in page
    assert "Assumed: a save every 10 minutes" in page
    assert "stallbench run" in page and "--blocks 2" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_without_network_shows_the_page_at_phone_width(finished, tmp_path):
    arguments = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * 0.0.0.0"]
    arguments += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    arguments += [f"--user-data-dir={tmp_path}", "--window-size=390,800", "--virtual-time-budget=3000"]
    # The page has no scripts of its own; this one, in a copy, reads what the browser laid out.
    probe = (
        "<script>document.title = [document.documentElement.scrollWidth, ...[...document.images].map("
        "i => i.naturalWidth > 0 && i.width <= innerWidth)].join()</script>"
    )
    copy = tmp_path / "copy.html"
    copy.write_text((finished.folder / "report" / "index.html").read_text().replace("</body>", probe + "</body>"))
    done = subprocess.run([*arguments, "--dump-dom", f"file://{copy}"], capture_output=True, text=True, timeout=90)
    width, *images = re.search(r"<title>([^<]*)</title>", done.stdout)[1].split(",")
    assert int(width) <= 500  # headless Chromium lays out at 500 pixels at least
    assert images == ["true"] * 8


def test_the_summary_for_a_pull_request_has_the_headline_and_the_judged_claims(finished):
    text = (finished.folder / "report" / "summary.md").read_text()
    assert text.count("| modelled |") >= 7
    assert "| 2.6 |" not in text  # nothing was found on it, and it is only counted
    assert verdicts.headline(load_study(finished.folder)) in text


def test_the_executed_notebooks_stay_and_hold_no_error(finished):
    for name in ("02_checkpoint_stalls", "03_compounding", "report"):
        notebook = nbformat.read(finished.folder / "report" / f"{name}.ipynb", as_version=4)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert outputs and not [output for output in outputs if output.output_type in {"error", "stream"}]


def test_other_assumptions_and_a_sweep_change_the_page_and_it_still_needs_nothing_from_outside(finished, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(finished.folder, folder)
    study = load_study(folder)
    first, second = study.targets
    make_sweep(study, names={"disk": first, "nas": second})
    done = CliRunner().invoke(app, ["report", str(folder), "--assume", "team=8", "--assume", "interval_min=20"])
    assert done.exit_code == 0, done.output
    page = (folder / "report" / "index.html").read_text()
    assert "<strong>24 saves</strong>" in page and "Not the defaults: interval_min=20.0, team=8." in page
    assert "article's figures)" not in page and page.count("data:image/png;base64,") == 9
    assert 'id="Size"' in page and 'href="#Size"' in page
    assert "<script" not in page and "widget" not in page
    for path in (folder / "report").glob("*.ipynb"):
        assert "jupyter.widget" not in path.read_text()
    render(folder)  # what was assumed stays with the study
    assert "<strong>24 saves</strong>" in (folder / "report" / "index.html").read_text()
    assert claims.claims_table(load_study(folder)).set_index("id").loc["1.10"].verdict == judging.MODELLED


def test_a_plot_cell_without_an_image_fails_the_report(finished, tmp_path, monkeypatch):
    from stallbench.reporting import page as report

    folder, notebooks = tmp_path / "study", tmp_path / "notebooks"
    shutil.copytree(finished.folder, folder)
    shutil.copytree(report.NOTEBOOKS, notebooks)
    path = notebooks / "report.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[3].metadata["tags"] = ["figure"]
    nbformat.write(notebook, path)
    monkeypatch.setattr(report, "NOTEBOOKS", notebooks)
    with pytest.raises(ReportError, match=r"report\.ipynb: cell \d drew no figure"):
        render(folder)


def test_figures_come_from_the_spans_on_disk(finished):
    """Worked out by hand from the Parquet files, without the package's own tables."""
    study = load_study(finished.folder)
    means = {}
    for target in study.targets:
        for block in (1, 2):
            spans = pd.read_parquet(
                finished.folder / "trials" / f"b{block:02d}-a1-durable-trainer--{target}" / "spans.parquet"
            )
            save = spans[(spans.kind == "save") & (spans.step == 4)].iloc[0]
            sync = spans[(spans.kind == "sync") & (spans.step == 4)].iloc[0]
            means[target, block] = sync.end_s - save.start_s
    disk, nas = study.targets
    ratio = ((means[disk, 1] / means[nas, 1]) * (means[disk, 2] / means[nas, 2])) ** 0.5
    one = analysis.compare(study, "durable_s", nas)
    assert one.ratio.ratio == pytest.approx(ratio)
    assert one.saved_s.mean == pytest.approx(sum(means[nas, b] - means[disk, b] for b in (1, 2)) / 2)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.20, 0.30, judging.REPRODUCED),
        (0.15, 0.35, judging.REPRODUCED),
        (0.10, 0.30, judging.UNDECIDED),
        (0.20, 0.40, judging.UNDECIDED),
        (0.05, 0.60, judging.UNDECIDED),
        (0.36, 0.60, judging.NOT_REPRODUCED),
        (-0.2, 0.10, judging.NOT_REPRODUCED),
        (float("nan"), float("nan"), judging.UNDECIDED),
    ],
)
def test_the_rule_of_claim_1_2(low, high, verdict):
    assert judging.within(low, high, verdicts.CLAIM_LOW, verdicts.CLAIM_HIGH) == verdict


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0.4213, 0.3871, 0.4555, "s"), "0.42 s (0.39 to 0.46)"),
        ((85.21, 81.93, 87.94, "%"), "85 % (82 to 88)"),
        ((2.583, float("nan"), float("nan"), "s"), "2.58 s"),
        ((float("nan"), float("nan"), float("nan"), "%"), "unknown"),
        ((5.0, 5.0, 5.0, "s"), "5.00 s (5.00 to 5.00)"),
        ((-0.3, -12.1, 14.2, "%"), "0 % (-12 to 14)"),
    ],
)
def test_figures_have_the_digits_that_their_interval_bears(numbers, text):
    assert analysis.span_text(*numbers) == text


def test_a_bound_that_two_blocks_leave_open_is_not_spelled_out():
    assert analysis.percent(0.51, -170.84, 0.998) == "51 % (below -1000 to 100)"
    assert analysis.percent(0.51, -9.5, 0.998) == "51 % (-950 to 100)"
    assert analysis.percent(1.04, 0.5, 2842.9) == "104 % (50 to above 1000)"
    assert analysis.percent(1.04, -12.0, 2842.9) == "104 % (below -1000 to above 1000)"


def altered(finished, **changes) -> Study:
    """Give the finished study with other facts about where its second target lies; the first becomes a real NVMe."""
    study = load_study(finished.folder)
    request = copy.deepcopy(study.request)
    first, second = request["targets"]
    first["storage"] |= {"medium": "nvme"}
    second["storage"] |= {"medium": changes.pop("medium", "network")}
    second["storage"] |= {"file_system": changes.pop("file_system", "nfs4")}
    second |= {name: first[name] for name in changes.pop("as_the_first", ())}
    return dataclasses.replace(study, request=request)


@pytest.mark.parametrize(
    ("changes", "verdicts_of_1_2", "words"),
    [
        ({}, {judging.REPRODUCED, judging.NOT_REPRODUCED, judging.UNDECIDED}, "Compared: "),
        ({"medium": "emulated"}, {judging.MODELLED}, "would give the claimed 25 %"),
        ({"medium": "memory"}, {judging.NOT_TESTED}, "One target is memory"),
        ({"as_the_first": ["device"]}, {judging.NOT_TESTED}, "Both lie on one device"),
        ({"as_the_first": ["device", "fingerprint"]}, {judging.NOT_TESTED}, "A/A control"),
    ],
)
def test_a_verdict_is_held_back_where_the_storage_cannot_carry_it(finished, changes, verdicts_of_1_2, words):
    study = altered(finished, **changes)
    row = claims.claims_table(study).set_index("id").loc["1.2"]
    assert row.verdict in verdicts_of_1_2 and words in row.figure
    assert ("A/A control" in verdicts.headline(study)) == (words == "A/A control")


def with_raw_limits(study: Study, slower: dict[str, float]) -> Study:
    """Give the study with a second target whose raw limits are the first one's, slower by a factor for each kind."""
    spans = study.spans
    raw = spans[(spans.target == study.targets[0]) & spans.kind.isin(slower)].assign(target=study.targets[1])
    raw = raw.assign(duration_s=raw.duration_s * raw.kind.map(slower))
    changed = dataclasses.replace(study)
    changed.__dict__["spans"] = pd.concat([spans, raw], ignore_index=True)
    return changed


@pytest.mark.parametrize(
    ("slower", "verdict"),
    [
        ({"raw_write": 3.0, "raw_read": 2.0, "raw_random": 9.0}, judging.REPRODUCED),
        ({"raw_write": 3.0, "raw_read": 2.0, "raw_random": 1.0}, judging.NOT_REPRODUCED),
        ({"raw_write": 0.5, "raw_read": 2.0, "raw_random": 9.0}, judging.NOT_REPRODUCED),
        ({"raw_write": 3.0, "raw_read": 2.0}, judging.NOT_TESTED),
    ],
)
def test_a_hard_disks_mechanics_show_in_each_of_the_raw_limits_or_not_at_all(finished, slower, verdict):
    row = claims.claims_table(with_raw_limits(altered(finished), slower)).set_index("id").loc["1.7"]
    assert row.verdict == verdict
    emulated = claims.claims_table(with_raw_limits(altered(finished, medium="emulated"), slower)).set_index("id")
    assert emulated.loc["1.7"].verdict == (judging.NOT_TESTED if verdict == judging.NOT_TESTED else judging.MODELLED)
    if verdict == judging.REPRODUCED:
        assert re.search(r"random 4 KiB read: .* 88\.8\d* % .* less time", row.figure)


@pytest.mark.parametrize("file_system", ["nfs4", "fsspec"])
def test_where_training_reads_a_local_copy_the_training_phase_is_not_tested(finished, file_system):
    study = altered(finished, file_system=file_system)
    row = claims.claims_table(study).set_index("id").loc["1.1"]
    remote = file_system == "fsspec"
    assert (row.verdict == judging.NOT_TESTED) == remote == ("reads a local copy" in row.figure)
    assert any("training reads a local copy" in text for text in present.warnings(study)) == remote


def test_a_study_of_one_target_is_described_and_compares_nothing(finished, tmp_path):
    import json

    folder = tmp_path / "one"
    shutil.copytree(finished.folder, folder)
    for trial in folder.glob("trials/*-nas-*"):
        shutil.rmtree(trial)
    request = json.loads((folder / "study.json").read_text())
    request["targets"] = request["targets"][:1]
    (folder / "study.json").write_text(json.dumps(request))
    study = load_study(folder)
    assert "Nothing is compared" in verdicts.headline(study)
    assert set(claims.claims_table(study).verdict) == {judging.NOT_TESTED}


def test_what_only_one_target_did_is_left_out_of_the_comparison(finished, tmp_path):
    folder = tmp_path / "deleted"
    shutil.copytree(finished.folder, folder)
    for path in folder.glob("trials/*-nas-*/spans.parquet"):
        spans = pd.read_parquet(path)
        extra = spans[spans.kind == "save"].tail(1).assign(kind="delete", id=999)
        pd.concat([spans, extra], ignore_index=True).to_parquet(path, index=False)
    table = analysis.comparison_table(load_study(folder), "nas")
    assert len(table) == 5 and not table.index.str.startswith("deletion").any()


def test_warnings_name_the_number_and_the_way_out(finished):
    texts = list(present.warnings(load_study(finished.folder)))
    assert any("nas is emulated" in text and "--target" in text for text in texts)
    assert any(text.startswith("2 complete block(s)") and "--blocks 5" in text for text in texts)


def test_a_target_without_durable_times_is_compared_with_none_and_the_report_says_so(finished):
    study = load_study(finished.folder)
    nas = study.targets[1]
    assert analysis.compared_with(study) == [nas]
    events = study.events
    study.__dict__["events"] = events.assign(durable_s=events.durable_s.where(events.target != nas))
    assert analysis.compared_with(study) == []
    assert f"{nas}: its server can't say when bytes are durable" in " ".join(present.warnings(study))
