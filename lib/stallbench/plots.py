"""Figures: each takes tables and gives a matplotlib figure; colour is never the only sign."""

from importlib.resources import files

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

plt.style.use(str(files("stallbench") / "stallbench.mplstyle"))

# Okabe and Ito's palette (2008), told apart by lightness and by hatch in greyscale.
_LANES = {
    "put_data": ("data", "#999999", ""),
    "reload_data": ("data", "#56b4e9", ""),
    "data_wait": ("train", "#d55e00", ""),
    "step": ("train", "#f0e442", ""),
    "save": ("save", "#0072b2", ""),
    "sync": ("sync", "#cc79a7", "////"),
    "delete": ("save", "#999999", ""),
    "eval": ("train", "#009e73", ".."),
    "restore": ("restore", "#009e73", "\\\\\\\\"),
    "raw_write": ("probe", "#bbbbbb", ""),
    "raw_read": ("probe", "#777777", ""),
}


def trial_timeline(spans: pd.DataFrame, title: str) -> Figure:
    """Draw one trial's spans over its time.

    Parameters
    ----------
    spans
        Columns ``kind``, ``start_s``, ``end_s``, as ``Timeline.frame`` gives them.
    """
    lanes = ["data", "probe", "train", "save", "sync", "restore"]
    figure, axes = plt.subplots(figsize=(5.2, 2.9))
    handles = {}
    for kind, (lane, colour, hatch) in _LANES.items():
        rows = spans[spans.kind == kind]
        if rows.empty:
            continue
        bars = list(zip(rows.start_s, rows.end_s - rows.start_s, strict=True))
        y = len(lanes) - 1 - lanes.index(lane)
        axes.broken_barh(bars, (y - 0.36, 0.72), facecolor=colour, hatch=hatch, edgecolor="#333333", linewidth=0.25)
        handles[kind] = Patch(facecolor=colour, hatch=hatch, edgecolor="#333333", label=kind.replace("_", " "))
    axes.set_yticks(range(len(lanes)), lanes[::-1])
    axes.set_xlabel("seconds since the trial began")
    axes.set_title(title)
    axes.grid(axis="y", visible=False)
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=4, fontsize=8)
    return figure
