"""One load trial on one target: reads, saves and a log, alone and together; accelerators; neighbours; reloads."""

import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pandas as pd

from stallbench import workload
from stallbench.config import Target
from stallbench.load import dataset
from stallbench.load.accelerators import ACCELERATORS
from stallbench.load.config import LoadTrialConfig
from stallbench.load.neighbours import Outcome, planned, run
from stallbench.load.reading import PREFETCH, Reader
from stallbench.load.work import KEEP, Saver, Session, log_until
from stallbench.results import LOAD, METHOD_VERSION, SCHEMA_VERSION, SPANS, TRIAL, write_json
from stallbench.spans import Span, Timeline
from stallbench.storage import emulated, targets
from stallbench.storage.faults import free_memory_bytes
from stallbench.storage.pagecache import resident_pages
from stallbench.storage.probe import raw_limits
from stallbench.storage.targets import Storage, Workspace
from stallbench.trial import Trial, TrialError, step_of_trial

# Phases that put kinds of load on a place.
KINDS = {"cold reads": ("read",), "saves": ("save",), "log": ("log",), "together": ("read", "save", "log")}
PHASES = (*KINDS, "warm reads", "arrow", "tar")
STEPS = ("put_data", "load", "accelerate", "neighbours", "control", "reload")
REAL_MODEL = "the real model here"
WARM = dict.fromkeys(("cache_data", "cache_metadata", "cache_server"), "warm")
KEPT_READS = 5_000  # of a phase that reads from memory, some hundred thousand a second
CHECKED_FILES = 200  # of the small files, to see whether they stayed in the page cache
STILL_COLD = 0.02  # of them, at most, may have stayed
WARM_FILES = 500  # read again and again, so that they stay warm
MEMORY = "memory"  # how phases of the control are marked


class Place(NamedTuple):
    """Where load is put: the target, or memory for the control."""

    workspace: Workspace
    dataset: dataset.Dataset
    saver: Saver


class LoadTrial(Trial):
    """One load trial: ``put_data``, ``load``, ``accelerate``, ``neighbours``, ``control``, ``reload``, ``finish``.

    Parameters
    ----------
    config
        What to run, as for ``Trial``.

    Raises
    ------
    ConfigError
        If the target can't serve.
    """

    config: LoadTrialConfig

    def __init__(self, config: LoadTrialConfig) -> None:
        super().__init__(config)
        self._rows: list[pd.DataFrame] = []
        self._origin_s = 0.0
        self._done: list[str] = []

    def _needed_bytes(self) -> int:
        one_bytes = workload.checkpoint_bytes(self.config.model, self.config.method) or 0
        return dataset.needed_bytes(self.config) + self._saves_at_once * one_bytes

    @step_of_trial
    def put_data(self) -> None:
        """Make the dataset on the target, or recognise an earlier block's; probe the raw limits; make first saves."""
        self.timeline = Timeline()
        self._origin_s = time.monotonic() - self.timeline.now_s()
        made = dataset.open_dataset(self.config, self.workspace, self.timeline)
        raw_limits(self.workspace, self.timeline)
        self._session = Session(self.config)
        self._here = self._place(self.workspace, made)
        self._done.append("put_data")

    def _place(self, workspace: Workspace, made: dataset.Dataset) -> Place:
        """Make what saves at a place, and its first saves: up to the first deletion they touch fresh memory."""
        local = self._scratch / f"local-{workspace.folder.name}"
        saver = Saver(self._session, self.config, workspace, self.timeline, local, self._guard)
        self._closing.callback(saver.close)
        for _ in range(KEEP + 1):
            saver.save(warmup=True)
        return Place(workspace, made, saver)

    @step_of_trial
    def load(self) -> None:
        """Run the phases in an order that the seed draws: each kind of load alone, and all together."""
        for index in np.random.default_rng(self.config.seed).permutation(len(PHASES)):
            self.workspace.require_present()
            name = PHASES[index]
            if name in KINDS:
                self._put(name, KINDS[name], self._here)
            elif name == "warm reads":
                self._warm(name)
            else:
                self._shards(name)
        self._done.append("load")

    @contextmanager
    def _phase(self, name: str, caches: dict[str, str]) -> Iterator[Span]:
        with self.timeline.span("phase", part=name, **caches) as span:
            yield span

    @contextmanager
    def _cold_reads(self, name: str, place: Place) -> Iterator[Span]:
        """Open a phase that reads small files cold, and see at its end that none of what it read stayed in memory."""
        caches = WARM if place is not self._here else self.workspace.drop(place.dataset.small)
        with self._phase(name, caches) as span:
            yield span
        if caches["cache_data"] == "cold" and place.workspace.device is None:
            checked = place.dataset.paths[:: -(-len(place.dataset.paths) // CHECKED_FILES)]
            if sum(bool(resident_pages(Path(path))) for path in checked) > STILL_COLD * len(checked):
                span.cache_data = "warm"

    def _reader(self, phase: str, batch: int, place: Place) -> Reader:
        """Each phase has an order of its own: one that ends early would else leave the next one's files in a server."""
        seed = (self.config.seed << 32) + zlib.crc32(phase.encode())
        return Reader(place.dataset, self.config.workers, batch, seed, place.workspace.device)

    def _put(self, name: str, kinds: tuple[str, ...], place: Place) -> None:
        """Put some kinds of load on a place at once, for a phase's time and until two saves are done."""
        seconds, reads = self.config.phase_s, "read" in kinds
        opened = self._reader(name, self.config.read_batch, place).small(seconds, cold=True) if reads else nullcontext()
        phase = self._cold_reads(name, place) if reads else self._phase(name, {})
        with phase as span, ThreadPoolExecutor(2) as threads:
            with opened as stream:  # the workers are forked before any thread is at work
                until_s = time.monotonic() + seconds
                saves = threads.submit(place.saver.save_until, until_s) if "save" in kinds else None

                def go_on() -> bool:
                    return time.monotonic() < until_s or (saves is not None and not saves.done())

                every_s = self.config.log_every_s
                log = threads.submit(log_until, place.workspace, every_s, go_on) if "log" in kinds else None
                if stream is not None:
                    found = stream.read_while(go_on)
                    span.files, span.size_bytes = found.samples, found.size_bytes
                    self._keep(name, "read", found.reads)
            if saves is not None:
                self._keep(name, "save", self._of_saves(saves.result()))
            if log is not None:
                self._keep(name, "log", pd.DataFrame(log.result(), columns=["start_s", "latency_s"]))

    def _warm(self, name: str) -> None:
        """Read the same few files again and again, from the page cache."""
        for path in self._here.dataset.paths[:WARM_FILES]:
            Path(path).read_bytes()
        opened = self._reader(name, self.config.read_batch, self._here).small(self.config.phase_s, False, WARM_FILES)
        with self._phase(name, WARM) as span, opened as stream:
            until_s = time.monotonic() + self.config.phase_s
            found = stream.read_while(lambda: time.monotonic() < until_s)
            span.files, span.size_bytes = found.samples, found.size_bytes
        self._keep(name, "read", found.reads)

    def _shards(self, name: str) -> None:
        caches = self.workspace.drop(self._here.dataset.folder / name)
        with self._phase(name, caches) as span:
            found = self._reader(name, self.config.read_batch, self._here).shards(name)
        span.start_s, span.end_s = (self.timeline.at(when_s) for when_s in (found.start_s, found.end_s))
        shards = {"arrow": self._here.dataset.arrow, "tar": self._here.dataset.tar}[name]
        span.files, span.size_bytes = found.samples, sum(path.stat().st_size for path in shards)
        self._keep(name, "read", found.reads)
        self._check_cold(f"read of the {name} shards", [span])

    def _of_saves(self, saves: list[Span]) -> pd.DataFrame:
        rows = [(self._origin_s + span.start_s, span.duration_s, span.size_bytes) for span in saves]
        return pd.DataFrame(rows, columns=["start_s", "latency_s", "size_bytes"])

    def _keep(self, phase: str, kind: str, rows: pd.DataFrame, worker: int | None = None) -> None:
        """Keep events, whose ``start_s`` is monotonic, on the trial's own clock; of reads from memory every n-th.

        ``stands_for`` says of each row how many events there were.
        """
        every = 1
        if phase == "warm reads" or phase.endswith(MEMORY):
            every = -(-len(rows) // KEPT_READS) or 1
            rows = rows.iloc[::every]
        kept = pd.DataFrame({"size_bytes": 0, "worker": 0, "epoch": 0} | {name: rows[name] for name in rows})
        kept["stands_for"] = every
        start_s = (kept.start_s - self._origin_s).round(6)  # a microsecond: its storage is most of the table's
        kept = kept.assign(phase=phase, kind=kind, start_s=start_s, latency_s=kept.latency_s.astype("float32"))
        self._rows.append(kept if worker is None else kept.assign(worker=worker))

    @step_of_trial
    def accelerate(self) -> None:
        """Feed emulated accelerators, and the real model, from cold small files, and record what each waits for."""
        for one in ACCELERATORS:
            self._feed(one.name, one.batch, lambda number, step_s=one.step_s: emulated.wait_for(step_s))
        self._feed(REAL_MODEL, self.config.batch_size, self._session.step)
        self._done.append("accelerate")

    def _feed(self, name: str, batch: int, step: Callable[[int], Any]) -> None:
        """Take batches and compute until the time is over, or all files were read once: later, metadata is cached.

        The first steps aren't counted. They take what the loader had read ahead, more than a slow storage could give;
        and the workers' fork left memory to be copied at its first write.
        """
        in_a_pass = self.config.files // batch
        ahead = min(PREFETCH * self.config.workers, in_a_pass // 2)
        rows: list[tuple[float, float, float, int]] = []
        with (
            self._cold_reads(name, self._here) as span,
            self._reader(name, batch, self._here).small(self.config.accelerator_s, True) as stream,
        ):
            batches = iter(stream)
            next(batches)
            for number in range(ahead):
                step(number)
                next(batches)
            until_s = time.monotonic() + self.config.accelerator_s
            while not rows or (time.monotonic() < until_s and ahead + len(rows) < in_a_pass - 1):
                step_start_s = time.monotonic()
                step(len(rows))
                wait_start_s = time.monotonic()
                size_bytes = next(batches)
                rows.append((step_start_s, wait_start_s, time.monotonic(), size_bytes))
        span.files = batch * len(rows)
        times = np.array(rows)
        for kind, first in (("compute", 0), ("wait", 1)):
            latency_s = times[:, first + 1] - times[:, first]
            values = {"start_s": times[:, first], "latency_s": latency_s, "size_bytes": times[:, 3].astype(int)}
            self._keep(name, kind, pd.DataFrame(values))

    @step_of_trial
    def neighbours(self) -> None:
        """Run 1, 2, 4 experiments at once on the target, sharing the dataset."""
        self.checks["neighbours"] = []
        for count in self.config.counts:
            self._beside(f"{count} at once", count, self._here)
        self._done.append("neighbours")

    @step_of_trial
    def control(self) -> None:
        """Repeat the phases and the experiments on a memory file system.

        What they lose to each other there, they lose to this machine's processor and memory, which no storage gives
        back. Nothing is recorded where there is no memory file system with room for it.
        """
        parent, memory = emulated.default_folder()
        needed_bytes = dataset.needed_bytes(self.config) + self._saves_at_once * self._session.save_bytes
        if memory and min(shutil.disk_usage(parent).free, free_memory_bytes()) > 2 * needed_bytes:
            with targets.claim(Target(name=MEMORY, location=str(parent)), uuid4().hex[:12]) as folder:
                copy = folder / "dataset"
                shutil.copytree(self._here.dataset.small, copy / "small")
                made = dataset.Dataset(copy, self._here.dataset.sizes_bytes)
                place = self._place(Workspace(self.target, folder, Storage(MEMORY, MEMORY)), made)
                for name, kinds in KINDS.items():
                    self._put(f"{name}, {MEMORY}", kinds, place)
                for count in sorted({*self.config.counts[:1], *self.config.counts[-1:]}):
                    self._beside(f"{count} at once, {MEMORY}", count, place)
        self._done.append("control")

    @property
    def _saves_at_once(self) -> int:
        return max(KEEP + 1, *self.config.counts, 0)

    def _beside(self, name: str, count: int, place: Place) -> None:
        with tempfile.TemporaryDirectory(prefix="experiments-", dir=place.workspace.folder) as folder:
            meeting = tempfile.mkdtemp(dir=self._scratch)
            own = planned(self.config, count, meeting, folder, self._session.save_bytes, place.workspace.device)
            with self._cold_reads(name, place):
                outcomes = run(own, place.dataset.paths, self.config.save_limit_s)
        self._keep_outcomes(name, outcomes)

    def _keep_outcomes(self, name: str, outcomes: list[Outcome]) -> None:
        """Keep the experiments' events; one that was lost is marked, and the others stay, marked as beside it.

        Raises
        ------
        TrialError
            If all were lost.
        """
        lost = [one.lost for one in outcomes if one.lost]
        if len(lost) == len(outcomes):
            raise TrialError(f"all experiments of {name} failed: {lost[0]}")
        for one in outcomes:
            summary = {"phase": name, "experiments": len(outcomes), "experiment": one.number, "lost": one.lost}
            summary |= {"beside_lost": len(lost), "samples": one.samples, "seconds": one.end_s - one.start_s}
            self.checks["neighbours"].append(self.redactor.tree(summary))
            if not one.lost:
                waits = pd.DataFrame({"start_s": one.starts_s, "latency_s": one.waits_s})
                self._keep(name, "wait", waits, one.number)
                save = {"start_s": [one.save_start_s], "latency_s": [one.save_end_s - one.save_start_s]}
                self._keep(name, "save", pd.DataFrame(save), one.number)

    @step_of_trial
    def reload(self) -> None:
        """Go round the loop: reload the data cold, tokenise, train, evaluate, save, restore.

        Raises
        ------
        TrialError
            If a restored state differs from the saved one.
        """
        from stallbench.training import digest

        for number in range(self.config.iterations):
            part = self._iteration(number)
            caches = self.workspace.drop(self._here.dataset.folder / "arrow")
            with part("reload", **caches):
                self.workspace.charge_read(self._here.dataset.arrow)
                texts = workload.reload_texts(self._here.dataset.arrow)
            with part("process"):
                self._session.take(texts)
            with part("train"):
                losses = [self._session.step(step) for step in range(self.config.iteration_steps)]
            with part("evaluate"):
                self._session.evaluate()
            with part("save"):
                self._here.saver.save()
            saved = digest(self._session.state())
            self._session.step(0)  # so that only a restore can bring the saved state back
            caches = self.workspace.drop(self._here.saver.newest)
            with part("restore", **caches):
                self.workspace.charge_read(list(self._here.saver.newest.iterdir()))
                self._here.saver.restore()
            if digest(self._session.state()) != saved:
                raise TrialError("the restored state differs from the saved one")
            self.checks["loss"] = losses[-1]
        self._done.append("reload")

    def _iteration(self, number: int) -> Callable[..., Any]:
        return lambda part, **caches: self.timeline.span("iteration", part=part, step=number, **caches)

    @step_of_trial
    def finish(self) -> Path:
        """Leave the target as it was, but for the dataset, and write the results; ``trial.json`` comes last.

        Returns
        -------
        pathlib.Path
            The folder of the results.
        """
        missing = [step for step in STEPS if step not in self._done]
        if missing:
            raise TrialError(f"there is nothing to write: run {', '.join(missing)} first")
        self._closing.close()
        self.table.to_parquet(self.out / LOAD, index=False, compression="zstd")
        self.timeline.frame().to_parquet(self.out / SPANS, index=False)
        write_json(self.out / TRIAL, self._summary())
        return self.out

    @property
    def table(self) -> pd.DataFrame:
        """All events, in the columns that ``Study.load`` explains."""
        columns = ["phase", "kind", "start_s", "latency_s", "size_bytes", "worker", "epoch", "stands_for"]
        return pd.concat(self._rows, ignore_index=True)[columns]

    def _summary(self) -> dict[str, Any]:
        hidden = set() if self.config.show_paths else {"target", "out", "model"}
        accelerators = [one._asdict() for one in ACCELERATORS]
        return {
            "schema_version": SCHEMA_VERSION,
            "method_version": METHOD_VERSION,
            "trial": self.id,
            "tables": [LOAD, SPANS],
            "config": self.redactor.tree(self.config.model_dump(exclude=hidden)),
            "storage": self.redactor.tree(targets.storage_of(self.target)),
            "began_utc": self._began_utc.isoformat(timespec="seconds"),
            "wall_s": time.monotonic() - self._began_s,
            "memory_free_bytes": self._memory_free_bytes,
            "autosave_off": bool(self.config.claim_id),
            "save_bytes": self._session.save_bytes,
            "accelerators": accelerators,
            "checks": self.checks,
        }
