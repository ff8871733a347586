"""Figures of a load study, in the style of ``plots``: each takes a study and gives a matplotlib figure."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from stallbench.load import analysis as load
from stallbench.load.accelerators import REQUIRED_USE
from stallbench.reporting.plots import look, tick
from stallbench.reporting.stats import Interval, mean_interval
from stallbench.reporting.tables import called
from stallbench.results import Study

_PARTS = {
    "reload": ("reload the data, cold", "#56b4e9", "...."),
    "process": ("process it", "#999999", "////"),
    "train": ("train", "#f0e442", ""),
    "evaluate": ("evaluate", "#ffffff", "...."),
    "save": ("save, until durable", "#0072b2", ""),
    "restore": ("restore, cold", "#009e73", "\\\\\\\\"),
}
_KINDS = {"read": "a read", "save": "a save", "log": "a log line"}


def bursts(study: Study) -> Figure:
    """Draw the latency of each read over time with all load at once, one trial a target; bands mark the saves."""
    events = study.load[study.load.phase == load.TOGETHER]
    targets = [target for target in study.targets if (events.target == target).any()]
    figure, axes = plt.subplots(len(targets), squeeze=False, sharey=True, figsize=(5.2, 0.7 + 1.7 * len(targets)))
    for axis, target in zip(axes[:, 0], targets, strict=True):
        own = events[events.target == target]
        own = own[own.block == own.block.min()]
        start_s = own.start_s.min()
        reads, saves = own[own.kind == "read"], own[own.kind == "save"]
        shown = reads.iloc[:: max(1, len(reads) // 4000)]
        for save in saves.itertuples():
            axis.axvspan(save.start_s - start_s, save.start_s - start_s + save.latency_s, color="#cccccc", lw=0)
        axis.plot(shown.start_s - start_s, shown.latency_s * 1e3, ls="", ms=2, mew=0, alpha=0.5, **look(study, target))
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(f"{tick(study, target).replace(chr(10), ' ')}: block {own.block.min()}")
        axis.set_ylabel("latency of a\nread, ms")
    axes[-1, 0].set_xlabel("seconds since the load began; grey: a save is under way")
    return figure


def _bar(axes: Axes, y: float, value: Interval, **style: object) -> None:
    """Draw a mean with its interval."""
    axes.plot([value.low, value.high], [y, y], color="black", lw=2, solid_capstyle="butt")
    axes.plot(value.mean, y, ls="", ms=7, mec="black", mew=0.6, **style)


def interference(study: Study) -> Figure:
    """Draw how much longer each kind of load takes with the others, on each target and in memory, with intervals."""
    rows = [one for target in study.targets for one in load.interference(study, target)]
    figure, axes = plt.subplots(figsize=(5.2, 0.9 + 0.5 * len(rows)))
    for index, one in enumerate(rows[::-1]):
        factor = Interval(one.factor.ratio, one.factor.low, one.factor.high, one.factor.blocks)
        _bar(axes, index + 0.12, factor, **look(study, one.target))
        if one.memory:
            memory = Interval(one.memory.ratio, one.memory.low, one.memory.high, one.memory.blocks)
            _bar(axes, index - 0.2, memory, color="white", marker="d")
    axes.axvline(1, color="#333333", lw=0.8, ls="--")
    axes.set_xscale("log")
    factors = [1.0, *(ratio.ratio for one in rows for ratio in (one.factor, one.memory) if ratio)]
    axes.set_xlim(min(factors) / 3, max(factors) * 3)  # an interval over few blocks may leave it
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    names = [f"{_KINDS[one.kind]}, {tick(study, one.target).replace(chr(10), ' ')}" for one in rows[::-1]]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("times as long together as alone; white: in memory")
    axes.grid(axis="y", visible=False)
    return figure


def utilisation(study: Study) -> Figure:
    """Draw the utilisation of each emulated accelerator over the samples that it could take.

    Beside it the share that cold reads at their mean rate would let one expect.
    """
    figure, axes = plt.subplots(figsize=(5.2, 3.4))
    names = {}
    for target in study.targets:
        found = [one for one in load.fed(study, target) if np.isfinite(one.demand_per_s)]
        if not found:
            continue
        found.sort(key=lambda one: one.demand_per_s)
        demand = [one.demand_per_s for one in found]
        style = look(study, target)
        axes.plot(demand, [one.use.mean * 100 for one in found], ls="", ms=7, label=called(study, target), **style)
        rate_per_s = load.rates(study, target, "cold reads").samples_per_s.mean()
        scale = np.geomspace(demand[0], demand[-1], 200)
        axes.plot(scale, np.minimum(1, rate_per_s / scale) * 100, ls=":", lw=1, color=style["color"])
        for one in found:
            interval = np.clip([one.use.low * 100, one.use.high * 100], 0, 100)
            axes.plot([one.demand_per_s] * 2, interval, color="black", lw=1.6)
            names[one.accelerator] = one.demand_per_s
    for name, demand_per_s in names.items():
        axes.annotate(name, (demand_per_s, 107), rotation=30, fontsize=8.5, annotation_clip=False)
    axes.axhline(REQUIRED_USE * 100, color="#333333", lw=0.8, ls="--")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 105)
    axes.set_xlabel("samples a second that the emulated accelerator could take")
    axes.set_ylabel("busy, % of the time")
    axes.legend(loc="lower left")
    return figure


def neighbours(study: Study) -> Figure:
    """Draw what experiments at once read between them as they train, and how long their saves take, by their number."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(5.6, 2.9))
    for target in study.targets:
        found = load.neighbours(study, target)
        for memory, line, name in ((False, "-", called(study, target)), (True, ":", f"memory, beside {target}")):
            own = [one for one in found if one.memory == memory]
            style = look(study, target) | ({"color": "#999999"} if memory else {})
            counts = [one.experiments for one in own]
            left.plot(counts, [one.samples_per_s.mean for one in own], ls=line, ms=6, label=name, **style)
            right.plot(counts, [one.save_s.mean for one in own], ls=line, ms=6, **style)
            for one in own:
                for axis, value in ((left, one.samples_per_s), (right, one.save_s)):
                    axis.plot([one.experiments] * 2, [value.low, value.high], color="black", lw=1.6)
    left.set_ylabel("samples a second,\nall together")
    right.set_ylabel("a save until\ndurable, s")
    for axis in (left, right):
        axis.set_xlabel("experiments at once")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8.5)
    return figure


def loop(study: Study) -> Figure:
    """Draw where an iteration's time goes, a stacked bar a target, from the spans' means."""
    targets = [target for target in study.targets if len(load.loop_parts(study, target))]
    figure, axes = plt.subplots(figsize=(5.2, 1.3 + 0.5 * len(targets)))
    longest_s = max(load.loop_parts(study, target).sum(axis=1).mean() for target in targets)
    for row, target in enumerate(targets[::-1]):
        parts, begin_s = load.loop_parts(study, target), 0.0
        for part, (_, colour, hatch) in _PARTS.items():
            mean_s = parts[part].mean()
            axes.barh(
                row, mean_s, left=begin_s, height=0.62, color=colour, hatch=hatch, edgecolor="#333333", linewidth=0.4
            )
            begin_s += mean_s
        total = mean_interval(parts.sum(axis=1))
        axes.plot([total.low, total.high], [row, row], color="black", lw=2)
    axes.set_yticks(range(len(targets)), [tick(study, target) for target in targets[::-1]])
    axes.set_xlim(0, 1.7 * longest_s)  # an interval over few blocks may leave it
    axes.set_xlabel("seconds of an iteration; black: 95 % interval of the whole")
    axes.grid(axis="y", visible=False)
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#333333", linewidth=0.4, label=words)
        for words, colour, hatch in _PARTS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
    return figure
