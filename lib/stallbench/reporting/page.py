"""From a study's folder to one page: run the analysis notebooks, join them, render without scripts or network."""

import base64
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import HTMLExporter

from stallbench import __version__
from stallbench.compounding.assumptions import Assumptions
from stallbench.config import NOTEBOOKS
from stallbench.execute import execute_notebook, kernel_environment
from stallbench.load import present as load_present
from stallbench.privacy import Redactor
from stallbench.reporting import claims, digest, verdicts
from stallbench.results import ASSUMPTIONS, SIZES, SWEEP, Study, load_study, write_json

SECTIONS = ("02_checkpoint_stalls", "03_compounding")
SIZE_SECTION = "05_scaling"  # where a sweep over sizes was made
COVER = "report"
# The page of a load study, and a section of the page of a study that holds one.
LOAD_PAGE = "load_report"
# Cells of a load study's page that only it needs.
COVER_TAG = "cover"
ASSUMING = "03_compounding"  # takes the assumptions as parameters
# The cell of the cover notebook in whose place the sections stand.
SECTIONS_TAG, FIGURE_TAG = "sections", "figure"
CELL_LIMIT_S = 300


class ReportError(RuntimeError):
    """A report that came out incomplete; the message says which notebook and cell."""


def render(folder: str | Path, assumed: Assumptions | None = None) -> Path:
    """Execute the analysis notebooks on a study and write ``report/index.html``, ``summary.md`` and ``headline.png``.

    Nothing is measured. The executed notebooks stay beside the page.

    Parameters
    ----------
    folder
        A study's folder.
    assumed
        What the page takes for granted, kept with the study; by default what was kept before, else the defaults.

    Returns
    -------
    pathlib.Path
        The page.

    Raises
    ------
    ConfigError
        If the folder holds no study, or one that measured nothing.
    ReportError
        If a cell that draws a figure came out without one.
    """
    folder = Path(folder).expanduser().absolute()
    study = load_study(folder)
    if assumed is not None:
        write_json(folder / ASSUMPTIONS, assumed.overridden)
        study = load_study(folder)
    target = folder / "report"
    target.mkdir(exist_ok=True)
    nested, of_load = claims.nested_load(study), study.experiment == "load"
    sections = SECTIONS + ((SIZE_SECTION,) if (folder / SIZES / SWEEP).exists() else ())
    names = (LOAD_PAGE,) if of_load else (COVER, *sections)
    given = {ASSUMING: study.assumed}
    with tempfile.TemporaryDirectory(prefix="stallbench-") as scratch, kernel_environment(Path(scratch)):
        executed = {name: _execute(name, folder, target, Path(scratch), given.get(name, {})) for name in names}
        if nested:
            executed[LOAD_PAGE] = _execute(LOAD_PAGE, nested.folder, target, Path(scratch), {})
    (target / "headline.png").write_bytes(_first_figure(executed[LOAD_PAGE if of_load else SECTIONS[0]]))
    notebook = executed[LOAD_PAGE] if of_load else _join(executed)
    (target / "index.html").write_text(_to_html(notebook, study), encoding="utf-8")
    (target / "summary.md").write_text(digest.markdown(study), encoding="utf-8")
    return target / "index.html"


def told(study: Study) -> list[str]:
    """Say a study's answer in lines for a terminal: one a condition, then the headline."""
    words = load_present if study.experiment == "load" else verdicts
    return [*words.summary_lines(study), words.headline(study)]


def _execute(
    name: str, folder: Path, target: Path, scratch: Path, parameters: Mapping[str, Any]
) -> nbformat.NotebookNode:
    copy = target / f"{name}.ipynb"
    redactor = Redactor([("study", folder)])
    execute_notebook(
        NOTEBOOKS / f"{name}.ipynb",
        copy,
        {"study": str(folder)} | dict(parameters),
        redactor,
        scratch / "run",
        CELL_LIMIT_S,
    )
    notebook = nbformat.read(copy, as_version=4)
    for index, cell in enumerate(notebook.cells):
        if FIGURE_TAG in cell.metadata.get("tags", ()) and not _has_image(cell):
            raise ReportError(f"{name}.ipynb: cell {index} drew no figure; is a plotting backend forced?")
    return notebook


def _has_image(cell: nbformat.NotebookNode) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.get("outputs", ()))


def _first_figure(notebook: nbformat.NotebookNode) -> bytes:
    images = (output.data["image/png"] for cell in notebook.cells if _has_image(cell) for output in cell.outputs)
    return base64.b64decode(next(images))


def _join(executed: dict[str, nbformat.NotebookNode]) -> nbformat.NotebookNode:
    cover = executed[COVER]
    sections = [name for name in executed if name not in (COVER, LOAD_PAGE)]
    cells = []
    for cell in cover.cells:
        if SECTIONS_TAG in cell.metadata.get("tags", ()):
            cells += [part for name in sections for part in executed[name].cells]
            nested = executed[LOAD_PAGE].cells if LOAD_PAGE in executed else []
            cells += [part for part in nested if COVER_TAG not in part.metadata.get("tags", ())]
        else:
            cells.append(cell)
    return nbformat.v4.new_notebook(cells=cells, metadata=cover.metadata)


def _to_html(notebook: nbformat.NotebookNode, study: Study) -> str:
    headings = [line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines()]
    sections = [(_anchor(line[3:]), line[3:]) for line in headings if line.startswith("## ")]
    exporter = HTMLExporter(
        template_name="stallbench", extra_template_basedirs=[str(files("stallbench") / "templates")], exclude_input=True
    )
    resources = {
        "stallbench_version": __version__,
        "stallbench_title": f"Every minute your model waits: {study.folder.name}",
        "stallbench_sections": sections,
    }
    page, _ = exporter.from_notebook_node(notebook, resources)
    return page


def _anchor(title: str) -> str:
    return title.strip().replace(" ", "-")  # as nbconvert makes them
