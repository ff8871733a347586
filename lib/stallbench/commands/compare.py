"""``stallbench compare``: a thin face over ``regression``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stallbench.reporting.regression import Change
    from stallbench.results import Study

SLOWER, CANNOT_TELL = 1, 2
_STUDY = typer.Argument(help="A folder that stallbench run wrote.")


def _refuse(message: str) -> typer.Exit:
    typer.echo(f"stallbench: {message}", err=True)
    return typer.Exit(CANNOT_TELL)


def compare(
    old: Annotated[Path, _STUDY],
    new: Annotated[Path, _STUDY],
    threshold: Annotated[float, typer.Option(help="Share by which a time may grow.")] = 0.1,
    measure: Annotated[str, typer.Option(help="What is compared, for example durable_s, stall_s.")] = "durable_s",
    force: Annotated[bool, typer.Option("--force", help="Compare unlike machines, methods or models too.")] = False,
) -> None:
    """Say for each target and method whether it got slower from one study to another.

    Exit code: 1 if one is slower (its interval excludes no change, and the change passes the threshold); 0 if each
    interval ends below the threshold; 2 if that can't be told, or the request was refused.
    """
    from stallbench.reporting import regression
    from stallbench.results import load_study

    try:
        studies = load_study(old), load_study(new)
        found = regression.changes(*studies, measure, threshold)
        differences = regression.unlike(*studies)
    except ValueError as error:  # ConfigError is one
        raise _refuse(str(error)) from None
    if differences and not force:
        raise _refuse(f"the studies are unlike: {'; '.join(differences)}. With --force they are compared all the same")
    for difference in differences:
        typer.echo(f"unlike: {difference}")
    for change in found:
        typer.echo(_words(studies[0], change, measure, threshold))
    typer.echo(
        "Welch's t on logs of block means, 95 %. Two studies are two occasions: what else changed between them is in "
        "the figure, not in its interval."
    )
    answers = {change.answer for change in found}
    if "slower" in answers:
        raise typer.Exit(SLOWER)
    if "undecided" in answers:
        raise typer.Exit(CANNOT_TELL)


def _words(study: "Study", change: "Change", measure: str, threshold: float) -> str:
    from stallbench.reporting.analysis import percent, seconds
    from stallbench.reporting.judging import called

    one = change.condition
    old, new = (seconds(mean) if mean else "not measured" for mean in (change.old_s, change.new_s))
    grown = percent(change.ratio - 1, change.low - 1, change.high - 1)
    answer = change.answer if change.answer == "slower" else f"{change.answer}, by {threshold * 100:g} %"
    place = f"{called(study, one.target)}, {one.method}, wait={one.wait}"
    return f"{place}: {measure} {old}, then {new}; change {grown}: {answer}"
