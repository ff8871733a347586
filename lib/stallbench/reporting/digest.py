"""A study's figures in short: as Markdown for a pull request, as plain values for machines."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pandas as pd

from stallbench.load import analysis as load_analysis
from stallbench.load import present as load_present
from stallbench.reporting.analysis import SIDE_BY_SIDE, Condition, block_means, compare, compared_with, seconds
from stallbench.reporting.claims import claims_table
from stallbench.reporting.judging import NOT_TESTED
from stallbench.reporting.stats import Interval, mean_interval
from stallbench.reporting.tables import called
from stallbench.reporting.verdicts import headline, summary_lines
from stallbench.results import Study

# What the names and the shape of ``values`` mean; raised when one changes.
DIGEST_VERSION = 1
MEASURES = ("returned_s", "stall_s", "durable_s", "restore_s")


def markdown(study: Study) -> str:
    """Write headline, figures of each condition and verdicts as Markdown."""
    claims = claims_table(study)
    parts = [
        *(_load_parts(study) if study.experiment == "load" else _save_parts(study)),
        _table(
            ["claim", "", "verdict", "what was found"],
            [[row.id, row.claim, row.verdict, row.figure] for row in claims[claims.figure != ""].itertuples()],
        ),
        [f"{sum(claims.verdict == NOT_TESTED)} of {len(claims)} claims are not tested here."],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _load_parts(study: Study) -> list[list[str]]:
    return [
        ["# Storage under load", "", load_present.headline(study)],
        [f"- {line}" for line in load_present.summary_lines(study)],
    ]


def _save_parts(study: Study) -> list[list[str]]:
    return [
        ["# Every minute your model waits", "", headline(study)],
        [f"- {line}" for line in summary_lines(study)],
        _table(
            ["target", "method", "wait", "returned", "stall", "durable", "cold restore"],
            [
                [called(study, one.target), one.method, one.wait, *(_text(found[measure]) for measure in MEASURES)]
                for one, found in _conditions(study)
            ],
        ),
        ["Means with 95 % intervals over blocks; a stall under wait=durable ends when the save is durable."],
    ]


def values(study: Study) -> dict[str, Any]:
    """Give the same figures as plain values, without NaN: null is "not known" or "no interval".

    Times are in seconds, ``time_saved`` is a share; names are stable within a ``digest_version``. A load study has
    ``reads``, samples a second by phase, in place of ``conditions`` and ``comparisons``.
    """
    of_load = study.experiment == "load"
    blank = {
        "digest_version": DIGEST_VERSION,
        **{key: study.request[key] for key in ("study_id", "schema_version", "method_version")},
        "experiment": study.experiment,
        "headline": load_present.headline(study) if of_load else headline(study),
        "targets": [
            {"target": target, "storage": study.storage(target)["words"], "emulated": study.emulated(target)}
            for target in study.targets
        ],
        "trials": dict(Counter(study.trials[~study.trials.superseded].status)),
        **({"reads": list(_reads(study))} if of_load else _saves(study)),
        "claims": claims_table(study)[["id", "claim", "verdict", "figure"]].to_dict("records"),
    }
    return _without_nan(blank)


def _reads(study: Study) -> Iterator[dict[str, Any]]:
    for target in study.targets:
        for phase in load_present.READS:
            rate = load_analysis.rates(study, target, phase).samples_per_s
            yield {
                "target": target,
                "phase": phase,
                "samples_per_s": asdict(mean_interval(rate)) if len(rate) else None,
            }


def _saves(study: Study) -> dict[str, Any]:
    return {
        "conditions": [
            asdict(one) | {measure: asdict(found[measure]) if found[measure] else None for measure in MEASURES}
            for one, found in _conditions(study)
        ],
        "comparisons": list(_comparisons(study)),
    }


def _conditions(study: Study) -> Iterator[tuple[Condition, dict[str, Interval | None]]]:
    """Give each condition in which a trial succeeded, with the interval of each measure; None where it is unknown."""
    present = set(study.counted[["target", "method", "wait"]].itertuples(index=False, name=None))
    for target in study.targets:
        for method in study.methods:
            for wait in study.waits:
                if (target, method, wait) in present:
                    means = {measure: block_means(study, measure, target, wait, method) for measure in MEASURES}
                    found = {measure: mean_interval(one) if len(one) else None for measure, one in means.items()}
                    yield Condition(target, method, wait), found


def _comparisons(study: Study) -> Iterator[dict[str, Any]]:
    """Give the time that the study's first method saves on the first target, against each other one."""
    first = study.targets[0]
    for other in compared_with(study):
        for measure in SIDE_BY_SIDE:
            if block_means(study, measure, first).index.intersection(block_means(study, measure, other).index).empty:
                continue
            one = compare(study, measure, other)
            yield {
                "measure": measure,
                "wait": one.wait,
                "target": first,
                "against": other,
                "time_saved": one.ratio.time_saved,
                "time_saved_low": one.ratio.time_saved_low,
                "time_saved_high": one.ratio.time_saved_high,
                "blocks": one.ratio.blocks,
            }


def _text(interval: Interval | None) -> str:
    return seconds(interval) if interval else "unknown"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return ["None."]
    texts = pd.DataFrame(rows, dtype=str)
    texts = texts.replace({r"\|": r"\\|", "\n": "<br>"}, regex=True)  # a target's name may hold a bar
    lines = [head, ["---"] * len(head), *texts.to_numpy().tolist()]
    return [f"| {' | '.join(line)} |" for line in lines]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
