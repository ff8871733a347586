"""``stallbench sizes``: a thin face over ``sweep``."""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallbench.config import DEFAULT_DISK, DEFAULT_TARGETS, ConfigError, StudyConfig, parse_target

if TYPE_CHECKING:
    import pandas as pd

    from stallbench.results import Study

FAILED, REFUSED = 1, 2


def sizes(
    study: Annotated[Path, typer.Argument(help="A finished study; the sweep is kept in it, and its report shows it.")],
    target: Annotated[
        list[str] | None, typer.Option(help="As for run, and the study's own; repeat it. Default: run's own default.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="How to save a full state; repeat it. Default: trainer and fast.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="nanogpt-cpu (10 MB) to bert-large (4 GB); repeat it. Default: all seven."),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks: each saves every model by every method.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order and of the weights.")] = 0,
) -> None:
    """Save states from 10 MB to 4 GB to each target: what do larger models wait for? No training in between.

    Exit code: 0 if all was saved; 1 if a save failed; 2 if the request was refused.
    """
    from stallbench.workload import prepare_libraries

    prepare_libraries(allow_download=False)
    from stallbench import states, sweep
    from stallbench.checkpointing.state import CheckpointError
    from stallbench.results import load_study

    names = model or list(states.MODELS)
    try:
        if not target:
            DEFAULT_DISK.mkdir(exist_ok=True)
        config = StudyConfig.parse(
            targets=tuple(parse_target(text) for text in target or DEFAULT_TARGETS),
            methods=tuple(method or ("trainer", "fast")),
            waits=("return",),
            blocks=blocks,
            seed=seed,
            control=True,
        )
        found = load_study(study)
        _require_same(found, config)
        for warning in sweep.check(config, names):
            typer.echo(f"warning: {warning}")
        table = sweep.run(
            config, names, lambda words, durable_s: typer.echo(f"{words}: durable after {durable_s:.3g} s")
        )
    except ConfigError as error:
        typer.echo(f"stallbench: {error}", err=True)
        raise typer.Exit(REFUSED) from None
    except (CheckpointError, OSError) as error:
        typer.echo(f"stallbench: a save failed, and nothing was kept: {error}", err=True)
        raise typer.Exit(FAILED) from None
    _keep(found, config, names, table)


def _require_same(found: "Study", config: StudyConfig) -> None:
    """Refuse targets that aren't the study's: its report would set their figures side by side."""
    from stallbench.storage.targets import storage_of

    for target in config.targets:
        if target.name not in found.targets:
            raise ConfigError(
                f"target={target.name!r} is refused: the study's targets are {', '.join(found.targets)}; name those"
            )
        words, own = storage_of(target)["words"], found.storage(target.name)["words"]
        if words != own:
            raise ConfigError(f"target {target.name} is refused: it is {words}, and in the study it was {own}")


def _keep(found: "Study", config: StudyConfig, names: list[str], table: "pd.DataFrame") -> None:
    from stallbench import sweep
    from stallbench.environment import capture
    from stallbench.results import METHOD_VERSION, SAVES, SIZES, SWEEP, write_json
    from stallbench.study import redactor_of

    folder = found.folder / SIZES
    folder.mkdir(exist_ok=True)
    (folder / SWEEP).unlink(missing_ok=True)  # written last, it says that the sweep is whole
    table.to_parquet(folder / SAVES, index=False)
    command = redactor_of(config, show_paths=False).text(shlex.join(["stallbench", *sys.argv[1:]]))
    write_json(
        folder / SWEEP,
        {
            "method_version": METHOD_VERSION,
            "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "models": names,
            "methods": list(config.methods),
            "blocks": config.blocks,
            "seed": config.seed,
            "warmup_saves": sweep.WARMUP_SAVES,
            "counted_saves": sweep.COUNTED_SAVES,
            "environment": capture(),
        },
    )
    typer.echo(f"Kept: {folder.name}/{SAVES}. Render the report again to see it: stallbench report {found.folder.name}")
