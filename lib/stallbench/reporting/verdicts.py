"""The articles' claims, each with a rule fixed here before any reference study was run, and the headline."""

import itertools

from stallbench.compounding import forecast
from stallbench.compounding.assumptions import of
from stallbench.compounding.models import Schedule, compounding, worked_example
from stallbench.config import ASYNCHRONOUS
from stallbench.reporting import which_nas
from stallbench.reporting.analysis import (
    block_means,
    compare,
    compared_with,
    duration,
    percent,
    raw_against,
    seconds,
    share_of_limit,
    training_phase,
    waits_of_first,
)
from stallbench.reporting.judging import (
    MODELLED,
    NOT_REPRODUCED,
    NOT_TESTED,
    REPRODUCED,
    UNDECIDED,
    Judgement,
    agreed,
    called,
    less,
    less_of,
    on_this_storage,
    saved,
    within,
)
from stallbench.reporting.matrix import beside_saves, given_back
from stallbench.reporting.stats import Interval, mean_interval
from stallbench.results import Study

# Claim 1.2: "about 25 %".
CLAIM_LOW, CLAIM_HIGH = 0.15, 0.35
# Claim 1.5: a restore matters to the choice of storage if it differs by more than this.
RESTORE_DIFFERENCE = 0.05
# Claim 1.7: likewise for each of the raw limits.
RAW_DIFFERENCE = 0.05
_RAW = {"raw_write": "raw write", "raw_read": "raw cold read", "raw_random": "random 4 KiB read"}


def training_time(study: Study, other: str) -> Judgement:
    """Judge claim 1.1: whether steps take as long on both targets."""
    verdicts, figures = [], []
    for wait in waits_of_first(study):
        test = training_phase(study, other, wait)
        verdicts.append({"equivalent": REPRODUCED, "different": NOT_REPRODUCED}.get(test.verdict, UNDECIDED))
        change = percent(test.ratio - 1, test.low_95 - 1, test.high_95 - 1)
        answer = {"equivalent": "the same", "different": "not the same"}.get(test.verdict, "undecided whether the same")
        figures.append(f"wait={wait}: {answer} within 5 %; step time on {study.targets[0]} {change} against {other}")
    figure = "; ".join(figures) + "."
    if study.charged(other):
        figure += " The emulated device charges a step's data reads only; any other difference is this machine's."
    elif study.emulated(other):
        figure += " The lab's device is served by this machine's own cores, which training shares."
    if study.methods[0] in ASYNCHRONOUS:
        figure += f" Steps beside a save by {study.methods[0]} are among them."
    if study.remote(study.targets[0]) or study.remote(other):
        return Judgement(NOT_TESTED, f"Training reads a local copy where a target is a URL. {figure}")
    return on_this_storage(study, other, agreed(verdicts), figure)


def save_time(study: Study, other: str) -> Judgement:
    """Judge claim 1.2: whether a save takes about a quarter less time on the first target."""
    verdicts, figures = [], []
    for measure, words in (("returned_s", "returned"), ("durable_s", "durable")):
        one = compare(study, measure, other)
        verdicts.append(within(one.ratio.time_saved_low, one.ratio.time_saved_high, CLAIM_LOW, CLAIM_HIGH))
        figures.append(f"{words}: {less(one)} time")
    figure = f"{'; '.join(figures)}."
    if other == compared_with(study)[-1]:  # it says which store would do, of whatever the others are
        figure += f" {which_nas.words(study) or storage_for_claim(study, other)}"
    return on_this_storage(study, other, agreed(verdicts), figure)


def _total(saved: Interval, saves: int) -> str:
    if saved.mean < 0:
        return f"take {duration(-saved.mean * saves, -saved.high * saves, -saved.low * saves)} more"
    return f"save {duration(saved.mean * saves, saved.low * saves, saved.high * saves)}"


def storage_for_claim(study: Study, other: str) -> str:
    """Say which other storage would give the claimed 25 %: the save time, and the rate, that it takes."""
    one = compare(study, "durable_s", other)
    events = study.events[~study.events.warmup & (study.events.method == study.methods[0])]
    size_bytes = float(events[(events.target == one.fast) & (events.wait == one.wait)].size_bytes.mean())
    claimed = which_nas.CLAIMED_TIME_SAVED
    slow_s = one.fast_s.mean / (1 - claimed)
    return (
        f"A store on which this save of {size_bytes / 1e6:,.0f} MB is durable after {slow_s:.2g} s, that is "
        f"{size_bytes / slow_s / 1e6:,.0f} MB/s from end to end, would give the claimed {percent(claimed)}."
    )


def compounds(study: Study, other: str) -> Judgement:
    """Judge claim 1.3: what the saves of a run add up to."""
    schedule = of(study).schedule
    saved = compare(study, "durable_s", other).saved_s
    n = schedule.saves
    total = duration(saved.mean * n, saved.low * n, saved.high * n)
    figure = f"{n} saves in {schedule.run_h:g} h: {total} saved a run until durable, a projection from means. "
    rows = forecast.kept(study)
    if not rows:
        figure += "48 saves in a row were not run."
        return Judgement(NOT_TESTED if study.same_place(study.targets[0], other) else MODELLED, figure)
    worst = max(rows, key=lambda row: abs(row["error"]))
    met = sum(row["met"] for row in rows)
    figure += (
        f"Checked against {len(rows)} runs of {rows[0]['saves']} saves: {met} totals were predicted within their goal "
        f"(5 %, emulated 3 %), the worst, {worst['method']} on {worst['target']}, with an error of "
        f"{percent(worst['error'])}. {forecast.coverage_words(rows)}"
    )
    verdict = REPRODUCED if met == len(rows) else UNDECIDED
    if any(not row["met"] and row["within"] is False for row in rows):
        verdict = NOT_REPRODUCED
    return on_this_storage(study, other, verdict, figure)


def worked_hours(study: Study, other: str) -> Judgement:
    """Judge claim 1.4, which is arithmetic."""
    example = worked_example()
    table = example.compounding.set_index("scope").wait_s
    figure = (
        f"40 s to 30 s is {percent(example.time_saved)} less time ({percent(example.faster)} faster): "
        f"{example.saved_per_run_min:.0f} min a run, {duration(table['team-week'])} a week for a team of "
        f"{Schedule().team}. Arithmetic, with the article's own times."
    )
    one, assumed = compare(study, "durable_s", other), of(study)
    if not study.same_place(one.fast, other):
        week = compounding(one.saved_s, assumed.schedule).set_index("scope").loc["team-week"]
        figure += (
            f" With this study's, {seconds(one.slow_s)} to {seconds(one.fast_s)}: "
            f"{duration(week.wait_s, week.low_s, week.high_s)} a week for a team of {assumed.team}."
        )
    return Judgement(MODELLED, figure)


def restore(study: Study, other: str) -> Judgement:
    """Judge claim 1.5: whether cold restores differ."""
    one = compare(study, "restore_s", other)
    figure = f"{one.fast}: {seconds(one.fast_s)}; {one.slow}: {seconds(one.slow_s)}; {less(one)} time."
    own = study.restores[study.restores.target.isin([one.fast, one.slow])]
    states = set(own.cache_data)
    if states != {"cold"} or "warm" in set(own.cache_server):
        return Judgement(NOT_TESTED, f"The restores were not shown to be cold. {figure}")
    if "unknown" in set(own.cache_server):
        figure += " Cold here means this machine's page cache; a cache beneath it (NAS, hypervisor) is unknown."
    low, high = one.ratio.time_saved_low, one.ratio.time_saved_high
    verdict = within(low, high, RESTORE_DIFFERENCE, 1.0)
    if high <= -RESTORE_DIFFERENCE:
        verdict = REPRODUCED  # the first is slower: that matters as much
    elif verdict == NOT_REPRODUCED and low < -RESTORE_DIFFERENCE:
        verdict = UNDECIDED
    return on_this_storage(study, other, verdict, figure)


def mechanics(study: Study, other: str) -> Judgement:
    """Judge claim 1.7: whether each of the raw limits differs."""
    found = raw_against(study, other)
    if len(found) < len(_RAW):
        return Judgement(NOT_TESTED, f"The raw limits of {study.targets[0]} and {other} were not both probed.")
    limits = share_of_limit(study)
    names = (study.targets[0], other)
    shown = {
        "raw_write": [f"{limits.raw_write_bytes_per_s[name] / 1e6:,.0f} MB/s" for name in names],
        "raw_read": [f"{limits.raw_read_bytes_per_s[name] / 1e6:,.0f} MB/s" for name in names],
        "raw_random": [f"{limits.raw_random_s[name] * 1e3:,.2f} ms" for name in names],
    }
    figure = "; ".join(
        f"{words}: {' against '.join(shown[kind])}, {less_of(found[kind])} time" for kind, words in _RAW.items()
    )
    verdicts = [within(ratio.time_saved_low, ratio.time_saved_high, RAW_DIFFERENCE, 1.0) for ratio in found.values()]
    verdict = NOT_REPRODUCED if NOT_REPRODUCED in verdicts else agreed(verdicts)
    figure += ". A seek and a network hop can't be told apart from outside."
    return on_this_storage(study, other, verdict, figure)


def headline(study: Study) -> str:
    """Say the study's answer, a paragraph for each target compared, with intervals and with what it rests on."""
    others = compared_with(study)
    if not others:
        return _description(study)
    first = study.targets[0]
    return "\n\n".join(
        _control_sentence(study, other) if study.same_place(first, other) else _comparison_sentences(study, other)
        for other in others
    )


def _description(study: Study) -> str:
    parts = [
        f"On {called(study, target)} a checkpoint is durable after {seconds(mean_interval(means))}."
        for target in study.targets
        if len(means := block_means(study, "durable_s", target))
    ]
    alone = (
        "there is one target"
        if len(study.targets) == 1
        else "no two targets completed a block together with known times"
    )
    return " ".join([*parts, f"Nothing is compared: {alone}."])


def _control_sentence(study: Study, other: str) -> str:
    one = compare(study, "durable_s", other)
    low, high = one.ratio.time_saved_low, one.ratio.time_saved_high
    answer = "a false alarm" if low > 0 or high < 0 else "no difference was found, as it should be"
    return f"A/A control: {one.fast} and {one.slow} are one storage. Time saved, durable: {saved(one)}; {answer}."


def _comparison_sentences(study: Study, other: str) -> str:
    durable, returned = compare(study, "durable_s", other), compare(study, "returned_s", other)
    schedule, saved = of(study).schedule, durable.saved_s
    n = schedule.saves
    interval = "" if durable.ratio.blocks > 1 else " One block only, so no figure has an interval."
    words = (
        f"With wait={durable.wait}, a checkpoint is durable after {seconds(durable.fast_s)} on "
        f"{called(study, durable.fast)} and after {seconds(durable.slow_s)} on {called(study, other)}: "
        f"{less(durable)} time. With wait={returned.wait}, the save call returns after "
        f"{seconds(returned.fast_s)} against {seconds(returned.slow_s)}: {less(returned)}. "
        f"{n} saves in {schedule.run_h:g} hours would {_total(saved, n)} a run."
    )
    words += _better_save(study, other)
    if study.emulated(other) or study.emulated(durable.fast):
        words += " One of the two is emulated, so this is modelled, not measured on such a device."
    return words + interval


def _better_save(study: Study, other: str) -> str:
    """Say what better software gives back on the slower storage as it is."""
    found = given_back(study, other, "return") if "return" in study.waits else None
    if found is None or found.software is None:
        return ""
    return (
        f" On {other} as it is, a save by {found.better} holds training up for {seconds(found.software.fast_s)} "
        f"instead of {seconds(found.software.slow_s)}: {less(found.software)}"
        f"{moved_words(study, other, found.better)}."
    )


def moved_words(study: Study, target: str, method: str) -> str:
    """Say what an asynchronous save takes from the steps after its stall, on this machine's own processor."""
    moved = [one.moved_s for one in beside_saves(study) if (one.method, one.target) == (method, target)]
    if not moved or moved[0] is None:
        return ""
    cores = study.environment.get("cores", "few")
    return f", and takes {seconds(moved[0])} from the steps beside it on these {cores} cores"


def summary_lines(study: Study) -> list[str]:
    """Give one line a condition: how many trials succeeded, and what a save stalled."""
    lines = []
    current, events = study.trials[~study.trials.superseded], study.events[~study.events.warmup]
    for target in study.targets:
        for method, wait in itertools.product(study.request["methods"], study.request["waits"]):
            trials, own = (
                table[(table.target == target) & (table.method == method) & (table.wait == wait)]
                for table in (current, events)
            )
            if wait == "durable" and method in ASYNCHRONOUS:  # no condition of a study
                continue
            succeeded = int((trials.status == "complete").sum())
            stall = f"mean stall {own.stall_s.mean():.3g} s, worst {own.stall_s.max():.3g} s, {len(own)} saves"
            stall = stall if len(own) else "no save was measured"
            of = f"{succeeded} of {study.request['blocks']} trials"
            lines.append(f"{called(study, target)}, {method}, wait={wait}: {of}; {stall}")
    return lines
