"""Whole studies through the command line: real kernels, real kills."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import FAST_NAS, contents, foreign_files
from stallbench.results import load_study, scan

SLOW = "emulated:hdd-nas-1gbe?disk_bytes_per_s=1e6&server_cache_bytes=0"
ONE_WAIT = ("--wait", "durable", "--no-report")


def execute(arguments: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=200, env=os.environ | environment)


def start_and_wait_for(arguments: list[str], folder: Path, trials: int) -> subprocess.Popen:
    """Start a study and return once it works on its n-th trial."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 100
    while len(list((folder / "trials").glob("b*"))) < trials and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    return process


def kernels_of(process: subprocess.Popen) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "ipykernel" in " ".join(child.cmdline())
    ]


def two_targets(folder: Path) -> list[str]:
    (folder / "disk").mkdir(exist_ok=True)
    return ["--target", f"disk={folder / 'disk'}", "--target", f"nas={FAST_NAS}"]


def test_a_study_runs_reports_and_leaves_its_targets_as_they_were(finished):
    assert contents(finished.disk) == finished.before
    assert "2 of 2 trials" in finished.run.stdout
    assert "8 trials: 2 blocks x 2 targets x trainer x wait=return and wait=durable" in finished.run.stdout
    study = load_study(finished.folder)
    assert list(study.trials.status) == ["complete"] * 8
    assert study.targets == ["disk 1.ü", "nas"]
    assert len(study.events) == 8 * 2
    assert (study.events.durable_s >= study.events.returned_s).all()
    assert all((finished.folder / "trials" / trial / "notebook.ipynb").exists() for trial in study.trials.trial)
    assert len(study.restores) == 8


def test_blocks_come_in_an_order_that_the_seed_draws():
    from stallbench.config import StudyConfig, Target
    from stallbench.study import plan

    places = (Target(name="a", location="/x"), Target(name="b", location="/y"))
    first, again, other = (
        [
            [(one.target.name, one.wait) for one in block]
            for block in plan(StudyConfig(targets=places, blocks=20, seed=seed))
        ]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert all(sorted(block) == sorted(first[0]) for block in first)
    assert len({tuple(block) for block in first}) > 10


def test_the_losses_of_a_block_agree_and_those_of_two_blocks_do_not(finished):
    losses = {}
    for name, detail in load_study(finished.folder).details.items():
        losses.setdefault(name[:3], []).append(detail["losses"])
    assert all(all(one == block[0] for one in block) for block in losses.values())
    assert losses["b01"][0] != losses["b02"][0]


def test_a_second_run_measures_nothing_and_a_different_request_is_refused(finished, command):
    targets = ("--target", f"disk 1.ü={finished.disk}", "--target", f"nas={FAST_NAS}", "--out", str(finished.folder))
    before = {path: path.stat().st_mtime_ns for path in (finished.folder / "trials").rglob("*")}
    again = execute(command(*targets, "--blocks", "2", "--no-report"))
    assert again.returncode == 0
    assert "8 of 8 trials are there already." in again.stdout
    assert {path: path.stat().st_mtime_ns for path in (finished.folder / "trials").rglob("*")} == before
    refused = execute(command(*targets, "--blocks", "3"))
    assert refused.returncode == 2
    assert "holds another study (blocks differs); name a fresh folder with --out" in refused.stderr
    moved = execute(command("--target", f"disk 1.ü={finished.disk.parent}", *targets[2:], "--blocks", "2"))
    assert moved.returncode == 2
    assert "holds another study (targets differs)" in moved.stderr


@pytest.mark.parametrize(("victim", "blocks"), [("runner", 2), ("kernel", 1), ("both", 1)])
def test_a_study_killed_at_some_moment_resumes_to_a_whole_one(tmp_path, command, victim, blocks):
    folder = tmp_path / "results"
    targets = two_targets(tmp_path)
    foreign_files(tmp_path / "disk")
    before = contents(tmp_path / "disk")
    arguments = command(*targets, "--blocks", str(blocks), "--out", str(folder), *ONE_WAIT)
    process = start_and_wait_for(arguments, folder, trials=2)
    time.sleep(
        random.uniform(1.5, 4)
    )  # the kernel is up, the trial is somewhere between its imports and its first save
    victims = kernels_of(process) if victim != "runner" else []
    victims += [psutil.Process(process.pid)] if victim != "kernel" else []
    assert victims
    for one in victims:
        one.kill()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == (1 if victim == "kernel" else -signal.SIGKILL)
    if victim == "kernel":
        assert "FAILED: DeadKernelError" in output
    resumed = execute(arguments)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    trials, _ = scan(folder)
    current = trials[~trials.superseded]
    assert list(current.status) == ["complete"] * 2 * blocks
    # Block 1 was rerun whole, and both of its earlier trials are kept and marked.
    assert sorted(trials[trials.superseded].block) == [1, 1]
    assert list(current[current.block == 1].attempt) == [2, 2]
    assert set(current[current.block > 1].attempt) <= {1}
    assert contents(tmp_path / "disk") == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_in_order_and_leaves_nothing_on_the_targets(tmp_path, command, number):
    folder = tmp_path / "results"
    arguments = command(*two_targets(tmp_path), "--blocks", "1", "--out", str(folder), *ONE_WAIT)
    process = start_and_wait_for(arguments, folder, trials=1)
    time.sleep(2)
    kernels = kernels_of(process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Stopped. The same command goes on from here." in output
    assert "Traceback" not in output
    assert kernels and not any(kernel.is_running() for kernel in kernels)
    assert list((tmp_path / "disk").iterdir()) == []
    trials, _ = scan(folder)
    assert set(trials.status) == {"interrupted"}


def test_a_failing_target_costs_its_own_trials_only(tmp_path, command):
    folder = tmp_path / "results"
    (tmp_path / "disk").mkdir()
    targets = (
        "--target",
        f"disk={tmp_path / 'disk'}",
        "--target",
        f"slow={SLOW}",
        "--blocks",
        "1",
        "--wait",
        "durable",
    )
    run = execute(command(*targets, "--out", str(folder), "--set", "save_limit_s=2"))
    assert run.returncode == 1, run.stdout + run.stderr
    reason = "the save at step 2 passed its limit of save_limit_s=2 s"
    assert f"block 1: slow, trainer, wait=durable: FAILED: {reason}" in run.stdout
    assert "wait=durable: 1 of 1 trials" in run.stdout and "wait=durable: 0 of 1 trials" in run.stdout
    page = (folder / "report" / "index.html").read_text()
    assert reason in page
    assert "Nothing is compared" in page


def test_a_study_that_measured_nothing_is_refused_with_its_own_message(finished, tmp_path):
    folder = tmp_path / "nothing"
    shutil.copytree(finished.folder, folder)
    for marker in folder.glob("trials/*/trial.json"):
        marker.unlink()
    run = execute([sys.executable, "-m", "stallbench", "report", str(folder)])
    assert run.returncode == 2
    assert "measured nothing: no trial of it succeeded" in run.stderr


def test_a_damaged_file_costs_its_trial_and_is_named(finished, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(finished.folder, folder)
    (folder / "trials" / "b01-a1-return-trainer--nas" / "trial.json").write_text("")
    (folder / "trials" / "b02-a1-return-trainer--nas" / "spans.parquet").unlink()
    trials = load_study(folder).trials.set_index("trial")
    assert "trial.json is damaged" in trials.loc["b01-a1-return-trainer--nas"].reason
    assert trials.loc["b02-a1-return-trainer--nas"].reason == "its spans.parquet is gone"
    assert list(trials.status).count("complete") == 6
    (folder / "study.json").write_text("{bad")
    run = execute([sys.executable, "-m", "stallbench", "report", str(folder)])
    assert run.returncode == 2 and "study.json is damaged" in run.stderr and "Traceback" not in run.stderr


def test_one_directory_twice_renders_as_a_control_and_paths_stay_if_asked(tmp_path, command):
    (tmp_path / "disk").mkdir()
    targets = ("--target", f"a={tmp_path / 'disk'}", "--target", f"b={tmp_path / 'disk'}", "--blocks", "1")
    folder = tmp_path / "results"
    refused = execute(command(*targets, "--out", str(folder)))
    assert refused.returncode == 2 and "--control for an A/A study" in refused.stderr
    run = execute(command(*targets, "--control", "--wait", "durable", "--show-paths", "--out", str(folder)))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "A/A control: a and b are one storage." in run.stdout
    assert json.loads((folder / "study.json").read_text())["targets"][0]["path"] == str(tmp_path / "disk")
    assert str(tmp_path / "disk") in (folder / "trials" / "b01-a1-durable-trainer--a" / "notebook.ipynb").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "a=/nowhere/at/all"], "target a='/nowhere/at/all' is missing"),
        (["--target", "a"], "write NAME=DIRECTORY"),
        (["--set", "stepz=3"], "unknown parameter stepz='3'"),
        (["--set", "steps"], "write NAME=VALUE"),
        (["--set", "every_steps=0"], "would never save"),
        (["--profile", "huge"], "choose one of: quick, default, full"),
        (["--blocks", "0"], "blocks=0 is refused"),
        (["--set", "dataset=nowhere.csv"], "dataset='nowhere.csv' is refused: there is no such file"),
        (["--wait", "never"], "is refused"),
    ],
)
def test_a_bad_request_is_refused_in_one_line_before_anything_is_written(tmp_path, arguments, words):
    from typer.testing import CliRunner

    from stallbench.commands.main import app

    folder = tmp_path / "results"
    result = CliRunner().invoke(app, ["run", "--target", f"x={tmp_path}", *arguments, "--out", str(folder)])
    assert result.exit_code == 2
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_study_at_once_are_refused(finished, command):
    import fcntl

    arguments = command("--target", f"disk 1.ü={finished.disk}", "--target", f"nas={FAST_NAS}", "--blocks", "2")
    with (finished.folder / ".running").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        second = execute([*arguments, "--out", str(finished.folder)])
    assert second.returncode == 2 and "is being run by another process" in second.stderr


def test_results_in_a_folder_with_other_things_are_refused(tmp_path, command):
    (tmp_path / "disk").mkdir()
    refused = execute(command("--target", f"a={tmp_path / 'disk'}", "--out", str(tmp_path)))
    assert refused.returncode == 2 and "is not empty and holds no study" in refused.stderr


def test_a_home_that_cannot_be_written_is_no_hindrance(tmp_path, command):
    (tmp_path / "disk").mkdir()
    arguments = command("--target", f"a={tmp_path / 'disk'}", "--blocks", "1", *ONE_WAIT, "--out", str(tmp_path / "r"))
    run = execute(arguments, HOME="/proc/nowhere", XDG_CACHE_HOME="/proc/nowhere", XDG_CONFIG_HOME="/proc/nowhere")
    assert run.returncode == 0, run.stdout + run.stderr
