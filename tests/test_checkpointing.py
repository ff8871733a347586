"""Saves of a full state by every method, on real files: what comes back, when, and under which names."""

import errno
import fcntl
import math
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import FAST_NAS, contents
from stallbench.checkpointing import commit, direct
from stallbench.checkpointing.checkpointer import Checkpointer, load
from stallbench.checkpointing.state import TREE, CheckpointError, flatten, size_bytes, unflatten
from stallbench.config import AS_SHIPPED, EMULATED, METHODS, Target
from stallbench.spans import Span, Timeline
from stallbench.storage.emulated import Device, default_folder, parse_profile
from stallbench.storage.targets import Storage, Workspace

ALL = [method for method in METHODS if method not in AS_SHIPPED]
QUICK = [method for method in ALL if method != "dcp-async-process"]  # its process takes seconds to start
STEP = 7


def make_state(seed: int = 0, elements: int = 200_000) -> dict[str, Any]:
    """A state with every dtype and every kind of layout and of plain value that training states have."""
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(elements // 100, 100, generator=generator)
    floats = large[0]
    return {
        "model": {
            "large": large,
            "half": floats.to(torch.float16),
            "bf16": floats.to(torch.bfloat16),
            "double": floats.double(),
            "odd": torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45]),
            "mask": floats > 0,
            "ids": torch.randint(-(2**62), 2**62, (3, 5), generator=generator),
            "bytes": torch.randint(0, 256, (4097,), generator=generator, dtype=torch.uint8),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 3),
            "transposed": large.T,
            "sliced": large[3:5, 1:7],
            "rows": large[:10],
            "row": large[-1],
        },
        "optimizer": {"state": {0: {"step": torch.tensor(4.0)}, 1: {}}, "param_groups": [{"betas": (0.9, 0.999)}]},
        "scaler": None,
        "seed": seed,
    }


def assert_same(found: Any, expected: Any, place: str = "state") -> None:
    """Equal to the bit, with equal types."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected))
        assert torch.equal(left, right), place
        return
    assert type(found) is type(expected), place
    if isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key in expected:
            assert_same(found[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{place}.{index}")
    else:
        assert found == expected or (found != found and expected != expected), place


def cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: cloned(inner) for key, inner in value.items()}
    return type(value)(cloned(inner) for inner in value) if isinstance(value, list | tuple) else value


@pytest.fixture
def parent(tmp_path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


@pytest.fixture
def make(parent, tmp_path) -> Iterator[Callable[..., Checkpointer]]:
    """Make checkpointers, all on one folder; ``file_system`` is what the folder passes for."""
    made = []

    def build(
        method: str, *, device: Device | None = None, file_system: str = "unknown", folder: Path = parent, **rules: Any
    ) -> Checkpointer:
        workspace = Workspace(Target(name="disk", location=str(folder)), folder, Storage("-", "-", file_system), device)
        made.append(Checkpointer(method, workspace, folder, Timeline(), local=tmp_path / "local", **rules))
        return made[-1]

    yield build
    for checkpointer in made:
        checkpointer.close()


def write_nothing(folder: Path) -> None:
    """A checkpoint without small files of its own."""


def save(checkpointer: Checkpointer, step: int = STEP, state: Any = None) -> Path:
    """Save and wait until it is durable."""
    state = make_state() if state is None else state
    checkpointer.save(step, lambda: state, write_nothing)
    checkpointer.wait()
    return checkpointer.parent / f"checkpoint-{step}"


def spans(checkpointer: Checkpointer, kind: str) -> list[Span]:
    return [span for span in checkpointer.timeline.spans if span.kind == kind]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def slow_sync(monkeypatch) -> threading.Event:
    """Hold every save back before its sync until the event is set."""
    go_on, make_durable = threading.Event(), commit.make_durable

    def wait_first(*arguments: Any) -> None:
        assert go_on.wait(30)
        make_durable(*arguments)

    monkeypatch.setattr(commit, "make_durable", wait_first)
    return go_on


# What a state is, and how it becomes a flat table.


def test_every_plain_value_comes_back_as_it_was():
    state = {
        "numbers": [0, -1, 2**100, 0.1, -0.0, 1e308, math.nan, math.inf, -math.inf],
        "words": ["", "ü\n\x00", "$tensor"],
        "nothing": None,
        "truth": (True, False),
        "nested": ({"a": [(), [], {}]}, (1, (2,))),
        3: {4: {"x": torch.arange(3)}, -1: "negative"},
    }
    assert_same(unflatten(flatten(state)), state)
    assert math.copysign(1, unflatten(flatten(state))["numbers"][4]) == -1


@pytest.mark.parametrize("key", ["$tensor", "$tuple", "$pairs", "$", "", " ", "ü", "a/b", "..", 0, -1, 1.5, True, None])
def test_any_plain_key_comes_back_as_it_was(key):
    state = {"outer": {key: {"x": torch.arange(3)}, "other": (key,)}}
    assert_same(unflatten(flatten(state)), state)


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}},
        {1: torch.zeros(2), "1": torch.ones(2)},
        {"list": [torch.zeros(2)], "list.0": torch.ones(2)},
        {TREE: torch.zeros(2), "other": torch.ones(2)},
        {"": {"a": torch.zeros(2)}, "a": torch.ones(2)},
    ],
    ids=["dots", "number-and-text", "index", "name-of-the-tree", "empty-key"],
)
def test_tensors_whose_paths_read_the_same_stay_apart(state):
    assert_same(unflatten(flatten(state)), state)


def test_a_tied_tensor_is_stored_once_and_comes_back_under_both_names():
    weight = torch.randn(300, 10)
    state = {"embedding": weight, "head": {"weight": weight}, "parameter": torch.nn.Parameter(weight)}
    flat = flatten(state)
    assert sum(tensor.shape == weight.shape for tensor in flat.values()) == 1
    found = unflatten(flat)
    assert found["embedding"] is found["head"]["weight"] is found["parameter"]
    assert not any(tensor.requires_grad for tensor in flat.values())


def test_empty_tensors_and_other_views_of_one_memory_are_no_tied_tensors():
    memory = torch.arange(16.0).reshape(4, 4)
    state = {
        "all": memory,
        "turned": memory.T,
        "row": memory[0],
        "flat": memory.view(-1),
        "bits": memory.view(torch.int32),
    }
    state |= {"empty": torch.empty(0, 3), "other": torch.empty(2, 0)}
    assert_same(unflatten(flatten(state)), state)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"model": {"layers": [1, {2}]}}, "model.layers.1 is a set"),
        ({"optimizer": {0: {"fn": print}}}, "optimizer.0.fn is a builtin_function_or_method"),
        ({"raw": b"bytes"}, "raw is a bytes"),
        ({"kind": torch.float32}, "kind is a dtype"),
        ({"table": {(1, 2): "pair"}}, "table"),
        ({"table": {b"raw": 1}}, "table"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_place(state, place):
    with pytest.raises(CheckpointError, match=place):
        flatten(state)


# Every method.


@pytest.mark.parametrize("method", ALL)
def test_what_comes_back_is_the_state_at_the_save_though_training_changed_it_meanwhile(make, method):
    checkpointer = make(method, wait="return")
    state = make_state()
    expected = cloned(state)
    changed, begin = threading.Event(), checkpointer._writer.begin

    def held_back(*arguments: Any) -> Callable[[], None] | None:
        rest = begin(*arguments)
        return rest and (lambda: (changed.wait(30), rest()))

    checkpointer._writer.begin = held_back
    checkpointer.save(STEP, lambda: state, write_nothing)
    while True:
        for tensor in flatten(state["model"]).values():
            tensor.zero_()
        changed.set()
        if not checkpointer.busy:
            break
    checkpointer.wait()
    found = commit.complete_checkpoints(checkpointer.parent)
    assert [path.name for path in found] == [f"checkpoint-{STEP}"]
    assert_same(load(found[0]), expected)

    # The second save goes through buffers that are kept, and holds the second state.
    second = make_state(seed=1)
    assert_same(load(save(checkpointer, STEP + 1, second)), second)
    third = make_state(seed=2, elements=300_000)
    assert_same(load(save(checkpointer, STEP + 2, third)), third)


@pytest.mark.parametrize("method", QUICK)
def test_a_checkpoint_is_read_into_memory_that_exists_already(make, method):
    state = {"model": {"fits": torch.randn(500, 9), "other": torch.randn(4)}, "seed": 3}
    folder = save(make(method), state=state)
    model = {"fits": torch.zeros(500, 9), "other": torch.zeros(4, dtype=torch.float64)}
    found = load(folder, into=flatten({"model": model}))
    assert_same(found, state)
    assert_same(model["other"], torch.zeros(4, dtype=torch.float64))
    if method != "torch":
        assert found["model"]["fits"].data_ptr() == model["fits"].data_ptr()


@pytest.mark.parametrize("method", QUICK)
def test_the_phases_of_a_save_are_its_children_and_the_stall_ends_as_the_rule_says(make, method, monkeypatch):
    expected = {"call", "queue", "write", "sync", "commit"}
    expected |= {"snapshot"} if method in ("dcp-async", "fast-async") else set()
    for wait in ("durable", "return"):
        go_on = slow_sync(monkeypatch)
        checkpointer = make(method, wait=wait)
        if wait == "durable":
            threading.Timer(0.1, go_on.set).start()
        checkpointer.save(STEP, make_state, lambda folder: (folder / "small.json").write_text("{}"), warmup=True)
        assert checkpointer.busy == (wait == "return")
        go_on.set()
        checkpointer.wait()
        [saved] = spans(checkpointer, "save")
        phases = [span for span in checkpointer.timeline.spans if span.kind not in ("save", "delete")]
        assert {span.kind for span in phases} == expected
        assert all((span.parent, span.step, span.warmup) == (saved.id, STEP, True) for span in phases)
        assert all(span.start_s <= span.end_s for span in phases)
        [call], [committed] = (spans(checkpointer, kind) for kind in ("call", "commit"))
        sync = spans(checkpointer, "sync")[-1]  # staged has one on the local folder before
        assert call.end_s <= saved.end_s
        if wait == "durable":
            assert saved.end_s >= committed.end_s
            assert saved.duration_s > 0.1
        else:
            assert saved.end_s <= sync.end_s
        folder = checkpointer.parent / f"checkpoint-{STEP}"
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert (saved.size_bytes, saved.files) == (sum(path.stat().st_size for path in files), len(files))
        assert saved.size_bytes >= size_bytes(flatten(make_state())) or method == "torch"  # it stores views once


@pytest.mark.parametrize("method", QUICK)
def test_a_save_that_comes_while_the_last_is_under_way_waits_for_it(make, monkeypatch, method):
    go_on = slow_sync(monkeypatch)
    done = []
    checkpointer = make(method, wait="return", on_durable=done.append)
    checkpointer.save(1, make_state, write_nothing)
    assert names(checkpointer.parent) == [".checkpoint-1.stallbench-partial"] and not done
    threading.Timer(0.2, go_on.set).start()
    captured = []
    checkpointer.save(2, lambda: captured.append(list(done)) or make_state(seed=2), write_nothing)
    checkpointer.wait()
    first, second = spans(checkpointer, "queue")
    assert first.duration_s < 0.1 < second.duration_s
    assert captured == [[1]]  # the state is taken once the last save is over
    assert done == [1, 2]
    assert_same(load(checkpointer.parent / "checkpoint-2"), make_state(seed=2))


@pytest.mark.parametrize("wait", ["return", "durable"])
@pytest.mark.parametrize("method", ["safetensors", "dcp-async", "staged", "fast", "fast-async"])
def test_an_emulated_device_is_charged_with_the_files_and_the_next_save_waits_for_it(make, tmp_path, method, wait):
    slow = FAST_NAS.removeprefix(EMULATED).replace("3e8", "8e6", 1)
    checkpointer = make(method, wait=wait, device=Device(parse_profile(slow), tmp_path / "queue"))
    for step in (1, 2):
        checkpointer.save(step, make_state, write_nothing)
    checkpointer.wait()
    assert_same(load(checkpointer.parent / "checkpoint-2"), make_state())
    first, second = spans(checkpointer, "save")
    device_s = first.size_bytes / 8e6
    assert device_s > 0.1
    assert spans(checkpointer, "commit")[0].start_s - first.start_s > device_s
    stall_s = second.end_s - first.start_s
    assert stall_s > 2 * device_s if wait == "durable" else stall_s > device_s
    if wait == "return":
        assert spans(checkpointer, "queue")[1].duration_s > device_s / 2
        assert first.duration_s < device_s
    written = [span for span in spans(checkpointer, "write") if span.part != "local"]
    if method in ("staged", "fast-async", "dcp-async") and wait == "return":
        assert written[0].start_s >= first.end_s
    if method in ("safetensors", "fast"):
        assert [span.kind for span in checkpointer.timeline.spans if span.kind in ("serialize", "write")] == [
            "serialize",
            "write",
        ] * 2


@pytest.mark.parametrize("wait", ["return", "durable"])
def test_older_checkpoints_go_only_when_the_newer_one_is_complete(make, monkeypatch, wait):
    checkpointer = make("fast", wait=wait, keep=2)
    kept = []
    publish = commit.publish

    def look(partial: Path, final: Path) -> None:
        kept.append([path.name for path in commit.complete_checkpoints(checkpointer.parent)])
        publish(partial, final)

    monkeypatch.setattr(commit, "publish", look)
    for step in (2, 4, 10, 12):
        save(checkpointer, step)
    assert kept == [
        [],
        ["checkpoint-2"],
        ["checkpoint-2", "checkpoint-4"],
        ["checkpoint-4", "checkpoint-10"],
    ]
    assert names(checkpointer.parent) == ["checkpoint-10", "checkpoint-12"]
    deletes = spans(checkpointer, "delete")
    assert [span.step for span in deletes] == [10, 12]
    assert all(span.size_bytes > 500_000 for span in deletes)
    if wait == "durable":
        assert deletes[0].start_s >= spans(checkpointer, "save")[2].end_s


@pytest.mark.parametrize("wait", ["return", "durable"])
def test_the_checkpoint_just_saved_stays_though_an_abandoned_run_left_later_steps(make, wait):
    save(make("safetensors"), 100)
    resumed = make("safetensors", wait=wait, keep=1)
    folder = save(resumed, 3)
    assert commit.manifest(folder)


def test_deletion_spares_what_is_no_complete_checkpoint_of_ours(make, parent):
    foreign = parent / "checkpoint-1"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"somebody's")
    (parent / "checkpoint-best").mkdir()
    checkpointer = make("fast", keep=1)
    for step in (2, 3):
        save(checkpointer, step)
    assert names(parent) == ["checkpoint-1", "checkpoint-3", "checkpoint-best"]
    assert contents(foreign) == {"model.safetensors": b"somebody's"}


def test_the_guard_is_held_in_the_call_and_in_the_background(make):
    held = []

    @contextmanager
    def guard(step: int) -> Iterator[None]:
        held.append(("begin", step, threading.current_thread() is threading.main_thread()))
        yield
        held.append(("end", step, threading.current_thread() is threading.main_thread()))

    save(make("fast-async", guard=guard))
    assert held == [("begin", STEP, True), ("end", STEP, True), ("begin", STEP, False), ("end", STEP, False)]


# The commit protocol.


class Watch:
    """Look at a folder again and again: which names ever were there, and which checkpoints were not complete."""

    def __init__(self, parent: Path) -> None:
        self.seen: set[str] = set()
        self.incomplete: set[str] = set()
        self._parent, self._over = parent, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.is_set():
            for name in os.listdir(self._parent):
                self.seen.add(name)
                if not name.startswith(".") and commit.manifest(self._parent / name) is None:
                    self.incomplete.add(name)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize("method", QUICK)
def test_nothing_is_visible_under_a_checkpoints_name_before_it_is_complete(make, parent, method):
    checkpointer = make(method, wait="return")
    with Watch(parent) as watch:
        for step in range(1, 4):
            save(checkpointer, step)
    assert ".checkpoint-2.stallbench-partial" in watch.seen
    assert not watch.incomplete
    assert names(parent) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


@pytest.fixture
def events(monkeypatch) -> list[tuple[str, str]]:
    """What is asked of the file system, in order: every fsync and every rename."""
    happened = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        happened.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def recorded_rename(source: Path, destination: Path, **keywords: Any) -> None:
        rename(source, destination, **keywords)
        happened.append(("rename", str(destination)))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    return happened


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("method", QUICK)
def test_every_file_and_folder_is_on_stable_storage_before_the_name_and_the_name_before_it_is_told(
    make, parent, events, method
):
    told = []
    checkpointer = make(method, wait="return", on_durable=lambda step: told.append(len(events)))
    checkpointer.save(STEP, make_state, lambda folder: (folder / "trainer_state.json").write_text("{}"))
    checkpointer.wait()
    final, partial = parent / f"checkpoint-{STEP}", parent / f".checkpoint-{STEP}.stallbench-partial"
    named = events.index(("rename", str(final)))
    synced = {path for kind, path in events[:named] if kind == "fsync"}
    assert {str(partial / path.relative_to(final)) for path in final.rglob("*")} | {str(partial)} <= synced
    assert ("fsync", str(parent)) in events[named : told[0]]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("method", QUICK)
def test_on_a_store_without_rename_the_manifest_comes_last(make, parent, events, monkeypatch, method):
    checkpointer = make(method, file_system="fuse.s3fs", wait="return")
    final = parent / f"checkpoint-{STEP}"
    before = []
    write_manifest = commit.write_manifest
    monkeypatch.setattr(
        commit, "write_manifest", lambda *arguments: (before.extend(events), write_manifest(*arguments))
    )
    with Watch(parent) as watch:
        save(checkpointer)
    assert watch.seen <= {final.name}
    if not method.startswith("dcp"):  # DCP renames its own table of contents
        assert "rename" not in {kind for kind, _ in events}
    others = {str(path) for path in final.rglob("*") if path.is_file() and path.name != commit.MANIFEST}
    assert others and others <= {path for _, path in before}
    assert str(final / commit.MANIFEST) in {path for _, path in events[len(before) :]}
    assert_same(load(final), make_state())
    assert_same(load(save(checkpointer, state=make_state(seed=1))), make_state(seed=1))


def test_on_a_store_without_rename_a_save_cut_short_is_never_complete(make, parent, monkeypatch):
    checkpointer = make("safetensors", file_system="fuse.s3fs", wait="durable")
    save(checkpointer, 1)
    monkeypatch.setattr(commit, "write_manifest", lambda *arguments: None)  # as if killed just before
    monkeypatch.setattr(commit, "sync_file", lambda path: None)
    save(checkpointer, 2)
    assert (parent / "checkpoint-2" / "state.safetensors").exists()
    assert [path.name for path in commit.complete_checkpoints(parent)] == ["checkpoint-1"]
    with pytest.raises(CheckpointError, match="checkpoint-2 is no complete checkpoint"):
        load(parent / "checkpoint-2")


@pytest.mark.parametrize("file_system", ["unknown", "fuse.s3fs"])
@pytest.mark.parametrize("method", QUICK)
def test_saving_the_same_step_again_replaces_it(make, parent, method, file_system):
    checkpointer = make(method, file_system=file_system)
    save(checkpointer, state={"old": torch.zeros(3), "gone": [1]})
    assert_same(load(save(checkpointer, state=make_state(seed=5))), make_state(seed=5))
    assert names(parent) == [f"checkpoint-{STEP}"]


@pytest.mark.parametrize("method", ["torch", "dcp", "fast"])
@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "no manifest", "broken manifest"])
def test_a_damaged_checkpoint_is_not_complete_and_not_picked(make, parent, method, damage):
    checkpointer = make(method)
    save(checkpointer, 9)
    last = save(checkpointer, 10)
    largest = max((path for path in last.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    if damage == "missing":
        largest.unlink()
    elif damage == "shorter":
        os.truncate(largest, largest.stat().st_size - 1)
    elif damage == "longer":
        os.truncate(largest, largest.stat().st_size + 1)
    elif damage == "no manifest":
        (last / commit.MANIFEST).unlink()
    else:
        text = (last / commit.MANIFEST).read_text()
        (last / commit.MANIFEST).write_text(text[:-5])
    assert [path.name for path in commit.complete_checkpoints(parent)] == ["checkpoint-9"]
    with pytest.raises(CheckpointError, match="checkpoint-10 is no complete checkpoint"):
        load(last)


@pytest.mark.parametrize(
    "text", ["[]", "null", "7", '{"files": []}', '{"files": {"a": 1}}', '{"files": null}', "\ud800"]
)
def test_somebody_elses_manifest_is_no_complete_checkpoint(parent, text):
    folder = parent / "checkpoint-3"
    folder.mkdir()
    (folder / commit.MANIFEST).write_bytes(text.encode(errors="surrogatepass"))
    assert commit.manifest(folder) is None
    assert commit.complete_checkpoints(parent) == []


def test_what_a_killed_process_left_is_cleared_and_nothing_else_is_touched(make, parent, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("do not touch")
    for name in (".checkpoint-4.stallbench-partial", ".checkpoint-5.stallbench-replaced"):
        (parent / name / "deep").mkdir(parents=True)
        (parent / name / "deep" / "state.pt").write_bytes(b"half")
    save(make("fast"), 5)  # the folder that the replaced one made room for
    (parent / ".checkpoint-5.stallbench-replaced").mkdir(exist_ok=True)

    foreign = [".checkpoint-4.stallbench-partial.txt", ".checkpoint-x.stallbench-partial", ".checkpoint-4", ".hidden"]
    foreign += [
        "checkpoint-4.stallbench-partial",
        ".checkpoint-4.stallbench-partial2",
        ".xcheckpoint-4.stallbench-partial",
    ]
    for name in foreign:
        (parent / name).mkdir()
        (parent / name / "notes.txt").write_text(name)
    (parent / ".checkpoint-6.stallbench-partial").write_text("a file, no folder")
    (parent / ".checkpoint-7.stallbench-partial").symlink_to(elsewhere, target_is_directory=True)
    (parent / ".checkpoint-8.stallbench-replaced").symlink_to(elsewhere, target_is_directory=True)
    (parent / ".checkpoint-9.stallbench-partial").mkdir()
    (parent / ".checkpoint-9.stallbench-partial" / "link").symlink_to(elsewhere, target_is_directory=True)
    (parent / "thesis.txt").write_text("do not touch")

    make("fast")
    files = [
        ".checkpoint-6.stallbench-partial",
        ".checkpoint-7.stallbench-partial",
        ".checkpoint-8.stallbench-replaced",
    ]
    assert names(parent) == sorted([*foreign, *files, "checkpoint-5", "thesis.txt"])
    assert all((parent / name / "notes.txt").read_text() == name for name in foreign)
    assert contents(elsewhere) == {"thesis.txt": b"do not touch"}
    assert commit.manifest(parent / "checkpoint-5")


def test_a_checkpoint_about_to_be_replaced_gets_its_name_back(make, parent):
    folder = save(make("fast"))
    folder.rename(parent / f".{folder.name}.stallbench-replaced")
    (parent / f".{folder.name}.stallbench-partial").mkdir()
    make("fast")
    assert names(parent) == [folder.name]
    assert_same(load(folder), make_state())


def test_a_link_at_a_checkpoints_name_is_replaced_and_what_it_points_to_stays(make, parent, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("do not touch")
    (parent / f"checkpoint-{STEP}").symlink_to(elsewhere, target_is_directory=True)
    checkpointer = make("fast")
    for seed in (1, 2):
        folder = save(checkpointer, state=make_state(seed))
    assert not folder.is_symlink()
    assert_same(load(folder), make_state(2))
    assert contents(elsewhere) == {"thesis.txt": b"do not touch"}


def test_what_a_callback_put_into_the_folder_beforehand_stays_in_it(make, parent):
    final = parent / f"checkpoint-{STEP}"
    (final / "tokenizer").mkdir(parents=True)
    (final / "adapter.bin").write_bytes(b"adapter")
    (final / "tokenizer" / "vocab.txt").write_bytes(b"words")
    folder = save(make("fast"))
    assert_same(load(folder), make_state())
    assert {"adapter.bin": b"adapter", "tokenizer/vocab.txt": b"words"}.items() <= contents(folder).items()
    assert names(parent) == [folder.name]


def test_a_target_that_vanished_takes_no_save(make, parent):
    checkpointer = make("fast")
    save(checkpointer)
    shutil.rmtree(parent)
    with pytest.raises(OSError, match="the target is gone"):
        save(checkpointer)
    assert not parent.exists()


# The direct writer and reader.

BLOCK = direct.BLOCK_BYTES


def refuse_direct(monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...]) -> None:
    """Let the calls fail as where the page cache can't be passed by; a new file is made all the same."""
    for name in calls:
        original = getattr(os, name)

        def refuse(target: Any, argument: Any, *rest: Any, name: str = name, original: Any = original) -> Any:
            flags = argument if name == "open" else fcntl.fcntl(target, fcntl.F_GETFL)
            if flags & os.O_DIRECT:
                if name == "open":
                    os.close(original(target, argument & ~os.O_DIRECT, *rest))
                raise OSError(errno.EINVAL, "Invalid argument")
            return original(target, argument, *rest)

        monkeypatch.setattr(os, name, refuse)


@pytest.fixture(params=["disk", "memory", "ramfs", "refused at open", "refused at each access"])
def place(request, tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder on the disk, on memory file systems with and without O_DIRECT, and where O_DIRECT is refused."""
    if request.param == "memory":
        with tempfile.TemporaryDirectory(dir=default_folder()[0]) as folder:
            yield Path(folder)
    elif request.param == "ramfs":
        mount = tmp_path / "ramfs"
        mount.mkdir()
        if os.geteuid() or subprocess.run(["mount", "-t", "ramfs", "ramfs", str(mount)]).returncode:
            pytest.skip("nothing can be mounted here")
        yield mount
        subprocess.run(["umount", str(mount)], check=True)
    else:
        if request.param.startswith("refused"):
            refuse_direct(monkeypatch, ("open",) if request.param.endswith("open") else ("pwrite", "preadv"))
        yield tmp_path


def one(count: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(count, dtype=torch.int64).to(torch.uint8)}


@pytest.mark.parametrize("count", [0, 1, 4096, BLOCK - 4096, BLOCK, BLOCK + 1, 2 * BLOCK + 17])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_file_of_any_size_is_a_safetensors_file_and_is_read_back(place, count, snapshot):
    path, tensors = place / "state.safetensors", one(count)
    if snapshot:
        copy = direct.Snapshot()
        copy.take(tensors)
        copy.write(path)
    else:
        direct.DirectWriter().write(path, tensors)
    assert path.stat().st_size == direct.Layout(tensors).size_bytes
    assert_same(load_file(path), tensors)
    assert_same(direct.read(path), tensors)


@pytest.mark.parametrize("elements", [100, 3_000_000])
def test_the_readers_and_the_writers_understand_each_other(place, elements):
    tensors = {name: tensor.contiguous().clone() for name, tensor in flatten(make_state(elements=elements)).items()}
    tensors |= {f"small.{index}": torch.full((index,), index) for index in range(300)}
    for dtype in direct._NAMES:
        tensors[str(dtype)] = torch.arange(5).to(dtype)
    save_file(tensors, place / "theirs.safetensors", metadata={"format": "pt"})
    direct.DirectWriter().write(place / "ours.safetensors", tensors)
    for name in ("theirs.safetensors", "ours.safetensors"):
        found = [direct.read(place / name), load_file(place / name)]
        for read in found:
            assert_same({key: read[key] for key in sorted(read)}, {key: tensors[key] for key in sorted(tensors)})


def test_reading_fills_tensors_in_place_where_they_fit_and_leaves_the_others(tmp_path):
    tensors = {name: torch.randn(40, 50) for name in ("fits", "shape", "dtype", "turned", "missing")}
    path = tmp_path / "state.safetensors"
    direct.DirectWriter().write(path, tensors)
    into = {"fits": torch.nn.Parameter(torch.zeros(40, 50)), "shape": torch.zeros(50, 40)}
    into |= {
        "dtype": torch.zeros(40, 50, dtype=torch.float64),
        "turned": torch.zeros(50, 40).T,
        "extra": torch.zeros(2),
    }
    found = direct.read(path, into)
    assert_same({key: found[key] for key in tensors}, tensors)
    assert set(found) == set(tensors)
    assert found["fits"].data_ptr() == into["fits"].data_ptr()
    assert torch.equal(into["fits"].detach(), tensors["fits"])
    assert not any(into[name].any() for name in ("shape", "dtype", "turned", "extra"))


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x01",
        b"garbage" * 1000,
        b"\xff" * 20_000,
        b"\x00" * 20_000,
        header(b"[]"),
        header(b"7"),
        header(b"{"),
        header(b'{"x": []}'),
        header(b'{"x": {}}'),
        header(b'{"x": {"dtype": "Q1", "shape": [1], "data_offsets": [0, 1]}}', b"1"),
        header(b'{"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}', b"1"),
        header(b'{"x": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}', b"1"),
        header(b'{"x": {"dtype": "U8", "shape": ["a"], "data_offsets": [0, 1]}}', b"1"),
        header(b'{"x": {"dtype": "U8", "shape": [-1], "data_offsets": [1, 0]}}', b"1"),
        header(b'{"x": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}', b"1"),
        (BLOCK + 1).to_bytes(8, "little") + b" " * 100,
        (2**63).to_bytes(8, "little") + b" " * 100,
    ],
)
def test_garbage_is_refused_as_no_whole_file(tmp_path, damaged):
    path = tmp_path / "state.safetensors"
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"state\.safetensors is|shorter"):
        direct.read(path)


@pytest.mark.parametrize("left", [0, 7, 8, 100, 4096, 4097, BLOCK, 2 * BLOCK + 4095])
def test_a_truncated_file_is_refused(tmp_path, left):
    path = tmp_path / "state.safetensors"
    direct.DirectWriter().write(path, one(2 * BLOCK))
    assert left < path.stat().st_size
    os.truncate(path, left)
    with pytest.raises(CheckpointError):
        direct.read(path)


@pytest.mark.parametrize("writer", ["theirs", "ours"])
def test_a_header_larger_than_a_block_is_read(tmp_path, writer):
    path = tmp_path / "state.safetensors"
    tensors = {f"{index:05}{'n' * 400}": torch.tensor([index % 251], dtype=torch.uint8) for index in range(10_000)}
    if writer == "theirs":
        save_file(tensors, path)
    else:
        direct.DirectWriter().write(path, tensors)
    assert int.from_bytes(path.read_bytes()[:8], "little") > BLOCK
    found = direct.read(path)
    assert [found[name].item() for name in tensors] == [index % 251 for index in range(10_000)]


def test_the_tensors_of_a_header_may_stand_in_any_order(tmp_path):
    path = tmp_path / "state.safetensors"
    text = (
        b'{"b": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]},'
        b' "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}'
    )
    path.write_bytes(header(text, bytes([1, 2, 3, 4, 5])))
    found = direct.read(path)
    assert found["a"].tolist() == [1, 2] and found["b"].tolist() == [3, 4, 5]


def test_a_dtype_that_the_file_cannot_hold_is_refused_and_nothing_is_left(make, parent):
    checkpointer = make("fast")
    with pytest.raises(CheckpointError, match=r"wave has dtype torch\.complex128"):
        save(checkpointer, state={"wave": torch.zeros(3, dtype=torch.complex128)})
    assert names(parent) == []
    assert_same(load(save(checkpointer)), make_state())


def test_a_writer_never_writes_over_a_file(tmp_path):
    path = tmp_path / "state.safetensors"
    path.write_text("somebody's")
    with pytest.raises(FileExistsError):
        direct.DirectWriter().write(path, one(10))
    assert path.read_text() == "somebody's"


def test_an_error_in_one_block_ends_the_write_and_is_raised(tmp_path, monkeypatch):
    pwrite = os.pwrite

    def fail(descriptor: int, block: memoryview, begin: int) -> int:
        if begin >= BLOCK:
            raise OSError(5, "Input/output error")
        return pwrite(descriptor, block, begin)

    monkeypatch.setattr(os, "pwrite", fail)
    threads = threading.active_count()
    with pytest.raises(OSError, match="Input/output error"):
        direct.DirectWriter().write(tmp_path / "state.safetensors", one(5 * BLOCK))
    assert threading.active_count() == threads


def test_writes_that_are_cut_short_are_taken_up_again(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, block, begin: pwrite(descriptor, block[:65536], begin))
    direct.DirectWriter().write(tmp_path / "state.safetensors", one(BLOCK + 5))
    assert_same(load_file(tmp_path / "state.safetensors"), one(BLOCK + 5))


# A Trainer with the layers.

STEPS, EVERY = 6, 2


def make_trainer(output_dir: Path, model: torch.nn.Module, rows: list[dict], method: str | None) -> Any:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from stallbench.recording import Recorded, Recorder, add_layer
    from stallbench.training import Checkpointed, Proven

    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=STEPS,
        save_steps=EVERY,
        save_strategy="steps",
        per_device_train_batch_size=2,
        use_cpu=True,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    output_dir.mkdir(parents=True, exist_ok=True)
    timeline, workspace = Timeline(), Workspace(None, output_dir, Storage("-", "-"))
    trainer.recorder = Recorder(timeline, workspace)
    if method:
        trainer.checkpointer = Checkpointer(
            method, workspace, output_dir, timeline, local=output_dir.with_name("local")
        )
        add_layer(trainer, Checkpointed)
    add_layer(trainer, Recorded)
    add_layer(trainer, Proven)
    return trainer


@pytest.fixture
def classifier(tiny_model, tmp_path) -> Callable[..., Any]:
    """Make a Trainer with a fresh tiny classifier, dropout included."""

    def build(method: str | None, output: str = "out") -> Any:
        from transformers import AutoModelForSequenceClassification, set_seed

        set_seed(3)
        model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2)
        rows = [{"input_ids": [5 + row, 7, 9, 11], "labels": row % 2} for row in range(16)]
        return make_trainer(tmp_path / output, model, rows, method)

    return build


def train(trainer: Any, resume: str | bool | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer.train(resume_from_checkpoint=resume)
    trainer.recorder.close()
    if getattr(trainer, "checkpointer", None):
        trainer.checkpointer.close()
    return [loss.item() for loss in trainer.losses], cloned(dict(trainer.model.state_dict()))


@pytest.mark.parametrize("method", ["fast", "fast-async"])
def test_a_resumed_run_goes_on_as_the_unbroken_one_to_the_bit(classifier, tmp_path, method):
    losses, weights = train(classifier(method))
    assert len(set(losses)) == STEPS
    out = tmp_path / "out"
    assert names(out) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    found, resumed = train(classifier(method, "elsewhere"), str(out / "checkpoint-2"))
    assert found == losses[2:]
    assert_same(resumed, weights)

    shutil.rmtree(out / "checkpoint-6" / "pytorch", ignore_errors=True)
    (out / "checkpoint-6" / commit.MANIFEST).unlink()  # not complete: 4 is the newest
    found, resumed = train(classifier(method), True)
    assert found == losses[4:]
    assert_same(resumed, weights)


@pytest.mark.parametrize("resume", [True, "path"])
def test_a_checkpoint_in_the_trainers_own_layout_is_resumed_under_the_layers(classifier, tmp_path, resume):
    losses, weights = train(classifier(None))
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    assert (tmp_path / "out" / "checkpoint-4" / "model.safetensors").exists()
    trainer = classifier("fast")
    found, resumed = train(trainer, resume if resume is True else str(tmp_path / "out" / "checkpoint-4"))
    assert found == losses[4:]
    assert_same(resumed, weights)
    assert [span.part for span in trainer.recorder.timeline.spans if span.kind == "restore"] == [
        "weights",
        "optimizer",
        "rng",
    ]


def test_resuming_where_there_is_no_whole_checkpoint_says_so(classifier, tmp_path):
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    trainer = classifier("fast")
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer.train(resume_from_checkpoint=True)
    trainer.checkpointer.close()


def test_the_newest_checkpoint_is_the_whole_one_of_the_highest_step_whoever_wrote_it(make, parent):
    from stallbench.training import newest

    checkpointer = make("safetensors")
    for step in (9, 10, 100):
        save(checkpointer, step, {"x": torch.zeros(3)})
    (parent / "checkpoint-100" / commit.MANIFEST).unlink()
    for name, files in {
        "checkpoint-50": ["trainer_state.json", "model.safetensors"],
        "checkpoint-60": ["model.safetensors"],
        "checkpoint-70": ["trainer_state.json"],
        "checkpoint-best": ["trainer_state.json", "model.safetensors"],
    }.items():
        (parent / name).mkdir()
        for file in files:
            (parent / name / file).write_text("")
    assert newest(parent).name == "checkpoint-50"
    shutil.rmtree(parent / "checkpoint-50")
    assert newest(parent).name == "checkpoint-10"


@pytest.mark.parametrize("method", ["safetensors", "fast"])
def test_tied_weights_are_stored_once_and_stay_tied(tmp_path, method):
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    def build(output: str) -> Any:
        set_seed(3)
        config = GPT2Config(
            vocab_size=500, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
        )
        rows = [{"input_ids": [row, 2, 3, 4], "labels": [row, 2, 3, 4]} for row in range(16)]
        return make_trainer(tmp_path / output, GPT2LMHeadModel(config), rows, method)

    losses, weights = train(build("out"))
    checkpoint = tmp_path / "out" / "checkpoint-4"
    stored = load_file(checkpoint / "state.safetensors")
    assert sum(name.startswith("model.") and tensor.shape == (500, 16) for name, tensor in stored.items()) == 1
    trainer = build("elsewhere")
    found, resumed = train(trainer, str(checkpoint))
    assert found == losses[4:]
    assert_same(resumed, weights)
    assert trainer.model.lm_head.weight is trainer.model.transformer.wte.weight
