"""Sliders for JupyterLab that redraw at once; a static page shows the defaults only."""

from dataclasses import replace

import ipywidgets
import pandas as pd
from IPython.display import HTML, display

from stallbench.compounding import planning
from stallbench.compounding.assumptions import Assumptions
from stallbench.compounding.economics import idle_cost
from stallbench.compounding.models import SaveTime, compounding
from stallbench.compounding.scaling import size_text
from stallbench.reporting.analysis import compared_with, duration
from stallbench.reporting.present import table_html
from stallbench.results import Study


def waiting_table(assumed: Assumptions, size_bytes: float, bytes_per_s: float) -> pd.DataFrame:
    """Give what a store of this bandwidth (no latency) would make the team wait, and what its idle accelerators cost.

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    schedule = assumed.schedule
    one_s = SaveTime(0.0, bytes_per_s).seconds(size_bytes)
    waits = compounding(one_s, schedule).set_index("scope").wait_s
    idle = idle_cost(waits["team-year"], assumed.prices).mean
    rows = {
        f"a save of {size_text(size_bytes)} at {size_text(bytes_per_s)}/s": duration(waits["save"]),
        f"a run of {schedule.saves} saves": duration(waits["run"]),
        f"a year of a team of {assumed.team}": duration(waits["team-year"]),
        "idle accelerators in that year": f"{idle:,.0f} {assumed.currency}",
    }
    return pd.DataFrame({"waited": rows})


def sliders(study: Study, assumed: Assumptions) -> ipywidgets.VBox:
    """Show the table for the assumptions and the slower target; gives sliders over one that changes with them.

    The table is a text of its own, not an ``Output``: for that, whoever runs a notebook without a browser sends the
    kernel messages in the middle of a cell, and now and then the cell's own reply was never seen.
    """
    size_bytes = planning.own_bytes(study)
    target = (compared_with(study) or study.targets)[0]
    line = planning.line_of(study, target)
    rate = line.save.bytes_per_s if line else 1e8
    table = table_html(waiting_table(assumed, size_bytes, rate))
    display(HTML(table))
    floats = ipywidgets.FloatLogSlider
    controls = {
        "interval_min": floats(assumed.interval_min, min=0, max=3, description="interval, min"),
        "run_h": ipywidgets.FloatSlider(assumed.run_h, min=1, max=max(72, assumed.run_h), step=1, description="run, h"),
        "team": ipywidgets.IntSlider(assumed.team, min=1, max=max(100, assumed.team), description="team"),
        "gpu_hour": floats(assumed.gpu_hour, min=-1, max=2, description="GPU, an hour"),
        "megabytes_per_s": floats(rate / 1e6, min=1, max=5, description="MB/s"),
    }
    shown = ipywidgets.HTML(table)

    def redraw(change: object) -> None:
        values = {name: control.value for name, control in controls.items()}
        bytes_per_s = values.pop("megabytes_per_s") * 1e6
        values["interval_min"] = min(values["interval_min"], values["run_h"] * 60)
        shown.value = table_html(waiting_table(replace(assumed, **values), size_bytes, bytes_per_s))

    for control in controls.values():
        control.observe(redraw, "value")
    return ipywidgets.VBox([*controls.values(), shown])
