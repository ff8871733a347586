"""A study: plan its blocks, run each trial through papermill in a fresh kernel, survive being killed, resume."""

import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from stallbench.config import NOTEBOOKS, ConfigError, Method, Target, Wait
from stallbench.environment import capture
from stallbench.execute import execute_notebook, kernel_environment
from stallbench.lab import building as lab
from stallbench.load.config import AnyStudy
from stallbench.privacy import Redactor
from stallbench.results import (
    ENVIRONMENT,
    FAILURE,
    METHOD_VERSION,
    SCHEMA_VERSION,
    STUDY,
    TRIAL,
    read_json,
    scan,
    trial_id,
    write_json,
)
from stallbench.storage import places, preflight, targets

LAB_GRACE_S = 20.0  # in which a trial at its time limit may end by itself

# The model's and the data's names may be paths, redacted by where one stands; their fingerprint is compared.
_NOT_COMPARED = {"created_utc", "command", "model", "dataset"}


@dataclass(frozen=True)
class PlannedTrial:
    """One trial of the plan: a target, a method and a wait rule, in a block."""

    block: int
    target: Target
    method: Method
    wait: Wait

    @property
    def words(self) -> str:
        """Name it in a line of progress."""
        return f"block {self.block}: {self.target.name}, {self.method}, wait={self.wait}"


def plan(config: AnyStudy) -> list[list[PlannedTrial]]:
    """Give the blocks, each with one trial of every condition, in an order drawn from the study's seed."""
    draw = np.random.default_rng(config.seed)
    blocks = []
    for block in range(1, config.blocks + 1):
        trials = [PlannedTrial(block, target, *pair) for target in config.targets for pair in config.conditions]
        blocks.append([trials[index] for index in draw.permutation(len(trials))])
    return blocks


def open_folder(config: AnyStudy, folder: Path, show_paths: bool) -> dict[str, Any]:
    """Make the study's folder, or recognise the same study in it and go on.

    Raises
    ------
    ConfigError
        If the folder holds another study, or something else.
    """
    if (folder / STUDY).exists():
        found = read_json(folder / STUDY)
        asked = _request(config, found["study_id"], show_paths)
        for field, value in asked.items():
            if field not in _NOT_COMPARED and ({"experiment": "saves"} | found).get(field) != value:
                raise ConfigError(
                    f"out={str(folder)!r} holds another study ({field} differs); name a fresh folder with --out, "
                    "or repeat the earlier request to resume it"
                )
        return found
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"out={str(folder)!r} is not empty and holds no study; name a fresh folder with --out")
    request = _request(config, uuid4().hex[:12], show_paths)
    found = [preflight.examine(target, probe=False) for target in config.targets]
    facts = {one.name: preflight.lines(one)[1:] for one in found}
    environment = redactor_of(config, show_paths).tree(capture() | {"targets": facts})
    (folder / "trials").mkdir(parents=True)
    write_json(folder / STUDY, request)  # first: it makes the folder one that can be gone on with
    write_json(folder / ENVIRONMENT, environment)
    return request


def _request(config: AnyStudy, study_id: str, show_paths: bool) -> dict[str, Any]:
    """Give the resolved request; a target's path stands in it as a salted fingerprint, enough to recognise it."""
    entries = []
    for target in config.targets:
        path = os.path.realpath(targets.directory(target)) if target.mounted else target.location
        place = {
            "name": target.name,
            "storage": targets.storage_of(target),
            "fingerprint": _fingerprint(study_id, path),
            "device": _fingerprint(study_id, str(os.stat(path).st_dev) if target.mounted else path),
        }
        entries.append(place | ({"path": path} if show_paths else {}))
    return {
        "schema_version": SCHEMA_VERSION,
        "method_version": METHOD_VERSION,
        "study_id": study_id,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redactor_of(config, show_paths).text(shlex.join(["stallbench", *sys.argv[1:]])),
        "targets": entries,
        # Model and data may be paths.
        "workload_fingerprint": _fingerprint(study_id, "\n".join(path for name, path in config.places[:2])),
        **redactor_of(config, show_paths).tree(config.model_dump(mode="json", exclude={"targets"})),
    }


def _fingerprint(study_id: str, path: str) -> str:
    return hashlib.sha256(f"{study_id}{path}".encode()).hexdigest()[:16]


def _forms(target: Target) -> tuple[str | Path, ...]:
    return (target.location,) if target.remote else (target.location, targets.directory(target))


def redactor_of(config: AnyStudy, show_paths: bool, labs: Sequence[Target] = ()) -> Redactor:
    """Give what takes the paths of a study's targets, model and data out of texts."""
    named = [target for target in config.targets if target.mounted or target.remote]
    paths = [(target.name, path) for target in named for path in _forms(target)]
    paths += [(name, path) for name, path in config.places if path.startswith("/")]
    paths += [(target.name, target.location) for target in labs]
    return Redactor(paths, show_paths)


# Called when a trial has ended: the trial, the reason of its failure (or ""), its seconds, and those left (a guess).
OnTrial = Callable[[PlannedTrial, str, float, float], None]


def trials_to_run(config: AnyStudy, folder: Path) -> int:
    """Count the trials of a study's folder that still have to run."""
    return sum(len(trials) for _, trials in _missing(config, folder))


def run(config: AnyStudy, folder: Path, on_trial: OnTrial, show_paths: bool = False) -> bool:
    """Run what is missing of a study.

    A block counts when each of its trials has its ``trial.json``; any other is run again whole, since trials are
    paired in time, and its earlier attempt stays on disk, marked as superseded.

    Parameters
    ----------
    folder
        The study's folder, made by ``open_folder``.

    Returns
    -------
    bool
        Whether every trial succeeded.

    Raises
    ------
    ConfigError
        If another process runs this study, or a target can't be written any more.
    KeyboardInterrupt
        On Ctrl-C and SIGTERM, once the running trial is stopped and the targets are as they were.
    """
    with _alone(folder):
        return _run_missing(config, folder, on_trial, show_paths)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the study's folder: two runs of one study at once would measure each other."""
    with (folder / ".running").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it when the holder dies
        except BlockingIOError:
            raise ConfigError(f"out={str(folder)!r} is being run by another process; wait for it, or stop it") from None
        except OSError:
            pass  # a file system without locks
        yield


def _run_missing(config: AnyStudy, folder: Path, on_trial: OnTrial, show_paths: bool) -> bool:
    request = read_json(folder / STUDY)
    todo = _missing(config, folder)
    total = sum(len(trials) for _, trials in todo)
    if not total:
        return True
    succeeded, began_s, done = True, time.monotonic(), 0
    with ExitStack() as stack:
        stack.enter_context(_sigterm_as_interrupt())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stallbench-")))
        stack.enter_context(kernel_environment(scratch))
        held = stack.enter_context(places.held(config.targets, request["study_id"]))
        redactor = redactor_of(config, show_paths, [place.target for place in held.values() if place.lab])
        for attempt, trials in todo:
            for planned in trials:
                start_s = time.monotonic()
                place = held[planned.target.name]
                with _deadline(place.lab, config.trial_limit_s):
                    reason = _run_trial(config, folder, planned, attempt, place.owned, scratch, redactor, show_paths)
                done += 1
                succeeded = succeeded and not reason
                left_s = (time.monotonic() - began_s) / done * (total - done)
                on_trial(planned, reason, time.monotonic() - start_s, left_s)
    return succeeded


@contextmanager
def _deadline(made: lab.Lab | None, limit_s: float) -> Iterator[None]:
    """Take a lab down that holds a trial past its time limit: what waits for its device can't be killed before."""
    if made is None:
        yield
        return
    timer = threading.Timer(limit_s + LAB_GRACE_S, lab.down, [made.lab_id])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be at work, and what follows would get in its way


def _missing(config: AnyStudy, folder: Path) -> list[tuple[int, list[PlannedTrial]]]:
    """Give the attempt number and the trials of each block that isn't complete."""
    found, _ = scan(folder)
    todo = []
    for trials in plan(config):
        attempts = found[found.block == trials[0].block]
        last = int(attempts.attempt.max()) if len(attempts) else 0
        complete = attempts[(attempts.attempt == last) & (attempts.status == "complete")]
        if len(complete) < len(trials):
            todo.append((last + 1, trials))
    return todo


def _run_trial(
    config: AnyStudy,
    folder: Path,
    planned: PlannedTrial,
    attempt: int,
    owned: Path,
    scratch: Path,
    redactor: Redactor,
    show_paths: bool,
) -> str:
    """Run one trial in a fresh kernel; gives the reason of its failure, or an empty string."""
    name = trial_id(planned.block, attempt, planned.target.name, planned.method, planned.wait)
    out = folder / "trials" / name
    out.mkdir()
    parameters = config.model_dump(include=set(config.shared.model_fields)) | {
        "target": planned.target.location if planned.target.emulated or planned.target.remote else str(owned.parent),
        "target_name": planned.target.name,
        "method": planned.method,
        "wait": planned.wait,
        "seed": config.seed + planned.block,
        "block": planned.block,
        "attempt": attempt,
        "claim_id": owned.name.removeprefix("stallbench-"),
        "out": str(out.absolute()),
        "show_paths": show_paths,
    }
    try:
        execute_notebook(
            NOTEBOOKS / config.notebook,
            out / "notebook.ipynb",
            parameters,
            redactor,
            scratch,
            config.trial_limit_s,
        )
        error = "the notebook ended without its trial.json"
    except TimeoutError as failure:  # nbclient's; the last line is a rule
        error = f"{str(failure).splitlines()[0]} (trial_limit_s={config.trial_limit_s})"
    except Exception as failure:  # papermill and nbclient raise many kinds; trial.json alone decides
        lines = str(failure).strip().splitlines()
        error = f"{type(failure).__name__}: {lines[-1] if lines else 'the kernel died'}"
    finally:
        shutil.rmtree(owned / name, ignore_errors=True)  # a kernel that was killed couldn't
    if (out / TRIAL).exists():
        return ""
    if not (out / FAILURE).exists():
        write_json(out / FAILURE, {"trial": name, "reason": redactor.text(error), "interrupted": False})
    return read_json(out / FAILURE)["reason"]


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Stop on SIGTERM as on Ctrl-C; papermill would die at once and leave its work behind (its issues 508, 601)."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
