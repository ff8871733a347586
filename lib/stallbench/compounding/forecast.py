"""The projection, checked: what a few saves predict of 48, beside 48 that were really run (claim 1.3)."""

from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from stallbench.compounding.prediction import predict_total
from stallbench.proofs.validation import share
from stallbench.reporting.analysis import duration, percent
from stallbench.reporting.stats import Interval
from stallbench.results import VALIDATE_48, Study, read_json

CONFIDENCE = 0.9
# How far a predicted total may lie off: issue 6. An emulated device has no noise of its own.
GOAL, EMULATED_GOAL = 0.05, 0.03
DRIFT_ALPHA = 0.01  # for each of many runs


def rows_of(short: Study, long: Study, interval: str) -> list[dict[str, Any]]:
    """Predict the total stall of each long trial from the short study's trials of its condition.

    Parameters
    ----------
    short
        A study with a few counted saves a trial.
    long
        A study of the same targets, methods and wait rules, with as many saves a trial as are predicted.
    interval
        What the long study's interval is called.

    Returns
    -------
    list of dict
        One row a long trial: ``interval``, ``target``, ``emulated``, ``method``, ``wait``, ``saves``, ``from_blocks``,
        ``from_saves``; seconds ``predicted_s``, ``low_s``, ``high_s`` (None with one block), ``measured_s``, ``gap_s``
        (from a durable save to the next one's beginning, on average); shares ``error`` (predicted over measured, less
        1), ``drift`` (last quarter of the saves over the first, less 1); ``drift_p`` (Spearman's, of "no trend"),
        ``within``, ``goal``, ``met``.
    """
    rows = []
    events, few = (study.events[~study.events.warmup] for study in (long, short))
    for (target, method, wait, _), own in events.groupby(["target", "method", "wait", "trial"]):
        before = few[(few.target == target) & (few.method == method) & (few.wait == wait)]
        if before.empty:
            continue
        own = own.sort_values("start_s")
        blocks = {int(block): list(group.stall_s) for block, group in before.groupby("block")}
        found = predict_total(blocks, len(own), CONFIDENCE)
        measured_s, emulated = float(own.stall_s.sum()), long.emulated(target)
        goal = EMULATED_GOAL if emulated else GOAL
        error = found.mean / measured_s - 1
        label = {"interval": interval, "target": target, "emulated": emulated, "method": method, "wait": wait}
        counts = {"saves": len(own), "from_blocks": len(blocks), "from_saves": len(before)}
        rows.append(label | counts | _totals(found, measured_s) | _drift(own) | {
            "error": error, "goal": goal, "met": bool(abs(error) <= goal)})  # fmt: skip
    return rows


def _totals(found: Interval, measured_s: float) -> dict[str, Any]:
    known = found.low <= found.high  # one block has no interval
    bounds = {"low_s": found.low, "high_s": found.high} if known else {"low_s": None, "high_s": None}
    within = bool(found.low <= measured_s <= found.high) if known else None
    return {"predicted_s": found.mean, "measured_s": measured_s, "within": within} | bounds


def _drift(saves: pd.DataFrame) -> dict[str, float]:
    """Compare a run's last saves with its first, and test for a trend over all (``saves`` in their order in time)."""
    quarter = max(1, len(saves) // 4)
    values = saves.stall_s.to_numpy()
    alike = np.ptp(values) <= 1e-9 * values.max()  # but for rounding
    trend_p = 1.0 if alike else float(stats.spearmanr(range(len(values)), values).pvalue)
    gaps_s = saves.start_s.to_numpy()[1:] - saves[["durable_end_s", "end_s"]].max(axis=1).to_numpy()[:-1]
    return {
        "drift": float(values[-quarter:].mean() / values[:quarter].mean() - 1),
        "drift_p": trend_p,
        "gap_s": float(gaps_s.mean()),
    }


def kept(study: Study) -> list[dict[str, Any]]:
    """Read the rows that ``stallbench validate48`` kept in a study; empty without any."""
    path = study.folder / VALIDATE_48
    return read_json(path)["rows"] if path.exists() else []


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Say in lines what was predicted, what was measured, and how often the interval held it."""
    found = [
        f"{row['target']}{' (emulated)' if row['emulated'] else ''}, {row['method']}, wait={row['wait']}, "
        f"{row['interval']}: predicted {predicted_text(row)}, measured {duration(row['measured_s'])}; error "
        f"{percent(row['error'])}, goal {row['goal']:.0%}: {'met' if row['met'] else 'missed'}"
        for row in rows
    ]
    return [*found, coverage_words(rows)]


def predicted_text(row: dict[str, Any]) -> str:
    """Write the predicted total with its interval."""
    if row["low_s"] is None:
        return duration(row["predicted_s"])
    return duration(row["predicted_s"], row["low_s"], row["high_s"])


def coverage_words(rows: list[dict[str, Any]]) -> str:
    """Say how many prediction intervals held the measured total, with the share's binomial interval."""
    hits = [row["within"] for row in rows if row["within"] is not None]
    if not hits:
        return "No prediction has an interval: one block only."
    found = share("coverage", hits)
    low, high = found["coverage_low"], found["coverage_high"]
    answer = "consistent with" if low <= CONFIDENCE <= high else "not"
    return (
        f"{sum(hits)} of {len(hits)} prediction intervals hold the measured total: {found['coverage']:.0%} "
        f"({low:.0%} to {high:.0%}), {answer} the stated {CONFIDENCE:.0%}."
    )
