"""House rules of the notebooks, and the trial notebook run by plain papermill."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest

from stallbench.config import NOTEBOOKS, TrialConfig
from stallbench.load.config import LoadTrialConfig

ALL = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / name, as_version=4)


def code_cells(name: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def test_there_are_the_notebooks_of_the_study():
    assert ALL == [
        "01_finetune_trial.ipynb",
        "02_checkpoint_stalls.ipynb",
        "03_compounding.ipynb",
        "04_storage_under_load.ipynb",
        "05_scaling.ipynb",
        "load_report.ipynb",
        "report.ipynb",
    ]


@pytest.mark.parametrize("name", ALL)
def test_a_notebook_is_thin_and_committed_without_outputs(name):
    cells = read(name).cells
    assert len(cells) <= 30
    for cell in code_cells(name):
        assert cell.execution_count is None and cell.outputs == []
        if "parameters" not in cell.metadata.get("tags", []):
            assert cell.source.count("\n") < 15
        for word in ("def ", "class ", "except", "lambda"):
            assert word not in cell.source


@pytest.mark.parametrize("name", ALL)
def test_there_is_one_tagged_cell_and_papermill_sees_each_line_of_it(name):
    tagged = [cell for cell in code_cells(name) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1 and tagged[0] == code_cells(name)[0]
    names = [line.partition(":")[0] for line in tagged[0].source.splitlines()]
    assert list(papermill.inspect_notebook(str(NOTEBOOKS / name))) == names


@pytest.mark.parametrize(
    ("name", "config"), [("01_finetune_trial.ipynb", TrialConfig), ("04_storage_under_load.ipynb", LoadTrialConfig)]
)
def test_a_trials_parameters_are_those_of_its_configuration_with_the_same_defaults(name, config):
    namespace: dict = {}
    exec(code_cells(name)[0].source, {}, namespace)
    namespace.pop("__annotations__")
    assert namespace.keys() == config.model_fields.keys()
    assert config(**namespace) == config()


@pytest.mark.parametrize("name", ALL)
def test_a_cell_that_draws_is_tagged_as_a_figure(name):
    if name == "01_finetune_trial.ipynb":
        return  # its figure is a look at the trial, not part of the page
    for cell in code_cells(name):
        draws = any(line.startswith(("plots.", "plots_", "load_plots.")) for line in cell.source.splitlines())
        tags = cell.metadata.get("tags", [])  # optional: of what a study may lack
        assert ("figure" in tags or "optional-figure" in tags) == draws


def test_plain_papermill_runs_the_trial_alone(tmp_path, tiny):
    target = tmp_path / "some where"
    target.mkdir()
    raw = [
        part for name, value in tiny.items() for part in ("-r" if name in {"model", "dataset"} else "-p", name, value)
    ]
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(NOTEBOOKS / "01_finetune_trial.ipynb"),
        str(tmp_path / "out.ipynb"),
    ]
    command += ["-r", "target", str(target), "-r", "out", str(tmp_path / "results"), *raw, "--no-progress-bar"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "results" / "trial.json").read_text())["checks"]["restored_equal"]
    assert list(target.iterdir()) == []
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    assert any("image/png" in output.get("data", {}) for cell in executed.cells for output in cell.get("outputs", []))


def test_a_refused_parameter_fails_the_notebook_before_anything_is_written(tmp_path):
    target = Path(tmp_path, "target")
    target.mkdir()
    arguments = {"target": str(target), "steps": 7, "out": str(tmp_path / "out")}
    with pytest.raises(papermill.PapermillExecutionError, match="steps=7 is not a multiple of every_steps=5"):
        papermill.execute_notebook(
            str(NOTEBOOKS / "01_finetune_trial.ipynb"), str(tmp_path / "out.ipynb"), arguments, progress_bar=False
        )
    assert list(target.iterdir()) == [] and not (tmp_path / "out").exists()


def test_an_unknown_parameter_is_refused_before_a_kernel_starts(tmp_path):
    from stallbench.config import ConfigError
    from stallbench.execute import execute_notebook
    from stallbench.privacy import Redactor

    with pytest.raises(ConfigError, match=r"unknown parameter 'stepz' for report\.ipynb; known are: study"):
        execute_notebook(NOTEBOOKS / "report.ipynb", tmp_path / "copy.ipynb", {"stepz": 1}, Redactor(), tmp_path, 60)
