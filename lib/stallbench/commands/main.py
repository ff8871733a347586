"""The command line: a thin face over the functions of the package."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from stallbench import __version__
from stallbench.commands import compare as compare_cli
from stallbench.commands import lab as lab_cli
from stallbench.commands import sizes as sizes_cli
from stallbench.commands import targets as preflight_cli
from stallbench.commands import validate48 as validate48_cli
from stallbench.config import (
    DEFAULT_DISK,
    DEFAULT_TARGETS,
    METHODS,
    PROFILES,
    RESULTS,
    ConfigError,
    StudyConfig,
    Workload,
    parse_target,
)
from stallbench.load.config import LOAD_PROFILES, AnyStudy, Load, LoadStudyConfig

app = typer.Typer(
    help="Measure how many minutes a model waits for its storage: checkpoints, restores, data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
FAILED, REFUSED, STOPPED = 1, 2, 130


def _refuse(error: Exception) -> typer.Exit:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"stallbench: {error}", markup=False)
    return typer.Exit(REFUSED)


# What each experiment is called: its configuration, its parameters, and its profiles.
_EXPERIMENTS: dict[str, tuple[type[AnyStudy], type[Workload | Load], dict[str, dict[str, Any]]]] = {
    "saves": (StudyConfig, Workload, PROFILES),
    "load": (LoadStudyConfig, Load, LOAD_PROFILES),
}


def _settings(values: list[str], known: dict[str, Any]) -> dict[str, Any]:
    """Read ``--set NAME=VALUE`` pairs; the typed configuration checks names and values."""
    settings = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"set={text!r} is refused: write NAME=VALUE, for example steps=60")
        if name not in known:
            raise ConfigError(f"unknown parameter {name}={value!r}; known are: {', '.join(known)}")
        settings[name] = value
    return settings


_SETTINGS_HELP = "Override a parameter, NAME=VALUE; repeat it. Known" + "; ".join(
    f" to {experiment}: " + ", ".join(f"{name} ({field.default})" for name, field in shared.model_fields.items())
    for experiment, (_, shared, _) in _EXPERIMENTS.items()
)


_METHODS_HELP = "; ".join(f"{name}: {words}" for name, words in METHODS.items())


@app.command()
def run(
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=DIRECTORY, NAME=URL (s3://, sftp://) or NAME=emulated:PROFILE; repeat it. "
            "The first is compared with each of the others. "
            "Default: this machine's disk, and an emulated HDD NAS."
        ),
    ] = None,
    experiment: Annotated[
        str,
        typer.Option(
            help="saves: checkpoints, restores, training; load: reads of many small files, saves and a log, alone and "
            "together, several experiments at once, and the reload loop."
        ),
    ] = "saves",
    profile: Annotated[
        str, typer.Option(help="quick (about 3 minutes on 2 cores; load 4), default (9; load 22), full (an hour).")
    ] = "default",
    blocks: Annotated[int | None, typer.Option(help="Blocks: each runs one trial of every condition.")] = None,
    wait: Annotated[
        list[str] | None,
        typer.Option(help="Wait rule, return or durable; repeat it. Default: both, as two conditions."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"How to save; repeat it. Default: trainer. {_METHODS_HELP}"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the blocks' order, the weights and the data's order.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help=_SETTINGS_HELP)] = None,
    control: Annotated[bool, typer.Option(help="Allow one directory under two names: an A/A control.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The study's folder. Default: results/PROFILE of the checkout, or results/load-PROFILE."),
    ] = None,
    show_paths: Annotated[bool, typer.Option(help="Keep paths in the results.")] = False,
    report: Annotated[bool, typer.Option(help="Render the report at the end.")] = True,
) -> None:
    """Run a study, or go on with one that was stopped, and render its report.

    Exit code: 0 only if every trial succeeded; 1 if one failed; 2 if the request was refused; 130 if it was stopped.
    """
    from stallbench import estimate, study

    try:
        config = _study_config(experiment, target, profile, blocks, wait, method, seed, set_, control)
        named = profile if experiment == "saves" else f"{experiment}-{profile}"
        folder = (out or RESULTS / named).expanduser().absolute()
        ahead = estimate.preview(config)
        study.open_folder(config, folder, show_paths)
    except ConfigError as error:
        raise _refuse(error) from None
    console = Console(soft_wrap=True, highlight=False)
    todo = study.trials_to_run(config, folder)
    _announce(console, config, ahead, todo, folder)
    succeeded = _run(console, config, folder, todo, show_paths)
    if report:
        _render(console, folder)
    if not succeeded:
        raise typer.Exit(FAILED)


def _run(console: Console, config: AnyStudy, folder: Path, todo: int, show_paths: bool) -> bool:
    """Run the trials that are left, with a bar where there is a terminal; gives whether all succeeded."""
    from stallbench import study

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    try:
        with bar:
            return study.run(config, folder, _progress(console, bar, todo), show_paths)
    except ConfigError as error:
        raise _refuse(error) from None
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from here.")
        raise typer.Exit(STOPPED) from None


def _study_config(
    experiment: str,
    target: list[str] | None,
    profile: str,
    blocks: int | None,
    wait: list[str] | None,
    method: list[str] | None,
    seed: int,
    set_: list[str] | None,
    control: bool,
) -> AnyStudy:
    if experiment not in _EXPERIMENTS:
        raise ConfigError(f"experiment={experiment!r} is unknown; choose one of: {', '.join(_EXPERIMENTS)}")
    kind, shared, profiles = _EXPERIMENTS[experiment]
    if profile not in profiles:
        raise ConfigError(f"profile={profile!r} is unknown; choose one of: {', '.join(profiles)}")
    if not target:
        DEFAULT_DISK.mkdir(exist_ok=True)
    values = profiles[profile] | _settings(set_ or [], shared.model_fields)
    values |= {"blocks": blocks} if blocks is not None else {}
    values |= {"waits": tuple(wait)} if wait else {}
    values |= {"methods": tuple(method)} if method else {}
    places = tuple(parse_target(text) for text in target or DEFAULT_TARGETS)
    return kind.parse(targets=places, seed=seed, control=control, **values)


def _announce(console: Console, config: AnyStudy, ahead: Any, todo: int, folder: Path) -> None:
    waits = " and ".join(f"wait={wait}" for wait in config.waits)
    methods = ", ".join(config.methods)
    console.print(
        f"{config.trials} trials: {config.blocks} blocks x {len(config.targets)} targets x {methods} x {waits}"
    )
    for line in ahead.facts:
        console.print(line, markup=False)
    if todo < config.trials:
        console.print(f"{config.trials - todo} of {config.trials} trials are there already.")
    if todo:
        share = todo / config.trials
        size = "an amount that depends on the Hub model or on the interval in time"
        if ahead.written_bytes is not None:
            size = f"{ahead.written_bytes * share / 1e9:.1f} GB"
        minutes = _minutes(ahead.seconds * share)
        console.print(f"It writes {size} to each target, and takes about {minutes} (a first guess).")
    for warning in ahead.warnings:
        console.print(f"warning: {warning}", markup=False)
    console.print(f"Results: {_relative(folder)}", markup=False)


def _progress(console: Console, bar: Progress, todo: int) -> Any:
    task = bar.add_task("running", total=todo)

    def on_trial(planned: Any, reason: str, seconds: float, left_s: float) -> None:
        outcome = f"FAILED: {reason}" if reason else f"ok, {seconds:.0f} s"
        bar.update(task, advance=1, description=f"{_minutes(left_s)} left")
        left = f"; about {_minutes(left_s)} left" if left_s and not console.is_terminal else ""
        console.print(f"{planned.words}: {outcome}{left}", markup=False)

    return on_trial


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _relative(path: Path) -> str:
    shorter = os.path.relpath(path)
    return str(path) if shorter.startswith("..") else shorter


def _render(console: Console, folder: Path, assumed: Any = None) -> None:
    from stallbench.reporting.page import ReportError, render, told
    from stallbench.results import load_study

    try:
        page = render(folder, assumed)
    except (ConfigError, ReportError) as error:
        raise _refuse(error) from None
    for line in told(load_study(folder)):
        console.print(line, markup=False)
    console.print(f"Report: {_relative(page)}", markup=False)


@app.command()
def report(
    study: Annotated[Path, typer.Argument(help="A folder that stallbench run wrote.")],
    format_: Annotated[
        str, typer.Option("--format", help="html: render the page. md, json: print the figures, render nothing.")
    ] = "html",
    assume: Annotated[
        list[str] | None,
        typer.Option(
            help="Override what the page takes for granted, NAME=VALUE; repeat it. Kept until others are given."
        ),
    ] = None,
) -> None:
    """Render a study's report again, without measuring, or print its figures."""
    from stallbench.compounding import assumptions
    from stallbench.reporting import digest
    from stallbench.results import load_study

    try:
        assumed = assumptions.parse(assume) if assume else None
        if format_ == "html":
            _render(Console(soft_wrap=True, highlight=False), study, assumed)
            return
        if format_ not in ("md", "json"):
            raise ConfigError(f"format={format_!r} is unknown; choose one of: html, md, json")
        found = load_study(study)
        found = found if assumed is None else replace(found, assumed=assumed.overridden)
    except ConfigError as error:
        raise _refuse(error) from None
    text = digest.markdown(found) if format_ == "md" else json.dumps(digest.values(found), indent=1, allow_nan=False)
    typer.echo(text.rstrip("\n"))


_KEEP_HELP = "A study's folder: keep the table there, and its report shows it."


@app.command()
def validate(
    study: Annotated[Path | None, typer.Option(help=_KEEP_HELP)] = None,
) -> None:
    """Check the statistics on studies whose truth is known, synthetic and real ones; exit 1 if a goal is missed."""
    import pandas as pd

    from stallbench.proofs.calibration import real_coverage
    from stallbench.proofs.validation import coverage_table
    from stallbench.results import VALIDATION, load_study, write_json

    try:
        folder = load_study(study).folder if study else None
    except ConfigError as error:
        raise _refuse(error) from None
    real = real_coverage()
    table = pd.concat([coverage_table(), pd.DataFrame(real.rows)], ignore_index=True)
    print(table.to_string(index=False))
    print("\nreal studies:", ", ".join(f"{name} {value:.4g}" for name, value in real.doubts.items()))
    if folder:
        rows = json.loads(table.to_json(orient="records"))
        write_json(folder / VALIDATION, {"rows": rows, "doubts": real.doubts})
    if not table.passed[table.required].all():
        raise typer.Exit(FAILED)


@app.command()
def bench(
    study: Annotated[Path, typer.Argument(help="A finished study: its share of measurement.")] = RESULTS / "default",
    folder: Annotated[Path, typer.Option(help="Where the methods are raced.")] = DEFAULT_DISK,
) -> None:
    """Measure the instrument itself, and race the methods side by side; the study's report shows the result."""
    from stallbench.workload import prepare_libraries

    prepare_libraries(allow_download=False)
    import pandas as pd

    from stallbench.proofs import bench as benchmark
    from stallbench.proofs import load_bench, race
    from stallbench.results import BENCH, load_study, write_json
    from stallbench.storage import probe

    try:
        found = load_study(study)
    except ConfigError as error:
        raise _refuse(error) from None
    folder.mkdir(exist_ok=True)
    lines = [*benchmark.lines(found), *load_bench.lines(folder)]
    print(*lines, sep="\n")
    tables = {}
    if shutil.which("fio"):
        tables["own prober beside fio"] = pd.DataFrame(probe.both(folder)).set_index("kind")
    for size in race.ROUNDS:
        tables[f"methods, {size}"], goals = race.run(size, folder)
        lines += goals
        print(*goals, sep="\n")
    for title, table in tables.items():
        print(f"\n{title}\n{table.round(3).to_string(na_rep='')}")
    values = {
        title: json.loads(table.rename_axis("index").reset_index().to_json(orient="records"))
        for title, table in tables.items()
    }
    write_json(found.folder / BENCH, {"lines": lines, "tables": values})


@app.command()
def torture(
    kills: Annotated[int, typer.Option(min=0, help="Kills for each method.")] = 100,
    cuts: Annotated[int, typer.Option(min=0, help="Power cuts for each method.")] = 20,
    study: Annotated[Path | None, typer.Option(help=_KEEP_HELP)] = None,
) -> None:
    """Kill saves and cut their power at random moments; exit 1 if anything durable was lost."""
    from stallbench.workload import prepare_libraries

    prepare_libraries(allow_download=False)
    from stallbench.proofs import torture as proof
    from stallbench.results import TORTURE, load_study, write_json

    try:
        folder = load_study(study).folder if study else None
    except ConfigError as error:
        raise _refuse(error) from None

    def told(row: dict) -> None:
        print(f"{row['method']}, {row['event']}: {row['seconds']} s", file=sys.stderr)

    table = proof.torture(kills, cuts, on_row=told)
    print(table.to_string(index=False, na_rep="-"))
    if folder:
        write_json(folder / TORTURE, {"rows": json.loads(table.to_json(orient="records"))})
    if proof.lost(table):
        raise typer.Exit(FAILED)


app.command()(compare_cli.compare)
app.command()(sizes_cli.sizes)
app.command()(validate48_cli.validate48)
app.command()(preflight_cli.targets)
app.command()(preflight_cli.clean)
app.add_typer(lab_cli.app, name="lab")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


if __name__ == "__main__":
    sys.exit(app())
