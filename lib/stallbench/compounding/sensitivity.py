"""What the waiting depends on: over interval and size, and one assumption after the other."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import pandas as pd

from stallbench.compounding.checks import require_finite
from stallbench.compounding.models import SECONDS_PER_HOUR, SaveTime, Schedule, compounding


def waiting_grid(
    save: SaveTime, schedule: Schedule, intervals_min: Iterable[float], sizes_bytes: Iterable[float]
) -> pd.DataFrame:
    """Give the seconds waited in one run for each interval and checkpoint size: a heat map's table.

    Parameters
    ----------
    save
        Time of a save by its bytes, as ``sizes.fit`` gives it.
    schedule
        The run; its own interval is not used.
    intervals_min
        Minutes between two saves: the rows.
    sizes_bytes
        Bytes of a save: the columns. Beyond the sizes that were measured a cell is an extrapolation.

    Returns
    -------
    pandas.DataFrame
        Seconds a run, indexed by ``interval_min``, with columns ``size_bytes``.

    Raises
    ------
    ValueError
        If an interval or size isn't a positive number, or an interval is longer than the run.
    """
    seconds = {size: save.seconds(size) for size in sizes_bytes}
    saves = {interval: replace(schedule, interval_min=interval).saves for interval in intervals_min}
    grid = {interval: {size: n * one_s for size, one_s in seconds.items()} for interval, n in saves.items()}
    return pd.DataFrame.from_dict(grid, orient="index").rename_axis(index="interval_min", columns="size_bytes")


def team_year_wait_h(
    latency_s: float,
    bytes_per_s: float,
    size_bytes: float,
    interval_min: float,
    run_h: float,
    runs_per_day: int,
    team: int,
    workdays_per_year: int,
) -> float:
    """Give the hours that a team waits for its saves in a year, from single numbers, as ``tornado`` varies them.

    Raises
    ------
    ValueError
        As ``SaveTime`` and ``Schedule`` do.
    """
    schedule = Schedule(interval_min, run_h, runs_per_day, team, workdays_per_year=workdays_per_year)
    save_s = SaveTime(latency_s, bytes_per_s).seconds(size_bytes)
    return compounding(save_s, schedule).set_index("scope").wait_s["team-year"] / SECONDS_PER_HOUR


def tornado(
    outcome: Callable[..., float], base: Mapping[str, float], ranges: Mapping[str, tuple[float, float]]
) -> pd.DataFrame:
    """Vary one assumption after the other between a low and a high value, the others at their base.

    It shows which assumption matters most, not how sure the outcome is: assumptions may be wrong together.

    Parameters
    ----------
    outcome
        Takes the assumptions by name and gives one number, for example ``team_year_wait_h``.
    base
        Every assumption's value.
    ranges
        Low and high value of those that are varied.

    Returns
    -------
    pandas.DataFrame
        Sorted by effect, largest first: ``assumption``, ``base``, ``low``, ``high``, ``at_base``, ``at_low``,
        ``at_high`` (outcomes), ``effect`` (the distance of the last two), all in the outcome's unit.

    Raises
    ------
    ValueError
        In one line that names it: nothing to vary, an assumption that the base doesn't have, a base value outside its
        range, or an outcome that isn't finite; besides what ``outcome`` refuses.
    """
    if not ranges:
        raise ValueError("ranges={} is refused: name at least one assumption to vary")
    at_base = outcome(**base)
    rows = []
    for name, (low, high) in ranges.items():
        if name not in base:
            raise ValueError(f"ranges[{name!r}] is refused: known assumptions are {', '.join(base)}")
        if not low <= base[name] <= high:
            raise ValueError(f"{name}={base[name]:g} is refused: it must lie within its range, {low:g} to {high:g}")
        at_low, at_high = (outcome(**{**base, name: value}) for value in (low, high))
        for value in (at_base, at_low, at_high):
            require_finite(f"outcome of {name}", value)
        rows.append((name, base[name], low, high, at_base, at_low, at_high, abs(at_high - at_low)))
    columns = ["assumption", "base", "low", "high", "at_base", "at_low", "at_high", "effect"]
    table = pd.DataFrame(rows, columns=columns)
    return table.sort_values("effect", ascending=False, kind="stable", ignore_index=True)
