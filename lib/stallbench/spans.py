"""The timeline: spans on the monotonic clock."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import pandas as pd

# Kinds and what they cover. A save holds the call and its phases, from queue to commit; of these, sync and commit, and
# with an asynchronous method write too, may lie beside training. A raw_* span is a probe of the target's limit; a
# memory_save is the same save to memory, for what no storage can speed up; a mock_step is a wait in a step's stead; in
# settle, which counts as nothing, the next save waits until the last one is durable, as minutes of training would.
# Of a load trial: make_files and make_shards put the dataset on the target; a phase puts one kind of load on it; an
# iteration is a part of the reload loop, named by part: reload, process, train, evaluate, save, restore.
KINDS = (
    "put_data", "reload_data", "data_wait", "step", "save", "call", "queue", "snapshot", "serialize", "write", "sync",
    "commit", "delete", "settle", "eval", "restore", "raw_write", "raw_buffered", "raw_read", "raw_random", "raw_small",
    "memory_save", "mock_step", "make_files", "make_shards", "phase", "iteration",
)  # fmt: skip


@dataclass(slots=True)
class Span:
    """One stretch of time of a trial; times in seconds since the trial began, on the monotonic clock."""

    id: int
    kind: str
    start_s: float
    end_s: float = float("nan")
    part: str = ""
    step: int = -1
    size_bytes: int = 0
    files: int = 0
    parent: int = -1
    warmup: bool = False
    cache_data: str = ""
    cache_metadata: str = ""
    cache_server: str = ""

    @property
    def duration_s(self) -> float:
        """Length of the span in seconds."""
        return self.end_s - self.start_s


class Timeline:
    """Record spans.

    Parameters
    ----------
    synchronize
        Called before each timestamp of the main thread, so that an accelerator's pending work is counted where it
        belongs. Other threads only do I/O: waiting there would charge them with the training's work.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self.spans: list[Span] = []
        self._synchronize = synchronize
        self._ids = itertools.count()
        self._origin_s = time.monotonic()

    def now_s(self) -> float:
        """Seconds since the timeline began; in the main thread, once the accelerator is done."""
        if threading.current_thread() is threading.main_thread():
            self._synchronize()
        return time.monotonic() - self._origin_s

    def at(self, monotonic_s: float) -> float:
        """Convert a reading of ``time.monotonic()`` to the timeline's own seconds."""
        return monotonic_s - self._origin_s

    def begin(self, kind: str, **fields: object) -> Span:
        """Open a span now; ``end`` closes it."""
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is no kind of span; known are: {', '.join(KINDS)}")
        span = Span(next(self._ids), kind, self.now_s(), **fields)
        self.spans.append(span)
        return span

    def end(self, span: Span) -> None:
        """Close a span now."""
        span.end_s = self.now_s()

    @contextmanager
    def span(self, kind: str, **fields: object) -> Iterator[Span]:
        """Record what runs inside; a span that an error cuts short keeps an open end (NaN)."""
        span = self.begin(kind, **fields)
        yield span
        self.end(span)

    def frame(self) -> pd.DataFrame:
        """Give all spans as a tidy table, one row each, columns as in ``Span``."""
        return pd.DataFrame([asdict(span) for span in self.spans], columns=list(Span.__dataclass_fields__))
