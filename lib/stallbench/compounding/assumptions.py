"""What the study takes for granted where it can't measure: schedule, prices, failures; each can be overridden."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from stallbench.compounding.checks import require_positive, require_whole, require_within
from stallbench.compounding.economics import STALL_SHARE, Prices
from stallbench.compounding.models import Schedule
from stallbench.compounding.recovery import LLAMA_3_ACCELERATORS
from stallbench.config import ConfigError
from stallbench.results import Study


@dataclass(frozen=True)
class Assumptions:
    """Parameters of ``03_compounding.ipynb`` and of the claims that rest on them.

    Parameters
    ----------
    interval_min, run_h, runs_per_day, team, workdays_per_week, workdays_per_year
        See ``models.Schedule``.
    endurance_tb
        Terabytes that a drive is warranted for. Assumption: 600, usual for 1 TB of flash.
    mtbf_h
        Hours between failures of a small job. Assumption: 24, one a day, a person's mistakes included.
    accelerators
        Of the large job beside it: 16,384 had Llama 3 405B (``recovery``).
    gpu_hour, gpus, extra_price, extra_per_month, horizon_months, currency, prices_as_of
        See ``economics.Prices``.
    stall_share
        Share of the wall time that saves may take: 0.035, CheckFreq, FAST '21.
    restore_limit_s
        Seconds within which a checkpoint must be read back. Assumption: 600.
    kept
        Checkpoints that are kept. Assumption: 2.

    Raises
    ------
    ValueError
        In one line that names the field and its value.
    """

    interval_min: float = 10.0
    run_h: float = 8.0
    runs_per_day: int = 1
    team: int = 5
    workdays_per_week: int = 5
    workdays_per_year: int = 230
    endurance_tb: float = 600.0
    mtbf_h: float = 24.0
    accelerators: int = LLAMA_3_ACCELERATORS
    gpu_hour: float = 3.0
    gpus: int = 8
    extra_price: float = 5000.0
    extra_per_month: float = 50.0
    horizon_months: float = 36.0
    currency: str = "USD"
    prices_as_of: str = "2026-12"
    stall_share: float = STALL_SHARE
    restore_limit_s: float = 600.0
    kept: int = 2

    def __post_init__(self) -> None:
        """Refuse what can't be assumed."""
        require_positive("endurance_tb", self.endurance_tb)
        require_positive("mtbf_h", self.mtbf_h)
        require_whole("accelerators", self.accelerators)
        require_within("stall_share", self.stall_share, 0, 1)
        require_positive("restore_limit_s", self.restore_limit_s)
        require_whole("kept", self.kept)
        _ = self.schedule, self.prices

    @property
    def schedule(self) -> Schedule:
        """How often is saved, and by whom."""
        return Schedule(
            self.interval_min,
            self.run_h,
            self.runs_per_day,
            self.team,
            self.workdays_per_week,
            self.workdays_per_year,
        )

    @property
    def prices(self) -> Prices:
        """What waiting costs, and faster storage."""
        return Prices(
            self.prices_as_of,
            self.currency,
            self.gpu_hour,
            self.gpus,
            self.extra_price,
            self.extra_per_month,
            self.horizon_months,
        )

    @property
    def overridden(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {name: value for name, value in asdict(self).items() if value != _DEFAULTS[name]}

    @classmethod
    def from_namespace(cls, namespace: Mapping[str, Any]) -> "Assumptions":
        """Take the parameters that a notebook's tagged cell left in ``namespace``; refuses as the class does."""
        return cls(**{field.name: namespace[field.name] for field in fields(cls) if field.name in namespace})


_DEFAULTS = {field.name: field.default for field in fields(Assumptions)}


def of(study: Study) -> Assumptions:
    """Give what a study's page assumes: what was kept with it by ``stallbench report --assume``, else the defaults."""
    return Assumptions(**study.assumed)


def parse(pairs: Sequence[str]) -> Assumptions:
    """Read ``NAME=VALUE`` pairs.

    Raises
    ------
    ConfigError
        In one line that names the field and its value.
    """
    values = {}
    for text in pairs:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"assume={text!r} is refused: write NAME=VALUE, for example team=8")
        if name not in _DEFAULTS:
            raise ConfigError(f"unknown assumption {name}={value!r}; known are: {', '.join(_DEFAULTS)}")
        kind = type(_DEFAULTS[name])
        try:
            values[name] = kind(value)
        except ValueError:
            number = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{name}={value!r} is refused: it must be {number}") from None
    try:
        return Assumptions(**values)
    except ValueError as error:
        raise ConfigError(str(error)) from None


HELP = "; ".join(f"{name} ({value})" for name, value in _DEFAULTS.items())
