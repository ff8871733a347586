"""Saves that fail, by every method: what is said, what is left, and that the next one works."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from stallbench.checkpointing import checkpointer as checkpointer_module
from stallbench.checkpointing import commit, direct
from stallbench.checkpointing.checkpointer import Checkpointer, load
from stallbench.checkpointing.state import CheckpointError, flatten, size_bytes
from stallbench.config import SNAPSHOTS, Target
from stallbench.spans import Timeline
from stallbench.storage.faults import chain, free_memory_bytes, full_disk
from stallbench.storage.targets import Workspace, describe
from test_checkpointing import ALL, QUICK, assert_same, names, save, write_nothing

needs_mounts = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
FULL = re.compile(
    r"(disk full|disk full in the local folder|quota used up): the checkpoints need ([\d,]+) MB, ([\d,]+) MB are free"
)


def make_state(seed: int, megabytes: int = 14) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"model": [torch.randn(125_000, generator=generator) for _ in range(2 * megabytes)], "seed": seed}


def checkpointer_on(folder: Path, method: str, local: Path, **rules: Any) -> Checkpointer:
    workspace = Workspace(Target(name="disk", location=str(folder)), folder, describe(folder))
    return Checkpointer(method, workspace, folder / "checkpoints", Timeline(), local=local, **rules)


def helpers() -> set[Any]:
    """Threads and processes of this one, without Python's own for shared memory, which stay until the end."""
    children = psutil.Process().children(recursive=True)
    tracker = "multiprocessing.resource_tracker"
    own = [child for child in children if not any(tracker in part for part in command_line(child))]
    return {*(thread for thread in threading.enumerate() if "(_serve)" not in thread.name), *own}


def command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.fixture
def nothing_left_running() -> Iterator[list[BaseException]]:
    """Threads and processes that the test started are to end with it, though somebody holds the errors in the list."""
    before = helpers()
    held: list[BaseException] = []
    yield held
    until_s = time.monotonic() + 5
    while (left := helpers() - before) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not left


@pytest.fixture
def small(tmp_path, request) -> Iterator[Path]:
    """A file system that holds one checkpoint of 14 MB and not two; memory, or ext4 where the test asks for it."""
    mount = tmp_path / "small"
    mount.mkdir()
    if getattr(request, "param", "tmpfs") == "ext4":
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(30 << 20)
        make = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]
        if not shutil.which(make[0]) or subprocess.run(make).returncode:
            pytest.skip("no mkfs.ext4")
        arguments = ["-o", "loop", str(image)]
    else:
        arguments = ["-t", "tmpfs", "-o", "size=24m", "tmpfs"]
    if subprocess.run(["mount", *arguments, str(mount)]).returncode:
        pytest.skip("nothing can be mounted here")
    yield mount
    busy = subprocess.run(["umount", str(mount)]).returncode
    if busy:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
    assert not busy, "files are still open"


# A disk without room.


@needs_mounts
@pytest.mark.parametrize(
    ("method", "small"),
    [
        *((method, "tmpfs") for method in ALL),
        ("torch", "ext4"),
        ("dcp-async", "ext4"),
        ("staged", "ext4"),
        ("fast", "ext4"),
    ],
    indirect=["small"],
)
def test_a_disk_that_fills_up_in_the_middle_of_a_save(small, tmp_path, monkeypatch, method, nothing_left_running):
    monkeypatch.setattr(Checkpointer, "_check_room", lambda *arguments: None)  # as if others filled it meanwhile
    first, second = make_state(1), make_state(2)
    with closing(checkpointer_on(small, method, tmp_path, wait="return")) as checkpointer:
        previous = save(checkpointer, 1, first)
        free_bytes = shutil.disk_usage(small).free
        assert free_bytes < 14e6
        with pytest.raises(CheckpointError) as caught:
            save(checkpointer, 2, second)
        nothing_left_running.append(caught.value)
        words, needed, free = FULL.fullmatch(str(caught.value)).groups()
        assert words == "disk full"
        assert float(needed) == round(size_bytes(flatten(second)) / 1e6)
        assert abs(float(free) - free_bytes / 1e6) < 1
        assert names(checkpointer.parent) == ["checkpoint-1"]
        assert_same(load(previous), first)

        shutil.rmtree(previous)  # somebody makes room
        assert_same(load(save(checkpointer, 3, second)), second)


@needs_mounts
@pytest.mark.parametrize("method", ["torch", "dcp", "staged", "fast-async"])
def test_a_full_disk_fails_a_save_that_waits_until_it_is_durable(small, tmp_path, monkeypatch, method):
    monkeypatch.setattr(Checkpointer, "_check_room", lambda *arguments: None)
    with closing(checkpointer_on(small, method, tmp_path, wait="durable")) as checkpointer:
        save(checkpointer, 1, make_state(1))
        with pytest.raises(CheckpointError, match=r"^disk full: the checkpoints need 14 MB, "):
            checkpointer.save(2, lambda: make_state(2), write_nothing)
        checkpointer.wait()
        assert names(checkpointer.parent) == ["checkpoint-1"]


@needs_mounts
@pytest.mark.parametrize("method", QUICK)
def test_a_save_without_room_is_refused_before_a_byte_is_written(small, tmp_path, method):
    with closing(checkpointer_on(small, method, tmp_path)) as checkpointer:
        (small / "somebody").write_bytes(bytes(12 << 20))
        free_bytes = shutil.disk_usage(small).free
        with pytest.raises(CheckpointError) as caught:
            save(checkpointer, 1, make_state(1))
        assert str(caught.value) == (f"disk full: the checkpoints need 14 MB, {free_bytes / 1e6:,.0f} MB are free")
        assert names(checkpointer.parent) == []
        assert shutil.disk_usage(small).free == free_bytes
        assert not list(tmp_path.glob("staged"))
        (small / "somebody").unlink()
        assert_same(load(save(checkpointer, 2, make_state(2))), make_state(2))


@needs_mounts
@pytest.mark.parametrize("method", QUICK)
def test_room_that_others_take_during_a_save_is_not_called_free(small, tmp_path, method):
    def fill(folder: Path) -> None:
        (small / "somebody").write_bytes(bytes(20 << 20))

    with closing(checkpointer_on(small, method, tmp_path, wait="return")) as checkpointer:
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(1, lambda: make_state(1), fill)
            checkpointer.wait()
        _, _, free = FULL.fullmatch(str(caught.value)).groups()
        assert float(free) <= 4
        assert names(checkpointer.parent) == []


@needs_mounts
@pytest.mark.parametrize("seen_before", [True, False])
def test_a_full_local_folder_is_reported_with_its_own_room(small, tmp_path, monkeypatch, seen_before):
    target = tmp_path / "target"
    target.mkdir()
    if not seen_before:
        monkeypatch.setattr(Checkpointer, "_check_room", lambda *arguments: None)
    with closing(checkpointer_on(target, "staged", small)) as checkpointer:
        (small / "somebody").write_bytes(bytes(15 << 20))
        local_bytes = shutil.disk_usage(small).free
        with pytest.raises(CheckpointError) as caught:
            save(checkpointer, 1, make_state(1))
        words, _, free = FULL.fullmatch(str(caught.value)).groups()
        assert words == "disk full in the local folder"
        assert float(free) <= local_bytes / 1e6 + 1
        assert names(checkpointer.parent) == []


def refuse(number: int) -> Callable[..., None]:
    def call(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(("number", "words"), [(errno.EDQUOT, "quota used up"), (errno.ENOSPC, "disk full")])
@pytest.mark.parametrize("method", QUICK)
def test_lack_of_room_that_only_fsync_tells_is_named_and_nothing_is_left(
    tmp_path, monkeypatch, method, number, words, nothing_left_running
):
    state = make_state(1, megabytes=2)
    with closing(checkpointer_on(tmp_path, method, tmp_path, wait="return")) as checkpointer:
        save(checkpointer, 1, state)
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", refuse(number))
            with pytest.raises(
                CheckpointError,
                match=f"^{words}( in the local folder)?: the checkpoints need 2 MB, [0-9,]+ MB are free$",
            ):
                save(checkpointer, 2, state)
        assert names(checkpointer.parent) == ["checkpoint-1"]
        assert_same(load(save(checkpointer, 3, state)), state)


@pytest.mark.parametrize(("module", "call"), [(direct, "reserve"), (os, "pwrite"), (os, "ftruncate")])
@pytest.mark.parametrize("method", ["fast", "fast-async"])
def test_a_quota_that_ends_a_direct_write_is_named(tmp_path, monkeypatch, method, module, call, nothing_left_running):
    with closing(checkpointer_on(tmp_path, method, tmp_path)) as checkpointer:
        with monkeypatch.context() as broken:
            broken.setattr(module, call, refuse(errno.EDQUOT))
            with pytest.raises(CheckpointError, match=r"^quota used up: the checkpoints need 9 MB, "):
                save(checkpointer, 1, make_state(1, megabytes=9))
        assert names(checkpointer.parent) == []


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "free_bytes", "words"),
    [
        (OSError(errno.ENOSPC, "x"), 9, "disk full"),
        (OSError(errno.EDQUOT, "x"), 9, "quota used up"),
        (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), 9, "quota used up"),
        (RuntimeError("No space left on device (os error 28)"), 9, "disk full"),
        (chained(RuntimeError("outer"), chained(ValueError("inner"), OSError(errno.ENOSPC, "x"))), 9, "disk full"),
        (RuntimeError("[enforce fail at inline_container.cc] unexpected pos 64 vs 0"), 9e6, None),
        (RuntimeError("[enforce fail at inline_container.cc] unexpected pos 64 vs 0"), 0, "disk full"),
        (OSError(errno.EIO, "x"), 0, None),
        (ValueError("shape"), 0, None),
        (KeyboardInterrupt(), 0, None),
    ],
)
def test_only_lack_of_room_is_called_so(error, free_bytes, words):
    found = full_disk(error, 5_000_000, free_bytes)
    assert found == (words and f"{words}: the checkpoints need 5 MB, 0 MB are free")


def test_a_chain_of_errors_that_bites_its_own_tail_ends():
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert list(chain(first)) == [first, second]


# Other faults beside training.


@pytest.mark.parametrize("method", ["safetensors", "dcp-async", "staged", "fast-async"])
@pytest.mark.parametrize("surfaces_at", ["save", "wait", "close"])
def test_what_broke_in_the_background_surfaces_once_at_the_next_call(
    tmp_path, monkeypatch, method, surfaces_at, nothing_left_running
):
    told = []
    state = make_state(1, megabytes=1)
    checkpointer = checkpointer_on(tmp_path, method, tmp_path, wait="return", on_durable=told.append)
    with closing(checkpointer):
        save(checkpointer, 1, state)
        with monkeypatch.context() as broken:
            broken.setattr(commit, "make_durable", refuse(errno.EIO))
            checkpointer.save(2, lambda: state, write_nothing)  # looks fine
            while checkpointer.busy:
                time.sleep(0.01)
        with pytest.raises(OSError) as caught:
            {"save": lambda: save(checkpointer, 3, state), "wait": checkpointer.wait, "close": checkpointer.close}[
                surfaces_at
            ]()
        assert caught.value.errno == errno.EIO
        assert names(checkpointer.parent) == ["checkpoint-1"]
        assert told == [1]
        if surfaces_at != "close":
            checkpointer.wait()
            assert_same(load(save(checkpointer, 4, state)), state)


@pytest.mark.parametrize("method", QUICK)
def test_an_error_of_a_small_file_leaves_nothing(tmp_path, method, nothing_left_running):
    def broken(folder: Path) -> None:
        (folder / "half.json").write_text("{")
        raise ValueError("not serialisable")

    with closing(checkpointer_on(tmp_path, method, tmp_path)) as checkpointer:
        with pytest.raises(ValueError, match="not serialisable"):
            checkpointer.save(1, lambda: make_state(1, megabytes=1), broken)
        checkpointer.wait()
        assert names(checkpointer.parent) == []


def test_an_error_while_the_state_is_taken_leaves_the_last_checkpoint_of_that_step(tmp_path):
    def broken() -> None:
        raise ValueError("no state")

    state = make_state(1, megabytes=1)
    with closing(checkpointer_on(tmp_path, "fast", tmp_path)) as checkpointer:
        folder = save(checkpointer, 1, state)
        with pytest.raises(ValueError, match="no state"):
            checkpointer.save(1, broken, write_nothing)
        with pytest.raises(CheckpointError, match="model is a set"):
            checkpointer.save(1, lambda: {"model": {1}}, write_nothing)
        assert names(checkpointer.parent) == ["checkpoint-1"]
        assert_same(load(folder), state)


@pytest.mark.parametrize("method", [method for method in QUICK if method in SNAPSHOTS])
def test_a_snapshot_that_memory_does_not_hold_is_refused_with_the_figures(tmp_path, monkeypatch, method):
    with closing(checkpointer_on(tmp_path, method, tmp_path)) as checkpointer:
        monkeypatch.setattr(checkpointer_module, "free_memory_bytes", lambda: 1_200_000)
        with pytest.raises(CheckpointError) as caught:
            save(checkpointer, 1, make_state(1, megabytes=2))
        assert str(caught.value) == (
            f"method={method} needs 2 MB of memory for its snapshot, and 1 MB are free; use a method without one, "
            "such as fast"
        )
        assert names(checkpointer.parent) == []
        save(checkpointer, 2, {"x": torch.zeros(100)})


@pytest.mark.parametrize("method", [method for method in QUICK if method not in SNAPSHOTS])
def test_a_method_without_a_snapshot_needs_no_memory_for_one(tmp_path, monkeypatch, method):
    monkeypatch.setattr(checkpointer_module, "free_memory_bytes", lambda: 0)
    with closing(checkpointer_on(tmp_path, method, tmp_path)) as checkpointer:
        assert_same(load(save(checkpointer, 1, make_state(1, megabytes=1))), make_state(1, megabytes=1))


def test_memory_that_is_refused_to_one_snapshot_does_not_spoil_the_next(tmp_path, monkeypatch):
    state = make_state(1, megabytes=1)
    with closing(checkpointer_on(tmp_path, "fast-async", tmp_path)) as checkpointer:
        save(checkpointer, 1, state)
        with monkeypatch.context() as broken:
            broken.setattr(direct, "_image", lambda size_bytes: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                save(checkpointer, 2, make_state(2, megabytes=3))
        assert names(checkpointer.parent) == ["checkpoint-1"]
        assert_same(load(save(checkpointer, 3, state)), state)


def test_the_free_memory_is_no_more_than_the_machine_has():
    assert 0 < free_memory_bytes() <= psutil.virtual_memory().total


def test_a_saving_process_that_is_killed_fails_the_save_instead_of_hanging_it(tmp_path, nothing_left_running):
    state = make_state(1, megabytes=1)
    before = helpers()
    outcome: list[Path | Exception] = []
    with closing(checkpointer_on(tmp_path, "dcp-async-process", tmp_path)) as checkpointer:
        save(checkpointer, 1, state)
        for child in helpers() - before:
            if isinstance(child, psutil.Process):
                child.kill()
                while child.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.01)

        def attempt() -> None:
            try:
                outcome.append(save(checkpointer, 2, state))
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(20)
    assert outcome and isinstance(outcome[0], Exception)
    assert names(tmp_path / "checkpoints") == ["checkpoint-1"]


KILLED = """
import os, sys, time
from pathlib import Path
import torch
from stallbench.checkpointing import direct
from stallbench.checkpointing.checkpointer import Checkpointer
from stallbench.spans import Timeline
from stallbench.storage.targets import Storage, Workspace
folder = Path(sys.argv[1])
checkpointer = Checkpointer(
    "fast-async", Workspace(None, folder, Storage("-", "-")), folder / "checkpoints", Timeline(), local=folder
)
checkpointer.save(1, lambda: {"x": torch.arange(3_000_000)}, lambda folder: None)
checkpointer.wait()
pwrite = os.pwrite
def slow(descriptor, block, begin):
    written = pwrite(descriptor, block, begin)
    os.write(1, b"writing\\n")  # in one piece: several threads write
    time.sleep(60)
    return written
os.pwrite = slow
checkpointer.save(2, lambda: {"x": torch.arange(3_000_000)}, lambda folder: None)
time.sleep(60)
"""


def test_a_process_killed_in_the_middle_of_a_save_leaves_the_last_checkpoint_and_its_rest_is_cleared(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout.readline() == "writing\n"
        child.send_signal(signal.SIGKILL)
    parent = tmp_path / "checkpoints"
    assert names(parent) == [".checkpoint-2.stallbench-partial", "checkpoint-1"]
    assert [path.name for path in commit.complete_checkpoints(parent)] == ["checkpoint-1"]
    with closing(checkpointer_on(tmp_path, "fast", tmp_path)):
        assert names(parent) == ["checkpoint-1"]
    assert_same(load(parent / "checkpoint-1"), {"x": torch.arange(3_000_000)})
