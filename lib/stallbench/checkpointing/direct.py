"""The quickest durable write and cold read that we know of: a safetensors file through O_DIRECT, several threads deep.

The page cache is passed by: no second copy of the state, no fresh pages to touch, no write-back to wait for. The file
is an ordinary safetensors file (https://github.com/huggingface/safetensors, "Format"), whose header is padded so that
the data begin at a multiple of the block size.
"""

import errno
import itertools
import json
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from stallbench.checkpointing.state import CheckpointError, Tensors
from stallbench.storage.pagecache import reserve

# Four requests of 4 MiB in flight reach the rate of a deeper queue on every disk tried; more only cost memory.
BLOCK_BYTES, THREADS = 4 << 20, 4
_ALIGN_BYTES = 4096  # covers every logical block size in use, and the page
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def _aligned(size_bytes: int) -> mmap.mmap:
    """Get page-aligned memory, in huge pages where the system has them: far fewer pages to touch and to pin."""
    memory = mmap.mmap(-1, _padded(max(size_bytes, 1)))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Layout:
    """Where each byte of a safetensors file comes from.

    Parameters
    ----------
    tensors
        The largest elements are stored first, so that each tensor is aligned when the file is mapped.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, dict] = {}
        ends = itertools.accumulate((tensors[name].nbytes for name in names), initial=0)
        for name, (begin, end) in zip(names, itertools.pairwise(ends), strict=True):
            tensor = tensors[name]
            if tensor.dtype not in _NAMES:
                raise CheckpointError(f"{name} has dtype {tensor.dtype}, which a safetensors file can't hold")
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text = text.ljust(_padded(8 + len(text)) - 8)
        self.head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
        begins = [len(self.head) + entry["data_offsets"][0] for entry in header.values()]
        self.places = [(begin, name) for begin, name in zip(begins, header, strict=True) if tensors[name].nbytes]
        self.size_bytes = len(self.head) + sum(tensor.nbytes for tensor in tensors.values())


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class DirectWriter:
    """Write tensors from where they lie, through a few buffers that are kept from save to save."""

    def __init__(self) -> None:
        self._buffers = [_aligned(BLOCK_BYTES) for _ in range(THREADS)]

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors in the processor's memory to a fresh safetensors file.

        Raises
        ------
        OSError
            As the file system does, for example ENOSPC.
        """
        layout = Layout(tensors)
        pieces = [(0, layout.head), *((begin, _bytes_of(tensors[name])) for begin, name in layout.places)]
        begins = np.array([begin for begin, _ in pieces])
        views = [np.frombuffer(buffer, np.uint8) for buffer in self._buffers]

        def fill(worker: int, begin: int, end: int) -> memoryview:
            at = begin
            for start, piece in pieces[int(np.searchsorted(begins, begin, "right")) - 1 :]:
                if start >= end:
                    break
                count = min(end, start + len(piece)) - at
                np.copyto(views[worker][at - begin : at - begin + count], piece[at - start : at - start + count])
                at += count
            return memoryview(self._buffers[worker])

        _write_blocks(path, layout.size_bytes, fill)


class Snapshot:
    """A copy of a state in memory of its own, laid out as the file will be; its pages are kept from save to save.

    Where there is a GPU the memory is pinned, so that the copy runs at the bus's rate.
    """

    def __init__(self) -> None:
        self._image: torch.Tensor | None = None
        self._layout: Layout | None = None
        self._shape: list[tuple] = []
        self._places: list[tuple[str, torch.Tensor]] = []

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy all tensors; returns when the copies are complete."""
        shape = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if shape != self._shape:
            self._shape = []  # till all of it is laid out
            self._lay_out(tensors)
            self._shape = shape
        for name, place in self._places:
            place.copy_(tensors[name], non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}:
            torch.accelerator.synchronize(device)

    def _lay_out(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._layout, self._places = Layout(tensors), []
        size_bytes = _padded(self._layout.size_bytes)
        if self._image is None or len(self._image) < size_bytes:
            self._image = None  # given back before the larger one is asked for
            self._image = _image(size_bytes)
        self._image.numpy()[: len(self._layout.head)] = self._layout.head
        for begin, name in self._layout.places:
            piece = self._image[begin : begin + tensors[name].nbytes]
            self._places.append((name, piece.view(tensors[name].dtype).view(tensors[name].shape)))

    def write(self, path: Path) -> None:
        """Write the copy to a fresh safetensors file, without touching a byte of it again.

        Raises
        ------
        OSError
            As the file system does, for example ENOSPC.
        """
        view = memoryview(self._image.numpy())
        _write_blocks(path, self._layout.size_bytes, lambda worker, begin, end: view[begin : _padded(end)])


def _image(size_bytes: int) -> torch.Tensor:
    if torch.cuda.is_available():
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)  # page-aligned, as CUDA gives it
    return torch.frombuffer(_aligned(size_bytes), dtype=torch.uint8)


def _open(path: Path, flags: int, direct: bool) -> int:
    return os.open(path, flags | (getattr(os, "O_DIRECT", 0) if direct else 0), 0o644)


def _write_blocks(
    path: Path, size_bytes: int, fill: Callable[[int, int, int], memoryview], direct: bool = True
) -> None:
    """Write past the page cache, or through it where the file system can't do otherwise."""
    descriptor = None
    try:
        descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, direct)
        reserve(descriptor, _padded(size_bytes))

        def work(worker: int, begin: int) -> None:
            end = min(begin + BLOCK_BYTES, size_bytes)
            block = fill(worker, begin, end)[: _padded(end - begin)]
            while block:
                written = os.pwrite(descriptor, block, begin)
                block, begin = block[written:], begin + written

        _in_parallel(range(0, size_bytes, BLOCK_BYTES), work)
        os.ftruncate(descriptor, size_bytes)  # direct writes come in whole blocks
    except OSError as error:
        if not direct or error.errno not in _NO_DIRECT:
            raise
        path.unlink(missing_ok=True)  # an open that is refused may have made it
        _write_blocks(path, size_bytes, fill, direct=False)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def read(path: Path, into: Mapping[str, torch.Tensor] | None = None) -> Tensors:
    """Read a safetensors file past the page cache.

    Parameters
    ----------
    into
        Tensors to be filled in place, where name, shape and dtype agree: memory that exists already is far quicker
        than fresh pages, which cost more than the read itself on many machines.

    Raises
    ------
    OSError
        As the file system does.
    CheckpointError
        If the file is shorter than its header says, or no safetensors file.
    """
    try:
        return _read_blocks(path, into or {}, direct=True)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return _read_blocks(path, into or {}, direct=False)


def _read_blocks(path: Path, into: Mapping[str, torch.Tensor], direct: bool) -> Tensors:
    size_bytes = path.stat().st_size
    descriptor = _open(path, os.O_RDONLY, direct)
    try:
        buffers = [_aligned(BLOCK_BYTES) for _ in range(THREADS)]
        entries, data_begin = _header(descriptor, buffers[0], path.name)
        tensors, pieces = {}, []
        for name, dtype, shape, begin, end in entries:
            tensors[name] = place(name, dtype, shape, into)
            if end > size_bytes or end - begin != tensors[name].nbytes:
                raise CheckpointError(f"{path.name} is {size_bytes} bytes long, its header speaks of {end}")
            if end > begin:
                pieces.append((begin, _bytes_of(tensors[name])))
        begins = np.array([begin for begin, _ in pieces] or [size_bytes])
        views = [np.frombuffer(buffer, np.uint8) for buffer in buffers]

        def work(worker: int, begin: int) -> None:
            end = min(begin + BLOCK_BYTES, size_bytes)
            _fill_block(descriptor, buffers[worker], begin, end)
            for start, piece in pieces[max(0, int(np.searchsorted(begins, begin, "right")) - 1) :]:
                if start >= end:
                    break
                first, last = max(begin, start), min(end, start + len(piece))
                if last > first:
                    np.copyto(piece[first - start : last - start], views[worker][first - begin : last - begin])

        _in_parallel(range(data_begin // BLOCK_BYTES * BLOCK_BYTES, size_bytes, BLOCK_BYTES), work)
    finally:
        os.close(descriptor)
    return tensors


def _fill_block(descriptor: int, buffer: mmap.mmap, begin: int, end: int) -> None:
    """Read until ``end`` of the file is there; direct reads ask for whole blocks, also beyond the end."""
    filled = 0
    while begin + filled < end:
        count = os.preadv(descriptor, [memoryview(buffer)[filled:]], begin + filled)
        if not count:
            raise CheckpointError("the file became shorter while it was read")
        filled += count


def _header(descriptor: int, buffer: mmap.mmap, name: str) -> tuple[list[tuple], int]:
    """Read the header: (name, dtype, shape, first and last byte in the file) of each tensor, and where data begin."""
    os.preadv(descriptor, [buffer], 0)
    begin = 8 + int.from_bytes(buffer[:8], "little")
    try:
        if begin > BLOCK_BYTES:  # tens of thousands of tensors
            buffer = _aligned(min(begin, os.fstat(descriptor).st_size))
            _fill_block(descriptor, buffer, 0, len(buffer))
        entries = json.loads(buffer[8:begin])
        entries.pop("__metadata__", None)
        return [(key, *_entry(entry, begin)) for key, entry in entries.items()], begin
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name} is no whole safetensors file ({type(error).__name__})") from error


def _entry(entry: dict, data_begin: int) -> tuple[torch.dtype, list[int], int, int]:
    first, last = entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (first, last, *entry["shape"])):
        raise ValueError("an offset or a shape is no whole number")
    return _DTYPES[entry["dtype"]], entry["shape"], data_begin + first, data_begin + last


def place(name: str, dtype: torch.dtype, shape: list[int], into: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Give the tensor of ``into`` that can be filled in place, or a fresh one."""
    found = into.get(name)
    usable = (
        found is not None
        and found.dtype == dtype
        and list(found.shape) == shape
        and found.device.type == "cpu"
        and found.is_contiguous()
    )
    return found.detach() if usable else torch.empty(shape, dtype=dtype)


def _in_parallel(begins: range, work: Callable[[int, int], None]) -> None:
    """Hand the blocks out in order to ``THREADS`` threads; the first error ends them all and is raised."""
    todo, lock, errors = iter(begins), threading.Lock(), []

    def loop(worker: int) -> None:
        try:
            while not errors:
                with lock:
                    begin = next(todo, None)
                if begin is None:
                    return
                work(worker, begin)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=loop, args=[worker]) for worker in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
