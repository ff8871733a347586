"""Real saves at several sizes: what they write, what they leave, what is refused."""

import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from conftest import FAST_NAS, contents, foreign_files
from made import make
from stallbench import states, sweep
from stallbench.commands.main import app
from stallbench.compounding import scaling
from stallbench.config import ConfigError, StudyConfig, parse_target
from stallbench.results import load_study

SMALL = ("nanogpt-cpu", "bert-tiny")


def test_the_models_have_the_sizes_of_their_papers():
    sizes = {name: states.checkpoint_bytes(name) / 1e6 for name in states.MODELS}
    assert list(sizes.values()) == sorted(sizes.values())
    assert sizes["bert-tiny"] == pytest.approx(4.39 * 12, rel=0.01)
    assert sizes["bert-base"] == pytest.approx(109.5 * 12, rel=0.01)
    assert sizes["bert-large"] == pytest.approx(335.1 * 12, rel=0.01)
    with pytest.raises(ConfigError, match="model='gpt-9' is unknown; choose from: nanogpt-cpu"):
        states.checkpoint_bytes("gpt-9")


def asked(folder, *arguments):
    return CliRunner().invoke(app, ["sizes", str(folder), *arguments])


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Sweep two sizes by three methods over a directory with foreign files and an emulated NAS."""
    base = tmp_path_factory.mktemp("swept")
    disk, folder = base / "disk", base / "study"
    disk.mkdir()
    foreign_files(disk)
    make(folder)
    request = json.loads((folder / "study.json").read_text())
    places = [parse_target(f"disk={disk}"), parse_target(f"nas={FAST_NAS}")]
    for entry, place in zip(request["targets"], places, strict=True):
        from stallbench.storage.targets import storage_of

        entry["storage"] |= {"words": storage_of(place)["words"]}
    (folder / "study.json").write_text(json.dumps(request))
    before = contents(disk)
    arguments = ["--target", f"disk={disk}", "--target", f"nas={FAST_NAS}", "--blocks", "2"]
    arguments += [part for name in SMALL for part in ("--model", name)]
    arguments += [part for name in ("trainer", "fast", "dcp-async") for part in ("--method", name)]
    return folder, disk, before, asked(folder, *arguments)


def test_every_cell_is_saved_in_every_block_and_warm_ups_are_marked(swept):
    folder, _, _, done = swept
    assert done.exit_code == 0, done.output
    saves = pd.read_parquet(folder / "sizes" / "saves.parquet")
    assert tuple(saves.columns) == sweep.COLUMNS
    counts = saves.groupby(["model", "target", "method", "block"]).warmup.agg(["sum", "count"])
    assert len(counts) == 2 * 2 * 3 * 2
    assert set(counts["sum"]) == {sweep.WARMUP_SAVES}
    assert set(counts["count"]) == {sweep.WARMUP_SAVES + sweep.COUNTED_SAVES}


def test_sizes_are_those_of_full_states_and_times_are_in_order(swept):
    saves = pd.read_parquet(swept[0] / "sizes" / "saves.parquet")
    for model in SMALL:
        own = saves[saves.model == model].size_bytes
        full_bytes = states.checkpoint_bytes(model)
        assert own.between(full_bytes, 1.05 * full_bytes).all()  # DCP pads
    assert (saves.returned_s > 0).all() and (saves.durable_s >= saves.returned_s).all()
    # The emulated device alone takes this long: 300 MB/s.
    assert (saves[saves.target == "nas"].durable_s >= saves[saves.target == "nas"].size_bytes / 3e8).all()


def test_a_target_is_left_as_it_was_and_its_path_stays_out_of_the_results(swept):
    folder, disk, before, _ = swept
    assert contents(disk) == before
    assert str(disk) not in (folder / "sizes" / "sweep.json").read_text()


def test_the_kept_sweep_is_read_back(swept):
    found = scaling.load(load_study(swept[0]))
    assert len(found.cells) == 6 and not found.saves.warmup.any()
    assert found.saves.size_bytes.nunique() <= 2 * 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "box={disk}"), "target='box' is refused: the study's targets are disk, nas"),
        (("--target", "disk=emulated:hdd-nas-1gbe"), "target disk is refused: it is emulated"),
        (("--target", "disk={disk}", "--model", "gpt-9"), "model='gpt-9' is unknown"),
        (("--target", "disk={disk}", "--model", "bert-tiny", "--model", "bert-tiny"), "each of them once"),
        (("--target", "disk={disk}", "--method", "model-only"), "a sweep saves full states"),
        (("--target", "disk={disk}/none"), "is missing"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused_in_one_line(swept, arguments, words):
    folder, disk, before, _ = swept
    refused = asked(folder, *(text.format(disk=disk) for text in arguments))
    assert refused.exit_code == 2 and words in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert contents(disk) == before


def test_a_state_that_memory_cannot_hold_is_refused(swept, monkeypatch):
    config = StudyConfig.parse(targets=(parse_target(f"disk={swept[1]}"),), methods=("fast-async",))
    monkeypatch.setattr(sweep, "free_memory_bytes", lambda: 100_000_000)
    with pytest.raises(ConfigError, match=r"model='bert-tiny' is refused: it needs 0\.1 GB of memory"):
        sweep.check(config, ["bert-tiny"])


def test_a_sweep_that_fails_keeps_nothing_and_clears_the_target(swept, monkeypatch, tmp_path):
    folder, disk, before, _ = swept
    kept = contents(folder / "sizes")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sweep, "_ours", full)
    failed = asked(folder, "--target", f"disk={disk}", "--model", "nanogpt-cpu", "--method", "fast", "--blocks", "1")
    assert failed.exit_code == 1 and "a save failed, and nothing was kept" in failed.stderr
    assert contents(disk) == before and contents(folder / "sizes") == kept


def test_a_lab_is_left_out_where_its_disk_cannot_hold_a_state(swept, monkeypatch):
    config = StudyConfig.parse(targets=(parse_target(f"disk={swept[1]}"), parse_target("nas=lab:hdd-nas-1gbe")))
    monkeypatch.setattr(sweep.lab, "require", lambda location: None)
    monkeypatch.setattr(sweep.lab, "SIZE_BYTES", 50_000_000)
    warnings = sweep.check(config, SMALL)
    assert [text for text in warnings if "left out" in text] == [
        "bert-tiny doesn't fit on target nas, a lab of 0.1 GB, and is left out there"
    ]
