"""Figures of the size sweep; colour is never the only sign."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stallbench.compounding.scaling import Sweep, findings
from stallbench.reporting.analysis import block_means
from stallbench.reporting.plots import LINES, look
from stallbench.results import Study


def save_time_by_size(study: Study, sweep: Sweep) -> Figure:
    """Draw every block's mean durable time over the bytes of a save, with the fitted line, one panel a method."""
    methods = [method for method in sweep.request["methods"] if method in set(sweep.saves.method)]
    found = {(one.target, one.method): one for one in findings(sweep)}
    figure, axes = plt.subplots(len(methods), sharex=True, squeeze=False, figsize=(5.2, 0.7 + 2.6 * len(methods)))
    for axis, method in zip(axes[:, 0], methods, strict=True):
        for target in study.targets:
            table = sweep.means(target, method)
            if table.empty:
                continue
            style = look(study, target)
            label = f"{target}, emulated" if study.emulated(target) else target
            axis.plot(table.size_bytes / 1e9, table.save_s, ls="", ms=5, alpha=0.6, mew=0, label=label, **style)
            line = found[target, method].line
            if line is not None:
                size = np.geomspace(table.size_bytes.min(), table.size_bytes.max(), 60)
                time_s = line.latency_s.mean + size / line.bytes_per_s.mean
                shown = time_s > 0  # a line through saves that a cache absorbed may begin below 0
                dashes = LINES[study.targets.index(target) % len(LINES)]
                axis.plot(size[shown] / 1e9, time_s[shown], color=style["color"], ls=dashes, lw=1.2)
        if method == study.methods[0]:
            _draw_partial(axis, study)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylabel("seconds until durable")
        axis.set_title(method)
        axis.legend(loc="upper left")
    axes[-1, 0].set_xlabel("GB of a save")
    return figure


def _draw_partial(axes: Axes, study: Study) -> None:
    """Add the study's own saves of weights or of an adapter alone, as open points."""
    for method in (name for name in ("model-only", "adapter-only") if name in study.methods):
        size_bytes = study.events[study.events.method == method].size_bytes.mean()
        for target in study.targets:
            means = block_means(study, "durable_s", target, method=method)
            style = look(study, target)
            axes.plot([size_bytes / 1e9] * len(means), means, ls="", ms=5, mfc="none", **style)
            if len(means):
                axes.annotate(f" {method}", (size_bytes / 1e9, means.mean()), fontsize=7.5)
