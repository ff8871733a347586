"""A Trainer that saves by another method, on a schedule, with proofs: each a layer over any Trainer's class."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import ExportableState

from stallbench.checkpointing import commit
from stallbench.checkpointing.checkpointer import Checkpointer, Guard, load
from stallbench.checkpointing.state import (
    CheckpointError,
    capture,
    flatten,
    gather,
    random_state,
    set_random_state,
)
from stallbench.config import AS_SHIPPED, TrialConfig
from stallbench.recording import Recorded, Recorder, StepClock, add_layer
from stallbench.spans import Timeline
from stallbench.storage.targets import Workspace
from stallbench.workload import TargetRows, load_model

_STATE_FILE = "trainer_state.json"


def fingerprint(trainer: Trainer) -> dict[str, str | int]:
    """Give SHA-256 digests of everything that a checkpoint must bring back.

    Returns
    -------
    dict
        ``weights``, ``optimizer``, ``scheduler`` and ``rng`` as hex digests, and ``step``.
    """
    rng = [random.getstate(), np.random.get_state(), torch.random.get_rng_state()]
    if torch.cuda.is_available():
        rng.append(torch.cuda.random.get_rng_state())
    return {
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "scheduler": digest(trainer.lr_scheduler.state_dict()),
        "rng": digest(rng),
        "step": trainer.state.global_step,
    }


def digest(value: Any) -> str:
    """Give the SHA-256 of nested tensors, arrays and plain values, as a hex string."""
    sha = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            array = value.detach().cpu().contiguous()
            sha.update(f"{array.dtype}{tuple(array.shape)}".encode())
            sha.update(array.reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, np.ndarray):
            sha.update(np.ascontiguousarray(value))
        elif isinstance(value, dict):
            for key in value:
                sha.update(repr(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        else:
            sha.update(repr(value).encode())

    feed(value)
    return sha.hexdigest()


class Checkpointed:
    """Layer over a Trainer's class: full states saved and resumed by one of our methods, under the Trainer's names."""

    checkpointer: Checkpointer | None
    recorder: Recorder
    _resumed: dict[str, Any] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, **keywords: Any) -> Any:
        """Train as the Trainer does; ``True`` resumes from the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest(Path(self.args.output_dir)))
        result = super().train(resume_from_checkpoint=resume_from_checkpoint, **keywords)
        if self.checkpointer is not None:
            self.checkpointer.wait()
        return result

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        if trial is not None:
            raise CheckpointError(
                "a hyperparameter search saves each run in a folder of its own; use the Trainer's saves"
            )
        self.store_flos()
        random_states = gather(random_state())  # by all ranks, before the first may fail
        if self.checkpointer is not None:
            self.checkpointer.save(
                self.state.global_step,
                lambda: capture(self, random_states),
                self._write_state,
                self.recorder.count_save(),
            )

    def _write_state(self, folder: Path) -> None:
        """Write ``trainer_state.json`` as the Trainer's own save does."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, exported = type(callback).__name__, callback.state()
                if isinstance(self.state.stateful_callbacks.get(name), list):
                    self.state.stateful_callbacks[name].append(exported)
                else:
                    self.state.stateful_callbacks[name] = exported
        self.state.save_to_json(str(folder / _STATE_FILE))

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        self._resumed = None
        if commit.manifest(Path(checkpoint)) is None:
            return super()._load_from_checkpoint(checkpoint, model)
        target = self.accelerator.unwrap_model(model or self.model)
        self._resumed = load(Path(checkpoint), into=flatten({"model": target.state_dict()}))
        target.load_state_dict(self._resumed.pop("model"))

    def _state_in(self, checkpoint: str | None) -> dict[str, Any] | None:
        """Give what a checkpoint of ours holds beside the model; None for one in the Trainer's own layout."""
        if checkpoint is None or commit.manifest(Path(checkpoint)) is None:
            return None
        return self._resumed or load(Path(checkpoint))  # read again where the Trainer starts its loop anew

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        state = self._state_in(checkpoint)
        if state is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["scheduler"])

    def _load_scaler(self, checkpoint: str | None) -> None:
        state = self._state_in(checkpoint)
        if state is None:
            return super()._load_scaler(checkpoint)
        if state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        state, self._resumed = self._state_in(checkpoint), None
        if state is None:
            return super()._load_rng_state(checkpoint)
        states = state["random"]
        if self.args.process_index < len(states):
            set_random_state(states[self.args.process_index])


def newest(parent: Path) -> Path:
    """Give the newest checkpoint to resume from: ours if complete, or one in the Trainer's own layout.

    Raises
    ------
    ValueError
        As the Trainer does, if there is none.
    """
    shipped = [
        path
        for path in parent.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit() and (path / _STATE_FILE).exists() and _has_weights(path)
    ]
    found = sorted([*commit.complete_checkpoints(parent), *shipped], key=commit.step_of)
    if not found:
        raise ValueError(f"No valid checkpoint found in output directory ({parent})")
    return found[-1]


def _has_weights(folder: Path) -> bool:
    patterns = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*")
    return any(list(folder.glob(pattern)) for pattern in patterns)


class SaveSchedule(TrainerCallback):
    """Say when to save, by steps or by time; the last planned step is always saved.

    The Trainer runs one step more, which the restored run repeats.

    Parameters
    ----------
    settle
        Waits until the last save is durable; called before a save, unless the configuration says otherwise.
    """

    def __init__(self, config: TrialConfig, timeline: Timeline, settle: Callable[[], None]) -> None:
        self._config, self._timeline, self._settle = config, timeline, settle
        self._last_save_s = timeline.now_s()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock of the first interval."""
        self._last_save_s = self._timeline.now_s()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ask for a save where one is due."""
        due = state.global_step == self._config.steps
        if self._config.every_steps:
            due = due or state.global_step % self._config.every_steps == 0
        else:
            due = due or self._timeline.now_s() - self._last_save_s >= self._config.every_s
        control.should_save = due and state.global_step <= self._config.steps
        if control.should_save and self._config.settle:
            with self._timeline.span("settle", step=state.global_step):
                self._settle()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the next interval when the save is over."""
        self._last_save_s = self._timeline.now_s()


class Proven:
    """Layer over a recorded Trainer: what its proofs compare. Its losses are kept unread: reading makes a GPU wait."""

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Keep the loss."""
        loss = super().training_step(*arguments, **keywords)
        self.__dict__.setdefault("losses", []).append(loss.detach())
        return loss

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.state.global_step == self.recorder.last_step:
            self.saved = fingerprint(self)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        self.restored = fingerprint(self)


def make_trainer(
    config: TrialConfig,
    classes: int,
    workspace: Workspace,
    output_dir: Path,
    timeline: Timeline,
    local: Path,
    guard: Guard,
) -> Trainer:
    """Make a trial's Trainer, deterministic so that it can be proven, with its layers: method, recording, proofs."""
    set_seed(config.seed, deterministic=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would fill empty buffers inside timed work
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=config.steps + 1,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        seed=config.seed,
        full_determinism=True,
        use_cpu=not torch.cuda.is_available(),  # the Trainer saves no other accelerator's random state
        save_strategy="no",  # SaveSchedule asks for each save, also by time
        save_only_model=config.method in ("model-only", "adapter-only"),
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = workspace.folder / "data"
    trainer = Trainer(
        model=load_model(config, classes, adapter=config.method == "adapter-only"),
        args=arguments,
        train_dataset=TargetRows(data / "train", workspace.charge_read),
        eval_dataset=TargetRows(data / "eval", workspace.charge_read),
    )
    trainer.remove_callback(PrinterCallback)
    rules = {"wait": config.wait, "keep": config.keep, "guard": guard}
    trainer.recorder = Recorder(
        timeline,
        workspace,
        warmup_steps=config.warmup_steps,
        warmup_saves=config.warmup_saves,
        last_step=config.steps,
        **rules,
    )
    settle = trainer.recorder.settle
    if config.method not in AS_SHIPPED:
        trainer.checkpointer = Checkpointer(config.method, workspace, output_dir, timeline, local=local, **rules)
        add_layer(trainer, Checkpointed)
        settle = trainer.checkpointer.wait
    add_layer(trainer, Recorded)
    add_layer(trainer, Proven)
    trainer.add_callback(StepClock(trainer.recorder))
    trainer.add_callback(SaveSchedule(config, timeline, settle))
    return trainer
