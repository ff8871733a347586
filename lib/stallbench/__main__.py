"""Run the command line as ``python -m stallbench``."""

from stallbench.cli import app

app(prog_name="stallbench")
