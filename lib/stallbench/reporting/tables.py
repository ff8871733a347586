"""A study's tables as a page shows them: figures written out with their unit and interval."""

import pandas as pd

from stallbench.compounding.models import Schedule, compounding, drive_wear, worked_example
from stallbench.config import ASYNCHRONOUS
from stallbench.reporting import analysis, matrix, trust, which_nas
from stallbench.reporting.analysis import compare, compared_with, duration, percent, seconds
from stallbench.reporting.stats import mean_interval
from stallbench.results import Study


def called(study: Study, target: str) -> str:
    """Name a target, and say if it is emulated."""
    return f"{target} (emulated)" if study.emulated(target) else target


def limits_table(study: Study) -> pd.DataFrame:
    """Give each target's raw limits, and which share of the write limit a durable save reaches."""
    table = analysis.share_of_limit(study)
    rate, latency = "{:,.0f} MB/s".format, "{:,.2f} ms".format
    columns = {
        "raw write": table.raw_write_bytes_per_s.div(1e6).map(rate, na_action="ignore"),
        "buffered + fsync": table.raw_buffered_bytes_per_s.div(1e6).map(rate, na_action="ignore"),
        "raw cold read": table.raw_read_bytes_per_s.div(1e6).map(rate, na_action="ignore"),
        "random 4 KiB read": table.raw_random_s.mul(1e3).map(latency, na_action="ignore"),
        "small file, durable": table.raw_small_s.mul(1e3).map(latency, na_action="ignore"),
        f"save ({study.methods[0]}), durable": table.save_bytes_per_s.div(1e6).map(rate, na_action="ignore"),
        "share of limit": table.share.map(percent),
    }
    return pd.DataFrame(columns)


def matrix_table(study: Study, wait: str) -> pd.DataFrame:
    """Give stall, durable and restore of each method on each target under one wait rule."""
    measures = {"stall": "stall_s", "durable": "durable_s", "cold restore": "restore_s"}
    if wait == "durable":
        measures.pop("stall")  # it is the same
    found = {name: matrix.cells(study, measure, wait) for name, measure in measures.items()}
    rows = {
        method: [
            seconds(found[name][method, target]) if (method, target) in found[name] else "not measured"
            for target in study.targets
            for name in measures
        ]
        for method in study.methods
        if wait == "return" or method not in ASYNCHRONOUS
    }
    columns = pd.MultiIndex.from_product([[called(study, target) for target in study.targets], list(measures)])
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def floors_table(study: Study) -> pd.DataFrame:
    """Give what of each durable save no storage can speed up."""
    rows = {}
    for floor in matrix.floors(study):
        ratio = floor.at_most
        saved = percent(ratio.time_saved, ratio.time_saved_low, ratio.time_saved_high)
        name = f"{floor.method} on {called(study, floor.target)}"
        rows[name] = [seconds(floor.durable_s), seconds(floor.memory_s), saved]
    return pd.DataFrame.from_dict(rows, orient="index", columns=["durable", "to memory alone", "storage saves at most"])


def nas_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Give what the disk saves against every NAS of the sweep, the slowest first."""
    return pd.DataFrame(
        [
            {
                "link": one.link.replace(" ", "\N{NO-BREAK SPACE}"),
                "behind it": "stable memory" if one.memory else f"{one.array_bytes_per_s / 1e6:,.0f} MB/s",
                "end to end, stated": f"{one.rate_bytes_per_s / 1e6:,.0f} MB/s",
                "durable": seconds(one.durable_s),
                "time saved by the disk": percent(
                    one.saved.time_saved, one.saved.time_saved_low, one.saved.time_saved_high
                ),
                "bound by": "the emulation" if one.at_ceiling else "the NAS",
            }
            for one in which_nas.swept(rows)
        ]
    )


def beside_table(study: Study) -> pd.DataFrame:
    """Give what the asynchronous saves take from the steps beside them."""
    rows = {}
    for one in matrix.beside_saves(study):
        slower = [
            percent(ratio.ratio - 1, ratio.low - 1, ratio.high - 1) if ratio else "no step beside a save"
            for ratio in (one.steps, one.mock_steps)
        ]
        moved = seconds(one.moved_s) if one.moved_s else "unknown"
        rows[f"{one.method} on {called(study, one.target)}"] = [f"{one.background_s:.2f} s", *slower, moved]
    columns = ["background", "real steps slower", "mock steps slower", "moved to real steps"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def wear_table(study: Study, schedule: Schedule, endurance_tb: float) -> pd.DataFrame:
    """Give the bytes that saves write in a year, and the share of a drive's endurance that this is."""
    saves = study.events[~study.events.warmup]
    rows = {}
    for method in study.methods:
        save_bytes = float(saves[saves.method == method].size_bytes.mean())
        wear = drive_wear(save_bytes, schedule, endurance_tb * 1e12)
        rows[method] = [
            f"{save_bytes / 1e6:,.1f} MB",
            f"{wear.bytes_per_year / 1e12:,.2f} TB",
            percent(wear.endurance_share),
            f"{wear.years:,.0f}" if wear.years < 1000 else "more than 1,000",
        ]
    columns = ["one save", "written a year", f"of {endurance_tb:g} TB endurance", "years until worn"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def projection_table(study: Study, measure: str, schedule: Schedule) -> pd.DataFrame:
    """Give the projected waiting on each target, and the time saved against each other one, by scope."""
    columns: dict[str, pd.DataFrame] = {}
    for target in study.targets:
        means = analysis.block_means(study, measure, target)
        if len(means):
            columns[called(study, target)] = compounding(mean_interval(means), schedule)
    for other in compared_with(study):
        columns[f"saved against {other}"] = compounding(compare(study, measure, other).saved_s, schedule)
    longest = [max(abs(table.wait_s[row]) for table in columns.values()) for row in range(6)]
    texts = {
        name: [duration(row.wait_s, row.low_s, row.high_s, longest[row.Index]) for row in table.itertuples()]
        for name, table in columns.items()
    }
    index = next(iter(columns.values())).scope
    return pd.DataFrame(texts, index=index.rename(None))


def worked_example_table() -> pd.DataFrame:
    """Give the time that the article's example saves, by scope."""
    table = worked_example().compounding
    return pd.DataFrame({"scope": table.scope, "saves": table.events, "time saved": table.wait_s.map(duration)})


def noise_table(study: Study) -> pd.DataFrame:
    """Give how much the machine varied from trial to trial."""
    table = trust.noise(study)
    return pd.DataFrame(
        {
            "trials": table.trials,
            "spread (coefficient of variation)": table.spread.map(percent),
            "slowest / fastest": table.worst.map("{:.2f}".format),
        }
    )


def machine_table(study: Study) -> pd.DataFrame:
    """Give the hardware and software that the figures hold for."""
    machine = study.environment
    rows = {f"target {target}": study.storage(target)["words"] for target in study.targets}
    rows |= {
        f"target {target}, options": ", ".join(study.storage(target)["options"]) or "none known"
        for target in study.targets
        if not study.emulated(target)
    }
    limits = machine["dirty_limits"]
    rows |= {
        "processor": f"{machine['cpu']}, {machine['cores']} cores",
        "accelerator": machine["accelerator"],
        "memory": f"{_gigabytes(machine['memory_bytes'])}",
        "free at the start": f"{_gigabytes(machine['memory_free_bytes'])}",
        "virtual machine": machine["virtual_machine"],
        "write-back": (
            f"from {_gigabytes(limits['dirty_background_bytes'])} dirty on, "
            f"throttled from {_gigabytes(limits['dirty_bytes'])}"
            if limits
            else "unknown"
        ),
        "system": f"{machine['system']}, Python {machine['python']}",
        "packages": ", ".join(f"{name} {version}" for name, version in machine["packages"].items()),
        "model": str(study.request["model"]),
        "data": str(study.request.get("dataset", "small files of text")),
        "commit": machine["git_commit"],
        "begun": study.request["created_utc"],
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=[""])


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
