"""The project's own promises: one list of dependencies, imports that run one way, commands that exist."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from stallbench.config import ROOT

PACKAGE = ROOT / "lib" / "stallbench"
# Each module may import those above it, never one below.
ORDER = (
    "__init__", "storage.__init__", "lab.__init__", "load.__init__", "compounding.__init__", "proofs.__init__",
    "reporting.__init__", "commands.__init__", "config", "load.config", "load.accelerators", "privacy",
    "storage.pagecache", "storage.emulated", "storage.faults", "spans", "lab.profile", "storage.medium",
    "storage.ownership", "storage.remote", "storage.targets", "storage.probe", "storage.mounting", "lab.disk",
    "lab.building", "lab.check", "storage.places", "storage.preflight", "commands.targets", "workload",
    "load.dataset", "load.reading", "load.neighbours", "estimate", "checkpointing.__init__", "checkpointing.state",
    "checkpointing.commit", "checkpointing.direct", "checkpointing.writers", "checkpointing.checkpointer",
    "recording", "training", "controls", "results", "states", "sweep", "trial", "load.work", "load.trial",
    "environment", "execute", "study", "attach", "compounding.checks", "reporting.stats", "compounding.models",
    "compounding.prediction", "compounding.recovery", "compounding.economics", "compounding.sensitivity",
    "compounding.sizes", "proofs.validation", "reporting.analysis", "reporting.matrix", "reporting.trust",
    "reporting.which_nas", "compounding.assumptions", "compounding.scaling", "compounding.planning",
    "load.analysis", "reporting.tables", "reporting.judging", "load.verdicts", "compounding.forecast",
    "compounding.tables", "compounding.judges", "reporting.verdicts", "reporting.claims", "reporting.plots",
    "compounding.plots_scaling", "compounding.plots", "load.plots", "reporting.present", "load.present",
    "reporting.proofs", "compounding.whatif", "reporting.digest", "reporting.regression", "proofs.validate48",
    "reporting.page", "proofs.bench", "proofs.race", "lab.sweep", "proofs.load_bench", "proofs.calibration",
    "proofs.volatile_disk", "proofs.powercut", "proofs.torture", "commands.compare", "commands.sizes",
    "commands.validate48", "commands.lab", "commands.main", "__main__",
)  # fmt: skip
MEASURING = {
    "spans", "storage.medium", "storage.ownership", "storage.remote", "storage.targets", "storage.probe",
    "workload", "recording", "training", "controls", "trial", "study", "execute", "attach", "storage.preflight",
    "storage.places", "states", "sweep", "load.dataset", "load.reading", "load.neighbours", "estimate", "load.work",
    "load.trial",
    *(name for name in ORDER if name.startswith("checkpointing")),
}  # fmt: skip
ANALYSING = {
    "compounding.checks", "reporting.stats", "compounding.models", "compounding.prediction", "compounding.recovery",
    "compounding.economics", "compounding.sensitivity", "compounding.sizes", "proofs.validation",
    "reporting.analysis", "reporting.matrix", "reporting.trust", "reporting.which_nas", "compounding.assumptions",
    "compounding.scaling", "compounding.planning", "load.analysis", "reporting.tables", "reporting.judging",
    "load.verdicts", "compounding.forecast", "compounding.tables", "compounding.judges", "reporting.verdicts",
    "reporting.claims", "reporting.plots", "compounding.plots_scaling", "compounding.plots", "load.plots",
    "reporting.present", "load.present", "reporting.proofs", "compounding.whatif", "reporting.digest",
    "reporting.regression",
}  # fmt: skip
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def path_of(module: str) -> Path:
    return PACKAGE / f"{module.replace('.', '/')}.py"


def imports(module: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("stallbench"):
            continue
        above = node.module.partition(".")[2]
        inner = {f"{above}.{alias.name}".lstrip(".") for alias in node.names}
        names |= {name for name in inner if path_of(name).exists()} or ({above} if above else set())
    return names


def test_every_module_has_its_place_in_the_order():
    found = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    assert {".".join(path.parts) for path in found} == set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_run_one_way(module):
    assert imports(module) <= set(ORDER[: ORDER.index(module)])


def test_measurement_and_analysis_know_nothing_of_each_other():
    assert not {name for module in MEASURING for name in imports(module)} & ANALYSING
    assert not {name for module in ANALYSING for name in imports(module)} & MEASURING


@pytest.mark.parametrize("module", ORDER)
def test_a_module_is_read_in_one_sitting(module):
    source = path_of(module).read_text()
    assert source.count("\n") <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 65, node.name


def requirements() -> dict[str, str]:
    lines = PYPROJECT["project"]["dependencies"]
    return {re.match(r"[\w-]+", line)[0]: re.sub(r"^[\w-]+", "", line) for line in lines}


def test_conda_and_pip_ask_for_the_same():
    file = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in file["dependencies"] if isinstance(entry, dict))
    conda = [entry for entry in file["dependencies"] if isinstance(entry, str)] + [
        entry for entry in pip if "==" in entry
    ]
    found = {re.match(r"[\w-]+", entry)[0]: re.sub(r"^[\w-]+", "", entry) for entry in conda}
    assert found.pop("python") == PYPROJECT["project"]["requires-python"]
    assert found.pop("fio") == found.pop("pip") == ""
    found["torch"] = found.pop("pytorch")
    assert found == requirements()
    assert "-e ." in pip


def test_what_is_installed_is_what_constraints_pin():
    from importlib.metadata import version

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert requirements().keys() <= pins.keys()
    assert {name: version(name).partition("+")[0] for name in requirements()} == {
        name: pins[name] for name in requirements()
    }


def test_every_command_of_the_readme_exists():
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make ([a-z0-9-]+)", readme))
    assert {"report", "test", "validate", "bench"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    for command in set(re.findall(r"(?:bin/|`)stallbench ([a-z]+)", readme)):
        script = f"from stallbench.commands.main import app; app(['{command}', '--help'])"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, command


def test_the_readme_quotes_the_reference_study_to_the_letter():
    from stallbench.reporting.verdicts import headline
    from stallbench.results import load_study

    readme = " ".join((ROOT / "README.md").read_text().replace("\n>", " ").split())
    assert " ".join(headline(load_study(ROOT / "results" / "reference")).split()) in readme


def test_the_reference_report_is_what_its_study_renders_to():
    from stallbench.reporting.digest import markdown
    from stallbench.results import load_study

    folder = ROOT / "results" / "reference"
    study = load_study(folder)
    assert markdown(study) == (folder / "report" / "summary.md").read_text()
    assert study.request["blocks"] >= 5 and study.counted.block.nunique() >= 5


def test_no_large_file_is_committed():
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True).stdout.splitlines()
    if not names:
        pytest.skip("not a checkout")
    total = 0
    for name in names:
        path = ROOT / name
        if name.startswith("results/reference/"):
            total += path.stat().st_size
        assert path.stat().st_size < 3_000_000, name  # a load trial on a quick disk: 200,000 reads
    assert total < 16_000_000
