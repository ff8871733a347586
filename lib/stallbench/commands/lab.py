"""The commands of ``stallbench lab``."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from stallbench.config import DEFAULT_DISK, ConfigError
from stallbench.lab import building as lab
from stallbench.lab import check as lab_check
from stallbench.lab.profile import PROFILES, parse

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
def check(
    profile: Profile,
    study: Annotated[Path | None, typer.Option(help="A study's folder: its report shows the table.")] = None,
) -> None:
    """Hold both emulations against arithmetic."""
    from stallbench.results import LAB_CHECK, load_study, read_json, write_json

    try:
        folder = load_study(study).folder if study else None
        rows = lab_check.check(parse(profile))
    except (ConfigError, ValueError, RuntimeError) as error:
        _refuse(error)
    print(lab_check.table(rows))
    if folder:
        kept = read_json(folder / LAB_CHECK) if (folder / LAB_CHECK).exists() else {}
        write_json(folder / LAB_CHECK, kept | {profile: rows})


@app.command()
def sweep(
    study: Annotated[Path, typer.Argument(help="A finished study: its report shows the map.")],
    folder: Annotated[Path, typer.Option(help="On the disk that the NASes are compared with.")] = DEFAULT_DISK,
    rounds: Annotated[int, typer.Option(min=2, help="Visits of every NAS; each takes about 2 minutes.")] = 5,
) -> None:
    """Save a checkpoint on emulated NASes of many kinds, to find which one makes the disk save 25 % of the time."""
    from stallbench.workload import prepare_libraries

    prepare_libraries(allow_download=False)
    from stallbench.lab import sweep as lab_sweep
    from stallbench.reporting.which_nas import words
    from stallbench.results import LAB_SWEEP, load_study, write_json

    try:
        found = load_study(study)
        folder.mkdir(exist_ok=True)
        write_json(found.folder / LAB_SWEEP, lab_sweep.measure(folder, rounds))
    except (ConfigError, RuntimeError) as error:
        _refuse(error)
    print(words(found))
