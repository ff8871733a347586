"""A load study in words and tables: what its section shows besides figures."""

import html
from collections.abc import Iterator

import pandas as pd

from stallbench.load import analysis as load
from stallbench.load.verdicts import number, share_text, times
from stallbench.reporting.analysis import compared_with, seconds
from stallbench.reporting.judging import called, storage_warnings
from stallbench.reporting.present import paragraphs_html
from stallbench.reporting.stats import Interval, mean_interval
from stallbench.reporting.tables import called as short
from stallbench.results import Study

READS = {
    "cold reads": "small files, random order, cold",
    "warm reads": "small files, random order, warm",
    "arrow": "Arrow shards, cold",
    "tar": "tar shards, cold",
}
FEW_BLOCKS = 3


def headline(study: Study) -> str:
    """Say what happens under load, a paragraph for each target, with intervals and what it rests on."""
    parts = [_sentence(study, target) for target in study.targets if target in set(study.counted.target)]
    emulated = [target for target in study.targets if study.emulated(target)]
    if emulated:
        parts.append(f"{' and '.join(emulated)}: emulated, so this is modelled, not measured on such a device.")
    if study.counted.block.nunique() == 1:
        parts.append("One block only, so no figure has an interval.")
    return "\n\n".join(parts)


def _sentence(study: Study, target: str) -> str:
    rate = mean_interval(load.rates(study, target, "cold reads").samples_per_s)
    busiest = load.fed(study, target)[0]
    factors = {one.kind: times(one.factor) for one in load.interference(study, target)}
    words = (
        f"{called(study, target)} gives {number(rate, 'small files a second')}, read cold and at random; a "
        f"{busiest.accelerator} (emulated) is busy {share_text(busiest.use)} of the time. With reads, saves and a log "
        f"at once, a read takes {factors['read']} times as long as alone, a save {factors['save']}."
    )
    return f"{words} {_packing(study, target)}".strip()


def _packing(study: Study, target: str) -> str:
    """Say what the most experiments at once read between them; nothing where there are no two."""
    most = max(load.counts(study, target), default=1)
    kept = load.kept_pace(study, target, most)
    if most == 1 or kept is None:
        return ""
    return f"{most} experiments at once read {times(kept, by=most)} times what one does."


def summary_lines(study: Study) -> list[str]:
    """Give one line a target: how many trials succeeded, and what its cold small files gave."""
    current, lines = study.trials[~study.trials.superseded], []
    for target in study.targets:
        trials = current[current.target == target]
        succeeded = int((trials.status == "complete").sum())
        rate = load.rates(study, target, "cold reads").samples_per_s
        figure = f"{rate.mean():,.0f} cold small files a second" if len(rate) else "nothing was measured"
        lines.append(f"{called(study, target)}, load: {succeeded} of {study.request['blocks']} trials; {figure}")
    return lines


def headline_html(study: Study) -> str:
    """Write the headline, a paragraph for each target."""
    return paragraphs_html(headline(study))


def warnings_html(study: Study) -> str:
    """Write what a reader must know before any figure."""
    return "".join(f'<p class="warning">{html.escape(text)}</p>' for text in warnings(study))


def warnings(study: Study) -> Iterator[str]:
    """Give the study's own warnings: the number, why it matters, and what mends it."""
    yield from storage_warnings(study)
    for row in study.trials[study.trials.status == "failed"].itertuples():
        yield f"Trial {row.trial} failed and counts nowhere: {row.reason}; the same command tries its block again."
    blocks = study.counted.block.nunique()
    if blocks < FEW_BLOCKS:
        yield (
            f"{blocks} complete block(s): intervals need 2, are of use from 3 on, and are called open where they say "
            "nothing. Use --blocks 5."
        )
    if len(study.targets) > 1 and not compared_with(study):
        yield "No two targets completed a block together, so nothing is compared."
    phases = study.spans[(study.spans.kind == "phase") & (study.spans.part == "cold reads")]
    for layer, words in (("cache_data", "their data"), ("cache_metadata", "their metadata")):
        for target in phases[phases[layer] != "cold"].target.unique():
            yield f"{target}: small files could not be shown to be cold in {words}; reads may be too quick."
    for target in study.targets:
        lost = sum(one.lost for one in load.neighbours(study, target))
        if lost:
            yield f"{target}: {lost} experiment(s) at once were lost; their blocks don't count among neighbours."


def reads_table(study: Study) -> pd.DataFrame:
    """Give what each way of reading gives in a second, and the latency of single reads."""
    rows = {}
    for target in study.targets:
        for phase, words in READS.items():
            rate = load.rates(study, target, phase)
            if rate.empty:
                continue
            p50, p95, p99 = (_milliseconds(one) for _, one in load.quantiles(study, target, phase).items())
            rows[f"{words}, {short(study, target)}"] = [
                number(mean_interval(rate.samples_per_s), "/s"),
                number(mean_interval(rate.bytes_per_s / 1e6), "MB/s"),
                p50, p95, p99,
            ]  # fmt: skip
    return pd.DataFrame.from_dict(rows, orient="index", columns=["samples", "bytes", "latency: p50", "p95", "p99"])


def _milliseconds(by_block: pd.Series) -> str:
    if by_block.isna().any():
        return "too few reads"
    return number(mean_interval(by_block * 1e3), "ms")


def reads_words(study: Study) -> str:
    """Say what was read, and how the table is meant."""
    config = next(iter(study.details.values()))["config"]
    making = "; ".join(
        f"{short(study, target)}: {rate:,.0f} files a second"
        for target in study.targets
        if (rate := load.making(study, target)) == rate
    )
    return (
        f"{config['files']:,} samples of real text, {config['workers']} workers, means over blocks with their 95 % "
        "interval. Small files: first pass only. A shard's first sample carries the time of opening it. Making "
        f"the small files until durable: {making or 'not in a trial that counts'}."
    )


def interference_table(study: Study) -> pd.DataFrame:
    """Give how much longer each kind of load takes with the others, on the target and in memory."""
    rows = {}
    for target in study.targets:
        for one in load.interference(study, target):
            cells = [times(ratio) if ratio else "unknown" for ratio in (one.factor, one.memory, one.storage)]
            rows[f"{one.kind} on {short(study, target)}"] = [*cells, one.events]
    columns = ["together / alone", "the same in memory", "the target's part, at least", "events together"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def use_table(study: Study) -> pd.DataFrame:
    """Give how busy each accelerator was on each target, and how much of the time it waited for data."""
    rows = {}
    for target in study.targets:
        for one in load.fed(study, target):
            real = one.step_s != one.step_s
            name = one.accelerator if real else f"{one.accelerator} (emulated)"
            rows[f"{name}, {short(study, target)}"] = [
                "measured" if real else f"{one.step_s * 1e3:.1f} ms",
                "-" if real else f"{one.demand_per_s:,.0f} /s",
                share_text(one.use),
                share_text(Interval(1 - one.use.mean, 1 - one.use.high, 1 - one.use.low, one.use.blocks)),
            ]
    return pd.DataFrame.from_dict(rows, orient="index", columns=["step", "could take", "busy", "data stall"])


def use_words() -> str:
    """Say below the accelerators' table what they were fed."""
    return (
        "Cold small files, each read once, without a save beside them. Step: a tenth of MLPerf's for ResNet-50, whose "
        "batch is a tenth too. The real model trains on this machine."
    )


def neighbours_table(study: Study) -> pd.DataFrame:
    """Give what experiments at once get, by their number, on each target and in memory."""
    rows = {}
    for target in study.targets:
        for one in load.neighbours(study, target):
            where = f"memory, in trials of {short(study, target)}" if one.memory else short(study, target)
            rows[f"{one.experiments} on {where}"] = [
                number(one.samples_per_s, "/s"), seconds(one.step_s), share_text(one.stalled), seconds(one.save_s),
                f"{one.fairness:.2f}", one.lost,
            ]  # fmt: skip
    columns = ["samples in training, all together", "step", "of it waiting", "save, durable", "fairness (Jain)", "lost"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def neighbours_words(study: Study) -> str:
    """Say from which number on a target slows its experiments down, and what packing gains."""
    lines = []
    for target in study.targets:
        packing = _packing(study, target)
        if not packing:
            continue
        count = load.saturates_at(study, target)
        slow = f"slows experiments down by a tenth or more from {count} at once on"
        if count is None:
            slow = "was not shown to slow any experiment down by a tenth"
        memory = load.kept_pace(study, target, max(load.counts(study, target)), memory=True)
        shared = " They slow each other down in memory too, so part of it is the processor."
        slowed = memory is not None and memory.ratio < load.KEPT_PACE
        lines.append(f"- {short(study, target)} {slow}. {packing}{shared if slowed else ''}")
    return "\n".join(lines) or "No two experiments ran at once."


def loop_words(study: Study) -> str:
    """Say how long an iteration takes, what of it is storage, and how many there are in a day."""
    lines = []
    for target in study.targets:
        if target not in set(study.counted.target):
            continue
        whole, share = load.iteration(study, target), load.storage_share(study, target)
        a_day = number(load.iterations_a_day(study, target), "iterations a day")
        lines.append(
            f"- {short(study, target)}: {seconds(whole)} an iteration, of which reload, save and restore are "
            f"{share_text(share)}; {a_day} if nothing else is done."
        )
    return "\n".join(lines)
