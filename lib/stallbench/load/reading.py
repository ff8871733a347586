"""Reads as training does them: a DataLoader with workers over small files in random order, Arrow and tar shards.

Each read's latency is taken in the worker that did it, on the monotonic clock, into an array that is there before the
first read. A file that is gone or cut short fails the run with one line.
"""

import itertools
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from stallbench.load import dataset as data
from stallbench.storage.emulated import Device

# Rows that a worker may record in a second; bare reads from memory reach a third of it.
ROWS_PER_S = 150_000
LEAST_ROWS = 20_000
PREFETCH = 2  # batches that each worker reads ahead
COLUMNS = ("start_s", "latency_s", "size_bytes", "epoch")


class ReadError(RuntimeError):
    """A sample that can't be read; the message says in one line which, and why."""


class Record:
    """Latencies of reads, one table a worker in shared memory, so that recording one is a few stores.

    Parameters
    ----------
    workers
        Processes that record.
    seconds
        How long they record, at most.
    """

    def __init__(self, workers: int, seconds: float) -> None:
        rows = int(seconds * ROWS_PER_S) + LEAST_ROWS
        self._table = torch.zeros((workers, rows, len(COLUMNS)), dtype=torch.float64).share_memory_()
        self._counts = torch.zeros(workers, dtype=torch.int64).share_memory_()
        self._rows = rows
        self._views: tuple[np.ndarray, np.ndarray] | None = None

    def __getstate__(self) -> dict:
        """Leave the views out, which a worker makes for itself: they would be copied, not shared."""
        return self.__dict__ | {"_views": None}

    def add(self, worker: int, rows: list[tuple[float, float, int, int]]) -> None:
        """Record reads, each with its begin (monotonic) and latency in seconds, its bytes and its epoch.

        Raises
        ------
        ReadError
            If there is no room for them: reads that go unrecorded would make the others look rarer.
        """
        if self._views is None:
            self._views = self._table.numpy(), self._counts.numpy()
        table, counts = self._views
        row = int(counts[worker])
        if row + len(rows) > self._rows:
            raise ReadError(f"more than {self._rows} reads in a phase; use a shorter phase_s")
        table[worker, row : row + len(rows)] = rows
        counts[worker] = row + len(rows)

    def frame(self, until_s: float = np.inf) -> pd.DataFrame:
        """Give the reads that began before a time, with ``COLUMNS`` and ``worker``, in the order of their begin."""
        table, counts = self._table.numpy(), self._counts.numpy()
        parts = [
            pd.DataFrame(table[worker, :count].copy(), columns=list(COLUMNS)).assign(worker=worker)
            for worker, count in enumerate(counts)
        ]
        frame = pd.concat(parts, ignore_index=True).astype({"size_bytes": "int64", "epoch": "int64"})
        return frame[frame.start_s < until_s].sort_values("start_s", ignore_index=True)


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


class Batch(NamedTuple):
    """Samples that a worker reads at a time: a stretch of a pass's random order."""

    epoch: int
    first: int
    count: int


class SmallFiles(Dataset):
    """The small files as a map-style dataset whose items are batches; reading one gives its bytes.

    Parameters
    ----------
    source
        The dataset on the target.
    count
        How many of its files are read: the first ones.
    device
        Charged for each file before it is read, where the target is emulated in-process and the read is to be cold.
    forget
        Drop each file from the page cache once it was read, so that a later pass reads its data cold again.
    """

    def __init__(
        self, source: data.Dataset, count: int, seed: int, record: Record, device: Device | None, forget: bool
    ) -> None:
        self._paths, self._sizes = source.paths[:count], source.sizes_bytes[:count].tolist()
        self._seed, self._record, self._device = seed, record, device
        self._forget = forget and hasattr(os, "posix_fadvise")
        self._order: tuple[int, list[int]] = -1, []

    def __len__(self) -> int:
        """Give the number of files."""
        return len(self._paths)

    def __getitem__(self, batch: Batch) -> int:
        """Read a batch's files whole, and record each read.

        Raises
        ------
        ReadError
            If one is gone, can't be read, or holds more or fewer bytes than it should.
        """
        if self._order[0] != batch.epoch:  # each worker draws the same order, which needn't be sent to it
            order = np.random.default_rng([self._seed, batch.epoch]).permutation(len(self._paths))
            self._order = batch.epoch, order.tolist()
        index, rows, clock = 0, [], time.monotonic
        try:
            for index in self._order[1][batch.first : batch.first + batch.count]:
                path, size = self._paths[index], self._sizes[index]
                start_s = clock()
                if self._device is not None:
                    self._device.read(path, size)
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    found = len(os.read(descriptor, size + 1))
                    end_s = clock()
                    if self._forget:
                        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
                if found != size:
                    raise ReadError(f"{data.name_of(index)} of the dataset has {found} bytes instead of {size}")
                rows.append((start_s, end_s - start_s, size, batch.epoch))
        except OSError as error:
            raise ReadError(f"{data.name_of(index)} of the dataset can't be read: {error.strerror}") from None
        self._record.add(_worker(), rows)
        return sum(row[2] for row in rows)


class _Shards(IterableDataset):
    """Shards, shared out among the workers; a sample is the number of its bytes."""

    def __init__(self, shards: Sequence[Path], record: Record, device: Device | None) -> None:
        self._shards, self._record, self._device = list(shards), record, device

    def __iter__(self) -> Iterator[int]:
        """Read this worker's shards in order; the first sample of a shard carries the time of opening it."""
        info = get_worker_info()
        own = self._shards[info.id :: info.num_workers] if info else self._shards
        for shard in own:
            start_s = time.monotonic()
            try:
                if self._device is not None:
                    self._device.read(str(shard), shard.stat().st_size)
                for size in self._samples(shard):
                    self._record.add(_worker(), [(start_s, time.monotonic() - start_s, size, 0)])
                    yield size
                    start_s = time.monotonic()  # it may have waited here until the loader asked for more
            except (OSError, tarfile.TarError, ValueError) as error:  # pyarrow's errors of a cut file are ValueErrors
                words = getattr(error, "strerror", None) or str(error).splitlines()[0]
                raise ReadError(f"shard {shard.name} can't be read: {words}") from None

    def _samples(self, shard: Path) -> Iterator[int]:
        raise NotImplementedError


class ArrowShards(_Shards):
    """Arrow shards by ``datasets``, memory-mapped."""

    def _samples(self, shard: Path) -> Iterator[int]:
        import datasets

        for row in datasets.Dataset.from_file(str(shard)):
            yield len(row["text"])


class TarShards(_Shards):
    """Tar shards, streamed by ``tarfile``."""

    def _samples(self, shard: Path) -> Iterator[int]:
        with tarfile.open(shard, "r|") as tar:
            for member in tar:
                yield len(tar.extractfile(member).read())


class Batches:
    """The batches of one pass after the other, without end: a sampler."""

    def __init__(self, files: int, batch: int) -> None:
        self._files, self._batch = files, batch

    def __iter__(self) -> Iterator[Batch]:
        """Give the batches; the last of a pass may be smaller."""
        for epoch in itertools.count():
            for first in range(0, self._files, self._batch):
                yield Batch(epoch, first, min(self._batch, self._files - first))


class Pass(NamedTuple):
    """A stretch of reads: when it began and ended (monotonic seconds), its samples and bytes, and every read."""

    start_s: float
    end_s: float
    samples: int
    size_bytes: int
    reads: pd.DataFrame


@dataclass(frozen=True)
class Reader:
    """How a dataset is read; ``device`` is the emulated one in front of it, if there is one."""

    source: data.Dataset
    workers: int
    batch: int
    seed: int
    device: Device | None

    def small(self, seconds: float, cold: bool, files: int | None = None) -> "Stream":
        """Open the small files, or the first ``files`` of them, in random order, for about so many seconds."""
        record = Record(self.workers, seconds)
        count = min(files or len(self.source.paths), len(self.source.paths))
        samples = SmallFiles(self.source, count, self.seed, record, self.device if cold else None, forget=cold)
        sampler = Batches(count, self.batch)
        loader = DataLoader(
            samples, batch_size=None, sampler=sampler, num_workers=self.workers, prefetch_factor=PREFETCH
        )
        return Stream(loader, record)

    def shards(self, kind: str) -> Pass:
        """Read all shards once, ``arrow`` or ``tar``.

        Raises
        ------
        ReadError
            If one can't be read, or samples are missing.
        """
        import datasets  # noqa: F401  here, not in each worker's first read

        expected = len(self.source.sizes_bytes)
        record = Record(self.workers, expected / ROWS_PER_S)
        if kind == "arrow":
            shards: _Shards = ArrowShards(self.source.arrow, record, self.device)
        else:
            shards = TarShards(self.source.tar, record, self.device)
        loader = DataLoader(shards, batch_size=self.batch, num_workers=self.workers, collate_fn=list)
        with Stream(loader, record) as stream:
            samples = sum(len(batch) for batch in stream)
        if samples != expected:
            raise ReadError(f"the {kind} shards hold {samples} samples instead of {expected}")
        reads = record.frame()
        # From the first read to the end of the last: the workers' start is no storage's time.
        end_s = float((reads.start_s + reads.latency_s).max())
        return Pass(float(reads.start_s.min()), end_s, samples, int(reads.size_bytes.sum()), reads)


class Stream:
    """Batches of one DataLoader, whose workers run as long as it is open."""

    def __init__(self, loader: DataLoader, record: Record) -> None:
        self._loader, self.record = loader, record
        self._iterator = None

    def __enter__(self) -> "Stream":
        """Start the workers, which begin to read."""
        self._iterator = iter(self._loader)
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers; they finish the batch that they are at."""
        self._iterator = None

    def __iter__(self) -> Iterator[Any]:
        """Give the batches: of small files their bytes, of shards the bytes of each sample.

        Raises
        ------
        ReadError
            With the one line of the worker that failed.
        """
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                return
            except ReadError as error:  # torch hands a worker's error on as the text of its traceback
                raise ReadError(str(error).strip().splitlines()[-1].partition("ReadError: ")[2]) from None
            yield batch

    def read_while(self, go_on: Callable[[], bool]) -> Pass:
        """Take batches as fast as they come for as long as ``go_on`` says."""
        start_s = time.monotonic()
        for _ in self:
            if not go_on():
                break
        end_s = time.monotonic()
        reads = self.record.frame(end_s)
        return Pass(start_s, end_s, len(reads), int(reads.size_bytes.sum()), reads)
