"""The full training state as a flat table of tensors, without anything that is executed when it is read back."""

import json
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import Trainer

# The name under which everything that is no tensor lies beside the tensors, as JSON in bytes.
TREE = "__tree__"
_TREE_BYTES = 4096
# How JSON marks what it has no word for. A dict with such a key of its own is written as pairs.
_TENSOR, _TUPLE, _PAIRS = "$tensor", "$tuple", "$pairs"

Tensors = dict[str, torch.Tensor]


class CheckpointError(RuntimeError):
    """A checkpoint that can't be saved or read back; the message says why in one line."""


def flatten(state: Any) -> Tensors:
    """Turn nested dicts, lists and tuples into one table of tensors.

    A tensor that stands in several places (tied weights) is stored once. What is no tensor lies in ``TREE`` as JSON.

    Raises
    ------
    CheckpointError
        If something else than tensors, numbers, strings and None stands in the state; names the place.
    """
    tensors: Tensors = {TREE: torch.empty(0)}  # takes its name first
    seen: dict[tuple, str] = {}

    def store(tensor: torch.Tensor, path: str) -> str:
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and same in seen:
            return seen[same]
        while path in tensors:  # another place whose path reads the same
            path += "'"
        tensors[path] = tensor
        return seen.setdefault(same, path)

    def strip(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter):  # sharded, quantised: its memory isn't all of it
                raise CheckpointError(f"{path} is a {type(value).__name__}, which no method here can save")
            return {_TENSOR: store(value.detach(), path)}
        if isinstance(value, Mapping):
            for key in value:
                if not (key is None or isinstance(key, bool | int | float | str)):
                    raise CheckpointError(f"{path} has a key {key!r}, which no method here can save")
            plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
            items = [(key, strip(inner, f"{path}.{key}" if path else str(key))) for key, inner in value.items()]
            return dict(items) if plain else {_PAIRS: items}
        if isinstance(value, list | tuple):
            items = [strip(inner, f"{path}.{index}") for index, inner in enumerate(value)]
            return {_TUPLE: items} if isinstance(value, tuple) else items
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CheckpointError(f"{path} is a {type(value).__name__}, which no method here can save")

    text = json.dumps(strip(state, "")).encode()
    padded = text.ljust(-(-len(text) // _TREE_BYTES) * _TREE_BYTES)  # its length should stay from save to save
    tensors[TREE] = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    return tensors


def unflatten(tensors: Mapping[str, torch.Tensor]) -> Any:
    """Turn what ``flatten`` made back into the nested state; tensors are not copied."""

    def build(value: Any) -> Any:
        if isinstance(value, list):
            return [build(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        if _TUPLE in value:
            return tuple(build(inner) for inner in value[_TUPLE])
        if _PAIRS in value:
            return {key: build(inner) for key, inner in value[_PAIRS]}
        return {key: build(inner) for key, inner in value.items()}

    return build(json.loads(bytes(tensors[TREE].numpy())))


def size_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Give the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def capture(trainer: "Trainer", random_states: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Collect what a Trainer needs to go on: model, optimizer, scheduler, scaler, random state, by reference.

    Parameters
    ----------
    random_states
        Those of all ranks, as ``gather`` gives them; by default this process's own.
    """
    scaler = getattr(trainer.accelerator, "scaler", None)
    return {
        "model": trainer.accelerator.unwrap_model(trainer.model).state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "scaler": scaler.state_dict() if scaler else None,
        "random": random_states or [random_state()],
    }


def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Give every rank what each of them has; all must call this at once."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return everyone


def random_state() -> dict[str, Any]:
    """Give the state of every generator that training draws from, as tensors and numbers."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.random.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set every generator to what ``random_state`` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.random.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.random.set_rng_state_all(state["cuda"])
