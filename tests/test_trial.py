"""Trials run in this process, on real files, with a tiny model."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from conftest import FAST_NAS, contents, foreign_files, run
from stallbench.config import ConfigError, TrialConfig
from stallbench.storage.emulated import default_folder
from stallbench.storage.ownership import sweep
from stallbench.trial import Trial, TrialError


@pytest.fixture
def trial(tmp_path, tiny):
    """Make a trial; ``overrides`` replace the tiny parameters."""

    def make(target: Path | str, **overrides: object) -> Trial:
        out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        values = tiny | {"target": str(target), "out": str(out)} | overrides
        return Trial(TrialConfig.parse(**values))

    return make


@pytest.fixture
def place(tmp_path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    foreign_files(folder)
    return folder


def reason(trial: Trial) -> str:
    assert not (trial.out / "trial.json").exists()
    return json.loads((trial.out / "failure.json").read_text())["reason"]


def test_the_losses_are_the_same_on_every_target_and_under_every_wait_rule(trial, place):
    runs = [
        run(trial(target, wait=wait))
        for target, wait in ((place, "durable"), (place, "return"), (FAST_NAS, "durable"), (FAST_NAS, "return"))
    ]
    losses = [result["losses"] for result, _ in runs]
    assert len(losses[0]) == 5
    assert losses == [losses[0]] * 4
    assert run(trial(place, seed=1))[0]["losses"] != losses[0]


def test_the_target_is_as_it_was_and_the_restore_was_proven(trial, place):
    before = contents(place)
    result, spans = run(trial(place))
    assert contents(place) == before
    assert result["checks"]["restored_equal"] and result["checks"]["next_step_equal"]
    assert list(spans[spans.kind == "restore"].part) == ["weights", "optimizer", "rng"]
    expected = "cold" if hasattr(os, "posix_fadvise") else "unknown"
    assert set(spans[spans.kind == "restore"].cache_data) == {expected}


def test_a_save_holds_its_write_and_its_sync_and_waits_as_told(trial, place):
    for wait in ("durable", "return"):
        _, spans = run(trial(place, wait=wait, steps=6))
        saves, calls, syncs = (spans[spans.kind == kind].set_index("step") for kind in ("save", "call", "sync"))
        assert list(saves.index) == [2, 4, 6]
        assert list(saves.warmup) == [True, False, False]
        assert (saves.files == 7).all() and (saves.size_bytes > 5e6).all()
        assert (calls.end_s >= saves.start_s).all() and (syncs.parent.values == saves.id.values).all()
        if wait == "durable":
            assert (saves.end_s >= syncs.end_s).all()
        else:
            assert (syncs.start_s >= calls.end_s).all()
            # The stall ends when the call is back; what takes longer happens beside the training.
            assert (saves.end_s - calls.end_s < 0.05).all()
        deletes = len(spans[spans.kind == "delete"])
        assert deletes == 1 if wait == "durable" else deletes <= 1


def test_an_emulated_save_takes_as_long_as_the_arithmetic_says(trial):
    slow = "emulated:hdd-nas-1gbe?disk_bytes_per_s=1e7&link_bytes_per_s=5e7&server_cache_bytes=0"
    for wait in ("durable", "return"):
        _, spans = run(trial(slow, wait=wait))
        save = spans[spans.kind == "save"].iloc[-1]
        write = spans[spans.kind == "write"].iloc[-1]
        sync = spans[spans.kind == "sync"].iloc[-1]
        # Without a cache, acknowledged is on the disk: bytes / rate and a position and four round trips a file.
        least_s = save.size_bytes / 1e7 + save.files * (0.01217 + 4 * 0.0002)
        assert least_s * 0.99 < write.end_s - save.start_s < least_s * 1.1 + 0.5
        assert sync.end_s - sync.start_s < 0.1


def test_saving_by_time_saves_and_ends_with_a_save(trial, place):
    _, spans = run(trial(place, every_steps=0, every_s=0.001, steps=3))
    assert list(spans[spans.kind == "save"].step) == [1, 2, 3]
    _, spans = run(trial(place, every_steps=0, every_s=1000, steps=3, warmup_saves=0))
    assert list(spans[spans.kind == "save"].step) == [3]


def test_only_as_many_checkpoints_stay_as_asked(trial, place):
    one = trial(place, steps=8, keep=1)
    one.put_data()
    one.train()
    left = sorted(path.name for path in (one.workspace.folder / "checkpoints").iterdir())
    assert left == ["checkpoint-8"]
    one.restore()
    one.control()
    one.finish()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_with_one_changed_bit_is_caught(trial, place, file):
    one = trial(place)
    one.put_data()
    one.train()
    path = one.workspace.folder / "checkpoints" / "checkpoint-4" / file
    if file == "scheduler.pt":
        import torch

        state = torch.load(path, weights_only=True)
        state["base_lrs"] = [value * 1.0000001 for value in state["base_lrs"]]
        torch.save(state, path)
    elif file == "rng_state.pth":
        import torch
        from transformers.trainer_pt_utils import safe_globals

        with safe_globals():
            state = torch.load(path, weights_only=True)
        state["cpu"][104] ^= 1  # the low byte of a word; the high half is padding
        torch.save(state, path)
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(TrialError, match="restored state differs from the unbroken run in: "):
        one.restore()
    assert "differs" in reason(one)
    assert not one.workspace.folder.exists()


def slowed_down(trial: Trial) -> Trial:
    """A trial up to its restore, whose probe found next to nothing, as if something else had held the disk."""
    trial.put_data()
    trial.train()
    for span in trial.timeline.spans:
        if span.kind == "raw_read":
            span.end_s = span.start_s + 1e5
    return trial


def test_a_restore_above_a_raw_limit_that_was_disturbed_is_held_against_a_second_probe(trial, place):
    one = slowed_down(trial(place))
    one.restore()
    one.control()
    one.finish()
    assert sum(span.kind == "raw_read" for span in one.timeline.spans) == 2


def test_a_restore_above_the_raw_limit_twice_was_not_cold(trial, place, monkeypatch):
    one = slowed_down(trial(place))
    monkeypatch.setattr("stallbench.trial.raw_limits", lambda workspace, timeline: None)
    with pytest.raises(TrialError, match="above the raw limit of 0 MB/s: some cache below was warm"):
        one.restore()


def test_a_model_with_a_head_for_other_classes_gets_a_new_head(trial, place, tmp_path):
    path = tmp_path / "three.csv"
    path.write_text("text,label\n" + "".join(f"row number {row},class {row % 3}\n" for row in range(30)))
    result, _ = run(trial(place, dataset=str(path)))
    assert result["checks"]["restored_equal"]


def test_a_trial_out_of_order_is_refused(trial, place):
    one = trial(place)
    with pytest.raises(TrialError, match="run put_data, train, restore and control first"):
        one.finish()


def test_results_are_never_written_over(trial, place, tmp_path):
    run(trial(place, out=str(tmp_path / "same")))
    with pytest.raises(ConfigError, match="holds a trial already; name a fresh folder"):
        trial(place, out=str(tmp_path / "same"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"dataset": "nobody/has-this"}, "dataset='nobody/has-this' can't be loaded"),
        ({"text_column": "body"}, "column 'body' is not in the dataset; it has: text, label"),
        ({"dataset": "numbers.csv"}, "column 'text' must hold text"),
        ({"dataset": "empty.csv"}, "20 rows have none of one; mend them"),
        ({"eval_rows": 1000}, "has 40 rows, fewer than eval_rows=1000"),
        ({"model": "nobody/has-this"}, "can't be loaded"),
    ],
)
def test_data_or_a_model_that_cannot_be_had_fails_with_its_name(trial, place, tmp_path, monkeypatch, overrides, words):
    monkeypatch.chdir(tmp_path)
    Path("numbers.csv").write_text("text,label\n" + "".join(f"{row},x\n" for row in range(40)))
    Path("empty.csv").write_text("text,label\n" + "".join(f'"{"" if row % 2 else row}",x\n' for row in range(40)))
    one = trial(place, **overrides)
    with pytest.raises(ConfigError):
        one.put_data()
    assert words in reason(one)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "quota used up: the checkpoints need 12 MB, "),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "disk full: the checkpoints need 12 MB, "),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk full: "),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "OSError: [Errno 5] Input/output error"),
        (ValueError("first line\nsecond line"), "ValueError: first line"),
        (KeyboardInterrupt(), "stopped before the trial ended"),
    ],
)
def test_every_failure_has_one_plain_line(trial, place, error, words):
    one = trial(place)
    text = one.explain(error)
    assert text.startswith(words) and "\n" not in text
    one.fail("end of the test")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_fills_up_fails_the_trial_as_disk_full(trial, tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(mount)], check=True)
    try:
        one = trial(mount, steps=8)
        one.put_data()
        (mount / "somebody").write_bytes(b"x" * (93 << 20))  # after the check, as on a shared disk
        with pytest.raises(Exception):  # noqa: B017 (torch, safetensors and the OS each raise their own)
            one.train()
        assert "disk full: the checkpoints need" in reason(one)
        assert [path.name for path in mount.iterdir()] == ["somebody"]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
def test_a_mount_that_vanishes_fails_the_trial_and_the_disk_below_takes_nothing(trial, tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(mount)], check=True)
    one = trial(mount)
    one.put_data()
    subprocess.run(["umount", "--lazy", str(mount)], check=True)
    with pytest.raises(OSError):
        one.train()
    assert "gone" in reason(one)
    assert list(mount.iterdir()) == []


def test_an_interval_too_long_to_count_a_save_fails_the_trial(trial, place):
    one = trial(place, every_steps=0, every_s=1000, steps=3)
    one.put_data()
    with pytest.raises(TrialError, match="1 saves were made, warmup_saves=1 of them are not counted"):
        one.train()


def test_a_save_past_its_limit_ends_the_process_with_its_reason(tmp_path, tiny):
    slow = "emulated:hdd-nas-1gbe?disk_bytes_per_s=1e6&server_cache_bytes=0"
    script = (
        "import json, sys\nfrom stallbench.config import TrialConfig\nfrom stallbench.trial import Trial\n"
        "trial = Trial(TrialConfig.parse(**json.loads(sys.argv[1])))\n"
        "trial.put_data()\ntrial.train()\n"
    )
    out = tmp_path / "out"
    values = tiny | {"target": slow, "save_limit_s": 1, "out": str(out)}
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(values)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 70, done.stderr
    assert json.loads((out / "failure.json").read_text())["reason"] == (
        "the save at step 2 passed its limit of save_limit_s=1 s"
    )
    # The process ended at once, so its folder waits for the next start.
    folder, _ = default_folder()
    left = [path for path in folder.glob("stallbench-*") if not psutil.pid_exists(owner(path))]
    assert left
    sweep(folder)
    assert not any(path.exists() for path in left)


def owner(folder: Path) -> int:
    return json.loads((folder / "stallbench.json").read_text())["pid"]
