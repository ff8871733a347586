"""Run the command line as ``python -m stallbench``."""

from stallbench.commands.main import app

app(prog_name="stallbench")
