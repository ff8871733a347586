"""The commands of ``stallbench lab``."""

from typing import Annotated, NoReturn

import typer

from stallbench import lab, lab_check
from stallbench.config import ConfigError
from stallbench.lab_profile import PROFILES, parse

REFUSED = 2
app = typer.Typer(help="Emulated storage on real kernel I/O: a block device with a disk's mechanics.")
Profile = Annotated[str, typer.Argument(help=f"{', '.join(PROFILES)}; NAME?field=value changes a field.")]


def _refuse(error: Exception) -> NoReturn:
    typer.echo(str(error), err=True)
    raise typer.Exit(REFUSED)


@app.command()
def up(profile: Profile) -> None:
    """Build a lab and leave it mounted."""
    try:
        lab.up(parse(profile))
    except (ConfigError, ValueError, RuntimeError) as error:
        _refuse(error)


@app.command()
def down(
    lab_id: Annotated[str | None, typer.Argument(help="One lab; without it all but those of running studies.")] = None,
) -> None:
    """Remove labs, whoever made them."""
    try:
        for name in lab.down(lab_id):
            print(f"lab {name} is removed")
    except ConfigError as error:
        _refuse(error)


@app.command()
def status() -> None:
    """List the labs."""
    for row in lab.status():
        print(", ".join(f"{name} {value}" for name, value in row.items()))


@app.command()
def check(profile: Profile) -> None:
    """Hold both emulations against arithmetic."""
    try:
        rows = lab_check.check(parse(profile))
    except (ConfigError, ValueError, RuntimeError) as error:
        _refuse(error)
    print(lab_check.table(rows))
