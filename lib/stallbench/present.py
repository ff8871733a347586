"""A study in words and tables: what the notebooks show besides figures."""

import html
import re
from collections.abc import Iterator

import pandas as pd

from stallbench import analysis
from stallbench.analysis import MEASURES, compare, compared_with, condition, duration, percent
from stallbench.models import ARTICLE_FAST_S, ARTICLE_SLOW_S, Schedule, compounding, worked_example
from stallbench.results import VALIDATION, Study, read_json
from stallbench.stats import mean_interval
from stallbench.verdicts import NOT_TESTED, claims_table, headline, summary_lines


def summary(study: Study) -> str:
    """Write the headline and the judged claims as Markdown, for a pull request or a CI summary."""
    table = claims_table(study)
    judged = table[table.verdict != NOT_TESTED]
    figures = judged.figure.str.replace("|", "\\|", regex=False)  # a target's name may hold one
    rows = [
        f"| {row.id} | {row.claim} | {row.verdict} | {figure} |"
        for row, figure in zip(judged.itertuples(), figures, strict=True)
    ]
    lines = [
        "# Every minute your model waits",
        "",
        headline(study),
        "",
        *(f"- {line}" for line in summary_lines(study)),
    ]
    if rows:
        lines += ["", "| claim | | verdict | figure |", "| --- | --- | --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def claims_html(study: Study) -> str:
    """Write the table of claims, linked to their sections; those that nothing was found on are folded away."""
    judged, later = [], []
    for row in claims_table(study).itertuples():
        text = html.escape(row.claim)
        link = f'<a href="#{row.section}">{text}</a>' if row.section else text
        link += f"<br><small>{html.escape(row.rule)}</small>" if row.figure else ""
        cells = [row.id, link, row.verdict, *([html.escape(row.figure)] if row.figure else [])]
        (judged if row.figure else later).append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("", "claim", "verdict", "what was found"))
    tables = [f'<table class="claims"><thead><tr>{head}</tr></thead><tbody>{"".join(judged)}</tbody></table>']
    if later:
        tables.append(
            f"<details><summary>{len(later)} claims are not tested here</summary>"
            f'<table class="claims later"><tbody>{"".join(later)}</tbody></table></details>'
        )
    return "".join(tables)


def table_html(table: pd.DataFrame, index: bool = True) -> str:
    """Write a table that scrolls inside itself on a narrow screen."""
    text = table.to_html(index=index, border=0, na_rep="unknown")
    text = _INTERVAL.sub(r"<td>\1<br><small>\2</small></td>", text)
    return f'<div class="scroll">{text}</div>'


def caption(study: Study, text: str) -> str:
    """Write what stands below a figure: what it shows, from which study, made by which command."""
    command = html.escape(study.request["command"])
    return f'<p class="caption">{html.escape(text)} Study {study.study_id}, <code>{command}</code>.</p>'


# A value and its interval, which stand below each other in a table's cell.
_INTERVAL = re.compile(r"<td>([^<(]*) \(([^<(]* to [^<(]*)\)</td>")


def headline_html(study: Study) -> str:
    """Write the headline."""
    return f'<p class="headline">{html.escape(headline(study))}</p>'


def warnings_html(study: Study) -> str:
    """Write what a reader must know before any figure: emulation, failures, missing intervals, unknown caches."""
    return "".join(f'<p class="warning">{html.escape(text)}</p>' for text in warnings(study))


def warnings(study: Study) -> Iterator[str]:
    """Give the study's own warnings: the number, why it matters, and what mends it."""
    for target in study.targets:
        if study.emulated(target):
            yield (
                f"{target} is emulated ({study.storage(target)['words']}): its times follow from stated rates, not "
                "from a device. Give your own path with --target to measure one."
            )
        if study.storage(target)["medium"] == "memory":
            yield f"{target} is a memory file system: its figures are memory's, not storage's. Name a disk's directory."
    for row in study.trials[study.trials.status == "failed"].itertuples():
        again = "its block was run again" if row.superseded else "the same command tries its block again"
        yield f"Trial {row.trial} failed and counts nowhere: {row.reason}; {again}."
    blocks = min((compare(study, "durable_s", other).ratio.blocks for other in compared_with(study)), default=0)
    if 0 < blocks < 3:
        yield f"{blocks} complete block(s): intervals need 2, and are of use from 3 on. Use --blocks 5."
    if study.request["warmup_saves"] <= study.request["keep"]:
        yield (
            f"warmup_saves={study.request['warmup_saves']}: the counted saves include some before the first deletion, "
            f"which touch fresh memory. Use --set warmup_saves={study.request['keep'] + 1}."
        )
    if not compared_with(study) and len(study.targets) > 1:
        yield "No two targets completed a block together, so nothing is compared."
    unknown = study.restores[study.restores.cache_data != "cold"].target.unique()
    for target in unknown:
        yield f"{target}: the restored files could not be shown to be out of the page cache; its restore may be warm."


def lost_html(study: Study) -> str:
    """Write the trials that don't count, each with its reason."""
    lost = study.trials[(study.trials.status != "complete") | study.trials.superseded]
    if lost.empty:
        return "<p>None: every trial of this study succeeded at its first attempt.</p>"
    return table_html(lost[["trial", "status", "superseded", "reason"]], index=False)


def how_to_read(study: Study, other: str) -> str:
    """Say below the side-by-side table how its columns are meant."""
    first = study.targets[0]
    return (
        f"Means over blocks with their 95 % interval. Time saved: by {first} against {other}, paired by block. "
        "Detectable: the smallest time saved that this many blocks with this spread would have shown (80 % power). "
        "Events: on one target. Deletion stops training too, and is in no save's time; an emulated device charges "
        "nothing for it."
    )


def events_caption(study: Study) -> str:
    """Say below the figure of all events what a point and a bar are, and how many there are."""
    counts = []
    for measure in ("step_s", "returned_s", "durable_s", "restore_s"):
        values = analysis.measured(study, measure)
        per_target = values.groupby("target").size()
        low, high = per_target.min(), per_target.max()
        counts.append(f"{low if low == high else f'{low} to {high}'} {measure.removesuffix('_s')}")
    blocks = study.counted.block.nunique()
    return (
        f"Points: single events, in seconds; {', '.join(counts)} events on each target, {blocks} blocks. "
        "Black: mean over blocks with its 95 % interval (none with one block)."
    )


def training_phase_words(study: Study, other: str) -> str:
    """Answer the question whether training takes as long on both targets, for each wait rule."""
    lines = []
    for wait in study.waits:
        test = analysis.training_phase(study, other, wait)
        change = percent(test.ratio - 1, test.low_95 - 1, test.high_95 - 1)
        answer = {
            "equivalent": "**equivalent**: the difference is within 5 %",
            "different": "**different**: the difference is beyond 5 %",
            "undecided": "**undecided**: these blocks can neither show nor rule out a difference of 5 %",
        }[test.verdict]
        lines.append(
            f"- wait={wait}: {answer}. Step time on {study.targets[0]} against {other}: {change} (95 % interval, "
            f"{test.blocks} blocks; two one-sided tests, p = {test.p_value:.3g})."
        )
    return "\n".join(lines)


def limits_table(study: Study) -> pd.DataFrame:
    """Give each target's raw limits, and which share of the write limit a durable save reaches."""
    table = analysis.share_of_limit(study)
    rate = "{:,.0f} MB/s".format
    columns = {
        "raw write": table.raw_write_bytes_per_s.div(1e6).map(rate, na_action="ignore"),
        "raw read": table.raw_read_bytes_per_s.div(1e6).map(rate, na_action="ignore"),
        "save, durable": table.save_bytes_per_s.div(1e6).map(rate, na_action="ignore"),
        "share of limit": table.share.map(percent),
    }
    return pd.DataFrame(columns)


def schedule_words(schedule: Schedule) -> str:
    """Say which schedule the projection assumes; every number is a parameter of the notebook."""
    return (
        f"Assumed: a save every {schedule.interval_min:g} minutes of training, {schedule.run_h:g} hours a run: "
        f"**{schedule.saves} saves** (the article's figures). {schedule.runs_per_day} run a day, a team of "
        f"{schedule.team}, {schedule.workdays_per_week} days a week, {schedule.workdays_per_year} days a year (ours). "
        "Each is a parameter of the notebook."
    )


def projection_table(study: Study, measure: str, schedule: Schedule) -> pd.DataFrame:
    """Give the projected waiting on each target, and the time saved against each other one, by scope."""
    columns: dict[str, pd.DataFrame] = {}
    for target in study.targets:
        means = analysis.block_means(study, measure, target)
        if len(means):
            columns[_called(study, target)] = compounding(mean_interval(means), schedule)
    for other in compared_with(study):
        columns[f"saved against {other}"] = compounding(compare(study, measure, other).saved_s, schedule)
    longest = [max(abs(table.wait_s[row]) for table in columns.values()) for row in range(6)]
    texts = {
        name: [duration(row.wait_s, row.low_s, row.high_s, longest[row.Index]) for row in table.itertuples()]
        for name, table in columns.items()
    }
    index = next(iter(columns.values())).scope
    return pd.DataFrame(texts, index=index.rename(None))


def _called(study: Study, target: str) -> str:
    return f"{target} (emulated)" if study.emulated(target) else target


def worst_words(study: Study, measure: str) -> str:
    """Say how bad the worst save was: a mean alone would hide it."""
    values = analysis.measured(study, measure)
    worst = [
        f"{target} {own.max():.2f} s (mean {own.mean():.2f} s, {len(own)} saves)"
        for target in study.targets
        if len(own := values[values.target == target].value_s)
    ]
    wait = condition(study, MEASURES[measure][1])
    return f"{MEASURES[measure][0].capitalize()}, wait={wait}. Worst single save: {'; '.join(worst)}."


def worked_example_words() -> str:
    """Work the article's example out."""
    example = worked_example()
    return (
        f"{ARTICLE_SLOW_S:g} s to {ARTICLE_FAST_S:g} s: time saved **{percent(example.time_saved)}**, or "
        f"{percent(example.faster)} faster. {example.saves} saves: **{example.saved_per_run_min:g} minutes a run**."
    )


def worked_example_table() -> pd.DataFrame:
    """Give the time that the article's example saves, by scope."""
    table = worked_example().compounding
    return pd.DataFrame({"scope": table.scope, "saves": table.events, "time saved": table.wait_s.map(duration)})


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
            "95 % interval holds the truth": _shares(table, "coverage"),
            "A/A false alarms": _shares(table, "false_alarms"),
            "goal met": table.passed.map({True: "yes", False: "no"}).where(table.required, "not required"),
        }
    )
    words = (
        f"<p>{int(table.studies.iloc[0]):,} synthetic studies a row, with skewed and autocorrelated noise and a known "
        "ratio (<code>make validate</code>). Goals: 93 to 97 % coverage, 3 to 7 % false alarms. <em>Unlike</em>: one "
        "target spreads six times as much as the other, as a real disk does beside an emulated one; there the "
        "intervals hold the truth less often than they say. The percentile bootstrap stands here to show why it isn't "
        "used.</p>"
    )
    return words + table_html(shown, index=False)


def _shares(table: pd.DataFrame, name: str) -> list[str]:
    return [
        "" if pd.isna(share) else f"{share:.1%} ({low:.1%} to {high:.1%})"
        for share, low, high in zip(table[name], table[f"{name}_low"], table[f"{name}_high"], strict=True)
    ]


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
        "data": str(study.request["dataset"]),
        "commit": machine["git_commit"],
        "begun": study.request["created_utc"],
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=[""])


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def reproduce_words(study: Study) -> str:
    """Say which commands make this study again, and render it again."""
    return (
        f"```\nmake setup\n.venv/bin/{study.request['command']}\n```\n\n"
        f"The same command goes on with a study that was stopped. To render again without measuring: "
        f"`.venv/bin/stallbench report results/{study.folder.name}`. On your own storage: "
        "`.venv/bin/stallbench run --target local=/fast/disk --target nas=/mnt/nas`."
    )
