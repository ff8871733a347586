"""The commands that look at targets and tidy them: a thin face over ``preflight`` and ``targets``."""

from typing import TYPE_CHECKING, Annotated

import typer

from stallbench.config import DEFAULT_DISK, DEFAULT_TARGETS, ConfigError, Target, parse_target

if TYPE_CHECKING:
    from stallbench.storage.ownership import LeftOver

REFUSED = 2

_Places = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME=PATH]...", help="Targets. Default: those of a study that names none."),
]


def _parsed(places: list[str] | None) -> list[Target]:
    if not places:
        DEFAULT_DISK.mkdir(exist_ok=True)
    return [parse_target(text) for text in places or DEFAULT_TARGETS]


def _refuse(error: ConfigError) -> typer.Exit:
    typer.echo(f"stallbench: {error}", err=True)
    return typer.Exit(REFUSED)


def targets(
    places: _Places = None,
    probe: Annotated[bool, typer.Option(help="Measure what each takes and gives back, in a folder of our own.")] = True,
) -> None:
    """Say what targets are, what can't be known of them, and what to mend before a study."""
    from stallbench.storage import preflight

    try:
        found = [preflight.examine(target, probe) for target in _parsed(places)]
    except ConfigError as error:
        raise _refuse(error) from None
    for facts in found:
        typer.echo("\n".join(preflight.lines(facts)))
    for warning in preflight.warnings(found):
        typer.echo(f"warning: {warning}")


def clean(
    places: _Places = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; else they are only listed.")] = False,
    include_foreign: Annotated[
        bool, typer.Option("--include-foreign", help="Those of other machines too: be sure that no study runs there.")
    ] = False,
) -> None:
    """List what killed studies left on targets, and remove what nobody can be using."""
    from stallbench.storage import ownership, targets

    try:
        roots = [(target, targets.directory(target)) for target in _parsed(places) if target.mounted]
    except ConfigError as error:
        raise _refuse(error) from None
    ready = False
    for target, root in roots:
        for left in ownership.left_overs(root):
            words = _words(left)
            if left.removable or (left.state == "elsewhere" and include_foreign):
                ready = True
                if yes:
                    words += ": removed" if ownership.clean(left.folder, include_foreign) else ": NOT removed"
            typer.echo(f"{target.name}: {left.folder.name}, {words}")
    if ready and not yes:
        typer.echo("Nothing was removed; add --yes.")


def _words(left: "LeftOver") -> str:
    states = {
        "gone": "its study has ended",
        "unmarked": "empty, its study was killed at once",
        "running": "its study may be running; it stays",
        "elsewhere": "of another machine, where its study may be running; it stays without --include-foreign",
    }
    size = "size unknown" if left.size_bytes is None else f"{left.size_bytes / 1e6:,.1f} MB"
    return f"{left.age_s / 3600:,.1f} h old, {size}, {states[left.state]}"
