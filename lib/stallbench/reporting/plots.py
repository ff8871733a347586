"""Figures: each takes a study or its tables and gives a matplotlib figure; colour is never the only sign."""

from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stallbench.compounding.models import ARTICLE_FAST_S, ARTICLE_SLOW_S, Schedule, cumulative_wait
from stallbench.reporting import which_nas
from stallbench.reporting.analysis import MEASURES, block_means, condition, measured
from stallbench.reporting.matrix import cells, phase_means
from stallbench.reporting.stats import Interval, mean_interval
from stallbench.results import Study

plt.style.use(str(files("stallbench") / "stallbench.mplstyle"))

# Okabe and Ito's palette (2008): told apart by lightness, and by marker, line or hatch besides.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#333333", "#56b4e9")
_MARKERS = ("o", "^", "s", "D", "v", "P")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
_LANES = {
    "put_data": ("data", "#999999", ""),
    "reload_data": ("data", "#56b4e9", "...."),
    "raw_write": ("raw limit", "#bbbbbb", ""),
    "raw_buffered": ("raw limit", "#dddddd", "////"),
    "raw_read": ("raw limit", "#777777", ""),
    "raw_random": ("raw limit", "#ffffff", "...."),
    "raw_small": ("raw limit", "#333333", ""),
    "step": ("train", "#f0e442", ""),
    "data_wait": ("train", "#d55e00", ""),
    "eval": ("train", "#ffffff", "...."),
    "snapshot": ("save", "#56b4e9", "...."),
    "serialize": ("save", "#999999", "////"),
    "write": ("save", "#0072b2", ""),
    "sync": ("sync", "#cc79a7", "////"),
    "commit": ("sync", "#333333", ""),
    "delete": ("save", "#000000", ""),
    "restore": ("restore", "#009e73", "\\\\\\\\"),
    "memory_save": ("controls", "#dddddd", ""),
    "mock_step": ("controls", "#ffffff", "xxxx"),
}


def look(study: Study, target: str) -> dict[str, str]:
    """Give a target the same colour and marker in every figure."""
    index = study.targets.index(target) % len(_COLOURS)
    return {"color": _COLOURS[index], "marker": _MARKERS[index]}


def tick(study: Study, target: str) -> str:
    """Name a target at an axis, and say if it is emulated."""
    return f"{target}\n(emulated)" if study.emulated(target) else target


def trial_timeline(spans: pd.DataFrame, title: str) -> Figure:
    """Draw one trial's spans over its time.

    Parameters
    ----------
    spans
        Columns ``kind``, ``start_s``, ``end_s``, as ``Timeline.frame`` gives them.
    """
    figure, axes = plt.subplots(figsize=(5.2, 2.9))
    _draw_timeline(axes, spans)
    axes.set_title(title)
    axes.set_xlim(0, spans.end_s.max() * 1.02)
    axes.set_xlabel("seconds since the trial began")
    _timeline_legend(figure, spans)
    return figure


def timelines(study: Study) -> Figure:
    """Draw one trial of each target, from the same block and wait rule, over one time axis."""
    wait = condition(study, "return")
    trials = study.counted[(study.counted.wait == wait) & (study.counted.method == study.methods[0])]
    block = trials.groupby("block").target.nunique().idxmax()
    shown = trials[trials.block == block].set_index("target").trial
    targets = [target for target in study.targets if target in shown]
    figure, axes = plt.subplots(len(targets), sharex=True, squeeze=False, figsize=(5.2, 0.8 + 1.75 * len(targets)))
    for axis, target in zip(axes[:, 0], targets, strict=True):
        _draw_timeline(axis, study.spans[study.spans.trial == shown[target]])
        emulated = ", emulated" if study.emulated(target) else ""
        axis.set_title(f"{target}{emulated}: block {block}, wait={wait}")
    axes[-1, 0].set_xlim(0, study.spans[study.spans.trial.isin(shown)].end_s.max() * 1.02)
    axes[-1, 0].set_xlabel("seconds since the trial began")
    _timeline_legend(figure, study.spans[study.spans.trial.isin(shown)])
    return figure


def _draw_timeline(axes: Axes, spans: pd.DataFrame) -> None:
    lanes = ["data", "raw limit", "train", "save", "sync", "restore", "controls"]
    for kind, (lane, colour, hatch) in _LANES.items():
        rows = spans[spans.kind == kind]
        bars = list(zip(rows.start_s, rows.end_s - rows.start_s, strict=True))
        y = len(lanes) - 1 - lanes.index(lane)
        axes.broken_barh(bars, (y - 0.38, 0.76), facecolor=colour, hatch=hatch, edgecolor="#333333", linewidth=0.2)
    axes.set_yticks(range(len(lanes)), lanes[::-1])
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.grid(axis="y", visible=False)


def _timeline_legend(figure: Figure, spans: pd.DataFrame) -> None:
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#333333", linewidth=0.4, label=kind.replace("_", " "))
        for kind, (_, colour, hatch) in _LANES.items()
        if (spans.kind == kind).any()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, handlelength=1.4)


def side_by_side(study: Study) -> Figure:
    """Draw every counted event as a point, and the mean over blocks with its 95 % interval, one panel a measure."""
    measures = ("step_s", "returned_s", "durable_s", "restore_s")
    height = 0.55 + 0.42 * len(study.targets)
    figure, axes = plt.subplots(len(measures), figsize=(5.2, len(measures) * (height + 0.45)))
    for axis, measure in zip(axes, measures, strict=True):
        words, preferred = MEASURES[measure]
        wait = condition(study, preferred)
        _draw_events(axis, study, measure, wait)
        axis.set_title(f"{words[0].upper()}{words[1:]} (wait={wait})")
    figure.get_layout_engine().set(hspace=0.09)
    axes[-1].set_xlabel("seconds; each panel has its own scale, from 0")
    return figure


def _draw_events(axes: Axes, study: Study, measure: str, wait: str) -> None:
    scatter = np.random.default_rng(0)  # so that a page rendered twice is the same
    values = measured(study, measure, wait)
    for row, target in enumerate(study.targets):
        points = values[values.target == target].value_s
        if points.empty:
            continue
        y = len(study.targets) - 1 - row
        style = look(study, target)
        axes.plot(points, y + scatter.uniform(-0.22, 0.22, len(points)), ls="", ms=4.5, alpha=0.45, mew=0, **style)
        mean = mean_interval(block_means(study, measure, target, wait))
        axes.plot([mean.low, mean.high], [y, y], color="black", lw=2.2, solid_capstyle="butt")
        axes.plot(mean.mean, y, marker="|", ms=17, mew=2.2, color="black")
    axes.set_yticks(range(len(study.targets)), [tick(study, target) for target in study.targets[::-1]])
    axes.set_ylim(-0.5, len(study.targets) - 0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)


_PHASES = {
    "queue": ("waiting for the save before", "#ffffff", "xxxx"),
    "snapshot": ("snapshot", "#56b4e9", "...."),
    "serialize": ("serialize, to memory", "#999999", "////"),
    "write": ("write", "#0072b2", ""),
    "sync": ("sync", "#cc79a7", "\\\\\\\\"),
    "commit": ("commit", "#333333", ""),
}


def phase_bars(study: Study) -> Figure:
    """Draw what a mean save is made of, by method, one panel a target; a mark shows where training goes on."""
    wait = condition(study, "return")
    phases, found = phase_means(study, wait), cells(study, "stall_s", wait)
    height = 0.75 + 0.3 * len(study.methods)
    figure, axes = plt.subplots(len(study.targets), squeeze=False, figsize=(5.2, 0.6 + height * len(study.targets)))
    for axis, target in zip(axes[:, 0], study.targets, strict=True):
        own = phases[phases.target == target]
        stalls = {method: stall.mean for (method, name), stall in found.items() if name == target}
        for row, method in enumerate(study.methods[::-1]):
            begin_s = 0.0
            for phase in own[own.method == method].itertuples():
                _, colour, hatch = _PHASES[phase.kind]
                axis.barh(
                    row, phase.mean_s, left=begin_s, height=0.62, color=colour, hatch=hatch, edgecolor="#333333", lw=0.4
                )
                begin_s += phase.mean_s
            if method in stalls:
                axis.plot(stalls[method], row, marker="|", ms=19, mew=2.4, color="black", zorder=3)
        axis.set_yticks(range(len(study.methods)), study.methods[::-1])
        axis.set_title(f"{target}, emulated" if study.emulated(target) else target)
        axis.set_xlim(left=0)
        axis.grid(axis="y", visible=False)
    axes[-1, 0].set_xlabel(f"seconds from the begin of a save (wait={wait}); black mark: training goes on")
    visible = set(phases[phases.mean_s > 1e-3].kind)
    shown = [kind for kind in _PHASES if kind in visible]
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#333333", linewidth=0.4, label=words)
        for words, colour, hatch in (_PHASES[kind] for kind in shown)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
    return figure


def saved_over_rate(study: Study) -> Figure | None:
    """Draw what the disk saves against the sweep's NASes over their rate; None where nothing was swept."""
    kept = which_nas.load(study)
    if kept is None:
        return None
    rows, size_bytes = kept
    a, b = which_nas.line(rows, size_bytes)
    disk_s = rows.durable_s[rows.place == "disk"].mean()
    points = which_nas.swept(rows)
    fastest = max(one.rate_bytes_per_s for one in points if not one.memory)
    figure, axes = plt.subplots(figsize=(5.2, 3.6))
    for memory, marker, label in ((False, "o", "array only"), (True, "s", "with stable memory")):
        own = [one for one in points if one.memory == memory]
        saved = [one.saved for one in own]
        spread = [
            [one.time_saved - one.time_saved_low for one in saved],
            [one.time_saved_high - one.time_saved for one in saved],
        ]
        axes.errorbar(
            [one.rate_bytes_per_s / 1e6 for one in own], [one.time_saved * 100 for one in saved],
            yerr=np.array(spread) * 100, fmt=marker, ms=5, color="black" if memory else _COLOURS[0], capsize=2,
            mfc="white" if memory else None, label=label,
        )  # fmt: skip
    rates = np.geomspace(min(one.rate_bytes_per_s for one in points), 5 * fastest, 200)
    curve = 100 * (1 - disk_s / (a + b * size_bytes / rates))
    inside = rates <= fastest
    axes.plot(rates[inside] / 1e6, curve[inside], color=_COLOURS[0], label="line through the arrays")
    axes.plot(rates[~inside] / 1e6, curve[~inside], color=_COLOURS[0], ls=":", label="extrapolated")
    axes.axhline(which_nas.CLAIMED_TIME_SAVED * 100, color="black", lw=1, ls="--")
    axes.annotate("claimed", (rates[0] / 1e6, which_nas.CLAIMED_TIME_SAVED * 100 + 2), fontsize=9)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(min(0, *curve), 100)
    axes.set_xlabel("MB/s that the emulated NAS takes from end to end, as stated")
    axes.set_ylabel("time saved by this disk, %")
    axes.set_title("A save until durable: this disk against a NAS")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def cumulative(study: Study, schedule: Schedule) -> Figure:
    """Draw how the projected waiting adds up over one run, until durable, with the 95 % interval as a band."""
    figure, axes = plt.subplots(figsize=(5.2, 3.1))
    for target, interval in _durable(study).items():
        steps = cumulative_wait(interval, schedule)
        colour = look(study, target)["color"]
        line = LINES[study.targets.index(target) % len(LINES)]
        axes.step(steps.hour, steps.wait_s / 60, where="post", color=colour, ls=line, label=_label(study, target))
        axes.fill_between(steps.hour, steps.low_s / 60, steps.high_s / 60, step="post", color=colour, alpha=0.22, lw=0)
    axes.set_xlabel("hours of training")
    axes.set_ylabel("minutes waited (projected)")
    axes.set_xlim(0, schedule.run_h)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{schedule.saves} saves in {schedule.run_h:g} hours, until durable")
    axes.legend(loc="upper left")
    return figure


def beside_the_article(study: Study, schedule: Schedule) -> Figure:
    """Draw the minutes waited in a run: the article's 40 s and 30 s, and the times measured here, until durable."""
    none = float("nan")
    bars = [
        ("article: HDD NAS, 40 s", Interval(ARTICLE_SLOW_S, none, none, 0), "#bbbbbb", "////"),
        ("article: NVMe, 30 s", Interval(ARTICLE_FAST_S, none, none, 0), "#eeeeee", ""),
    ]
    for target, interval in _durable(study).items():
        bars.append((_label(study, target), interval, look(study, target)["color"], ""))
    figure, axes = plt.subplots(figsize=(5.2, 0.9 + 0.4 * len(bars)))
    for row, (_, interval, colour, hatch) in enumerate(bars[::-1]):
        mean, low, high = (value * schedule.saves / 60 for value in (interval.mean, interval.low, interval.high))
        axes.barh(row, mean, color=colour, hatch=hatch, edgecolor="#333333", linewidth=0.6, height=0.62)
        axes.plot([low, high], [row, row], color="black", lw=2)
        axes.annotate(f" {mean:.1f} min", (max(mean, np.nan_to_num(high)), row), va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars[::-1]])
    axes.set_xlim(0, max(interval.mean for _, interval, *_ in bars) * schedule.saves / 60 * 1.2)
    axes.set_xlabel(f"minutes waited in a run of {schedule.saves} saves")
    axes.grid(axis="y", visible=False)
    return figure


def _durable(study: Study) -> dict[str, Interval]:
    means = {target: block_means(study, "durable_s", target) for target in study.targets}
    return {target: mean_interval(blocks) for target, blocks in means.items() if len(blocks)}


def _label(study: Study, target: str) -> str:
    return f"{target}, emulated" if study.emulated(target) else target
