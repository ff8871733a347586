"""A short form of ``make torture``, and the proof that it would find a protocol that loses something."""

import json
import subprocess
import sys

import pytest

from stallbench.proofs.powercut import missing
from stallbench.proofs.torture import lost

NO_CUTS = pytest.mark.skipif(bool(missing()), reason=missing() or "the power can be cut")


def torture(*, kills: int = 0, cuts: int = 0, methods: tuple[str, ...], sabotage: str = "") -> list[dict]:
    """Run in a process of its own, which has no threads and can be forked."""
    script = (
        "import sys, warnings\nfrom stallbench.proofs import torture\nfrom stallbench.checkpointing import commit\n"
        f"{sabotage}\ntable = torture.torture({kills}, {cuts}, {methods!r})\nprint(table.to_json(orient='records'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_kills_lose_nothing():
    rows = torture(kills=4, methods=("torch", "dcp-async", "fast-async"))
    assert [(row["method"], row["events"], row["lost"], row["broken"]) for row in rows] == [
        ("torch", 4, 0, 0), ("dcp-async", 4, 0, 0), ("fast-async", 4, 0, 0)
    ]  # fmt: skip


def test_a_protocol_that_names_a_checkpoint_too_early_is_found_out():
    early = """
def publish(partial, final):
    final.mkdir(exist_ok=True)
    (final / commit.MANIFEST).write_text('{"method": "fast", "step": 1, "files": {}}')
    import time; time.sleep(1)
commit.publish = publish
"""
    [row] = torture(kills=3, methods=("fast",), sabotage=early)
    assert row["broken"] > 0


@NO_CUTS
def test_power_cuts_lose_nothing():
    rows = torture(cuts=2, methods=("fast", "fast-async"))
    assert [(row["event"], row["events"], row["lost"], row["broken"]) for row in rows] == [("power cut", 2, 0, 0)] * 2


@NO_CUTS
def test_a_save_that_is_never_synced_is_found_out():
    unsynced = "commit.sync_tree = commit.sync_file = lambda path: None"
    [row] = torture(cuts=4, methods=("safetensors",), sabotage=unsynced)
    assert row["lost"] + row["broken"] > 0


def test_what_the_trainers_own_layout_loses_is_reported_and_no_failure():
    import pandas as pd

    rows = [{"method": "trainer", "lost": 3, "broken": 2}, {"method": "fast", "lost": 0, "broken": 0}]
    assert not lost(pd.DataFrame(rows))
    rows[1]["lost"] = 1
    assert lost(pd.DataFrame(rows))
