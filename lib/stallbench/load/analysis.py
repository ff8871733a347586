"""From a load study's tables to figures: interference, data stall and utilisation, neighbours, the loop's time split.

As everywhere, the block is the unit: a figure is a mean over blocks of one value a trial, and a comparison is paired by
block (DESIGN part 4). Load that saturates a machine's processor slows everything down too, so that what the target adds
is judged against the same load on a memory file system, recorded in the same trial.
"""

import math
from dataclasses import dataclass

import pandas as pd

from stallbench.reporting.stats import Interval, PairedRatio, mean_interval, paired_ratio
from stallbench.results import Study

ALONE = {"read": "cold reads", "save": "saves", "log": "log"}
TOGETHER = "together"
MEMORY = ", memory"
PERCENTILES = (0.5, 0.95, 0.99)
LEAST_BEYOND = 5  # reads beyond a percentile, or it is one read's chance
LOOP = ("reload", "process", "train", "evaluate", "save", "restore")
STORAGE_PARTS = ("reload", "save", "restore")
DAY_S = 86_400
STEPS_OF_LOSS = 100  # between two saves: the loss of waits and that of a save are added up over it
# An experiment beside others that keeps less than this share of its pace alone is slowed down.
KEPT_PACE = 0.9


@dataclass(frozen=True)
class Interference:
    """How much longer one kind of load takes on a target when all kinds run at once.

    ``factor`` is together / alone, ``memory`` the same on the memory file system (None where there was none), and
    ``storage`` the one over the other: what the target adds at least. In memory all goes as fast as the processor can,
    so that it is shared there more than beside a slow target.
    """

    target: str
    kind: str
    factor: PairedRatio
    memory: PairedRatio | None
    storage: PairedRatio | None
    events: int


@dataclass(frozen=True)
class Fed:
    """How well cold small files feed one accelerator on a target.

    ``use`` is its utilisation as MLPerf Storage has it, compute time / wall time; ``demand_per_s`` the samples that it
    could take in a second; ``step_s`` its step; NaN for the real model, whose step is measured.
    """

    target: str
    accelerator: str
    step_s: float
    demand_per_s: float
    use: Interval


@dataclass(frozen=True)
class Neighbours:
    """Some experiments at once on a target, in means over blocks.

    ``samples_per_s`` is that of all together while they train, ``step_s`` a step with its wait for data, ``stalled``
    the share of it that is the wait, ``save_s`` a save, and ``fairness`` Jain's index of the experiments' samples.
    """

    target: str
    experiments: int
    memory: bool
    samples_per_s: Interval
    step_s: Interval
    stalled: Interval
    save_s: Interval
    fairness: float
    lost: int


def _of(events: pd.DataFrame, target: str, phase: str, kind: str) -> pd.DataFrame:
    return events[(events.target == target) & (events.phase == phase) & (events.kind == kind)]


def _first_pass(study: Study, target: str, phase: str) -> pd.DataFrame:
    """Give a phase's reads; of cold ones those of the first pass, as later ones find their metadata cached."""
    reads = _of(study.load, target, phase, "read")
    return reads if phase == "warm reads" else reads[reads.epoch == 0]


def quantiles(study: Study, target: str, phase: str) -> pd.DataFrame:
    """Give the 50th, 95th and 99th percentile of a phase's reads in seconds: a row a block, a column a percentile.

    NaN in all blocks where one of them has fewer than ``LEAST_BEYOND`` reads beyond the percentile.
    """
    reads = _first_pass(study, target, phase)
    found = reads.groupby("block").latency_s.quantile(list(PERCENTILES)).unstack()
    fewest = reads.groupby("block").stands_for.sum().min()
    found[[one for one in found.columns if fewest * (1 - one) < LEAST_BEYOND]] = math.nan
    return found


def rates(study: Study, target: str, phase: str) -> pd.DataFrame:
    """Give what a phase read in a second, indexed by block: ``samples_per_s`` and ``bytes_per_s`` of the samples.

    The sum of the workers' own rates, each from its first read to the end of its last one: one that still reads when
    another has ended, or whose last batch went unrecorded, makes none of them look slower.
    """
    reads = _first_pass(study, target, phase)
    size_bytes = reads.size_bytes * reads.stands_for
    reads = reads.assign(end_s=reads.start_s + reads.latency_s, size_bytes=size_bytes)
    own = reads.groupby(["block", "worker"])
    sums = own.agg({"start_s": "min", "end_s": "max", "size_bytes": "sum", "stands_for": "sum"})
    rate = sums[["stands_for", "size_bytes"]].div(sums.end_s - sums.start_s, axis=0).groupby("block").sum()
    return rate.set_axis(["samples_per_s", "bytes_per_s"], axis=1)


def making(study: Study, target: str) -> float:
    """Give the small files a second at which the dataset was made until durable; NaN if no counted trial made it."""
    spans = study.spans[(study.spans.target == target) & (study.spans.kind == "make_files")]
    return float(spans.files.sum() / spans.duration_s.sum()) if len(spans) else math.nan


def interference(study: Study, target: str, confidence: float = 0.95) -> list[Interference]:
    """Compare each kind of load together with alone, on a target and in memory, paired by block."""
    found = []
    for kind, alone in ALONE.items():
        here = _ratio_by_block(study, target, alone, kind, "")
        memory = _ratio_by_block(study, target, alone, kind, MEMORY)
        if here.empty:
            continue
        one = pd.Series(1.0, index=here.index)
        shared = here.index.intersection(memory.index)
        found.append(
            Interference(
                target,
                kind,
                paired_ratio(here, one, confidence),
                paired_ratio(memory, pd.Series(1.0, index=memory.index), confidence) if len(memory) else None,
                paired_ratio(here[shared], memory[shared], confidence) if len(shared) else None,
                len(_of(study.load, target, TOGETHER, kind)),
            )
        )
    return found


def _ratio_by_block(study: Study, target: str, alone: str, kind: str, where: str) -> pd.Series:
    parts = [_of(study.load, target, phase + where, kind) for phase in (TOGETHER, alone)]
    if kind == "read" and not any(part.empty for part in parts):
        parts = _like_with_like(*parts)
    together, by_itself = (part.groupby("block").latency_s.mean() for part in parts)
    return (together / by_itself).dropna()


def _like_with_like(together: pd.DataFrame, alone: pd.DataFrame) -> list[pd.DataFrame]:
    """Keep reads that found the caches alike: of later passes (data cold, metadata cached) where most are, else first.

    On a quick storage the first pass is over before the others' load has begun.
    """
    later = all((part.epoch > 0).mean() > 0.5 for part in (together, alone))
    return [part[(part.epoch > 0) == later] for part in (together, alone)]


def fed(study: Study, target: str) -> list[Fed]:
    """Give the utilisation of each accelerator that a target fed, the most demanding first, the real model last."""
    trials = study.counted[study.counted.target == target].trial
    stated = {one["name"]: one for trial in trials for one in study.details[trial]["accelerators"]}
    events = study.load[study.load.target == target]
    found = []
    for name in dict.fromkeys(events[events.kind == "compute"].phase):
        parts = events[events.phase == name].groupby(["block", "kind"]).latency_s.agg(["sum", "count"]).unstack()
        seconds, steps = parts["sum"], parts["count"]["compute"]
        one = stated.get(name)
        computed_s = steps * one["step_s"] if one else seconds["compute"]
        demand_per_s = one["batch"] / one["step_s"] if one else math.nan
        use = mean_interval(computed_s / seconds.sum(axis=1))
        found.append(Fed(target, name, one["step_s"] if one else math.nan, demand_per_s, use))
    return sorted(found, key=lambda each: (math.isnan(each.demand_per_s), -each.demand_per_s))


def pace(study: Study, target: str, experiments: int, memory: bool = False) -> pd.Series:
    """Give the mean step of experiments at once, with its wait for data, in seconds by block."""
    waits = _side_by_side(study, target, experiments, memory, "wait")
    step_s = {trial: study.details[trial]["config"]["neighbour_step_s"] for trial in waits.trial.unique()}
    return (waits.latency_s + waits.trial.map(step_s).astype(float)).groupby(waits.block).mean()


def phase_name(experiments: int, memory: bool = False) -> str:
    """Name the phase of experiments at once, as a trial does."""
    return f"{experiments} at once{MEMORY if memory else ''}"


def lost_time(study: Study, target: str, experiments: int) -> pd.Series:
    """Give the seconds that experiments at once lose to the target between them, by block: waits and one save each.

    The waits are those of ``STEPS_OF_LOSS`` steps, so that numbers and targets compare.
    """
    waits, saves = (
        _side_by_side(study, target, experiments, False, kind).groupby("block").latency_s.mean()
        for kind in ("wait", "save")
    )
    return (waits * STEPS_OF_LOSS + saves) * experiments


def _side_by_side(study: Study, target: str, experiments: int, memory: bool, kind: str) -> pd.DataFrame:
    """Give the events of experiments at once, of blocks that lost none: the others had more of the target."""
    events = _of(study.load, target, phase_name(experiments, memory), kind)
    return events[events.block.isin(_whole_blocks(study, target, experiments, memory))]


def counts(study: Study, target: str) -> list[int]:
    """Give the numbers of experiments at once of which all ran to their end in some block, fewest first."""
    outcomes = _outcomes(study, target)
    tried = sorted(outcomes.experiments.unique().tolist()) if len(outcomes) else []
    return [count for count in tried if len(_whole_blocks(study, target, count, memory=False))]


def _whole_blocks(study: Study, target: str, experiments: int, memory: bool) -> pd.Series:
    """Give the blocks in which all of some experiments at once ran to their end."""
    own = _outcomes(study, target)
    if own.empty:
        return pd.Series(dtype=int)
    return own[(own.experiments == experiments) & (own.memory == memory) & (own.beside_lost == 0)].block


def _outcomes(study: Study, target: str) -> pd.DataFrame:
    rows = []
    for trial in study.counted[study.counted.target == target].itertuples():
        for one in study.details[trial.trial]["checks"]["neighbours"]:
            rows.append(one | {"block": trial.block, "memory": one["phase"].endswith(MEMORY)})
    return pd.DataFrame(rows)


def neighbours(study: Study, target: str) -> list[Neighbours]:
    """Describe experiments at once, on a target and in memory; a block in which one was lost counts as lost only."""
    outcomes = _outcomes(study, target)
    found = []
    for (count, memory), own in outcomes.groupby(["experiments", "memory"]) if len(outcomes) else ():
        whole = own[own.beside_lost == 0]
        lost = int((own.lost != "").sum())
        if whole.empty:
            continue
        waits, saves = (_side_by_side(study, target, count, memory, kind) for kind in ("wait", "save"))
        step_s = pace(study, target, count, memory)
        batch = whole.samples.sum() / len(waits)
        found.append(
            Neighbours(
                target,
                int(count),
                bool(memory),
                mean_interval(count * batch / step_s),
                mean_interval(step_s),
                mean_interval(waits.groupby("block").latency_s.mean() / step_s),
                mean_interval(saves.groupby("block").latency_s.mean()),
                float(whole.groupby("block").samples.agg(jain).mean()),
                lost,
            )
        )
    return found


def jain(shares: pd.Series) -> float:
    """Give Jain's fairness index: 1 if all get the same, 1/n if one gets all.

    Source: Jain, Chiu and Hawe, A quantitative measure of fairness and discrimination, DEC-TR-301, 1984.
    """
    total = float((shares**2).sum())
    return float(shares.sum() ** 2 / (len(shares) * total)) if total else math.nan


def kept_pace(study: Study, target: str, count: int, memory: bool = False) -> PairedRatio | None:
    """Give the share of its pace alone that each of some experiments at once keeps; None where one of both is lost."""
    alone, beside = pace(study, target, 1, memory), pace(study, target, count, memory)
    return paired_ratio(alone, beside) if len(alone.index.intersection(beside.index)) else None


def saturates_at(study: Study, target: str) -> int | None:
    """Give the least number of experiments of which each surely keeps less than 0.9 of its pace alone; None if none.

    Surely: by the whole interval, so that one block shows none.
    """
    kept = {count: kept_pace(study, target, count) for count in counts(study, target)}
    return next((count for count, one in kept.items() if one and one.high < KEPT_PACE), None)


def loop_parts(study: Study, target: str) -> pd.DataFrame:
    """Give the mean seconds of each part of an iteration: a row a block, a column a part of ``LOOP``."""
    spans = study.spans[(study.spans.target == target) & (study.spans.kind == "iteration")]
    return spans.groupby(["block", "part"]).duration_s.mean().unstack().reindex(columns=list(LOOP))


def iteration(study: Study, target: str) -> Interval:
    """Give the seconds of a whole iteration."""
    return mean_interval(loop_parts(study, target).sum(axis=1))


def iterations_a_day(study: Study, target: str) -> Interval:
    """Give how many iterations fit into a day if nothing else is done; endless where their time may be 0."""
    whole = iteration(study, target)
    high = DAY_S / whole.low if not whole.low <= 0 else math.inf
    return Interval(DAY_S / whole.mean, DAY_S / whole.high, high, whole.blocks)


def storage_share(study: Study, target: str) -> Interval:
    """Give the share of an iteration that reload, save and restore take."""
    parts = loop_parts(study, target)
    return mean_interval(parts[list(STORAGE_PARTS)].sum(axis=1) / parts.sum(axis=1))
