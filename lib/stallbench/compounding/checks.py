"""Refusals that the analysis modules share: one line that names the field and its value."""

import math


def require_finite(name: str, value: float) -> None:
    """Refuse NaN and the infinite.

    Raises
    ------
    ValueError
        In one line that names ``name`` and ``value``; as do all of this module.
    """
    if not math.isfinite(value):
        raise ValueError(f"{name}={value:g} is refused: it must be a finite number")


def require_positive(name: str, value: float) -> None:
    """Refuse what isn't a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value:g} is refused: it must be a number above 0")


def require_not_negative(name: str, value: float) -> None:
    """Refuse what isn't a finite number from 0 on."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value:g} is refused: it must be a number from 0 on")


def require_whole(name: str, value: float, least: int = 1) -> None:
    """Refuse what can't be a count."""
    if not (math.isfinite(value) and value == int(value) and value >= least):
        raise ValueError(f"{name}={value:g} is refused: it must be a whole number from {least} on")


def require_within(name: str, value: float, low: float, high: float) -> None:
    """Refuse what doesn't lie between ``low`` and ``high``, both excluded."""
    if not low < value < high:
        raise ValueError(f"{name}={value:g} is refused: it must lie between {low:g} and {high:g}")
