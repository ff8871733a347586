"""What is taken for granted: one list, in the class and in the notebook; bad values refused by name."""

import math
from dataclasses import asdict

import nbformat
import pytest
from typer.testing import CliRunner

from made import make
from stallbench.commands.main import app
from stallbench.compounding import assumptions
from stallbench.compounding.assumptions import Assumptions, parse
from stallbench.compounding.economics import Prices
from stallbench.compounding.models import Schedule
from stallbench.config import NOTEBOOKS, ConfigError
from stallbench.reporting import claims, verdicts
from stallbench.results import load_study


def test_the_notebook_has_the_same_parameters_with_the_same_defaults():
    cells = nbformat.read(NOTEBOOKS / "03_compounding.ipynb", as_version=4).cells
    namespace: dict = {}
    exec(next(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])), {}, namespace)
    for name in ("study", "__annotations__"):
        namespace.pop(name)
    assert namespace == asdict(Assumptions())


def test_the_defaults_are_those_of_the_models():
    assert Assumptions().schedule == Schedule() and Assumptions().prices == Prices()
    assert Assumptions().overridden == {}


def test_pairs_are_read_with_their_type():
    found = parse(["team=8", "gpu_hour=2.5", "currency=EUR"])
    assert (found.team, found.gpu_hour, found.currency) == (8, 2.5, "EUR")
    assert found.overridden == {"team": 8, "gpu_hour": 2.5, "currency": "EUR"}


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("team", "assume='team' is refused: write NAME=VALUE"),
        ("teams=8", "unknown assumption teams='8'; known are: interval_min"),
        ("team=many", "team='many' is refused: it must be a whole number"),
        ("team=0", "team=0 is refused"),
        ("team=2.5", "team='2.5' is refused: it must be a whole number"),
        ("run_h=long", "run_h='long' is refused: it must be a number"),
        ("gpu_hour=nan", "gpu_hour=nan is refused"),
        ("gpu_hour=-3", "gpu_hour=-3 is refused"),
        ("interval_min=600", "run_h=8 is refused: the run is shorter than one interval"),
        ("mtbf_h=0", "mtbf_h=0 is refused"),
        ("mtbf_h=inf", "mtbf_h=inf is refused"),
        ("accelerators=0", "accelerators=0 is refused"),
        ("stall_share=1", "stall_share=1 is refused"),
        ("endurance_tb=-1", "endurance_tb=-1 is refused"),
        ("restore_limit_s=0", "restore_limit_s=0 is refused"),
        ("kept=0", "kept=0 is refused"),
    ],
)
def test_bad_values_are_refused_in_one_line_with_field_and_value(tmp_path, pair, words):
    with pytest.raises(ConfigError) as refused:
        parse([pair])
    assert words in str(refused.value) and "\n" not in str(refused.value)
    make(tmp_path)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--assume", pair])
    assert done.exit_code == 2 and words in done.stderr
    assert not (tmp_path / "assumptions.json").exists() and not (tmp_path / "report").exists()


def test_figures_for_machines_take_the_assumptions_and_keep_nothing(tmp_path):
    study = make(tmp_path)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--format", "md", "--assume", "interval_min=5"])
    assert "96 saves in 8 hours" in done.stdout and "48 saves in 8 hours" in verdicts.headline(study)
    assert not (tmp_path / "assumptions.json").exists()


def test_what_was_kept_with_a_study_holds_for_its_claims(tmp_path):
    make(tmp_path)
    (tmp_path / "assumptions.json").write_text('{"gpu_hour": 6.0}')
    study = load_study(tmp_path)
    assert assumptions.of(study).gpu_hour == 6
    figures = [claims.claims_table(one).set_index("id").figure["2.7"] for one in (study, make(tmp_path / "other"))]
    worth = [float(figure.partition("is worth ")[2].split(" ")[0].replace(",", "")) for figure in figures]
    assert math.isclose(worth[0], 2 * worth[1], rel_tol=0.01)
