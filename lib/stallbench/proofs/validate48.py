"""Run 48 saves for real, after a few that predict them: studies like any other, one for each part and wait rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stallbench import estimate, study
from stallbench.compounding import forecast
from stallbench.config import ASYNCHRONOUS, ConfigError, Method, StudyConfig, Target
from stallbench.results import Study, load_study

METHODS: tuple[Method, ...] = ("trainer", "dcp-async", "fast")
WARMUP_SAVES = 3  # as a study's default: beyond the first deletion


@dataclass(frozen=True)
class Part:
    """Trials of one kind: counted saves, steps between two of them, blocks; ``methods`` empty for all."""

    name: str
    saves: int
    every_steps: int
    blocks: int
    methods: tuple[Method, ...] = ()


SHORT = Part("short", 6, 5, 3)
# The article's 48, at two intervals: whether idle gaps, in which a cache could drain, matter.
LONG = (Part("every 5 steps", 48, 5, 1), Part("every 20 steps", 48, 20, 1, ("trainer",)))


def run(
    targets: Sequence[Target],
    methods: Sequence[Method],
    folder: Path,
    on_trial: study.OnTrial,
    short: Part = SHORT,
    long: Sequence[Part] = LONG,
    settings: dict[str, Any] | None = None,
    announce: Callable[[str], None] = lambda words: None,
) -> list[dict[str, Any]]:
    """Run what is missing of all parts, and set predicted and measured totals side by side.

    Parameters
    ----------
    folder
        Holds one study a part and wait rule; a second call goes on with them.
    settings
        Other parameters of the trials.

    Returns
    -------
    list of dict
        Rows as ``forecast.rows_of`` gives them.

    Raises
    ------
    ConfigError
        If a target can't serve, or a trial failed: 48 saves with one missing predict nothing.
    """
    rows = []
    for wait, own in _by_wait(methods).items():
        made = {}
        for part in (short, *long):
            chosen = tuple(method for method in own if not part.methods or method in part.methods)
            if chosen:
                made[part.name] = _study(part, wait, chosen, targets, folder, on_trial, settings or {}, announce)
        for part in long:
            if part.name in made:
                rows += forecast.rows_of(made[short.name], made[part.name], part.name)
    return rows


def _by_wait(methods: Sequence[Method]) -> dict[str, list[Method]]:
    """Give each method the wait rule under which its stall is all that training waits for until it is safe to go on."""
    found: dict[str, list[Method]] = {}
    for method in methods:
        found.setdefault("return" if method in ASYNCHRONOUS else "durable", []).append(method)
    return found


def _study(
    part: Part,
    wait: str,
    methods: tuple[Method, ...],
    targets: Sequence[Target],
    folder: Path,
    on_trial: study.OnTrial,
    settings: dict[str, Any],
    announce: Callable[[str], None],
) -> Study:
    config = StudyConfig.parse(
        targets=tuple(targets),
        methods=methods,
        waits=(wait,),
        blocks=part.blocks,
        **settings
        | {
            "steps": (WARMUP_SAVES + part.saves) * part.every_steps,
            "every_steps": part.every_steps,
            "warmup_saves": WARMUP_SAVES,
        },
    )
    place = folder / f"{part.name.replace(' ', '-')}-{wait}"
    estimate.preview(config)
    study.open_folder(config, place, show_paths=False)
    announce(f"{part.name}, wait={wait}: {study.trials_to_run(config, place)} trials of {part.saves} saves")
    if not study.run(config, place, on_trial):
        raise ConfigError(f"out={place.name!r}: a trial failed, and nothing is compared; the same command goes on")
    return load_study(place)
