"""What several tests need: a model small enough to train in seconds, and one finished study."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

if TYPE_CHECKING:
    from stallbench.trial import Trial

# Before any test imports a Hugging Face library: the suite never downloads.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

TOKEN = "planted-token-5f2a91"
# A fast emulated device, so that a test waits for the code and not for the arithmetic.
FAST_NAS = "emulated:hdd-nas-10gbe?disk_bytes_per_s=3e8&link_bytes_per_s=3e8&position_s=0.001"
TINY = ["steps=4", "every_steps=2", "warmup_steps=1", "warmup_saves=1", "batch_size=2", "max_tokens=8", "eval_rows=4"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model that trains in seconds."""
    from stallbench.proofs.bench import tiny_model

    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """A labelled CSV of 40 rows."""
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = [f"row number {row} of a small set,{'even' if row % 2 == 0 else 'odd'}" for row in range(40)]
    path.write_text("\n".join(["text,label", *lines]))
    return path


@pytest.fixture
def tiny(tiny_model, tiny_data) -> dict:
    """Parameters of a trial that takes a second."""
    settings = dict(pair.split("=") for pair in TINY)
    return settings | {"model": str(tiny_model), "dataset": str(tiny_data)}


@pytest.fixture(scope="session")
def command(tiny_model, tiny_data):
    """Build the arguments of a tiny study."""

    def build(*arguments: str) -> list[str]:
        settings = [*TINY, f"model={tiny_model}", f"dataset={tiny_data}"]
        sets = [part for setting in settings for part in ("--set", setting)]
        return [sys.executable, "-m", "stallbench", "run", *sets, *arguments]

    return build


def foreign_files(folder: Path) -> None:
    """Put somebody else's files into a target, some of them named as ours are."""
    (folder / "thesis.txt").write_text("do not touch")
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / "model.safetensors").write_bytes(b"somebody's model")
    (folder / "stallbench-000000000000-0").mkdir()
    (folder / "stallbench-000000000000-0" / "notes.txt").write_text("a folder of that name without our marker")
    (folder / "stallbench-link").symlink_to(folder / "checkpoint-2", target_is_directory=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that look at the finished study on one worker, so that it is run once."""
    for item in items:
        if "finished" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("finished"))


class Finished:
    """A finished study and the places that it ran on."""

    def __init__(self, folder: Path, disk: Path, before: dict[str, bytes], run: subprocess.CompletedProcess) -> None:
        self.folder, self.disk, self.before, self.run = folder, disk, before, run


@pytest.fixture(scope="session")
def finished(tmp_path_factory, command) -> Finished:
    """Run a study of two blocks on a directory with foreign files (spaces, unicode, a secret) and an emulated NAS."""
    base = tmp_path_factory.mktemp("study")
    disk = base / f"mein Läufwerk {TOKEN}"
    disk.mkdir()
    foreign_files(disk)
    before = contents(disk)
    folder = base / "results"
    arguments = ("--target", f"disk 1.ü={disk}", "--target", f"nas={FAST_NAS}", "--blocks", "2", "--out", str(folder))
    environment = os.environ | {"MY_API_TOKEN": TOKEN, "MPLBACKEND": "agg"}
    run = subprocess.run(command(*arguments), capture_output=True, text=True, env=environment, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    return Finished(folder, disk, before, run)


def run(trial: "Trial") -> tuple[dict, pd.DataFrame]:
    """Run a trial whole; gives its result and its spans."""
    trial.put_data()
    trial.train()
    trial.restore()
    trial.control()
    out = trial.finish()
    return json.loads((out / "trial.json").read_text()), pd.read_parquet(out / "spans.parquet")
