"""The targets of a study while it runs: labs up, our marked folder on each, and all of it gone at the end."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stallbench.config import Target
from stallbench.lab import building as lab
from stallbench.lab import profile as lab_profile
from stallbench.storage import targets


@dataclass(frozen=True)
class Place:
    """A target as its trials see it: a lab is the directory where it is mounted. ``owned`` is our folder on it."""

    target: Target
    owned: Path
    lab: lab.Lab | None


@contextmanager
def held(wanted: Sequence[Target], study_id: str) -> Iterator[dict[str, Place]]:
    """Bring labs up, and make and mark our folder on each target, until the context ends.

    Raises
    ------
    ConfigError
        If a folder can't be made.
    """
    with ExitStack() as stack:
        labs_up = stack.enter_context(ExitStack())
        places = {}
        built = {target.name: _up(target, labs_up) for target in wanted if target.lab}
        for index, target in enumerate(wanted):
            made = built.get(target.name)
            place = Target(name=target.name, location=str(made.mountpoint)) if made else target
            owned = stack.enter_context(targets.claim(place, f"{study_id}-{index}"))
            places[target.name] = Place(place, owned, made)
        stack.callback(labs_up.close)  # first of all: nothing need be cleared away on a device that may have failed
        yield places


def _up(target: Target, stack: ExitStack) -> lab.Lab:
    return stack.enter_context(lab.running(lab_profile.parse(target.location), out=lambda line: None))
