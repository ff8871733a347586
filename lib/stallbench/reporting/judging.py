"""What a verdict is, the rule for ranges, and when the storage that was there can carry one."""

from collections.abc import Iterator
from dataclasses import dataclass

from stallbench.reporting.analysis import Comparison, percent
from stallbench.reporting.stats import PairedRatio
from stallbench.results import Study

REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided"
MODELLED, NOT_TESTED = "modelled", "not tested here"


@dataclass(frozen=True)
class Judgement:
    """A verdict with the figure that it rests on, in words."""

    verdict: str
    figure: str


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


def agreed(verdicts: list[str]) -> str:
    """Give the verdict that all share, else undecided."""
    return verdicts[0] if len(set(verdicts)) == 1 else UNDECIDED


def called(study: Study, target: str) -> str:
    """Name a target with what is known of its storage."""
    return f"{target} ({study.storage(target)['words']})"


def storage_warnings(study: Study) -> Iterator[str]:
    """Say which targets are emulated and which are memory, and what that makes of their figures."""
    emulated = [target for target in study.targets if study.emulated(target)]
    if emulated:
        names, kinds = (" and ".join(texts) for texts in (emulated, [study.storage(one)["words"] for one in emulated]))
        are, their = ("are", "their") if len(emulated) > 1 else ("is", "its")
        yield (
            f"{names} {are} emulated ({kinds}): {their} times follow from stated rates, not from a device. Give your "
            "own path with --target to measure one."
        )
    for target in study.targets:
        if study.storage(target)["medium"] == "memory":
            yield f"{target} is a memory file system: its figures are memory's, not storage's. Name a disk's directory."


def saved(one: Comparison) -> str:
    """Write the time saved with its interval."""
    ratio = one.ratio
    return percent(ratio.time_saved, ratio.time_saved_low, ratio.time_saved_high)


def less(one: Comparison) -> str:
    """Say by how much the first takes less, or more, time than the other."""
    return less_of(one.ratio)


def less_of(ratio: PairedRatio) -> str:
    """Say the same of a ratio."""
    if ratio.time_saved < 0:
        return f"{percent(-ratio.time_saved, -ratio.time_saved_high, -ratio.time_saved_low)} more"
    return f"{percent(ratio.time_saved, ratio.time_saved_low, ratio.time_saved_high)} less"
