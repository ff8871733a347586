"""What the measured seconds add up to: pure functions from numbers to numbers (DESIGN part 6)."""

import math
from dataclasses import dataclass, fields

import pandas as pd

from stallbench.compounding.checks import require_finite, require_not_negative, require_positive
from stallbench.reporting.stats import Interval

SECONDS_PER_MINUTE = 60
MINUTES_PER_HOUR = 60
SECONDS_PER_HOUR = 3600
ARTICLE_FAST_S = 30.0  # article 000_c54d6adbbf34d903.txt: a checkpoint that takes 40 s instead of 30 s
ARTICLE_SLOW_S = 40.0


@dataclass(frozen=True)
class Schedule:
    """How often checkpoints are saved and how many people wait for them.

    Parameters
    ----------
    interval_min
        Minutes of training between two saves. Source: article 000_c54d6adbbf34d903.txt, every 10 minutes.
    run_h
        Hours of training in a run; the waiting comes on top. Source: the same article, 8 hours.
    runs_per_day
        Runs that a developer waits for on a working day. Assumption: one, which fills the day.
    team
        Developers who train in parallel, each with runs of their own. Assumption.
    workdays_per_week
        Assumption: Monday to Friday.
    workdays_per_year
        Assumption: 52 weeks of 5 days, less 30 days of leave and holidays.

    Raises
    ------
    ValueError
        In one line that names the field and its value: if it isn't a positive number, if what is counted isn't whole,
        if a week or year has more working days than days, or if a run is shorter than one interval.
    """

    interval_min: float = 10
    run_h: float = 8
    runs_per_day: int = 1
    team: int = 5
    workdays_per_week: int = 5
    workdays_per_year: int = 230

    def __post_init__(self) -> None:
        """Refuse what can't be a schedule."""
        for field in fields(self):
            value = getattr(self, field.name)
            require_positive(field.name, value)
            if field.type is int and value != int(value):
                raise ValueError(f"{field.name}={value:g} is refused: it must be a whole number")
        for name, most in (("workdays_per_week", 7), ("workdays_per_year", 366)):
            if getattr(self, name) > most:
                raise ValueError(f"{name}={getattr(self, name):g} is refused: it must be at most {most}")
        if not self.saves:
            raise ValueError(
                f"run_h={self.run_h:g} is refused: the run is shorter than one interval "
                f"(interval_min={self.interval_min:g}); nothing would be saved"
            )

    @property
    def saves(self) -> int:
        """Saves of one run: one at the end of every whole interval, the one at the end of the run included."""
        # The small term keeps 4.8 min / 0.1 min at 48, where binary fractions would give 47.999.
        return math.floor(self.run_h * MINUTES_PER_HOUR / self.interval_min + 1e-9)


@dataclass(frozen=True)
class SaveTime:
    """The time of a save as a straight line over its bytes: ``latency_s + size_bytes / bytes_per_s``.

    Parameters
    ----------
    latency_s
        Seconds that a save takes whatever its size; 0 is allowed.
    bytes_per_s
        Bandwidth.

    Raises
    ------
    ValueError
        If ``latency_s`` is below 0, ``bytes_per_s`` isn't above 0, or one isn't finite.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        """Refuse what can't be a save's time."""
        require_not_negative("latency_s", self.latency_s)
        require_positive("bytes_per_s", self.bytes_per_s)

    def seconds(self, size_bytes: float) -> float:
        """Give the seconds that a save of ``size_bytes`` takes; refuses a size that isn't a positive number."""
        require_positive("size_bytes", size_bytes)
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """The article's own figures, worked out; ``time_saved`` and ``faster`` are shares, without unit.

    ``compounding`` is the time saved as ``compounding`` gives it, its ``wait_s`` in seconds.
    """

    fast_s: float
    slow_s: float
    time_saved: float
    faster: float
    saves: int
    saved_per_run_min: float
    compounding: pd.DataFrame


def time_saved(fast_s: float, slow_s: float) -> float:
    """Give the share of the time that the fast target saves: 1 - fast / slow (DESIGN part 1).

    40 s to 30 s is a time saved of 0.25: 25 % less time.

    Parameters
    ----------
    fast_s, slow_s
        Times of the same work in seconds.

    Raises
    ------
    ValueError
        If a time isn't a positive number.
    """
    require_positive("fast_s", fast_s)
    require_positive("slow_s", slow_s)
    return 1 - fast_s / slow_s


def speedup(fast_s: float, slow_s: float) -> float:
    """Give by what share the fast target is faster: slow / fast - 1 (DESIGN part 1).

    40 s to 30 s is a speedup of 0.33: 33 % faster, and yet 25 % less time. Lead with ``time_saved``.

    Parameters
    ----------
    fast_s, slow_s
        Times of the same work in seconds.

    Raises
    ------
    ValueError
        If a time isn't a positive number.
    """
    require_positive("fast_s", fast_s)
    require_positive("slow_s", slow_s)
    return slow_s / fast_s - 1


def compounding(save_s: Interval | float, schedule: Schedule) -> pd.DataFrame:
    """Multiply the seconds of one save up to a run, a day, a team and a year (claims 1.3 and 1.4).

    The sum of n saves is n times their mean, so that an interval of the mean scales with it. It says how well the mean
    is known, not how much one day differs from another.

    Parameters
    ----------
    save_s
        Mean seconds of a save: waited, or saved against a slower target (then it may be negative).
    schedule
        How often is saved, and by whom.

    Returns
    -------
    pandas.DataFrame
        Columns ``scope``, ``events`` (saves), ``wait_s``, ``low_s``, ``high_s`` (seconds; NaN without an interval), one
        row each for save, run, day, developer-week, team-week and team-year.

    Raises
    ------
    ValueError
        If the mean is NaN or infinite.
    """
    day = schedule.saves * schedule.runs_per_day
    events = {
        "save": 1,
        "run": schedule.saves,
        "day": day,
        "developer-week": day * schedule.workdays_per_week,
        "team-week": day * schedule.workdays_per_week * schedule.team,
        "team-year": day * schedule.workdays_per_year * schedule.team,
    }
    table = pd.DataFrame({"scope": list(events), "events": list(events.values())})
    return table.assign(**_scaled(save_s, table["events"]))


def cumulative_wait(save_s: Interval | float, schedule: Schedule) -> pd.DataFrame:
    """Add up one run's saves in the order in which they come: the steps of the 8-hour plot.

    Parameters
    ----------
    save_s
        Mean seconds of a save, as in ``compounding``.
    schedule
        How often is saved.

    Returns
    -------
    pandas.DataFrame
        One row a save: ``hour`` (hours of training done), ``wait_s``, ``low_s``, ``high_s`` (seconds waited up to and
        with this save; NaN without an interval).

    Raises
    ------
    ValueError
        If the mean is NaN or infinite.
    """
    count = pd.Series(range(1, schedule.saves + 1))
    return pd.DataFrame({"hour": count * schedule.interval_min / MINUTES_PER_HOUR, **_scaled(save_s, count)})


@dataclass(frozen=True)
class DriveWear:
    """Bytes that saves write in a year, the share of a drive's endurance that this is, and the years until it is used up."""  # noqa: E501

    bytes_per_year: float
    endurance_share: float
    years: float


def drive_wear(save_bytes: float, schedule: Schedule, endurance_bytes: float) -> DriveWear:
    """Set the bytes that one developer's saves write in a year against a drive's rated endurance.

    Endurance is what the vendor warrants (terabytes written, TBW); JESD218 defines how it is rated. What the file
    system and the drive write besides (write amplification) is in the rating of a sequential workload, not added here.

    Parameters
    ----------
    save_bytes
        Bytes of one save.
    schedule
        How often is saved; the team's size is not used, as each developer is taken to have a drive.
    endurance_bytes
        Bytes that the drive is warranted for.

    Raises
    ------
    ValueError
        If a size isn't a positive number.
    """
    require_positive("save_bytes", save_bytes)
    require_positive("endurance_bytes", endurance_bytes)
    per_year = save_bytes * schedule.saves * schedule.runs_per_day * schedule.workdays_per_year
    return DriveWear(per_year, per_year / endurance_bytes, endurance_bytes / per_year)


def worked_example() -> WorkedExample:
    """Work out the article's 40 s against 30 s (claim 1.4): 25 % less time, 48 saves, 8 minutes a run."""
    schedule = Schedule()
    saved_s = ARTICLE_SLOW_S - ARTICLE_FAST_S
    return WorkedExample(
        fast_s=ARTICLE_FAST_S,
        slow_s=ARTICLE_SLOW_S,
        time_saved=time_saved(ARTICLE_FAST_S, ARTICLE_SLOW_S),
        faster=speedup(ARTICLE_FAST_S, ARTICLE_SLOW_S),
        saves=schedule.saves,
        saved_per_run_min=schedule.saves * saved_s / SECONDS_PER_MINUTE,
        compounding=compounding(saved_s, schedule),
    )


def _scaled(save_s: Interval | float, events: pd.Series) -> dict[str, pd.Series]:
    nan = float("nan")
    mean, low, high = (save_s.mean, save_s.low, save_s.high) if isinstance(save_s, Interval) else (save_s, nan, nan)
    require_finite("save_s", mean)
    return {"wait_s": events * mean, "low_s": events * low, "high_s": events * high}
