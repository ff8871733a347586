"""The instrument, measured: what recording costs a training step, and how much of a study is measurement."""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stallbench import workload
from stallbench.config import TrialConfig
from stallbench.reporting.stats import Interval, mean_interval
from stallbench.results import Study

OVERHEAD_GOAL, MEASUREMENT_GOAL = 0.005, 0.60
# Steps of a few milliseconds, on which a cost of microseconds shows; pairs of steps are the unit of comparison.
_STEPS, _WARMUP, _BATCH = 3000, 100, 1
_REFERENCE_STEPS = 30
# The kinds of spans that don't lie inside another one.
_OUTER = ("put_data", "reload_data", "raw_write", "raw_read", "data_wait", "step", "save", "delete", "eval", "restore")


def recording_cost() -> tuple[Interval, float]:
    """Measure what the timeline adds to a training step, side by side in one training.

    Every second step is recorded, the others are not, and both are timed from outside; which comes first in a pair is
    drawn at random. The cost of a step's spans doesn't depend on the model, so it is measured on steps of a tiny one,
    and compared with the step of the default one, timed in the same run.

    Returns
    -------
    Interval
        Seconds that recording adds to a step, with the 95 % interval over 20 stretches of the run.
    float
        Seconds of a step of the default model and batch.
    """
    with tempfile.TemporaryDirectory(prefix="stallbench-bench-") as folder:
        tiny = tiny_model(Path(folder) / "model")
        differences = _paired_differences(str(tiny), Path(folder))
        reference = _step_times(workload.DEFAULT_MODEL, Path(folder), _REFERENCE_STEPS, TrialConfig().batch_size)
    stretches = pd.Series([part.mean() for part in np.array_split(differences, 20)])
    return mean_interval(stretches), float(np.mean(reference[5:]))


def tiny_model(folder: Path) -> Path:
    """Save a BERT of half a million random parameters with the default model's tokenizer; its checkpoint has 6 MB."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(workload.model_folder(workload.DEFAULT_MODEL))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _paired_differences(model: str, folder: Path) -> np.ndarray:
    """Give recorded - unrecorded, in seconds, for each pair of neighbouring steps."""
    first_is_recorded = np.random.default_rng(0).random(_STEPS // 2) < 0.5
    recorded = np.stack([first_is_recorded, ~first_is_recorded], axis=1).ravel()
    pairs = _step_times(model, folder, _STEPS, _BATCH, recorded).reshape(-1, 2)
    differences = np.where(first_is_recorded, pairs[:, 0] - pairs[:, 1], pairs[:, 1] - pairs[:, 0])
    return differences[_WARMUP // 2 :]


def _step_times(
    model: str, folder: Path, steps: int, batch_size: int, recorded: np.ndarray | None = None
) -> np.ndarray:
    """Train, and give each step's seconds by an outside clock; ``recorded`` says which steps the timeline records."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from stallbench.recording import Recorded, Recorder, StepClock, add_layer, synchronize
    from stallbench.spans import Timeline
    from stallbench.storage.targets import Storage, Workspace

    ends_s: list[float] = []

    class Switched(Timeline):
        """Record only in the steps that are to be recorded."""

        def begin(self, kind: str, **fields: Any) -> Any:
            on = recorded is None or recorded[min(len(ends_s), steps - 1)]
            return super().begin(kind, **fields) if on else None

        def end(self, span: Any) -> None:
            if span is not None:
                super().end(span)

    class OutsideClock(TrainerCallback):
        """Note when each step is over, recording included."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends_s.append(time.perf_counter())

    config = TrialConfig(model=model, steps=steps, every_steps=steps, warmup_saves=0, batch_size=batch_size)
    data = folder / f"data-{steps}"
    classes = workload.put_data(config, data, folder)
    trainer = Trainer(
        model=workload.load_model(config, classes),
        args=TrainingArguments(
            output_dir=str(folder / "out"), max_steps=steps, per_device_train_batch_size=batch_size,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        ),
        train_dataset=workload.TargetRows(data / "train", lambda paths: None),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    workspace = Workspace(None, folder, Storage("a temporary folder", "unknown"))
    trainer.recorder = Recorder(Switched(synchronize), workspace)
    add_layer(trainer, Recorded)
    trainer.add_callback(StepClock(trainer.recorder))
    trainer.add_callback(OutsideClock())
    began_s = time.perf_counter()
    trainer.train()
    return np.diff([began_s, *ends_s])


def measurement_share(study: Study) -> tuple[float, float]:
    """Give the share of a study's wall time that lies in measured spans, and that wall time in seconds.

    The rest is what each trial's kernel needs to start and import, the models it builds and the proofs it makes. Wall
    time runs from the first trial's begin to the last one's end; a study that was interrupted would read too low.
    """
    details = pd.DataFrame(list(study.details.values()))
    began = pd.to_datetime(details.began_utc)
    wall_s = (began + pd.to_timedelta(details.wall_s, unit="s")).max() - began.min()
    measured_s = study.spans[study.spans.kind.isin(_OUTER)].duration_s.sum()
    return measured_s / wall_s.total_seconds(), wall_s.total_seconds()


def lines(study: Study) -> list[str]:
    """Measure, and say what was found beside its goal."""
    cost_s, step_s = recording_cost()
    share, wall_s = measurement_share(study)
    low, high = cost_s.low / step_s, cost_s.high / step_s
    overhead = "met" if high <= OVERHEAD_GOAL else "not shown" if low <= OVERHEAD_GOAL else "missed"
    measured = "met" if share >= MEASUREMENT_GOAL else "missed"
    return [
        f"recording a step: {cost_s.mean * 1e6:.0f} us ({cost_s.low * 1e6:.0f} to {cost_s.high * 1e6:.0f}), "
        f"{cost_s.mean / step_s:.3%} of the default step of {step_s * 1e3:.0f} ms "
        f"({low:.3%} to {high:.3%}); goal at most {OVERHEAD_GOAL:.1%}: {overhead}",
        f"measurement: {share:.0%} of the {wall_s:.0f} s of study {study.study_id}; "
        f"goal at least {MEASUREMENT_GOAL:.0%}: {measured}",
    ]
