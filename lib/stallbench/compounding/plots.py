"""Figures for decisions: what waiting depends on, and how often to save; colour is never the only sign."""

import math

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from stallbench.compounding import planning
from stallbench.compounding.assumptions import Assumptions
from stallbench.compounding.models import SECONDS_PER_MINUTE
from stallbench.compounding.scaling import size_text
from stallbench.reporting.plots import LINES, look
from stallbench.results import Study

_NAMES = {
    "latency_s": ("latency of a save", "s"),
    "bytes_per_s": ("bandwidth of a save", "B/s"),
    "size_bytes": ("checkpoint size", "B"),
    "interval_min": ("interval", "min"),
    "run_h": ("hours of a run", "h"),
    "runs_per_day": ("runs a day", ""),
    "team": ("developers", ""),
    "workdays_per_year": ("working days", ""),
}


def heat_maps(study: Study, assumed: Assumptions) -> Figure:
    """Draw the minutes waited in a run by interval and checkpoint size, one panel a target."""
    grids = {target: planning.waiting(study, target, assumed) for target in study.targets}
    grids = {target: grid for target, grid in grids.items() if grid is not None}
    if not grids:
        return _nothing("No durable time is known: nothing to project.")
    rows = max(len(grid) for grid in grids.values())
    figure, axes = plt.subplots(len(grids), squeeze=False, figsize=(5.2, (0.9 + 0.33 * rows) * len(grids)))
    for axis, (target, grid) in zip(axes[:, 0], grids.items(), strict=True):
        line = planning.line_of(study, target)
        largest = line.fit.sizes_bytes[-1] if line.fit else line.size_bytes
        shade = np.log10(grid.to_numpy())
        axis.imshow(shade, cmap="Greys", aspect="auto", vmin=shade.min(), vmax=shade.max() + 1)
        for row, column in np.ndindex(grid.shape):
            style = "italic" if grid.columns[column] > largest * 1.001 else "normal"
            dark = shade[row, column] > (shade.min() + shade.max() + 1) / 2
            value = grid.iloc[row, column]
            text = f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
            axis.text(
                column, row, text, ha="center", va="center", fontsize=8, style=style, color="white" if dark else "black"
            )
        axis.set_xticks(range(grid.shape[1]), [size_text(size) for size in grid.columns])
        axis.set_yticks(range(grid.shape[0]), [f"{interval:g}" for interval in grid.index])
        axis.set_ylabel("minutes between saves")
        axis.set_title(f"{target}, emulated" if study.emulated(target) else target)
        axis.grid(visible=False)
    axes[-1, 0].set_xlabel(f"bytes of a save; cells: minutes waited in a run of {assumed.run_h:g} h")
    return figure


def tornado(study: Study, target: str, assumed: Assumptions) -> Figure:
    """Draw how far each assumption moves the team's waiting in a year."""
    table = planning.tornado(study, target, assumed)
    if table is None:
        return _nothing(f"No durable time is known on {target}: nothing to vary.")
    figure, axes = plt.subplots(figsize=(5.2, 0.9 + 0.36 * len(table)))
    for row, one in enumerate(table.iloc[::-1].itertuples()):
        for end, value, hatch in ((one.at_low, one.low, "////"), (one.at_high, one.high, "")):
            style = {"color": "#bbbbbb", "hatch": hatch} if hatch else {"color": "#0072b2"}
            axes.barh(row, end - one.at_base, left=one.at_base, height=0.6, edgecolor="#333333", lw=0.5, **style)
            side, shift = ("left", 3) if end >= one.at_base else ("right", -3)
            text = _value(one.assumption, value)
            place = {"xytext": (shift, 0), "textcoords": "offset points", "ha": side, "va": "center"}
            axes.annotate(text, (end, row), fontsize=7.5, **place)
    axes.axvline(table.at_base[0], color="black", lw=1)
    axes.set_yticks(range(len(table)), [_NAMES[name][0] for name in table.assumption[::-1]])
    axes.margins(x=0.22)
    axes.set_xlabel(f"team's hours of waiting a year, {target}; hatched: low value")
    axes.grid(axis="y", visible=False)
    return figure


def _nothing(words: str) -> Figure:
    """Say in a figure's place why there is none."""
    figure, axes = plt.subplots(figsize=(5.2, 0.6))
    axes.axis("off")
    axes.text(0, 0.5, words, va="center")
    return figure


def _value(name: str, value: float) -> str:
    unit = _NAMES[name][1]
    if unit.startswith("B"):
        return size_text(value) + unit[1:]
    return f"{value:.3g} {unit}".strip()


def time_lost(study: Study, assumed: Assumptions) -> Figure:
    """Draw the share of time that is no lasting work over the interval between saves, with each best interval."""
    jobs, costs = planning.job_mtbfs_s(assumed), planning.shown_costs(study)
    if not costs:
        return _nothing("No full save with a restore was measured.")
    figure, axes = plt.subplots(len(jobs), sharex=True, figsize=(5.2, 2.7 * len(jobs)))
    intervals_s = np.geomspace(1, 6 * 3600, 120)
    for axis, (name, mtbf_s) in zip(axes, jobs.items(), strict=True):
        for cost in costs:
            first = cost.method == study.methods[0]
            style = look(study, cost.target)
            share = [planning.lost_share(cost, mtbf_s, one) * 100 for one in intervals_s]
            dashes = LINES[0 if first else 1]
            axis.plot(
                intervals_s / SECONDS_PER_MINUTE, share, color=style["color"], ls=dashes,
                label=f"{cost.method}, {cost.target}{' (emulated)' if study.emulated(cost.target) else ''}",
            )  # fmt: skip
            best_s = _best_s(cost, mtbf_s)
            lost = planning.lost_share(cost, mtbf_s, best_s) * 100
            axis.plot(best_s / SECONDS_PER_MINUTE, lost, ls="", mec="black", mew=0.6, ms=6, **style)
        axis.axvline(assumed.interval_min, color="black", lw=0.8, ls=":")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylabel("% of time lost")
        axis.set_title(name)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
    axes[-1].set_xlabel("minutes of work between saves; point: best, dotted: assumed")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7.5)
    return figure


def _best_s(cost: planning.Cost, mtbf_s: float) -> float:
    try:
        return cost.plan(mtbf_s).interval_s
    except ValueError:
        return math.nan
