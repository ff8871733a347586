"""A study in words and tables: what the notebooks show besides figures."""

import html
import re
from collections.abc import Iterator

import pandas as pd

from stallbench.compounding.models import ARTICLE_FAST_S, ARTICLE_SLOW_S, Schedule, worked_example
from stallbench.config import METHODS
from stallbench.reporting import analysis, matrix, trust, which_nas
from stallbench.reporting.analysis import (
    MEASURES,
    Comparison,
    compare,
    compared_with,
    condition,
    never_durable,
    percent,
    seconds,
)
from stallbench.reporting.claims import claims_table
from stallbench.reporting.judging import storage_warnings
from stallbench.reporting.tables import beside_table, called, nas_table
from stallbench.reporting.verdicts import headline, moved_words, summary_lines
from stallbench.results import Study


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
    command = study.request["command"]
    whole = "" if len(command) <= LONG_COMMAND else ' … (<a href="#Reproduce">whole</a>)'
    shown = f"<code>{html.escape(command[:LONG_COMMAND])}</code>{whole}"
    return f'<p class="caption">{html.escape(text)} Study {study.study_id}, {shown}.</p>'


FEW_TRIALS = 24
LONG_COMMAND = 100  # characters of a command that a caption shows
# A value and its interval, which stand below each other in a table's cell.
_INTERVAL = re.compile(r"<td>([^<(]*) \(([^<(]* to [^<(]*)\)</td>")


def headline_html(study: Study) -> str:
    """Write the headline, a paragraph for each target compared."""
    return paragraphs_html(headline(study))


def paragraphs_html(text: str) -> str:
    """Write a headline's paragraphs, which empty lines divide."""
    parts = "".join(f"<p>{html.escape(part)}</p>" for part in text.split("\n\n"))
    return f'<div class="headline">{parts}</div>'


def warnings_html(study: Study) -> str:
    """Write what a reader must know before any figure: emulation, failures, missing intervals, unknown caches."""
    return "".join(f'<p class="warning">{html.escape(text)}</p>' for text in warnings(study))


def warnings(study: Study) -> Iterator[str]:
    """Give the study's own warnings: the number, why it matters, and what mends it."""
    yield from storage_warnings(study)
    for target in study.targets:
        if study.remote(target):
            yield (
                f"{target} is a URL: checkpoints and reloads of the data cross the network, but training reads a local "
                "copy, so that its steps say nothing of that storage."
            )
        if never_durable(study, target):
            yield f"{target}: its server can't say when bytes are durable; that is unknown, and nothing is compared."
    for target, reached, stated in trust.shortfalls(study):
        yield (
            f"{target} reached {reached / 1e6:,.0f} of the {stated / 1e6:,.0f} MB/s that its profile states, in raw "
            "writes or reads between the saves: this machine was too busy to emulate it, and its figures are those of "
            "a slower store. Run it again with nothing else running."
        )
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
    yield from (hidden.words for hidden in trust.hidden_by_noise(study))
    if not compared_with(study) and len(study.targets) > 1:
        yield "No two targets completed a block together with known times, so nothing is compared."
    for target in study.restores[study.restores.cache_data != "cold"].target.unique():
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
        "Events: on one target. Deletion by the Trainer stops training too, and is in no save's time; a "
        "device emulated in-process charges nothing for it."
    )


def events_caption(study: Study) -> str:
    """Say below the figure of all events what a point and a bar are, and how many there are."""
    counts = []
    for measure in ("step_s", "returned_s", "durable_s", "restore_s"):
        values = analysis.measured(study, measure)
        per_target = values.groupby("target").size()
        if per_target.empty:
            continue
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
    for wait in analysis.waits_of_first(study):
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


def matrix_caption(study: Study, wait: str) -> str:
    """Say how the matrix is read, and what each method is."""
    rule = {
        "return": "training goes on when the save call is back; durable comes later, beside training",
        "durable": "training waits until the checkpoint is durable: stall and durable are one",
    }[wait]
    blocks = study.counted[study.counted.wait == wait].block.nunique()
    methods = "; ".join(f"{method}: {METHODS[method]}" for method in study.methods)
    text = f"wait={wait}: {rule}. Means over {blocks} blocks with their 95 % interval. {methods}."
    return f"{text} {_staged_words(study)}" if wait == "return" and "staged" in study.methods else text


def _staged_words(study: Study) -> str:
    """Say when staged saves are durable on the local folder, which is not the target."""
    local = matrix.cells(study, "local_s", "return")
    places = [f"{seconds(when)} beside {target}" for (method, target), when in local.items() if method == "staged"]
    if not places:
        return ""
    return (
        f"A staged save is durable on its local folder first: after {', '.join(places)}. Its stall includes the "
        "removal of the last local copy. What that folder lies on is not examined: by default it is the temporary one."
    )


def given_back_words(study: Study, other: str) -> str:
    """Say what faster storage gives back, what a better save does on the same storage, and what both do."""
    lines = []
    for wait in study.waits:
        found = matrix.given_back(study, other, wait)
        if found is None:
            continue
        first, today = study.targets[0], found.today
        lines.append(
            f"- **wait={wait}**: a save by {today} on {called(study, other)} holds training up for "
            f"{seconds(found.storage.slow_s)}. Faster storage, the same save on {called(study, first)}: "
            f"{_less(found.storage)}."
        )
        if found.software:
            moved = moved_words(study, other, found.better)
            lines[-1] += (
                f" A better save on the same storage ({found.better} on {other}): {_less(found.software)}{moved}."
            )
        if found.both:
            lines[-1] += f" Both ({found.better} on {first}): {_less(found.both)}."
    return "\n".join(lines)


def _less(one: Comparison) -> str:
    saved = percent(one.ratio.time_saved, one.ratio.time_saved_low, one.ratio.time_saved_high)
    return f"{seconds(one.fast_s)}, **{saved}** less"


def schedule_words(schedule: Schedule) -> str:
    """Say which schedule the projection assumes; every number is a parameter of the notebook."""
    usual = Schedule()
    as_told = (schedule.interval_min, schedule.run_h) == (usual.interval_min, usual.run_h)
    source = " (the article's figures)" if as_told else ""
    return (
        f"Assumed: a save every {schedule.interval_min:g} minutes of training, {schedule.run_h:g} hours a run: "
        f"**{schedule.saves} saves**{source}. {schedule.runs_per_day} run a day, a team of "
        f"{schedule.team}, {schedule.workdays_per_week} days a week, {schedule.workdays_per_year} days a year (ours). "
        "Each is a parameter of the notebook."
    )


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


def targets_html(study: Study) -> str:
    """Write what was known of each target before anything was measured."""
    found = study.environment.get("targets", {})
    parts = [
        f"<details><summary>{html.escape(called(study, name))}: what its system says</summary>"
        f"<ul>{''.join(f'<li>{html.escape(line.strip())}</li>' for line in lines)}</ul></details>"
        for name, lines in found.items()
        if lines
    ]
    return "".join(parts)


def summary_html(study: Study) -> str:
    """Write one line a condition, folded away where there are many."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in summary_lines(study))
    current = study.trials[~study.trials.superseded]
    succeeded = int((current.status == "complete").sum())
    shown = f"<ul>{lines}</ul>"
    if len(current) <= FEW_TRIALS:
        return shown
    return f"<details><summary>{succeeded} of {len(current)} trials succeeded; by condition</summary>{shown}</details>"


def reproduce_words(study: Study) -> str:
    """Say which commands make this study again, and render it again."""
    if study.request.get("watched"):
        return (
            f"A recording of `{study.request['command']}`, made by `stallbench.watch`; running it again adds to it. To "
            f"render again: `stallbench report {study.folder.name}`."
        )
    return (
        f"```\nmake setup\n.venv/bin/{study.request['command']}\n```\n\n"
        f"The same command goes on with a study that was stopped. To render again without measuring: "
        f"`.venv/bin/stallbench report results/{study.folder.name}`. On your own storage: "
        "`.venv/bin/stallbench run --target local=/fast/disk --target nas=/mnt/nas`."
    )


def limits_words() -> str:
    """Say below the table of raw limits what they are."""
    return (
        "Means over trials, by fio where it is installed. Raw: direct I/O, a deep queue, fsync after a write. A "
        "small file is created, written, made durable and renamed. Of a device emulated in-process, the limits "
        "are what its stated rates come to; a lab's are probed. A cache beneath a raw read is unknown."
    )


def phases_caption() -> str:
    """Say below the phase bars where a figure comes from."""
    return (
        "Mean seconds of each phase over all counted saves. The Trainer's phases come from an override of its save "
        "steps; each is serialising and writing in one. An asynchronous library's write holds its serialising too."
    )


def floors_caption() -> str:
    """Say below the table of floors how they were obtained."""
    return (
        "To memory alone: on a real path, the same save to a memory file system; on a device emulated in-process, "
        "the save's own time without the device's. Storage saves at most: what an infinitely fast store would save, "
        "paired by block."
    )


def nas_html(study: Study) -> str:
    """Write the map of NASes: which of them would make the disk save the claimed share of the time."""
    kept = which_nas.load(study)
    if kept is None:
        return "<p>Not mapped for this page; <code>stallbench lab sweep DIR</code> does it (Linux, root).</p>"
    rows, size_bytes = kept
    shown = (
        f"By stallbench lab sweep: the Trainer's save of {size_bytes / 1e6:,.0f} MB, then fsync, on emulated NASes "
        f"(labs) and on the disk, in {rows['round'].nunique()} rounds in random order; time saved is paired by round, "
        "with its 95 % interval. Bound by the emulation: its own chain takes more than half of that time, so a real "
        "one of these rates may be faster. A network store also loses time to round trips for each file, which a block "
        "device has none of."
    )
    return (
        f"<p>{html.escape(which_nas.words(study))}</p>"
        + table_html(nas_table(rows), index=False)
        + caption(study, shown)
    )


def beside_html(study: Study) -> str:
    """Write what asynchronous saves take from the steps beside them, or that none was run."""
    table = beside_table(study)
    if table.empty:
        return "<p>No asynchronous method was run; <code>--method fast-async</code> adds one.</p>"
    words = (
        "Background: from the end of the stall until durable. Slower: steps beside a save against steps without one. "
        "Moved: what all steps up to the next save take longer, to be added to its stall; a background that outlasts "
        "them may take more. Mock steps are waits, "
        "an emulated accelerator's: a lower bound, as a wait needs a core and the interpreter's lock only to wake up."
    )
    return table_html(table) + caption(study, words)
