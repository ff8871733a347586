"""Execute a notebook through papermill in a clean kernel, and keep a copy that can be shared."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat

from stallbench.config import ROOT, ConfigError
from stallbench.privacy import Redactor

_WIDGET = "application/vnd.jupyter.widget-view+json"


@contextmanager
def kernel_environment(scratch: Path) -> Iterator[None]:
    """Set what the kernels inherit: no settings of the user's own, nothing written to the home folder.

    MPLBACKEND=agg would leave notebooks without any figure, and without an error.
    """
    ours = {
        "IPYTHONDIR": str(scratch / "ipython"),
        "JUPYTER_CONFIG_DIR": str(scratch / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(scratch / "runtime"),
        "HF_DATASETS_CACHE": str(scratch / "datasets"),
        "MPLCONFIGDIR": str(scratch / "matplotlib"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    settings = scratch / "ipython" / "profile_default" / "ipython_kernel_config.py"
    settings.parent.mkdir(parents=True)
    # It warns of TCP on loopback at every start, and logs the interrupt of an orderly stop as an error.
    settings.write_text("c.IPKernelApp.log_level = 50\n")
    before = {name: os.environ.get(name) for name in (*ours, "MPLBACKEND")}
    os.environ.update(ours)
    os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def execute_notebook(
    source: Path, copy: Path, parameters: Mapping[str, Any], redactor: Redactor, scratch: Path, limit_s: int
) -> nbformat.NotebookNode:
    """Run ``source`` with ``parameters`` and keep the executed notebook, redacted, as ``copy``.

    Papermill rewrites its output at every cell and stores paths in it, so it writes to ``scratch`` (local, outside
    every target), and only the redacted copy reaches the results; also when the run fails.

    Parameters
    ----------
    limit_s
        Seconds that one cell may take.

    Raises
    ------
    ConfigError
        If a parameter is not one of the notebook's: papermill would only log it and run with the default.
    """
    import papermill

    known = papermill.inspect_notebook(str(source))
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise ConfigError(f"unknown parameter {unknown[0]!r} for {source.name}; known are: {', '.join(known)}")
    scratch.mkdir(exist_ok=True)
    output = scratch / "running.ipynb"
    try:
        return papermill.execute_notebook(
            str(source),
            str(output),
            parameters=dict(parameters),
            kernel_name="python3",
            progress_bar=False,
            log_output=False,
            autosave_cell_every=0,
            coalesce_streams=True,
            iopub_timeout=60,
            execution_timeout=limit_s,
            cwd=str(ROOT),
        )
    except KeyboardInterrupt:
        # The cell's own task, left behind, finds its kernel dead, and asyncio would print that as an error of its own.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        raise
    finally:
        if output.exists():
            share(output, copy, redactor)
            output.unlink()


def share(executed: Path, copy: Path, redactor: Redactor) -> None:
    """Write a redacted copy of an executed notebook, without papermill's own metadata of paths and parameters."""
    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata.pop("papermill", None)
    notebook.metadata.pop("widgets", None)  # sliders need a kernel, and would make a page load scripts from outside
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        cell.source = redactor.text(cell.source)
        if "outputs" in cell:
            static = [output for output in cell.outputs if _WIDGET not in output.get("data", {})]
            cell.outputs = nbformat.from_dict(redactor.tree(static))
    nbformat.write(notebook, copy)
