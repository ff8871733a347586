"""A study whose every number is known, written as a real one is."""

import math
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from stallbench.results import (
    METHOD_VERSION,
    SAVES,
    SCHEMA_VERSION,
    SIZES,
    SPANS,
    SWEEP,
    Study,
    load_study,
    trial_id,
    write_json,
)
from stallbench.spans import Span

BLOCKS = 3
# Seconds of a save's phases by target and method; each block is this much slower than the one before.
DRIFT = 1.01
PHASES = {
    ("disk", "trainer"): {"write": 0.4, "sync": 0.1},
    ("nas", "trainer"): {"write": 1.6, "sync": 0.4},
    ("disk", "fast-async"): {"snapshot": 0.02, "write": 0.15, "sync": 0.02, "commit": 0.01},
    ("nas", "fast-async"): {"snapshot": 0.02, "write": 1.4, "sync": 0.09, "commit": 0.01},
}
STEP_S, BESIDE_S, MEMORY_S = 0.10, 0.12, 0.05


class Spans:
    """Append spans one after the other."""

    def __init__(self) -> None:
        self.rows: list[Span] = []
        self.now_s = 0.0

    def add(self, kind: str, length_s: float, **fields: object) -> Span:
        span = Span(len(self.rows), kind, self.now_s, self.now_s + length_s, **fields)
        self.rows.append(span)
        self.now_s = span.end_s
        return span

    def write(self, path: Path) -> None:
        pd.DataFrame([asdict(span) for span in self.rows]).to_parquet(path, index=False)


def save(spans: Spans, step: int, phases: dict[str, float], wait: str, factor: float, asynchronous: bool) -> float:
    """Add a save; gives how long it goes on beside training."""
    begin_s = spans.now_s
    outer = spans.add("save", 0, step=step, size_bytes=100_000_000, files=7)
    call = spans.add("call", 0, step=step, parent=outer.id)
    for kind, length_s in phases.items():
        spans.add(kind, length_s * factor, step=step, parent=outer.id)
    durable_s = spans.now_s
    stall_s = phases["snapshot" if asynchronous else "write"] * factor
    call.end_s = begin_s + stall_s
    outer.end_s = call.end_s if wait == "return" else durable_s
    spans.now_s = outer.end_s
    return durable_s - outer.end_s


def trial(folder: Path, target: str, method: str, wait: str, block: int, slower: float) -> None:
    factor, spans = DRIFT**block * slower, Spans()
    asynchronous = method == "fast-async"
    spans.add("raw_write", 0.05, size_bytes=100_000_000)
    for step in range(1, 7):
        spans.add("step", STEP_S * factor, step=step)
    for number in (1, 2):
        last = 10 * number
        background_s = save(spans, last, PHASES[target, method], wait, factor, asynchronous)
        beside = math.floor(background_s / (BESIDE_S * factor)) if asynchronous else 0
        for step in range(last + 1, last + 11):
            spans.add("step", (BESIDE_S if step - last <= beside else STEP_S) * factor, step=step)
        spans.now_s += 5
    for part in ("weights", "optimizer"):
        spans.add("restore", 0.2 * factor, part=part, cache_data="cold", cache_metadata="cold", cache_server="unknown")
    if not asynchronous:
        spans.add("memory_save", MEMORY_S * factor)
    else:
        for part, length_s in (("alone", 0.1), ("beside a save", 0.1)):
            spans.add("mock_step", length_s, part=part)
    name = trial_id(block, 1, target, method, wait)
    (folder / "trials" / name).mkdir(parents=True)
    spans.write(folder / "trials" / name / SPANS)
    values = {"losses": [0.5, 0.25 / block], "began_utc": "2026-12-01T00:00:00+00:00", "wall_s": 60, "checks": {}}
    write_json(folder / "trials" / name / "trial.json", values)


def target(name: str) -> dict:
    storage = {"words": "a made disk", "medium": "unknown", "file_system": "ext4", "options": []}
    return {"name": name, "storage": storage, "fingerprint": name, "device": name}


def make(folder: Path, study_id: str = "made", blocks: int = BLOCKS, slower: dict[str, float] | None = None) -> Study:
    """Write the study; ``slower`` multiplies all times of a target."""
    request = {
        "schema_version": SCHEMA_VERSION, "method_version": METHOD_VERSION, "study_id": study_id, "blocks": blocks,
        "targets": [target("disk"), target("nas")], "methods": ["trainer", "fast-async"], "command": "stallbench run",
        "waits": ["return", "durable"], "warmup_saves": 3, "keep": 2, "model": "m", "dataset": "d", "created_utc": "",
    }  # fmt: skip
    for block in range(1, blocks + 1):
        for place, method in PHASES:
            for wait in ("return", "durable"):
                if wait == "return" or method == "trainer":
                    trial(folder, place, method, wait, block, (slower or {}).get(place, 1.0))
    write_json(folder / "study.json", request)
    write_json(folder / "environment.json", {})
    return load_study(folder)


# Latency in seconds and bandwidth in bytes/s of each target's line, and the sizes of a sweep over them.
LINES = {"disk": (0.05, 1e9), "nas": (0.1, 1e8)}
SWEPT_BYTES = {"nanogpt-cpu": 10e6, "bert-tiny": 50e6, "bert-mini": 130e6, "bert-small": 350e6, "distilbert": 800e6}


def make_sweep(
    study: Study,
    models: tuple[str, ...] = tuple(SWEPT_BYTES),
    bent: bool = False,
    names: dict[str, str] | None = None,
) -> None:
    """Keep a sweep whose times lie on ``LINES`` but for 1 % a block; ``bent``: beyond 100 MB three times as slow.

    ``names`` calls the targets otherwise.
    """
    rows = []
    for target, (latency_s, bytes_per_s) in LINES.items():
        for model in models:
            size_bytes = SWEPT_BYTES[model]
            save_s = latency_s + size_bytes / bytes_per_s + bent * 2 * max(0.0, size_bytes - 100e6) / bytes_per_s
            for block in (1, 2, 3):
                for warmup in (True, False):
                    time_s = save_s * (9 if warmup else 0.99 + 0.005 * block)
                    row = {
                        "model": model,
                        "target": (names or {}).get(target, target),
                        "method": "trainer",
                        "block": block,
                        "warmup": warmup,
                    }
                    row |= {"size_bytes": int(size_bytes) + block, "files": 7, "returned_s": time_s}
                    rows.append(row | {"stall_s": time_s, "durable_s": time_s})
    folder = study.folder / SIZES
    folder.mkdir()
    pd.DataFrame(rows).to_parquet(folder / SAVES, index=False)
    limits = {"dirty_background_bytes": 100_000_000, "dirty_bytes": 500_000_000}
    request = {"models": list(models), "methods": ["trainer"], "blocks": 3, "warmup_saves": 1, "counted_saves": 1}
    write_json(folder / SWEEP, request | {"command": "stallbench sizes", "environment": {"dirty_limits": limits}})
