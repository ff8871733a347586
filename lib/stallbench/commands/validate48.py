"""``stallbench validate48``: a thin face over ``validate48``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stallbench.config import DEFAULT_DISK, RESULTS, ConfigError, parse_target

FAILED, REFUSED, STOPPED = 1, 2, 130
# This machine's disk, and a lab: emulated storage on real kernel I/O.
TARGETS = (f"disk={DEFAULT_DISK}", "lab=lab:hdd-nas-1gbe")


def validate48(
    target: Annotated[
        list[str] | None,
        typer.Option(help="As for run; repeat it. Default: this machine's disk, and lab:hdd-nas-1gbe."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="As for run; repeat it. Default: trainer, dcp-async and fast.")
    ] = None,
    study: Annotated[Path | None, typer.Option(help="A study's folder: keep the table there, for its report.")] = None,
    out: Annotated[Path, typer.Option(help="Where the trials are kept; the same command goes on there.")] = RESULTS
    / "validate48",
) -> None:
    """Predict the waiting of 48 saves from a few, really run them, and set both side by side (about 20 minutes).

    Exit code: 0 if each total was predicted within its goal; 1 if one wasn't; 2 if the request was refused or a trial
    failed; 130 if it was stopped.
    """
    from stallbench.compounding import forecast
    from stallbench.proofs import validate48 as proof
    from stallbench.results import VALIDATE_48, load_study, write_json

    try:
        if not target:
            DEFAULT_DISK.mkdir(exist_ok=True)
        places = [parse_target(text) for text in target or TARGETS]
        folder = load_study(study).folder if study else None
        rows = proof.run(
            places, tuple(method or proof.METHODS), out.expanduser().absolute(), _told, announce=typer.echo
        )
    except ConfigError as error:
        typer.echo(f"stallbench: {error}", err=True)
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        typer.echo("Stopped. The same command goes on from here.")
        raise typer.Exit(STOPPED) from None
    for line in forecast.lines(rows):
        typer.echo(line)
    if folder:
        write_json(folder / VALIDATE_48, {"rows": rows})
    if not all(row["met"] for row in rows):
        raise typer.Exit(FAILED)


def _told(planned: Any, reason: str, seconds: float, left_s: float) -> None:
    typer.echo(f"{planned.words}: {f'FAILED: {reason}' if reason else f'ok, {seconds:.0f} s'}", err=True)
