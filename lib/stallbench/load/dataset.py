"""A dataset on the target: real text in many small files, and the same samples in Arrow and in tar shards.

Names, sizes and contents follow from the parameters and a fixed seed, so that two targets hold the same bytes. The text
is that of ``workload.docstrings``; sizes are log-normal, as file sizes tend to be (Downey, The structural cause of file
size distributions, MASCOTS 2001).
"""

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from stallbench import workload
from stallbench.config import ConfigError
from stallbench.load.config import BLOCK_BYTES, Load
from stallbench.spans import Timeline
from stallbench.storage.emulated import wait_until
from stallbench.storage.pagecache import sync_tree
from stallbench.storage.targets import Workspace

MANIFEST = "manifest.json"
FOLDER_FILES = 1000  # files of one folder, at most
SHARDS = 8
SEED = 20_260  # the data are the same in every study, as its order of reads is not
_FORMATS = 3  # small files, Arrow and tar: each holds all samples


@dataclass(frozen=True)
class Dataset:
    """A dataset as it lies on a target; ``sizes_bytes`` has one entry a sample, shape (files,)."""

    folder: Path
    sizes_bytes: np.ndarray

    @property
    def small(self) -> Path:
        """Folder of the small files."""
        return self.folder / "small"

    @cached_property
    def paths(self) -> list[str]:
        """Path of each sample's small file."""
        return [str(self.small / name_of(index)) for index in range(len(self.sizes_bytes))]

    @property
    def arrow(self) -> list[Path]:
        """The Arrow shards."""
        return sorted((self.folder / "arrow").glob("*.arrow"))

    @property
    def tar(self) -> list[Path]:
        """The tar shards, in WebDataset's layout."""
        return sorted((self.folder / "tar").glob("*.tar"))


def name_of(index: int) -> str:
    """Name a sample's small file, below the folder of the small files."""
    return f"{index // FOLDER_FILES:05d}/{index:08d}.txt"


def sizes(config: Load) -> np.ndarray:
    """Draw the files' sizes in bytes, shape (files,): log-normal, cut to the least and the most that are allowed."""
    logs = np.random.default_rng(SEED).normal(np.log(config.file_median_bytes), config.file_sigma, config.files)
    return np.clip(np.exp(logs), config.file_least_bytes, config.file_most_bytes).astype(int)


def needed_bytes(config: Load) -> int:
    """Give the bytes that the dataset takes on a target, in all formats, small files in whole blocks."""
    each = sizes(config)
    blocks = int((-(-each // BLOCK_BYTES) * BLOCK_BYTES).sum())
    return blocks + (_FORMATS - 1) * int(each.sum() * 1.1) + config.files * 1024  # a tar member has headers of 1 KiB


def needed_inodes(config: Load) -> int:
    """Give the number of files and folders that the dataset makes."""
    return config.files + -(-config.files // FOLDER_FILES) + 2 * SHARDS + 8


def check_inodes(name: str, folder: Path, config: Load) -> None:
    """Refuse a file system without enough inodes; one that has no fixed number says 0 (statvfs(3)).

    Raises
    ------
    ConfigError
        With both figures.
    """
    found = os.statvfs(folder)
    if found.f_files and found.f_favail < needed_inodes(config):
        raise ConfigError(
            f"target {name} has too few inodes: the dataset needs {needed_inodes(config):,}, {found.f_favail:,} are "
            f"free; use fewer files than files={config.files}"
        )


def _check_room(name: str, folder: Path, config: Load) -> None:
    check_inodes(name, folder, config)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes(config):
        raise ConfigError(
            f"target {name} is too full: the dataset needs {needed_bytes(config) / 1e6:,.0f} MB, "
            f"{free_bytes / 1e6:,.0f} MB are free; use fewer files than files={config.files}"
        )


@cache
def _text() -> bytes:
    """Collect the text once a process: it takes a second."""
    return "\n".join(workload.docstrings()["text"]).encode("ascii", "replace")


def _samples(config: Load, sizes_bytes: np.ndarray) -> Iterator[bytes]:
    """Give the samples in order: stretches of real text from places that the seed draws."""
    text = _text()
    text *= -(-2 * config.file_most_bytes // len(text))
    starts = np.random.default_rng(SEED + 1).integers(0, len(text) - config.file_most_bytes, config.files)
    return (text[start : start + size] for start, size in zip(starts, sizes_bytes, strict=True))


def fingerprint(config: Load) -> dict[str, str | int]:
    """Say what a dataset of these parameters is: its count, its bytes, and a SHA-256 of names, sizes and contents."""
    sizes_bytes, sha = sizes(config), hashlib.sha256()
    for index, content in enumerate(_samples(config, sizes_bytes)):
        sha.update(f"{name_of(index)} {len(content)}\n".encode())
        sha.update(content)
    return {"files": config.files, "size_bytes": int(sizes_bytes.sum()), "sha256": sha.hexdigest()}


def open_dataset(config: Load, workspace: Workspace, timeline: Timeline) -> Dataset:
    """Make the dataset in the study's folder on the target, or recognise the one that an earlier block made.

    Making it is recorded as spans ``make_files`` and ``make_shards``, until durable.

    Raises
    ------
    ConfigError
        If there is no room for it, or what lies there is another dataset, or not whole any more.
    """
    folder, wanted = workspace.folder.parent / "dataset", fingerprint(config)
    made = Dataset(folder, sizes(config))
    name = workspace.target.name
    if (folder / MANIFEST).exists():
        _require_same(name, made, wanted)
        return made
    shutil.rmtree(folder, ignore_errors=True)  # of a trial that was killed while it made one
    _check_room(name, folder.parent, config)
    workspace.require_present()
    small_bytes = wanted["size_bytes"]
    with timeline.span("make_files", size_bytes=small_bytes, files=config.files):
        _make_files(config, made)
        _settle(workspace, made.small)
    with timeline.span("make_shards", files=2 * SHARDS) as span:
        _make_shards(config, made)
        for shards in ("arrow", "tar"):
            _settle(workspace, folder / shards)
        span.size_bytes = sum(path.stat().st_size for path in (*made.arrow, *made.tar))
    temporary = folder / f"{MANIFEST}.partial"
    temporary.write_text(json.dumps(wanted))
    temporary.rename(folder / MANIFEST)
    return made


def _settle(workspace: Workspace, folder: Path) -> None:
    """Wait until what was just written below ``folder`` is durable."""
    durable_s = workspace.charge_write(folder)
    if durable_s is None:
        sync_tree(folder)
    else:
        wait_until(durable_s)


def _require_same(name: str, found: Dataset, wanted: dict[str, str | int]) -> None:
    """Compare the manifest with what is wanted, and the names and sizes on the target with the manifest."""
    try:
        manifest = json.loads((found.folder / MANIFEST).read_text())
    except ValueError:
        manifest = {}
    unlike = [field for field, value in wanted.items() if manifest.get(field) != value]
    if unlike:
        raise ConfigError(
            f"target {name} holds another dataset ({unlike[0]}={manifest.get(unlike[0])!r} instead of "
            f"{wanted[unlike[0]]!r}); end the study that made it, or repeat its parameters"
        )
    for index, size in enumerate(found.sizes_bytes):
        try:
            size_found = os.stat(found.paths[index]).st_size
        except OSError:
            size_found = None
        if size_found != size:
            state = "is gone" if size_found is None else f"has {size_found} bytes instead of {size}"
            raise ConfigError(f"target {name}: {name_of(index)} of the dataset {state}; start the study again")


def _make_files(config: Load, made: Dataset) -> None:
    for first in range(0, config.files, FOLDER_FILES):
        (made.small / name_of(first)).parent.mkdir(parents=True)
    for path, content in zip(made.paths, _samples(config, made.sizes_bytes), strict=True):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)


def _make_shards(config: Load, made: Dataset) -> None:
    import datasets

    datasets.disable_progress_bars()
    samples = list(_samples(config, made.sizes_bytes))
    parts = np.array_split(np.arange(config.files), SHARDS)
    for folder in ("arrow", "tar"):
        (made.folder / folder).mkdir()
    for number, part in enumerate(parts):
        with datasets.arrow_writer.ArrowWriter(path=str(made.folder / "arrow" / f"{number:05d}.arrow")) as writer:
            for index in part:
                writer.write({"key": int(index), "text": samples[index].decode("ascii")})
            writer.finalize()
        with tarfile.open(made.folder / "tar" / f"{number:05d}.tar", "w") as tar:
            for index in part:
                member = tarfile.TarInfo(f"{index:08d}.txt")
                member.size = len(samples[index])
                tar.addfile(member, io.BytesIO(samples[index]))
