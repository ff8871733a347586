"""Both emulations held against arithmetic: bytes / rate + positions x time."""

import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from stallbench.config import ConfigError
from stallbench.lab import building as lab
from stallbench.lab.profile import PROFILES, LabProfile
from stallbench.storage import emulated
from stallbench.storage.pagecache import sync_file

SIZE_BYTES = 272 << 20  # a full checkpoint of the default model is 270 MB
BLOCK_BYTES = 4 << 20
PAGE_BYTES = 4 << 10
RANDOM_READS = 64


def _write(path: Path, flags: int) -> None:
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        block.write(os.urandom(BLOCK_BYTES))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
        try:
            for offset in range(0, SIZE_BYTES, BLOCK_BYTES):
                os.pwrite(descriptor, block, offset)
        finally:
            os.close(descriptor)
    sync_file(path)


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(BLOCK_BYTES):
            pass


def _read_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            for number in random.sample(range(SIZE_BYTES // PAGE_BYTES), RANDOM_READS):
                os.preadv(descriptor, [page], number * PAGE_BYTES)
        finally:
            os.close(descriptor)


def _drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _on_chain(profile: LabProfile) -> list[tuple[float, int]]:
    """Give the seconds and the positions of each row on a fresh lab."""
    with lab.running(profile, out=lambda line: None, check=False) as made:
        path = made.mountpoint / "file"
        _write(path, 0)  # so that every measured pass finds the image's memory touched
        steps: list[Callable[[], None]] = [
            lambda: _write(path, 0),
            lambda: _write(path, os.O_DIRECT),
            lambda: _read(path),
            lambda: _read_pages(path),
        ]
        taken_s = []
        for step in steps:
            _drop(path)
            before = made.counters()["positions"]
            start_s = time.monotonic()
            step()
            taken_s.append((time.monotonic() - start_s, made.counters()["positions"] - before))
        return taken_s


def _in_process(profile: LabProfile, state_path: Path) -> list[float | None]:
    values = profile.model_dump(include=set(emulated.Profile.model_fields))
    values["disk_bytes_per_s"] *= profile.spindles  # it has one disk
    device = emulated.Device(emulated.Profile(**values), state_path)
    start_s = time.monotonic()
    emulated.wait_until(device.write("file", SIZE_BYTES).durable_s)
    save_s = time.monotonic() - start_s
    return [save_s, None, device.read("file", SIZE_BYTES), None]


def check(profile: LabProfile) -> list[dict[str, str | float | None]]:
    """Measure a durable save, a cold restore and random reads on both emulations.

    Returns
    -------
    list of dict
        A row an operation, in seconds: ``arithmetic_s``, ``in_process_s`` (None: no such request there), ``lab_s``,
        ``lab_ratio`` to arithmetic with one position a stream, ``positions`` that the disk counted, and ``chain_s``:
        the same on the chain without limits, its own overhead.

    Raises
    ------
    ConfigError
        If there can be no lab here.
    """
    if reason := lab.missing():
        raise ConfigError(reason)
    sequential_s = SIZE_BYTES / profile.sustained_bytes_per_s + profile.position_s + profile.round_trip_s
    random_s = RANDOM_READS * (profile.position_s + PAGE_BYTES / profile.sustained_bytes_per_s + profile.round_trip_s)
    expected_s = [sequential_s, sequential_s, sequential_s, random_s]
    lab_s, chain_s = _on_chain(profile), _on_chain(PROFILES["fast"])
    state_path = emulated.default_folder()[0] / f"lab-check-{os.getpid()}"
    try:
        in_process_s = _in_process(profile, state_path)
    finally:
        state_path.unlink(missing_ok=True)
    names = ["durable save, buffered", "durable save, O_DIRECT", "cold restore", f"{RANDOM_READS} random 4 KiB reads"]
    return [
        {
            "operation": name,
            "arithmetic_s": expected,
            "in_process_s": inside,
            "lab_s": found[0],
            "lab_ratio": found[0] / expected,
            "positions": found[1],
            "chain_s": chain[0],
        }
        for name, expected, inside, found, chain in zip(names, expected_s, in_process_s, lab_s, chain_s, strict=True)
    ]


def table(rows: list[dict[str, str | float | None]]) -> str:
    """Format the rows of `check`."""
    lines = ["\t".join(rows[0])]
    for row in rows:
        lines.append("\t".join(f"{v:.3f}" if isinstance(v, float) else str(v or "-") for v in row.values()))
    return "\n".join(lines).expandtabs(24)
