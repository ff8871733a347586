"""What a load trial does besides reading: a model that trains, saves as training makes them, and a log."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stallbench import workload
from stallbench.checkpointing import commit
from stallbench.checkpointing.checkpointer import Checkpointer, Guard, load
from stallbench.checkpointing.state import flatten, random_state, size_bytes
from stallbench.load.config import LoadTrialConfig
from stallbench.spans import Span, Timeline
from stallbench.storage.emulated import wait_until
from stallbench.storage.targets import Workspace

CLASSES = len(workload.DOCSTRING_MODULES)
LOG_LINE = b'{"step": 12345, "loss": 1.2345678, "learning_rate": 4.9e-05, "grad_norm": 1.2345678, "epoch": 1.23}\n'
KEEP = 2  # checkpoints that stay on the target
LEAST_SAVES = 2  # of a phase, also where one takes longer than the phase


class Session:
    """A model in training: the real one, on this machine's processor or accelerator.

    Parameters
    ----------
    config
        Its model, batch and tokens.
    """

    def __init__(self, config: LoadTrialConfig) -> None:
        from transformers import AutoTokenizer

        torch.manual_seed(config.seed)
        self._config = config
        self._device = torch.accelerator.current_accelerator() or torch.device("cpu")
        self._tokenizer = AutoTokenizer.from_pretrained(workload.model_folder(config.model))
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        self.model = workload.load_model(config, CLASSES).to(self._device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5)
        self.take(workload.docstrings()["text"])
        self.step(0)  # AdamW's moments are there after its first step

    def take(self, texts: Sequence[str]) -> None:
        """Tokenise as many texts as an iteration trains on; ``step`` takes them in turn."""
        config = self._config
        rows = self._tokenizer(
            list(texts[: config.batch_size * config.iteration_steps]),
            truncation=True, max_length=config.max_tokens, padding="max_length", return_tensors="pt",
        )  # fmt: skip
        self._rows = {name: rows[name].to(self._device) for name in ("input_ids", "attention_mask")}

    def _batch(self, number: int) -> dict[str, torch.Tensor]:
        first = number * self._config.batch_size % len(self._rows["input_ids"])
        return {name: rows[first : first + self._config.batch_size] for name, rows in self._rows.items()}

    def step(self, number: int) -> float:
        """Train on one batch; gives the loss."""
        batch = self._batch(number)
        labels = torch.arange(len(batch["input_ids"]), device=self._device) % CLASSES
        loss = self.model(**batch, labels=labels).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()  # waits for an accelerator

    def evaluate(self) -> None:
        """Run the model over all rows without training."""
        with torch.no_grad():
            for number in range(self._config.iteration_steps):
                self.model(**self._batch(number)).logits.argmax().item()

    def state(self) -> dict[str, Any]:
        """Give all that a checkpoint holds."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": [random_state()],
        }

    @property
    def save_bytes(self) -> int:
        """Bytes of the tensors of a checkpoint."""
        return size_bytes(flatten(self.state()))

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Saver:
    """Saves of a session's state to the target, each until durable, by one of the study's methods."""

    def __init__(
        self,
        session: Session,
        config: LoadTrialConfig,
        workspace: Workspace,
        timeline: Timeline,
        local: Path,
        guard: Guard,
    ) -> None:
        self._session, self._timeline, self._pause_s = session, timeline, config.save_pause_s
        self.folder = workspace.folder / "checkpoints"
        self._checkpointer = Checkpointer(
            config.method, workspace, self.folder, timeline, local=local, wait="durable", keep=KEEP, guard=guard
        )
        self._step = 0

    def save(self, warmup: bool = False) -> Span:
        """Save once; returns when it is durable, with its span."""
        self._step += 1
        self._checkpointer.save(self._step, self._session.state, lambda folder: None, warmup)
        return next(span for span in reversed(self._timeline.spans) if span.kind == "save")

    def save_until(self, until_s: float) -> list[Span]:
        """Save again and again with the pause between, until a time of the monotonic clock, twice at least."""
        saves = [self.save()]
        while len(saves) < LEAST_SAVES or time.monotonic() + self._pause_s < until_s:
            time.sleep(self._pause_s)
            saves.append(self.save())
        return saves

    @property
    def newest(self) -> Path:
        """Folder of the newest checkpoint."""
        return commit.final_folder(self.folder, self._step)

    def restore(self) -> None:
        """Read the newest checkpoint back into the session."""
        self._session.set_state(load(self.newest))

    def close(self) -> None:
        """End what the method keeps running."""
        self._checkpointer.close()


def log_until(workspace: Workspace, every_s: float, go_on: Callable[[], bool]) -> list[tuple[float, float]]:
    """Append lines to a log on the target, each made durable, at a fixed rhythm.

    Returns
    -------
    list of tuple
        Of each line when it began (monotonic) and its seconds until durable.
    """
    path, device = workspace.folder / "train.log", workspace.device
    lines = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        while go_on():
            start_s = time.monotonic()
            os.write(descriptor, LOG_LINE)
            if device is None:
                os.fsync(descriptor)
            else:
                wait_until(device.write(str(path), len(LOG_LINE)).durable_s)
            lines.append((start_s, time.monotonic() - start_s))
            wait_until(start_s + every_s)
    finally:
        os.close(descriptor)
    return lines
