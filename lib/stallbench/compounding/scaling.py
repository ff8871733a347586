"""What a study's sweep over checkpoint sizes says: lines, bends, the size held out, and larger models."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from stallbench.compounding import sizes
from stallbench.compounding.economics import CHECKPOINT_BYTES
from stallbench.reporting.analysis import duration, percent, seconds, span_text
from stallbench.reporting.stats import OPEN_SPREAD, Interval, mean_interval
from stallbench.results import SAVES, SIZES, SWEEP, Study, read_json

# The largest size, held out, ought to be predicted this well: issue 6.
HELD_OUT_GOAL = 0.10


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep as it lies on disk; ``saves`` are the counted ones, ``size_bytes`` their model's mean."""

    request: dict
    saves: pd.DataFrame

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Targets and methods that were swept."""
        return list(self.saves[["target", "method"]].drop_duplicates().sort_values(["method", "target"]).itertuples(
            index=False, name=None))  # fmt: skip

    def means(self, target: str, method: str, measure: str = "durable_s") -> pd.DataFrame:
        """Give the mean of each model in each block: ``model``, ``block``, ``size_bytes``, ``save_s`` (seconds)."""
        own = self.saves[(self.saves.target == target) & (self.saves.method == method)]
        found = own.groupby(["model", "block", "size_bytes"], as_index=False)[measure].mean()
        return found.rename(columns={measure: "save_s"}).sort_values(["size_bytes", "block"], ignore_index=True)


@dataclass(frozen=True)
class Finding:
    """What one target and method came to; what couldn't be fitted is None, and ``reason`` says why."""

    target: str
    method: str
    line: sizes.SizeFit | None
    bend: sizes.Bend | None
    held_out: sizes.HeldOut | None
    reason: str


def load(study: Study) -> Sweep | None:
    """Read the sweep that ``stallbench sizes`` kept in a study; None without one."""
    folder = study.folder / SIZES
    if not (folder / SWEEP).exists():
        return None
    saves = pd.read_parquet(folder / SAVES)
    # A few bytes of JSON differ from save to save; a size is a model and method.
    means = saves.groupby(["model", "method"]).size_bytes.transform("mean").round()
    return Sweep(read_json(folder / SWEEP), saves.assign(size_bytes=means)[~saves.warmup].reset_index(drop=True))


def findings(sweep: Sweep) -> list[Finding]:
    """Fit each target and method, until durable."""
    found = []
    for target, method in sweep.cells:
        table = sweep.means(target, method)
        line, bend, held_out, reason = None, None, None, ""
        try:
            line, bend = sizes.fit(table), sizes.bend(table)
            held_out = sizes.hold_out_largest(table)
        except ValueError as error:
            reason = str(error)
        found.append(Finding(target, method, line, bend, held_out, reason))
    return found


def error_of(held_out: sizes.HeldOut) -> float:
    """Give the relative error of the prediction, without unit: above 0 where it predicted too long."""
    return held_out.predicted_s.mean / held_out.measured_s - 1


def lines_table(sweep: Sweep) -> pd.DataFrame:
    """Give the fits as texts, one row a target and method."""
    rows = {}
    for one in findings(sweep):
        name = f"{one.method} on {one.target}"
        if one.line is None:
            rows[name] = [one.reason, "", "", ""]
            continue
        rate = one.line.bytes_per_s
        rows[name] = [
            seconds(one.line.latency_s),
            span_text(rate.mean / 1e6, rate.low / 1e6, rate.high / 1e6, "MB/s"),
            _bend_words(one.bend),
            _held_out_words(one.held_out) if one.held_out else one.reason,
        ]
    columns = ["latency", "bandwidth", "bend", "largest size, held out"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def size_text(size_bytes: float) -> str:
    """Write a size in the unit that suits it."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes / 1e6:.3g} MB"


def _bend_words(bend: sizes.Bend) -> str:
    if not bend.found:
        return f"none found (p = {bend.p_value:.2g})"
    rates = [
        f"{rate / 1e6:,.0f} MB/s" if np.isfinite(rate) else "no growth"
        for rate in (bend.before_bytes_per_s, bend.beyond_bytes_per_s)
    ]
    return f"at {size_text(bend.at_bytes)}: {rates[0]} before, {rates[1]} beyond (p = {bend.p_value:.2g})"


def _held_out_words(held_out: sizes.HeldOut) -> str:
    error = error_of(held_out)
    goal = "met" if abs(error) <= HELD_OUT_GOAL else "missed"
    inside = "inside" if held_out.within else "outside"
    return (
        f"{size_text(held_out.size_bytes)}: predicted {seconds(held_out.predicted_s)}, measured "
        f"{held_out.measured_s:.3g} s, {inside}; error {percent(error)}, goal {HELD_OUT_GOAL:.0%}: {goal}"
    )


def projection_table(sweep: Sweep) -> pd.DataFrame:
    """Give what the lines say of larger models, as texts: one row a model, one column a target and method."""
    columns = {}
    for target, method in sweep.cells:
        name = f"{method} on {target}"
        try:
            found = sizes.extrapolate(sweep.means(target, method))
        except ValueError as error:
            columns[name] = {model: f"not said: {error}" for model in CHECKPOINT_BYTES}
            continue
        columns[name] = {row.Index: _projected(row.save_s, row.low_s, row.high_s) for row in found.itertuples()}
    table = pd.DataFrame(columns, index=list(CHECKPOINT_BYTES))
    largest = float(sweep.saves.size_bytes.max())
    table.insert(0, "checkpoint", [size_text(size) for size in CHECKPOINT_BYTES.values()])
    table.insert(1, "times the largest measured", [f"{size / largest:,.0f}" for size in CHECKPOINT_BYTES.values()])
    return table


def _projected(save_s: float, low_s: float, high_s: float) -> str:
    """Write a projection; an interval so wide that it says nothing is called open, and the middle of it isn't named."""
    return "open" if high_s > OPEN_SPREAD * low_s else duration(save_s, low_s, high_s)


@dataclass(frozen=True)
class Growth:
    """Seconds that the first target saves a save, at the smallest and the largest size, and how much more that is."""

    method: str
    smallest_bytes: float
    largest_bytes: float
    saved_small_s: Interval
    saved_large_s: Interval
    more_s: Interval


def growth(study: Study, sweep: Sweep, other: str) -> Growth | None:
    """Compare what is saved at the largest size with what is saved at the smallest, paired by block.

    None where the sweep hasn't both targets by the study's first method in a block.
    """
    method = study.methods[0]
    tables = [sweep.means(target, method) for target in (study.targets[0], other)]
    if any(table.empty for table in tables):
        return None
    wide = [table.pivot(index="block", columns="size_bytes", values="save_s").dropna() for table in tables]
    shared = wide[0].columns.intersection(wide[1].columns)  # a small lab lacks the largest
    saved = (wide[1][shared] - wide[0][shared]).dropna()
    if saved.empty or saved.shape[1] < 2:
        return None
    small, large = saved.columns.min(), saved.columns.max()
    return Growth(
        method,
        float(small),
        float(large),
        mean_interval(saved[small]),
        mean_interval(saved[large]),
        mean_interval(saved[large] - saved[small]),
    )


def caption_words(sweep: Sweep) -> str:
    """Say how the sweep was made and what its figure shows."""
    request = sweep.request
    return (
        f"Until durable. Points: means of {request['counted_saves']} saves after {request['warmup_saves']} warm-up, "
        f"{request['blocks']} blocks; open points: the study's own saves of a part. Lines: latency + bytes / "
        f"bandwidth, by relative errors. Random weights, full AdamW states: {', '.join(request['models'])}; no "
        f"training in between. {dirty_words(sweep)} Made by: {request['command']}."
    )


def dirty_words(sweep: Sweep) -> str:
    """Say on which side of the kernel's write-back limits the sizes lie."""
    limits = sweep.request["environment"]["dirty_limits"]
    found = np.sort(sweep.saves.size_bytes.unique())
    if not limits:
        return "The write-back limits are unknown."
    background, most = limits["dirty_background_bytes"], limits["dirty_bytes"]
    above = [int((found > limit).sum()) for limit in (background, most)]
    return (
        f"Write-back begins at {size_text(background)} of dirty pages, writers are throttled from {size_text(most)} "
        f"on: {above[0]} and {above[1]} of the {len(found)} sizes lie above."
    )
