"""The report's proofs of its own soundness: what was checked, by which command, and how it came out."""

import html

import pandas as pd

from stallbench.compounding import forecast
from stallbench.reporting import trust
from stallbench.reporting.analysis import duration, percent
from stallbench.reporting.present import caption, table_html
from stallbench.results import BENCH, LAB_CHECK, TORTURE, VALIDATION, Study, read_json


def validation_html(study: Study) -> str:
    """Write how often the intervals held the truth on synthetic studies, if that was checked for this study."""
    path = study.folder / VALIDATION
    if not path.exists():
        command = "<code>stallbench validate --study DIR</code>"
        return f"<p>The intervals' coverage was not checked for this page; {command} does it.</p>"
    table = pd.DataFrame(read_json(path)["rows"])
    shown = pd.DataFrame(
        {
            "method": table.method,
            "noise": table.noise,
            "blocks": table.blocks,
            "studies": table.studies.map("{:,}".format),
            "95 % interval holds the truth": _shares(table, "coverage"),
            "A/A false alarms": _shares(table, "false_alarms"),
            "goal met": table.passed.map({True: "yes", False: "no"}).where(table.required, "not required"),
        }
    )
    words = (
        "<p>How often the intervals hold a truth that is known (<code>make validate</code>). Synthetic studies have "
        "skewed and autocorrelated noise; goals: 93 to 97 % coverage, 3 to 7 % false alarms. <em>Unlike</em>: one "
        "target spreads six times as much as the other, as a real disk does beside an emulated one; there the "
        "intervals hold the truth less often than they say. <em>Real saves</em>: small studies really run on emulated "
        "devices, whose part of a save is arithmetic; goal: the binomial interval holds 95 %. The percentile bootstrap "
        "stands here to show why it isn't used.</p>"
    )
    return words + table_html(shown, index=False)


def _shares(table: pd.DataFrame, name: str) -> list[str]:
    return [
        "" if pd.isna(share) else f"{share:.1%} ({low:.1%} to {high:.1%})"
        for share, low, high in zip(table[name], table[f"{name}_low"], table[f"{name}_high"], strict=True)
    ]


def forecast_html(study: Study) -> str:
    """Write predicted and measured totals side by side, if 48 saves were run for this study."""
    rows = forecast.kept(study)
    if not rows:
        return (
            "<h3>48 saves, predicted and run</h3><p>Not run for this page; <code>stallbench validate48 --study "
            "DIR</code> does it.</p>"
        )
    shown = pd.DataFrame(
        {
            "target": [f"{row['target']}{' (emulated)' if row['emulated'] else ''}" for row in rows],
            "method": [f"{row['method']}, wait={row['wait']}" for row in rows],
            "interval": [f"{row['interval']}, gap {row['gap_s']:.1f} s" for row in rows],
            "predicted": [forecast.predicted_text(row) for row in rows],
            "measured": [duration(row["measured_s"]) for row in rows],
            "error": [f"{percent(row['error'])}, {'met' if row['met'] else 'missed'}" for row in rows],
            "drift": [
                f"{percent(row['drift'])}{', a trend' if row['drift_p'] < forecast.DRIFT_ALPHA else ''}" for row in rows
            ],
        }
    )
    first = rows[0]
    words = (
        f"Total stall of a run of {first['saves']} saves, predicted from {first['from_blocks']} short trials with "
        f"{first['from_saves']} saves in all (means, 90 % prediction interval of one run), and then really run "
        f"(<code>make validate-48</code>). Goals: error at most {forecast.GOAL:.0%}, on an emulated device "
        f"{forecast.EMULATED_GOAL:.0%}. Drift: the last quarter of the saves against the first; a trend is one by "
        f"Spearman's rank test at {forecast.DRIFT_ALPHA:.0%}. Minutes of training between saves are shortened to "
        "seconds; each save begins once the last is durable, and the gap is the idle time in between. "
    )
    return (
        f"<h3>48 saves, predicted and run</h3><p>{words}{html.escape(forecast.coverage_words(rows))}</p>"
        + table_html(shown, index=False)
    )


def determinism_words(study: Study) -> str:
    """Say whether trials that trained the same thing reached the same losses."""
    groups, equal = trust.determinism(study)
    answer = (
        "all of them, bit for bit" if equal == groups else f"only {equal} of them: the others are not deterministic"
    )
    return f"In {groups} groups of trials with one seed, the losses of all steps are compared: they agree in {answer}."


def controls_html(study: Study) -> str:
    """Write the study's own A/A controls: how many found a difference where there is none."""
    table = trust.controls(study)
    if table.empty:
        return "<p>None: they need trials under both wait rules, and two blocks.</p>"
    found = f"{int(table.alarm.sum())} of {len(table)} found a difference; about 5 % would by chance."
    shown = pd.DataFrame(
        {
            "what": table.what,
            "target": table.target,
            "method": table.method,
            "difference": [percent(*row) for row in zip(table.difference, table.low, table.high, strict=True)],
            "false alarm": table.alarm.map({True: "yes", False: "no"}),
        }
    )
    return f"<p>{found}</p><details><summary>each control</summary>{table_html(shown, index=False)}</details>"


def bench_html(study: Study) -> str:
    """Write what the instrument costs, if that was measured for this study."""
    path = study.folder / BENCH
    if not path.exists():
        return "<p>The instrument's cost was not measured for this page; <code>stallbench bench DIR</code> does it.</p>"
    found = read_json(path)
    parts = [f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in found['lines'])}</ul>"]
    for title, rows in found["tables"].items():
        table = pd.DataFrame(rows).set_index("index").rename_axis(None).dropna(axis="columns", how="all")
        rates = [name for name in table if name.endswith("_bytes_per_s")]
        table[rates] = (table[rates] / 1e6).map("{:,.0f}".format)
        table = table.rename(columns={name: f"{name.removesuffix('_bytes_per_s')}, MB/s" for name in rates})
        shown = table.map(lambda value: f"{value:.3f}" if isinstance(value, float) else value, na_action="ignore")
        parts.append(f"<h4>{html.escape(title)}</h4>{table_html(shown.fillna(''))}")
    words = (
        "Medians of interleaved rounds in one run: times in seconds, shares of fio's direct I/O at queue depth 8 on "
        "the same path, and peak memory over the state's size (a copy is 1)."
    )
    return "".join(parts) + caption(study, words)


def torture_html(study: Study) -> str:
    """Write what kills and power cuts left of checkpoints, if that was tried for this study."""
    path = study.folder / TORTURE
    if not path.exists():
        return "<p>No save was killed for this page; <code>stallbench torture --study DIR</code> does it.</p>"
    table = pd.DataFrame(read_json(path)["rows"]).drop(columns="seconds")
    names = {"left_partial": "partial checkpoint left", "lost": "reported, and lost", "broken": "newest one broken"}
    table = table.rename(columns=names)
    table["partial checkpoint left"] = [f"{value:g}" for value in table["partial checkpoint left"]]
    words = (
        "<p>Saves, one right after the other, are killed, or the disk below them loses its power and what wasn't "
        "flushed, at random moments (<code>make torture</code>). Then the newest checkpoint must be what was saved at "
        "its step, bit by bit, and no older than the last that was reported durable. The Trainer has no such report: "
        "there it is the last save that returned; <em>broken</em> is a folder that resuming would pick and that can't "
        "be read or isn't what was saved.</p>"
    )
    return words + table_html(table.replace("nan", "-"), index=False)


def lab_check_html(study: Study) -> str:
    """Write both emulations beside arithmetic, if that was measured for this study."""
    path = study.folder / LAB_CHECK
    if not path.exists():
        return (
            "<p>The emulations were not held against arithmetic for this page; "
            "<code>stallbench lab check PROFILE --study DIR</code> does it.</p>"
        )
    parts = [
        "<p>The same work on both emulations, beside bytes / rate + positions x time. "
        f"Goal: within {trust.LAB_TOLERANCE:.0%} of arithmetic, or the chain's own time says why not. The chain: the "
        "same work on a lab without limits.</p>"
    ]
    for profile, rows in read_json(path).items():
        table = pd.DataFrame(rows)
        ratio = table.lab_s / table.arithmetic_s
        shown = pd.DataFrame(
            {
                "operation": table.operation,
                "arithmetic": table.arithmetic_s.map("{:.3f} s".format),
                "in-process": table.in_process_s.map("{:.3f} s".format, na_action="ignore").fillna("-"),
                "lab": table.lab_s.map("{:.3f} s".format),
                "lab / arithmetic": ratio.map("{:.2f}".format),
                "positions": table.positions,
                "chain": table.chain_s.map("{:.3f} s".format),
                "within the goal": (abs(ratio - 1) <= trust.LAB_TOLERANCE).map({True: "yes", False: "no"}),
            }
        )
        parts.append(f"<h4>{html.escape(profile)}</h4>{table_html(shown, index=False)}")
    return "".join(parts)
