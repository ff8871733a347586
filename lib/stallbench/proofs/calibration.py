"""Does a real study's interval hold the truth? Small real studies on emulated devices whose true ratio is known."""

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from stallbench import workload
from stallbench.config import EMULATED, Target, TrialConfig
from stallbench.proofs import bench, validation
from stallbench.reporting import stats
from stallbench.storage import targets
from stallbench.storage.emulated import CHUNK_BYTES, Profile, Queue, charge_write, parse_profile
from stallbench.storage.pagecache import files_below
from stallbench.trial import Trial

# Two NAS that differ in their disk's rate. A save of 6 MB in 7 files takes the device some 19 and 29 ms, and this
# machine's own part about 10 ms, so that its noise counts. Without a server cache nothing of it hides behind a drain.
_NAS = "hdd-nas-10gbe?server_cache_bytes=0&position_s=5e-4"
DEVICES = {"fast": f"{_NAS}&disk_bytes_per_s=6e8", "slow": f"{_NAS}&disk_bytes_per_s=3e8"}
WARMUP_SAVES, COUNTED_SAVES = 2, 3  # as many saves count as in validation's synthetic trials
NOISE = "real saves, emulated"


@dataclass(frozen=True)
class Truth:
    """The true ratio of expected durable times, fast / slow, without unit, and how sure it is.

    ``low`` to ``high`` comes from the 95 % interval of ``own_s``, the machine's own part of a save in seconds.
    """

    ratio: float
    low: float
    high: float
    own_s: stats.Interval


@dataclass(frozen=True)
class Calibration:
    """What real studies say of the interval: rows as in ``validation.coverage_table``, figures as in ``doubts``."""

    rows: list[dict[str, Any]]
    doubts: dict[str, float]


def real_coverage(studies: int = 40, blocks: int = 3, seed: int = 20261201) -> Calibration:
    """Run small studies for real, and count how often their intervals hold the true ratio; 0.9 s a trial on 2 cores.

    A trial is ``Trial`` itself: data on the target, training of a tiny model, the Trainer's saves with wait=durable. It
    stops after its saves, and all share this process, so that noise from kernel to kernel is not in it.

    Parameters
    ----------
    studies, blocks
        Studies, at least 2, and blocks of each, at least 2; a block is one trial on each device in random order.
    seed
        Of the order, and of the A/A pairs' order. The times are real, so that no seed brings them back.

    Raises
    ------
    ValueError
        If there are too few studies or blocks.
    """
    for name, value in (("studies", studies), ("blocks", blocks)):
        if value < 2:
            raise ValueError(f"{name}={value} is refused: at least two are needed")
    rng = np.random.default_rng(seed)
    saves = measure(studies, blocks, rng)
    truth = true_ratio(saves)
    return Calibration([coverage_row(saves, truth.ratio), control_row(saves, rng)], doubts(saves, truth))


def measure(studies: int, blocks: int, rng: np.random.Generator) -> pd.DataFrame:
    """Run the trials, one after the other, and give their counted saves.

    Returns
    -------
    pandas.DataFrame
        One row a save, in the order in time: ``study``, ``block``, ``target`` (fast or slow), ``durable_s`` (from the
        save's begin to durable, from the timeline) and ``device_s`` (the device's part of it, by arithmetic).
    """
    workload.prepare_libraries(allow_download=False)
    places = {name: Target(name=name, location=EMULATED + device) for name, device in DEVICES.items()}
    tables = []
    with ExitStack() as closing:
        closing.enter_context(_one_thread())
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="stallbench-calibration-")))
        base = _tiny_trial(folder)
        targets.check(list(places.values()), workload.planned_bytes(base, base.method, base.wait) or 0)
        claims = {name: uuid4().hex[:12] for name in places}
        for name, place in places.items():
            closing.enter_context(targets.claim(place, claims[name]))

        def run(number: int, name: str) -> pd.DataFrame:
            own = {"target": places[name].location, "target_name": name, "claim_id": claims[name], "block": number}
            return _saves_of(Trial(base.model_copy(update=own | {"out": str(folder / f"{number}-{name}")})))

        run(studies * blocks, "slow")  # imports, first-touched memory: the process warms up
        for number in range(studies * blocks):
            for name in rng.permutation(list(places)):
                study, block = divmod(number, blocks)
                tables.append(run(number, str(name)).assign(study=study, block=block, target=str(name)))
    return pd.concat(tables, ignore_index=True)


def _tiny_trial(folder: Path) -> TrialConfig:
    rows = folder / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"row {row} of a small set,{row % 2}\n" for row in range(40)))
    steps = WARMUP_SAVES + COUNTED_SAVES
    return TrialConfig.parse(
        model=str(bench.tiny_model(folder / "model")), dataset=str(rows), wait="durable", keep=steps,
        steps=steps, every_steps=1, warmup_saves=WARMUP_SAVES, batch_size=2, max_tokens=8, eval_rows=4,
    )  # fmt: skip


@contextmanager
def _one_thread() -> Iterator[None]:
    """Train on one thread: a tiny model gains nothing from more, and waits for them where cores are busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _saves_of(trial: Trial) -> pd.DataFrame:
    trial.put_data()
    trial.train()
    spans = trial.timeline.frame()
    saves = spans[(spans.kind == "save") & ~spans.warmup]
    durable_end_s = spans[spans.parent >= 0].groupby("parent").end_s.max()  # as results.Study.events has it
    profile = parse_profile(trial.config.target.removeprefix(EMULATED))
    device_part_s = []
    for step in saves.step:
        files = files_below(trial.workspace.folder / "checkpoints" / f"checkpoint-{step}")
        device_part_s.append(device_s(profile, [path.stat().st_size for path in files]))
    trial.fail("stopped after its saves: the calibration looks at nothing else")  # clears its folder on the target
    durable_s = durable_end_s.loc[saves.id].to_numpy() - saves.start_s.to_numpy()
    return pd.DataFrame({"durable_s": durable_s, "device_s": device_part_s})


def device_s(profile: Profile, sizes_bytes: Iterable[int]) -> float:
    """Give the seconds that an idle device without a server cache takes for files that are written one by one.

    Arithmetic, no measurement: round trips a file, then its chunks by ``emulated.charge_write``. With a disk slower
    than the link this is files x (round trips + position) + bytes / disk rate.
    """
    queue, now_s = Queue(), 0.0
    for stream, size_bytes in enumerate(sizes_bytes):
        now_s += profile.round_trips_per_file * profile.round_trip_s
        for offset in range(0, size_bytes, CHUNK_BYTES):
            queue, written = charge_write(profile, queue, now_s, stream, min(CHUNK_BYTES, size_bytes - offset))
            now_s = written.acknowledged_s
    return now_s


def true_ratio(saves: pd.DataFrame) -> Truth:
    """Give the true ratio (own + fast device) / (own + slow device), in expected seconds.

    A save's durable time is the machine's own part (serialising to memory, the calls, late wake-ups) and the device's,
    one after the other: without a server cache none overlaps. The device's is known by arithmetic. The own part runs
    the same code on both devices, and so has one expectation, estimated from all saves of all studies and both devices
    (their measured ratio is never used); its 95 % interval is over studies. An error of the own part moves the ratio
    little, as it stands above and below: by 1 / (own + fast) - 1 / (own + slow), about 1 % a millisecond.
    """
    own_s = stats.mean_interval((saves.durable_s - saves.device_s).groupby(saves.study).mean())
    part_s = saves.groupby("target").device_s.mean()
    ratio, low, high = ((part + part_s.fast) / (part + part_s.slow) for part in (own_s.mean, own_s.low, own_s.high))
    return Truth(ratio, low, high, own_s)


def coverage_row(saves: pd.DataFrame, true_ratio: float) -> dict[str, Any]:
    """Judge each study as its report would, and count the 95 % intervals that hold the true ratio.

    It passes where the share's 95 % Wilson interval (Wilson, JASA 22, 1927) holds 0.95.
    """
    found = [stats.paired_ratio(pair.fast, pair.slow) for _, pair in _block_means(saves).groupby("study")]
    return _row(saves, "coverage", 0.95, NOISE, [one.low <= true_ratio <= one.high for one in found], required=False)


def control_row(saves: pd.DataFrame, rng: np.random.Generator) -> dict[str, Any]:
    """Pair each device's neighbouring trials to A/A studies without a difference, and count their false alarms.

    The trials are those of ``coverage_row``: of each device, blocks 1 and 2 in time make a pair, 3 and 4 the next, and
    as many pairs as a study has blocks make an A/A study, in random order within each pair. No trial is used twice, and
    what a pair's trials lie apart in time is a block, where a real study's are neighbours. One odd study is left out.
    """
    blocks = saves.block.nunique()
    alarmed = []
    for _, means_s in _block_means(saves).items():
        usable_s = means_s.to_numpy()[: len(means_s) // (2 * blocks) * 2 * blocks]
        for pairs_s in rng.permuted(usable_s.reshape(-1, blocks, 2), axis=2):
            found = stats.paired_ratio(pd.Series(pairs_s[:, 0]), pd.Series(pairs_s[:, 1]))
            alarmed.append(not found.low <= 1 <= found.high)
    return _row(saves, "false_alarms", 0.05, f"{NOISE}, A/A", alarmed, required=False)


def _row(
    saves: pd.DataFrame, counted: str, stated: float, noise: str, hits: Sequence[bool], required: bool
) -> dict[str, Any]:
    shares = validation.share("coverage", []) | validation.share("false_alarms", [])
    shares |= validation.share(counted, hits)
    passed = bool(shares[f"{counted}_low"] <= stated <= shares[f"{counted}_high"])
    label = {"method": "paired t", "noise": noise, "blocks": saves.block.nunique(), "studies": len(hits)}
    return label | shares | {"passed": passed, "required": required}


def _block_means(saves: pd.DataFrame) -> pd.DataFrame:
    """Give each block's mean durable seconds: columns fast and slow, rows in the order in time."""
    return saves.groupby(["study", "block", "target"]).durable_s.mean().unstack("target")


def doubts(saves: pd.DataFrame, truth: Truth) -> dict[str, float]:
    """Give in numbers what the truth rests on, and whether blocks are as independent as Student's t has it.

    ``own_slow_minus_fast_s`` should hold 0: the own part is the same on both devices. ``log_bias`` too: an interval
    estimates the mean of logs of block means, and the truth is a log of means. ``lag1`` and ``study_p_value`` ask the
    blocks' log ratios for memory: the correlation with the next block's (beyond 2 / sqrt(blocks) is some), and a
    one-way analysis of variance between studies. ``half_width_log`` is half of the median study's interval.
    """
    means = _block_means(saves)
    logs = np.log(means.fast / means.slow)
    own_s = (saves.durable_s - saves.device_s).groupby([saves.study, saves.block, saves.target]).mean().unstack()
    apart_s = stats.paired_difference(own_s.fast.reset_index(drop=True), own_s.slow.reset_index(drop=True))
    bias = stats.mean_interval(logs.groupby("study").mean() - math.log(truth.ratio))
    found = [stats.paired_ratio(pair.fast, pair.slow) for _, pair in means.groupby("study")]
    figures = {"true_ratio": truth.ratio, "true_ratio_low": truth.low, "true_ratio_high": truth.high}
    for name, interval in (("own", truth.own_s), ("own_slow_minus_fast", apart_s)):
        figures |= {f"{name}_s": interval.mean, f"{name}_low_s": interval.low, f"{name}_high_s": interval.high}
    figures |= {"log_bias": bias.mean, "log_bias_low": bias.low, "log_bias_high": bias.high}
    return figures | {
        "half_width_log": float(np.median([math.log(one.high / one.low) / 2 for one in found])),
        "block_sd_log": math.sqrt(logs.groupby("study").var().mean()),
        "lag1": float(logs.autocorr()),
        "study_p_value": float(scipy_stats.f_oneway(*(one for _, one in logs.groupby("study"))).pvalue),
    }
