"""Results on disk: what a study's folder holds, written atomically and read back as tidy tables."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from stallbench.config import AS_SHIPPED, ConfigError

# Raised when a column or a file changes; see the list below.
#   1  first version
#   2  methods; a save's call and phases are spans of their own
SCHEMA_VERSION = 2
# Raised when the way of timing changes, so that figures of two versions are never compared.
#   1  Trainer's save as shipped, fsync of the tree for durable, fadvise and mincore for cold
#   2  a save begins once the last is durable (settle); raw limits with fio where it is installed
#   3  metadata are dropped with the page cache, where the block device keeps its copy of them
METHOD_VERSION = 3

STUDY, ENVIRONMENT = "study.json", "environment.json"
VALIDATION, BENCH, TORTURE = "validation.json", "bench.json", "torture.json"
VALIDATE_48 = "validate48.json"
ASSUMPTIONS = "assumptions.json"  # what the page takes for granted, where it isn't the default
SIZES, SWEEP, SAVES = "sizes", "sweep.json", "saves.parquet"  # a folder, and the files in it
LAB_CHECK, LAB_SWEEP = "lab-check.json", "lab-sweep.json"
TRIAL, FAILURE, SPANS, LOAD = "trial.json", "failure.json", "spans.parquet", "load.parquet"
# What tells a trial from the others.
TRIAL_KEYS = ("trial", "target", "method", "wait", "block")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` so that the file is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read what ``write_json`` wrote.

    Raises
    ------
    ConfigError
        If it was damaged since.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path.parent.name}/{path.name} is damaged ({error}); restore it, or run anew") from None


def trial_id(block: int, attempt: int, target_name: str, method: str, wait: str) -> str:
    """Name a trial's folder; no method's name holds two dashes, so that it can be read back."""
    return f"b{block:02d}-a{attempt}-{wait}-{method}--{target_name}"


@dataclass(frozen=True)
class Study:
    """A study as it lies on disk.

    Attributes
    ----------
    trials
        One row a trial folder: ``trial``, ``target``, ``method``, ``wait``, ``block``, ``attempt``, ``status``
        (``complete``, ``failed``, ``interrupted``), ``superseded`` (a later attempt at its block exists), ``reason``.
    assumed
        What its page takes for granted instead of the defaults, see ``assumptions``.
    """

    folder: Path
    request: dict[str, Any]
    environment: dict[str, Any]
    trials: pd.DataFrame
    details: dict[str, dict[str, Any]]
    assumed: dict[str, Any] = field(default_factory=dict)

    @property
    def targets(self) -> list[str]:
        """The targets' names in the order of the request."""
        return [target["name"] for target in self.request["targets"]]

    @property
    def waits(self) -> list[str]:
        """The wait rules under which a trial succeeded, in the order of the request."""
        return [wait for wait in self.request["waits"] if (self.counted.wait == wait).any()]

    @property
    def methods(self) -> list[str]:
        """The methods by which a trial succeeded, in the order of the request."""
        return [method for method in self.request["methods"] if (self.counted.method == method).any()]

    @property
    def study_id(self) -> str:
        """The study's identity."""
        return self.request["study_id"]

    def same_place(self, one: str, other: str) -> bool:
        """Whether two targets are one directory under two names: an A/A control."""
        return self._place(one)["fingerprint"] == self._place(other)["fingerprint"]

    def same_device(self, one: str, other: str) -> bool:
        """Whether two targets lie on one device, so that a comparison says nothing about storage."""
        return self._place(one)["device"] == self._place(other)["device"]

    def _place(self, target: str) -> dict[str, Any]:
        return next(entry for entry in self.request["targets"] if entry["name"] == target)

    def storage(self, target: str) -> dict[str, Any]:
        """Say what kind of storage a target is."""
        return self._place(target)["storage"]

    def emulated(self, target: str) -> bool:
        """Whether a target is emulated."""
        return self.storage(target)["medium"] == "emulated"

    def charged(self, target: str) -> bool:
        """Whether a target is emulated in-process: its bytes lie in memory, and its time is arithmetic."""
        return "profile" in self.storage(target)

    def remote(self, target: str) -> bool:
        """Whether a target is a URL: training reads a local copy of its data there."""
        return self.storage(target)["file_system"] == "fsspec"

    @cached_property
    def counted(self) -> pd.DataFrame:
        """The trials that figures rest on: complete, and of the last attempt at their block."""
        return self.trials[(self.trials.status == "complete") & ~self.trials.superseded]

    @cached_property
    def spans(self) -> pd.DataFrame:
        """All spans of the counted trials, with ``TRIAL_KEYS`` and ``duration_s``; of several ranks the slowest."""
        frames = []
        for row in self.counted.itertuples():
            files = sorted((self.folder / "trials" / row.trial).glob("spans*.parquet"))
            frame = slowest_rank([pd.read_parquet(file) for file in files])
            frames.append(frame.assign(**{key: getattr(row, key) for key in TRIAL_KEYS}))
        spans = pd.concat(frames, ignore_index=True)
        return spans.assign(duration_s=spans.end_s - spans.start_s)

    @cached_property
    def load(self) -> pd.DataFrame:
        """All events of a load study's counted trials, with ``TRIAL_KEYS``: reads, saves, lines of the log, steps.

        ``phase`` and ``kind`` say what it was, ``start_s`` (since the trial began) and ``latency_s`` when and how long,
        ``worker`` which process, ``epoch`` which pass over the files, ``stands_for`` how many such events there were:
        of reads from memory, every n-th was kept.
        """
        frames = [
            pd.read_parquet(self.folder / "trials" / row.trial / LOAD).assign(
                **{key: getattr(row, key) for key in TRIAL_KEYS}
            )
            for row in self.counted.itertuples()
        ]
        return pd.concat(frames, ignore_index=True)

    @property
    def experiment(self) -> str:
        """What was studied: ``saves`` or ``load``."""
        return self.request.get("experiment", "saves")

    @cached_property
    def phases(self) -> pd.DataFrame:
        """The spans inside of saves, but for the call that holds some of them; each with its save's ``warmup``."""
        return self.spans[(self.spans.parent >= 0) & (self.spans.kind != "call")]

    @cached_property
    def events(self) -> pd.DataFrame:
        """One row a checkpoint event of the counted trials, as ``events_of`` gives it."""
        return events_of(self.spans)

    @cached_property
    def restores(self) -> pd.DataFrame:
        """One row a trial: the cold restore in seconds (its parts added up) and what is known about the caches."""
        parts = self.spans[self.spans.kind == "restore"]
        keys = list(TRIAL_KEYS)
        caches = ["cache_data", "cache_metadata", "cache_server"]
        total = parts.groupby(keys, as_index=False)[["duration_s", "size_bytes"]].sum()
        return total.rename(columns={"duration_s": "restore_s"}).merge(
            parts.groupby(keys, as_index=False)[caches].first(), on=keys
        )

    def of_kind(self, kind: str) -> pd.DataFrame:
        """Give the counted spans of one kind."""
        return self.spans[(self.spans.kind == kind) & ~self.spans.warmup]


def events_of(spans: pd.DataFrame) -> pd.DataFrame:
    """Give one row a checkpoint event: when its call returned, when it was durable, how long training stood still.

    ``returned_s``, ``durable_s``, ``stall_s``, for staged saves ``local_s`` (durable on the local folder), all from
    the beginning of the save; ``queue_s``, the part of the stall that waited for the save before; ``size_bytes``.

    Parameters
    ----------
        spans
            A timeline's spans with ``TRIAL_KEYS`` and ``duration_s``.
    """
    inside = spans[spans.parent >= 0].assign(save=spans.parent)
    key = ["trial", "save"]
    parts = {
        "returned_end_s": inside[inside.kind == "call"].groupby(key).end_s.max(),
        # The last phase alone says that it is durable; one that never came, or was cut short, leaves no time.
        "durable_end_s": inside[_is_last(inside)].groupby(key).end_s.max(),
        "local_end_s": inside[(inside.kind == "sync") & (inside.part == "local")].groupby(key).end_s.max(),
        "queue_s": inside[inside.kind == "queue"].groupby(key).duration_s.sum(),
    }
    saves = spans[spans.kind == "save"].rename(columns={"id": "save"})
    saves = saves.merge(pd.DataFrame(parts).reset_index(), on=key, how="left", validate="1:1")
    return saves.assign(
        returned_s=saves.returned_end_s - saves.start_s,
        durable_s=saves.durable_end_s - saves.start_s,
        local_s=saves.local_end_s - saves.start_s,
        stall_s=saves.end_s - saves.start_s,
        queue_s=saves.queue_s.fillna(0.0),
    )[[*TRIAL_KEYS, "save", "step", "warmup", "size_bytes", "files", "start_s", "end_s", "durable_end_s",
       "returned_s", "durable_s", "local_s", "stall_s", "queue_s"]]  # fmt: skip


def _is_last(phases: pd.DataFrame) -> pd.Series:
    """Mark the phase after which a save is durable: the commit, or the sync of a Trainer's own, which has none."""
    shipped = phases.method.isin(AS_SHIPPED)
    return (shipped & (phases.kind == "sync")) | (~shipped & (phases.kind == "commit"))


def slowest_rank(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Join the timelines of a job's ranks: for each step, the rank whose save, wait or step took longest counts.

    Ranks wait for each other, so that the slowest one sets the pace (MLPerf Storage counts checkpoints likewise).
    """
    if len(frames) == 1:
        return frames[0]
    ranked = pd.concat([frame.assign(rank=rank) for rank, frame in enumerate(frames)], ignore_index=True)
    outer = ranked[ranked.parent < 0].copy()
    inside = ranked[ranked.parent >= 0]
    ends = inside.groupby(["rank", "parent"]).end_s.max().rename_axis(["rank", "id"]).rename("inner_end_s")
    outer = outer.join(ends, on=["rank", "id"])
    outer["whole_s"] = outer[["end_s", "inner_end_s"]].max(axis=1) - outer.start_s
    outer["turn"] = outer.groupby(["rank", "kind", "step", "part"]).cumcount()
    kept = outer.loc[outer.groupby(["kind", "step", "part", "turn"]).whole_s.idxmax()]
    phases = inside.merge(kept[["rank", "id"]].rename(columns={"id": "parent"}), on=["rank", "parent"])
    joined = pd.concat([kept[ranked.columns], phases])
    ids = joined["rank"] * (ranked.id.max() + 1)  # ids of several ranks must not meet
    parents = (joined.parent + ids).where(joined.parent >= 0, -1)
    return joined.assign(id=joined.id + ids, parent=parents).drop(columns="rank").sort_values("start_s")


def load_study(folder: str | Path) -> Study:
    """Read a study's folder.

    Raises
    ------
    ConfigError
        If the folder holds no study, one of an unknown schema, or one in which nothing was measured.
    """
    folder = Path(folder)
    if not (folder / STUDY).is_file():
        raise ConfigError(f"study={str(folder)!r} holds no {STUDY}; name a folder that stallbench run wrote")
    request = read_json(folder / STUDY)
    if request.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"study={str(folder)!r} has schema {request.get('schema_version')}, this version reads {SCHEMA_VERSION}; "
            "render it with the version that wrote it"
        )
    trials, details = scan(folder)
    environment = read_json(folder / ENVIRONMENT)
    assumed = read_json(folder / ASSUMPTIONS) if (folder / ASSUMPTIONS).exists() else {}
    study = Study(folder, request, environment, trials, details, assumed)
    if study.counted.empty:
        raise ConfigError(
            f"study={str(folder)!r} measured nothing: no trial of it succeeded; see its failure.json files"
        )
    return study


def scan(folder: Path) -> tuple[pd.DataFrame, dict[str, dict[str, Any]]]:
    """List the trials of a study by what lies on disk: ``trial.json`` alone says that one succeeded."""
    rows, details = [], {}
    for path in sorted((folder / "trials").glob("b*-a*-*")):
        condition, target = path.name.split("--", 1)
        numbered, attempted, wait, method = condition.split("-", 3)
        row = {"trial": path.name, "target": target, "method": method, "wait": wait}
        row |= {"block": int(numbered[1:]), "attempt": int(attempted[1:])}
        row["status"], row["reason"] = status_of(path)
        if row["status"] == "complete":
            details[path.name] = read_json(path / TRIAL)
        rows.append(row)
    columns = [*TRIAL_KEYS, "attempt", "status", "reason"]
    trials = pd.DataFrame(rows, columns=columns)
    latest = trials.groupby("block").attempt.transform("max")
    return trials.assign(superseded=trials.attempt < latest), details


def status_of(path: Path) -> tuple[str, str]:
    """Say how a trial ended, ``complete``, ``failed`` or ``interrupted``, and why it isn't complete."""
    try:
        if (path / TRIAL).exists():
            tables = read_json(path / TRIAL).get("tables", [SPANS])
            gone = [name for name in tables if not (path / name).exists()]
            return ("failed", f"its {gone[0]} is gone") if gone else ("complete", "")
        if (path / FAILURE).exists():
            failure = read_json(path / FAILURE)
            return ("interrupted" if failure["interrupted"] else "failed"), failure["reason"]
    except ConfigError as error:
        return "failed", str(error)
    return "interrupted", "killed before the trial ended"
