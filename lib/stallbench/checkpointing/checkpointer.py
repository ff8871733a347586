"""One save after the other, by any method: what training waits for, what runs beside it, and when it is durable."""

import math
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stallbench.checkpointing import commit
from stallbench.checkpointing.state import CheckpointError, Tensors, flatten, size_bytes, unflatten
from stallbench.checkpointing.writers import make_writer, read
from stallbench.config import SNAPSHOTS, Wait
from stallbench.spans import Span, Timeline
from stallbench.storage.emulated import wait_until
from stallbench.storage.faults import chain, free_memory_bytes, full_disk
from stallbench.storage.pagecache import tree_size
from stallbench.storage.targets import Workspace

# Held while a save is under way, with its step: a limit on its time.
Guard = Callable[[int], AbstractContextManager[None]]


def no_guard(step: int) -> AbstractContextManager[None]:
    """Let a save take as long as it does."""
    return nullcontext()


class Checkpointer:
    """Save full training states into ``parent``, one at a time, each under its final name only when it is durable.

    Parameters
    ----------
    method
        One of ``config.METHODS``, but ``trainer`` and its kind, which are the Trainer's own.
    workspace
        The target: charges an emulated device, and tells how its file system commits.
    wait
        ``return``: training goes on when the save call is back, and what is left runs in a thread; ``durable``: it
        waits until the checkpoint is committed.
    keep
        Checkpoints that stay; older ones are deleted once a newer one is durable.
    local
        Folder for the local copies of ``staged``.
    guard
        A limit on the time of a save.
    on_durable
        Called with the step of each save that is committed, from the thread that committed it.
    """

    def __init__(
        self,
        method: str,
        workspace: Workspace,
        parent: Path,
        timeline: Timeline,
        *,
        local: Path,
        wait: Wait = "return",
        keep: int | None = None,
        guard: Guard = no_guard,
        on_durable: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.method, self.parent, self.timeline, self.wait_rule = method, parent, timeline, wait
        self._workspace, self._keep, self._guard, self._on_durable = workspace, keep, guard, on_durable
        self._local = local
        self._rename = workspace.storage.file_system not in commit.NO_RENAME
        self._writer = make_writer(method, local, workspace.store)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None
        self._has_buffers = False
        for folder in (parent, local):
            folder.mkdir(parents=True, exist_ok=True)
        commit.recover(parent)
        workspace.recover(parent)

    def save(
        self, step: int, capture: Callable[[], Any], write_files: Callable[[Path], None], warmup: bool = False
    ) -> None:
        """Save; returns when training may go on.

        A save that comes while the last one is still under way waits for it first: part of its stall.

        Parameters
        ----------
        capture
            Gives the nested state; called once the last save is over.
        write_files
            Writes small files that belong to the checkpoint into its folder.

        Raises
        ------
        CheckpointError
            If there is no room for it, on disk or in memory, or the save before this one failed in the background.
        """
        final = commit.final_folder(self.parent, step)
        with self.timeline.span("save", step=step, warmup=warmup) as save:
            with self.timeline.span("call", step=step, parent=save.id, warmup=warmup):
                with self._phase(save, "queue"):
                    self.wait()
                self._workspace.require_present()
                tensors = flatten(capture())
                self._check_room(tensors)
                with self._cleared_on_error(final, tensors) as folder, self._guard(step):
                    write_files(folder)
                    rest = self._writer.begin(tensors, folder, lambda kind, part="": self._phase(save, kind, part))
                    self._has_buffers = True
                    durable_s = self._charge(save, folder) if rest is None else None
            finish = partial(self._finish, save, final, rest, durable_s, size_bytes(tensors))

            if self.wait_rule == "durable":
                finish()
        if self.wait_rule == "durable":
            self._delete_old(step)
        else:
            self._pending = self._background.submit(finish)

    def _phase(self, save: Span, kind: str, part: str = "") -> AbstractContextManager[Span]:
        """Open a phase; buffered bytes are first written to memory, which is no device's time."""
        if kind == "write" and part not in ("local", "store") and self._workspace.buffered:
            kind = "serialize"
        return self.timeline.span(kind, part=part, step=save.step, parent=save.id, warmup=save.warmup)

    def _charge(self, save: Span, folder: Path) -> float | None:
        """Charge an emulated device with the files, or send them to the store; gives when they are durable."""
        if not self._workspace.buffered:
            return None
        commit.write_manifest(folder, self.method, save.step)
        with self.timeline.span("write", step=save.step, parent=save.id, warmup=save.warmup):
            return self._workspace.charge_write(folder)

    def _finish(
        self, save: Span, final: Path, rest: Callable[[], None] | None, durable_s: float | None, needed_bytes: int
    ) -> None:
        with self._cleared_on_error(final, needed_bytes, fresh=False) as folder, self._guard(save.step):
            if rest is not None:
                rest()
                durable_s = self._charge(save, folder)
            with self._phase(save, "sync"):
                if durable_s is None:
                    commit.make_durable(folder, self.method, save.step, self._rename)
                else:
                    wait_until(durable_s)
            with self._phase(save, "commit") as committed:
                commit.publish(folder, final)
            if durable_s is not None and math.isnan(durable_s):
                committed.end_s = math.nan  # the server can't say when, and no figure may
        save.size_bytes, save.files = tree_size(final)
        self._on_durable(save.step)
        if self.wait_rule == "return":
            self._delete_old(save.step)

    @contextmanager
    def _cleared_on_error(self, final: Path, needed: Tensors | int, fresh: bool = True) -> Iterator[Path]:
        """Give the folder that is written to; of a failed save nothing stays, and lack of room is named as such."""
        folder = commit.partial_folder(final, self._rename)
        try:
            if fresh:
                commit.open_partial(folder)
            yield folder
        except BaseException as error:
            for link in chain(error):  # else a library's writer keeps its file open, and the room
                traceback.clear_frames(link.__traceback__)
            self._workspace.forget(folder)
            shutil.rmtree(folder, ignore_errors=True)
            needed_bytes = needed if isinstance(needed, int) else size_bytes(needed)
            full = self._full(error, needed_bytes)
            if full:
                raise CheckpointError(full) from error
            raise

    def _full(self, error: BaseException, needed_bytes: int) -> str | None:
        """Say that there was no room, and where: what the broken save had taken is free again."""
        free_bytes = shutil.disk_usage(self.parent).free
        local_bytes = shutil.disk_usage(self._local).free if self.method == "staged" else free_bytes
        full = full_disk(error, needed_bytes, min(free_bytes, local_bytes))
        return full.replace(":", " in the local folder:", 1) if full and local_bytes < free_bytes else full

    def _check_room(self, tensors: Tensors) -> None:
        needed_bytes = size_bytes(tensors)
        for folder, where in ((self.parent, ""), (self._local, " in the local folder")):
            free_bytes = shutil.disk_usage(folder).free if not where or self.method == "staged" else needed_bytes
            if needed_bytes > free_bytes:
                raise CheckpointError(
                    f"disk full{where}: the checkpoints need {needed_bytes / 1e6:,.0f} MB, "
                    f"{free_bytes / 1e6:,.0f} MB are free"
                )
        needed_bytes *= self.method in SNAPSHOTS
        free_bytes = free_memory_bytes()
        if not self._has_buffers and needed_bytes > free_bytes:
            raise CheckpointError(
                f"method={self.method} needs {needed_bytes / 1e6:,.0f} MB of memory for its snapshot, and "
                f"{free_bytes / 1e6:,.0f} MB are free; use a method without one, such as fast"
            )

    def _delete_old(self, step: int) -> None:
        if self._keep is None:
            return
        # An abandoned run may have left later steps, so that the newest is not the one of the highest step.
        others = [folder for folder in commit.complete_checkpoints(self.parent) if commit.step_of(folder) != step]
        others.sort(key=lambda folder: (folder / commit.MANIFEST).stat().st_mtime_ns)
        for folder in others[: max(0, len(others) - self._keep + 1)]:
            bytes_, files = tree_size(folder)
            with self.timeline.span("delete", step=step, size_bytes=bytes_, files=files):
                self._workspace.forget(folder)
                commit.discard(folder, self._rename)

    @property
    def busy(self) -> bool:
        """Whether a save is under way in the background."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises
        ------
        CheckpointError, OSError
            What that save met in the background: it looked fine when it returned, and was not.
        """
        if self._pending is None:
            return
        pending = self._pending
        try:
            pending.result()
        finally:
            if pending.done():  # else we were interrupted, and its buffers are still in use
                self._pending = None

    def close(self) -> None:
        """Wait as ``wait`` does, and end all threads and processes."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._writer.close()


def load(folder: Path, into: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Read a checkpoint's nested state, whichever of our methods wrote it.

    Raises
    ------
    CheckpointError
        If it isn't a complete checkpoint of ours.
    """
    found = commit.manifest(folder)
    if found is None:
        raise CheckpointError(f"{folder.name} is no complete checkpoint: its manifest is missing, or files are")
    return unflatten(read(folder, found["method"], into))
