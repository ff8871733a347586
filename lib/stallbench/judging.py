"""What a verdict is, and when the storage that was there can carry one."""

from collections.abc import Callable
from dataclasses import dataclass

from stallbench.results import Study

REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided"
MODELLED, NOT_TESTED = "modelled", "not tested here"


@dataclass(frozen=True)
class Judgement:
    """A verdict with the figure that it rests on, in words."""

    verdict: str
    figure: str


@dataclass(frozen=True)
class Claim:
    """One claim of the articles; ``judge`` takes the study and the target that the first is compared with."""

    id: str
    text: str
    rule: str
    section: str
    judge: Callable[[Study, str], Judgement]


def within(low: float, high: float, least: float, most: float) -> str:
    """Judge an interval against a range: inside it, wholly outside it, or neither."""
    if not low <= high:  # NaN: one block has no interval
        return UNDECIDED
    if least <= low and high <= most:
        return REPRODUCED
    return NOT_REPRODUCED if high < least or low > most else UNDECIDED


def on_this_storage(study: Study, other: str, verdict: str, figure: str) -> Judgement:
    """Hold a verdict back where the storage can't carry it."""
    first = study.targets[0]
    media = [study.storage(target)["medium"] for target in (first, other)]
    if study.same_place(first, other):
        return Judgement(NOT_TESTED, f"A/A control, one storage against itself. {figure}")
    if study.same_device(first, other):
        return Judgement(NOT_TESTED, f"Both lie on one device. {figure}")
    if "emulated" in media:
        return Judgement(MODELLED, figure)
    if "memory" in media:
        return Judgement(NOT_TESTED, f"One target is memory, not storage. {figure}")
    return Judgement(verdict, f"{figure} Compared: {called(study, first)} and {called(study, other)}.")


def called(study: Study, target: str) -> str:
    """Name a target with what is known of its storage."""
    return f"{target} ({study.storage(target)['words']})"
