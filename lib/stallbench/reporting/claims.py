"""The claims of the articles, and the verdict on each."""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from stallbench.compounding import judges as planning_judges
from stallbench.load.verdicts import JUDGED_UNDER_LOAD
from stallbench.reporting import verdicts
from stallbench.reporting.analysis import compared_with
from stallbench.reporting.judging import NOT_TESTED, Judgement
from stallbench.results import STUDY, Study, load_study


@dataclass(frozen=True)
class Claim:
    """One claim; ``judge`` takes a study of ``experiment`` and the target that the first is compared with."""

    id: str
    text: str
    rule: str
    section: str
    judge: Callable[[Study, str], Judgement]
    experiment: str = "saves"


def _under_load(id: str, text: str) -> Claim:
    return Claim(id, text, *JUDGED_UNDER_LOAD[id], experiment="load")


def _untested(study: Study, other: str) -> Judgement:
    return Judgement(NOT_TESTED, "")


CLAIMS = (
    Claim(
        "1.1", "The training phase takes about the same time in both environments.",
        "Step time equivalent within 5 % by two one-sided paired t tests.", "Training-phase", verdicts.training_time,
    ),
    Claim(
        "1.2", "Checkpoint writes are about 25 % faster on local NVMe.",
        "The 95 % interval of the time saved lies within 15 to 35 %, returned and durable.", "Saves",
        verdicts.save_time,
    ),
    Claim(
        "1.3", "A checkpoint every 10 minutes for 8 hours is 48 events, and the gap compounds.",
        "48 saves really run: each total predicted within 5 %, on an emulated device 3 %.", "Compounding",
        verdicts.compounds,
    ),
    Claim(
        "1.4", "40 s instead of 30 s, over dozens of cycles a day, a team and weeks, is hours.",
        "The arithmetic of the worked example.", "Worked-example", verdicts.worked_hours,
    ),
    Claim(
        "1.5", "Checkpoints are also read back; restore time matters.",
        "Proven cold restores differ by more than 5 %.", "Saves", verdicts.restore,
    ),
    _under_load("1.6", "Waiting for data to reload between iterations costs time."),
    Claim(
        "1.7", "HDDs add seek time and a throughput ceiling; a network hop adds latency.",
        "Raw writes, raw cold reads and random 4 KiB reads each take at least 5 % less time on the first target.",
        "Saves", verdicts.mechanics,
    ),
    Claim(
        "1.8", "Faster saves allow more frequent checkpoints and so smaller recovery windows.",
        "Modelled: shorter recovery window at the best interval (95 % interval).", "How-often-to-save",
        planning_judges.smaller_windows,
    ),
    _under_load("1.9", "The effect multiplies for several developers on parallel workloads."),
    Claim(
        "1.10", "It grows with model and dataset size.",
        "The seconds saved a save grow from smallest to largest size (95 % interval).", "Size",
        planning_judges.grows_with_size,
    ),
    _under_load("1.11", "The loop is: process data, evaluate, save, adjust, go again."),
    _under_load("2.1", "Accelerators idle when storage can't feed them."),
    _under_load("2.2", "Training reads very many small files at random."),
    _under_load("2.3", "Reads, checkpoint writes and logs run at once, and need IOPS and low latency."),
    _under_load("2.4", "Parallel experiments share datasets without a bottleneck only on good storage."),
    Claim(
        "2.5", "Robust storage allows frequent checkpoints without slowing training.",
        "Saves take at most 3.5 % of the time (95 % interval).", "How-often-to-save",
        planning_judges.frequent_without_slowing,
    ),
    Claim(
        "2.6", "Thousands of processors load the storage at once.",
        "Takes a machine that can load storage so.", "", _untested,
    ),
    Claim(
        "2.7", "Storage is an investment: weigh its price against delayed work.",
        "Modelled: payback under stated prices.", "Money", planning_judges.worth_its_price,
    ),
    Claim(
        "2.8", "Plan for growth from the start.",
        "Modelled: bandwidth and capacity by model, interval and share of time.", "Planning",
        planning_judges.plan_for_growth,
    ),
)  # fmt: skip


def nested_load(study: Study) -> Study | None:
    """Give the load study in the study's folder ``load``; None if there is none."""
    folder = study.folder / "load"
    return load_study(folder) if (folder / STUDY).is_file() else None


def claims_table(study: Study) -> pd.DataFrame:
    """Judge every claim: ``id``, ``claim``, ``rule``, ``verdict``, ``figure``, ``section``, one row each.

    A figure has a line for each target that the first is compared with. What takes a load study is judged on it: the
    study itself, or the one that lies in its folder ``load``.
    """
    studies = {"saves": study, "load": nested_load(study)} if study.experiment == "saves" else {"load": study}
    rows = []
    for claim in CLAIMS:
        where = studies.get(claim.experiment)
        others = compared_with(where) if where else []
        judged = [(other, claim.judge(where, other)) for other in others]
        figure = _said({other: one.figure for other, one in judged}, "Against {}: ", "\n")
        rows.append(
            {
                "id": claim.id,
                "claim": claim.text,
                "rule": claim.rule,
                "verdict": _said({other: one.verdict for other, one in judged}, "{}: ", "; ") or NOT_TESTED,
                "figure": figure,
                "section": claim.section if figure else "",
            }
        )
    return pd.DataFrame(rows)


def _said(texts: dict[str, str], name: str, between: str) -> str:
    """Say once what holds against all targets, else by target."""
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "")
    return between.join(name.format(other) + text for other, text in texts.items() if text)
