"""The ways to write one flat table of tensors into a folder and to read it back."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from stallbench.checkpointing import direct
from stallbench.checkpointing.state import Tensors
from stallbench.storage.pagecache import sync_tree
from stallbench.storage.remote import Store

# Opens a phase of a save: its kind, and which part of it.
Phase = Callable[..., AbstractContextManager[Any]]


class Writer:
    """One way to save."""

    def begin(self, tensors: Tensors, folder: Path, phase: Phase) -> Callable[[], None] | None:
        """Do what training must wait for.

        Returns
        -------
        callable or None
            What is left to do while training goes on; it returns when all bytes were handed to ``folder``'s files.
            None if nothing is left.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End threads, processes, and give memory back."""


class TorchWriter(Writer):
    """``torch.save`` to one file, as most scripts do."""

    def begin(self, tensors: Tensors, folder: Path, phase: Phase) -> None:
        """Write all; serialising and writing can't be told apart."""
        with phase("write"):
            torch.save(tensors, folder / "state.pt")


class SafetensorsWriter(Writer):
    """``safetensors.torch.save_file`` to one file."""

    def begin(self, tensors: Tensors, folder: Path, phase: Phase) -> None:
        """Write all; serialising and writing can't be told apart."""
        from safetensors.torch import save_file

        with phase("write"):
            save_file(_apart(tensors), folder / "state.safetensors")


def _apart(tensors: Tensors) -> Tensors:
    """Give each tensor memory of its own, laid out in order, as safetensors demands; most have it already."""
    memories: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.contiguous() if memory not in memories else tensor.clone().contiguous()
        memories.add(memory)
    return apart


class DCPStoreWriter(Writer):
    """``torch.distributed.checkpoint`` through its own fsspec writer, straight to a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def begin(self, tensors: Tensors, folder: Path, phase: Phase) -> None:
        """Write all; serialising and sending can't be told apart."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter

        writer = FsspecWriter("memory://", sync_files=False)
        writer.fs = FileSystem()  # the store's own connection, with its settings
        writer.fs.fs, writer.path = self._store.fs, self._store.key(folder)
        self._store.make_folder(folder)
        _quiet()
        with phase("write", "store"):
            dcp.save(tensors, storage_writer=writer, no_dist=True)
        self._store.adopt(folder)


class DCPWriter(Writer):
    """``torch.distributed.checkpoint`` with its own defaults, but for fsync, which is a phase of its own here."""

    def begin(self, tensors: Tensors, folder: Path, phase: Phase) -> None:
        """Write all; serialising and writing can't be told apart."""
        import torch.distributed.checkpoint as dcp

        _quiet()
        with phase("write"):
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder, sync_files=False), no_dist=True)


def _quiet() -> None:
    """Let DCP take a single process for granted; for good, since it saves in threads of its own."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class DCPAsyncWriter(DCPWriter):
    """DCP's ``async_save``: a copy into staging buffers that are kept, then a save beside training.

    Parameters
    ----------
    process
        Save in a process of its own, which takes nothing from the interpreter lock, instead of a thread.
    """

    def __init__(self, process: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        # Pinned, but with blocking copies: it would wait for one accelerator's copies only.
        self._stager = DefaultStager(StagingOptions(torch.cuda.is_available(), process, False, False))
        self._type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._process = process
        if process:
            self._start_process()

    def _start_process(self) -> None:
        """Start DCP's process before training: seconds that no save should be charged with.

        It asks for a process group, which a single process has no other use for.
        """
        os.environ.setdefault("MASTER_ADDR", "localhost")  # else it looks its own host name up
        own_group = not torch.distributed.is_initialized()
        with tempfile.TemporaryDirectory(prefix="stallbench-") as folder:
            if own_group:
                torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
            try:
                self._save({"warm-up": torch.zeros(1)}, Path(folder, "checkpoint"), None).result()
            finally:
                if own_group:
                    torch.distributed.destroy_process_group()

    def _save(self, tensors: Tensors, folder: Path, stager: Any) -> Any:
        import torch.distributed.checkpoint as dcp

        _quiet()
        response = dcp.async_save(
            tensors,
            storage_writer=dcp.FileSystemWriter(folder, sync_files=False),
            async_checkpointer_type=self._type,
            async_stager=stager,
            no_dist=True,
        )
        return getattr(response, "upload_completion", response)

    def begin(self, tensors: Tensors, folder: Path, phase: Phase) -> Callable[[], None]:
        """Copy to the staging buffers."""
        with phase("snapshot"):
            upload = self._save(tensors, folder, self._stager)

        def finish() -> None:
            with phase("write"):
                upload.result()

        return finish

    def close(self) -> None:
        """Give the staging buffers back and end DCP's process, which would stay until this one ends."""
        self._stager.close()
        if self._process:
            from torch.distributed.checkpoint import _async_process_executor as executor

            executor._CHECKPOINT_PROCESS = None  # its finaliser asks the process to end, and waits


class StagedWriter(SafetensorsWriter):
    """Save to a fast local folder, train on, and copy to the target meanwhile: what storage guides recommend."""

    def __init__(self, local: Path) -> None:
        self._local = local / "staged"

    def begin(self, tensors: Tensors, folder: Path, phase: Phase) -> Callable[[], None]:
        """Write to the local folder; durable there and durable on the target are two times."""
        shutil.rmtree(self._local, ignore_errors=True)
        self._local.mkdir(parents=True)
        super().begin(tensors, self._local, lambda kind: phase(kind, part="local"))

        def finish() -> None:
            with phase("sync", part="local"):
                sync_tree(self._local)
            with phase("write", part="copy"):
                shutil.copytree(self._local, folder, dirs_exist_ok=True)

        return finish

    def close(self) -> None:
        """Remove the local copy."""
        shutil.rmtree(self._local, ignore_errors=True)


class FastWriter(Writer):
    """Ours: a safetensors file past the page cache, several writes deep. Training waits for all of it."""

    def __init__(self) -> None:
        self._direct = direct.DirectWriter()
        self._snapshot = direct.Snapshot()

    def begin(self, tensors: Tensors, folder: Path, phase: Phase) -> None:
        """Write from where the tensors lie; an accelerator's are copied to pinned memory first."""
        path = folder / "state.safetensors"
        if all(tensor.device.type == "cpu" for tensor in tensors.values()):
            with phase("write"):
                self._direct.write(path, tensors)
            return
        with phase("snapshot"):
            self._snapshot.take(tensors)
        with phase("write"):
            self._snapshot.write(path)


class FastAsyncWriter(FastWriter):
    """Ours, with a snapshot: training waits for one copy into memory that is kept, and goes on."""

    def begin(self, tensors: Tensors, folder: Path, phase: Phase) -> Callable[[], None]:
        """Copy."""
        with phase("snapshot"):
            self._snapshot.take(tensors)

        def finish() -> None:
            with phase("write"):
                self._snapshot.write(folder / "state.safetensors")

        return finish


def make_writer(method: str, local: Path, store: Store | None = None) -> Writer:
    """Make the writer of a method's name (``config.METHODS``, but for the Trainer's own); ``local`` is for staging."""
    makers: dict[str, Callable[[], Writer]] = {
        "torch": TorchWriter,
        "safetensors": SafetensorsWriter,
        "dcp": lambda: DCPStoreWriter(store) if store else DCPWriter(),
        "dcp-async": lambda: DCPAsyncWriter(process=False),
        "dcp-async-process": lambda: DCPAsyncWriter(process=True),
        "staged": lambda: StagedWriter(local),
        "fast": FastWriter,
        "fast-async": FastAsyncWriter,
    }
    return makers[method]()


def read(folder: Path, method: str, into: Mapping[str, torch.Tensor] | None = None) -> Tensors:
    """Read what a method's writer wrote to the processor's memory; nothing in the files of a payload is executed.

    Parameters
    ----------
    into
        Tensors by name; those that fit may be filled in place instead of fresh memory.
    """
    if method == "torch":
        return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    if method in {"safetensors", "staged"}:
        from safetensors.torch import load_file

        mapped = load_file(folder / "state.safetensors")  # not read yet: pages come when they are touched
        return {
            name: direct.place(name, tensor.dtype, list(tensor.shape), into or {}).copy_(tensor)
            for name, tensor in mapped.items()
        }
    if method.startswith("dcp"):
        return _read_dcp(folder, into or {})
    return direct.read(folder / "state.safetensors", into)


def _read_dcp(folder: Path, into: Mapping[str, torch.Tensor]) -> Tensors:
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: direct.place(name, entry.properties.dtype, list(entry.size), into) for name, entry in entries.items()
    }
    _quiet()
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
