"""Checkpoint states from 10 MB to 4 GB without a download: published model configurations with random weights."""

from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from stallbench.config import ConfigError
from stallbench.workload import saved_bytes


def _bert(layers: int, hidden: int) -> tuple[type[PreTrainedModel], BertConfig]:
    """Give a BERT of the published family: heads of 64, a feed-forward layer four times as wide (Turc et al. 2019)."""
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )
    return BertForSequenceClassification, config


# nanoGPT: the configuration that its README gives for a CPU (Shakespeare by characters). BERT miniatures: Turc et al.,
# Well-Read Students Learn Better, 2019. DistilBERT: Sanh et al. 2019, transformers' default. BERT base and large:
# Devlin et al. 2019. All are plain transformers, with no more tensors than their layers need.
_NANO = GPT2Config(n_layer=4, n_head=4, n_embd=128, n_positions=64, vocab_size=65, bos_token_id=None, eos_token_id=None)
MODELS = {
    "nanogpt-cpu": (GPT2LMHeadModel, _NANO),
    "bert-tiny": _bert(2, 128),
    "bert-mini": _bert(4, 256),
    "bert-small": _bert(4, 512),
    "distilbert": (DistilBertForSequenceClassification, DistilBertConfig()),
    "bert-base": _bert(12, 768),
    "bert-large": _bert(24, 1024),
}


def checkpoint_bytes(name: str) -> int:
    """Give the bytes of a model's full AdamW checkpoint, from its number of parameters; nothing is allocated.

    Raises
    ------
    ConfigError
        If the model isn't one of ``MODELS``.
    """
    with torch.device("meta"):
        weights_bytes = sum(parameter.nbytes for parameter in _make(name).parameters())
    return saved_bytes("trainer", weights_bytes, weights_bytes)


def _make(name: str) -> PreTrainedModel:
    if name not in MODELS:
        raise ConfigError(f"model={name!r} is unknown; choose from: {', '.join(MODELS)}")
    kind, config = MODELS[name]
    return kind(config)


def make_trainer(name: str, folder: Path, seed: int = 0) -> Trainer:
    """Make a Trainer of one of ``MODELS`` whose full state is there to be saved.

    Raises
    ------
    ConfigError
        If the model isn't one of ``MODELS``.
    """
    set_seed(seed)
    return trainer_of(_make(name), folder)


def trainer_of(model: PreTrainedModel, folder: Path) -> Trainer:
    """Make a Trainer whose optimizer has done one step, with random gradients: incompressible moments, on the CPU."""
    logging.disable_progress_bar()
    arguments = TrainingArguments(output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, max_steps=1)
    trainer = Trainer(model=model, args=arguments)
    trainer.create_optimizer_and_scheduler(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return trainer
