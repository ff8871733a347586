"""A load trial's parts, on real files and in real processes: the dataset, the reads, the neighbours, the trial."""

import json
import os
import shutil
import signal
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from conftest import FAST_NAS, contents, foreign_files
from stallbench import estimate
from stallbench.config import ConfigError, Target
from stallbench.load import dataset, neighbours, reading
from stallbench.load.config import Load, LoadStudyConfig, LoadTrialConfig
from stallbench.load.neighbours import Experiment
from stallbench.load.trial import PHASES, LoadTrial, Place
from stallbench.results import TRIAL, read_json
from stallbench.spans import Timeline
from stallbench.storage import targets

SMALL = Load(files=120)


@pytest.fixture
def workspace(tmp_path):
    with targets.claim(Target(name="disk", location=str(tmp_path)), "0123456789ab") as owned:
        yield targets.open_workspace(Target(name="disk", location=str(tmp_path)), owned, "trial")


@pytest.fixture
def made(workspace) -> dataset.Dataset:
    return dataset.open_dataset(SMALL, workspace, Timeline())


def reader(made: dataset.Dataset, device=None, workers: int = 2) -> reading.Reader:
    return reading.Reader(made, workers, 8, 0, device)


class Counting:
    """Stands in for an emulated device: leaves a line for each file that it was charged for, from any process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, stream: str, size_bytes: int) -> float:
        with self.path.open("a") as file:
            file.write(f"{stream}\n")
        return 0.0


def test_the_dataset_is_the_same_on_every_target_and_as_it_was_asked_for(made, workspace, tmp_path):
    config = Load(files=1200, file_sigma=2)
    sizes = dataset.sizes(config)
    assert (
        len(sizes) == 1200 and sizes.min() == 1024 and sizes.max() == 16384 and (sizes == dataset.sizes(config)).all()
    )
    assert {dataset.name_of(index).partition("/")[0] for index in range(1200)} == {"00000", "00001"}
    found = contents(made.small)
    assert sorted(len(content) for content in found.values()) == sorted(dataset.sizes(SMALL))
    with targets.claim(Target(name="b", location=str(tmp_path)), "ba9876543210") as owned:
        other = targets.open_workspace(Target(name="b", location=str(tmp_path)), owned, "trial")
        assert contents(dataset.open_dataset(SMALL, other, Timeline()).small) == found
    names = []
    for shard in made.tar:
        with tarfile.open(shard) as tar:
            names += tar.getnames()
    assert names == [f"{index:08d}.txt" for index in range(120)]
    assert json.loads((made.folder / dataset.MANIFEST).read_text()) == dataset.fingerprint(SMALL)


def test_a_later_block_takes_the_dataset_that_is_there_and_makes_nothing(made, workspace):
    before = {path: path.stat().st_mtime_ns for path in made.folder.rglob("*")}
    timeline = Timeline()
    assert dataset.open_dataset(SMALL, workspace, timeline).paths == made.paths
    assert timeline.spans == [] and {path: path.stat().st_mtime_ns for path in made.folder.rglob("*")} == before


def test_another_dataset_or_one_that_is_not_whole_is_refused_by_name(made, workspace):
    with pytest.raises(ConfigError, match=r"target disk holds another dataset \(files=120 instead of 130\)"):
        dataset.open_dataset(Load(files=130), workspace, Timeline())
    with pytest.raises(ConfigError, match=r"holds another dataset \(size_bytes="):
        dataset.open_dataset(Load(files=120, file_median_bytes=5000), workspace, Timeline())
    Path(made.paths[7]).write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"00000/00000007\.txt of the dataset has 5 bytes instead of"):
        dataset.open_dataset(SMALL, workspace, Timeline())
    Path(made.paths[7]).unlink()
    with pytest.raises(ConfigError, match=r"00000/00000007\.txt of the dataset is gone"):
        dataset.open_dataset(SMALL, workspace, Timeline())
    (made.folder / dataset.MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match="holds another dataset"):
        dataset.open_dataset(SMALL, workspace, Timeline())


def test_a_dataset_whose_making_was_killed_is_made_anew(made, workspace):
    found = contents(made.small)
    (made.folder / dataset.MANIFEST).unlink()
    Path(made.paths[3]).unlink()
    again = dataset.open_dataset(SMALL, workspace, Timeline())
    assert contents(again.small) == found


def test_too_few_inodes_or_too_little_room_is_refused_before_anything_is_written(workspace, monkeypatch):
    real = os.statvfs(workspace.folder)
    few = os.statvfs_result([*real[:5], 100, 100, 100, *real[8:]])
    monkeypatch.setattr(dataset.os, "statvfs", lambda path: few)
    with pytest.raises(ConfigError, match=r"target disk has too few inodes: the dataset needs 145, 100 are free"):
        dataset.open_dataset(SMALL, workspace, Timeline())
    without = os.statvfs_result([*real[:5], 0, 0, 0, *real[8:]])  # as btrfs has it: no fixed number
    monkeypatch.setattr(dataset.os, "statvfs", lambda path: without)
    monkeypatch.setattr(dataset.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000))
    with pytest.raises(ConfigError, match=r"target disk is too full: the dataset needs 2 MB, 0 MB are free"):
        dataset.open_dataset(SMALL, workspace, Timeline())
    assert not (workspace.folder.parent / "dataset").exists()


def test_a_pass_reads_every_file_once_whole_and_the_next_one_in_another_order(made):
    with reader(made).small(5, cold=True) as stream:
        found = stream.read_while(lambda: stream.record.frame().epoch.max() < 2)
    first, second = (found.reads[found.reads.epoch == epoch] for epoch in (0, 1))
    assert sorted(first.size_bytes) == sorted(second.size_bytes) == sorted(made.sizes_bytes)
    assert list(first.size_bytes) != list(second.size_bytes)
    assert set(first.worker) == {0, 1} and (found.reads.latency_s > 0).all()
    assert (found.reads.start_s >= found.start_s - 5).all() and found.reads.start_s.is_monotonic_increasing


@pytest.mark.parametrize("kind", ["arrow", "tar"])
def test_shards_hold_the_same_samples(made, kind, tmp_path):
    log = tmp_path / "charged"
    found = reader(made, Counting(log)).shards(kind)
    assert sorted(found.reads.size_bytes) == sorted(made.sizes_bytes) and found.samples == 120
    assert sorted(log.read_text().split()) == sorted(str(path) for path in getattr(made, kind))


def test_an_emulated_device_is_charged_for_each_cold_read_and_for_no_warm_one(made, tmp_path):
    log = tmp_path / "charged"
    for cold in (False, True):
        with reader(made, Counting(log)).small(5, cold) as stream:
            stream.read_while(lambda: stream.record.frame().epoch.max() < 1)
        assert log.exists() == cold
    assert set(log.read_text().split()) == set(made.paths)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_vanishes_or_is_cut_while_it_is_read_is_one_line(made, workers):
    def read() -> None:
        with reader(made, workers=workers).small(5, cold=False) as stream:
            stream.read_while(lambda: True)

    Path(made.paths[11]).write_bytes(b"cut")
    with pytest.raises(reading.ReadError, match=r"^00000/00000011\.txt of the dataset has 3 bytes instead of \d+$"):
        read()
    Path(made.paths[11]).unlink()
    words = r"^00000/00000011\.txt of the dataset can't be read: No such file or directory$"
    with pytest.raises(reading.ReadError, match=words):
        read()


@pytest.mark.parametrize("kind", ["arrow", "tar"])
def test_a_shard_that_is_cut_or_gone_is_one_line(made, kind):
    shard = getattr(made, kind)[2]
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(reading.ReadError, match=rf"^shard 00002\.{kind} can't be read: .+$"):
        reader(made).shards(kind)
    shard.unlink()
    with pytest.raises(reading.ReadError, match=rf"^the {kind} shards hold 105 samples instead of 120$"):
        reader(made).shards(kind)


def test_reads_that_find_no_room_in_the_record_fail_instead_of_going_unrecorded():
    record = reading.Record(1, 0)
    record.add(0, [(1.0, 0.5, 10, 0)] * reading.LEAST_ROWS)
    with pytest.raises(reading.ReadError, match=r"more than 20000 reads in a phase; use a shorter phase_s"):
        record.add(0, [(1.0, 0.5, 10, 0)])
    assert list(record.frame(1.0).latency_s) == [] and set(record.frame().latency_s) == {0.5}


def experiments(folder: Path, count: int, seconds: float = 0.3) -> list[Experiment]:
    meeting = folder / "meeting"
    meeting.mkdir()
    places = [folder / f"e{number}" for number in range(count)]
    for place in places:
        place.mkdir()
    return [
        Experiment(number, str(meeting), str(place), 0.01, 4, seconds, 1 << 20, number)
        for number, place in enumerate(places)
    ]


def test_neighbours_begin_together_read_the_shared_dataset_and_save_their_own(made, tmp_path):
    own = experiments(tmp_path, 2)
    found = neighbours.run(own, made.paths, limit_s=60)
    assert [one.lost for one in found] == ["", ""] and found[0].start_s == found[1].start_s
    assert all(one.samples == 4 * len(one.waits_s) > 0 and one.save_end_s > one.save_start_s for one in found)
    assert [(Path(one.folder) / "checkpoint").stat().st_size for one in own] == [1 << 20] * 2


def test_one_killed_neighbour_costs_its_own_result_only(made, tmp_path):
    own = experiments(tmp_path, 2, seconds=2.0)

    def kill() -> None:
        until_s = time.monotonic() + 30
        while not (tmp_path / "meeting" / neighbours.GO).exists() and time.monotonic() < until_s:
            time.sleep(0.02)
        children = psutil.Process().children()
        next(child for child in children if '"number": 1,' in " ".join(child.cmdline())).send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = neighbours.run(own, made.paths, limit_s=60)
    killer.join()
    assert [one.lost for one in found] == ["", "killed by signal 9"] and found[0].samples > 0


def test_neighbours_that_fail_or_hang_are_lost_with_the_reason(made, tmp_path):
    missing = [*made.paths[:5], "/nowhere/file.txt"]
    found = neighbours.run(experiments(tmp_path / "a", 1) if (tmp_path / "a").mkdir() is None else [], missing, 60)
    assert "No such file or directory: '/nowhere/file.txt'" in found[0].lost
    (tmp_path / "b").mkdir()
    found = neighbours.run(experiments(tmp_path / "b", 1, seconds=600), made.paths, limit_s=1)
    assert found[0].lost == "it passed its time limit"
    assert not [one for one in psutil.Process().children() if "neighbours" in " ".join(one.cmdline())]


TINY_LOAD = {
    "files": 120, "phase_s": 0.2, "accelerator_s": 0.1, "neighbours": 2, "neighbour_s": 0.2, "iterations": 1,
    "iteration_steps": 2, "save_pause_s": 0.05, "batch_size": 2, "max_tokens": 8,
}  # fmt: skip


def trial(target: str | Path, out: Path, model: Path, **settings) -> LoadTrial:
    return LoadTrial(LoadTrialConfig.parse(target=str(target), out=str(out), model=str(model), **TINY_LOAD | settings))


def test_no_phase_and_no_number_of_neighbours_reads_the_files_in_the_order_of_another(made, workspace, tmp_path):
    config = LoadTrialConfig(seed=3)
    place = Place(workspace, made, None)
    seeds = [LoadTrial._reader(SimpleNamespace(config=config), name, 1, place).seed for name in PHASES]
    for count in (1, 2, 4):
        seeds += [one.seed for one in neighbours.planned(config, count, "", str(tmp_path), 1, None)]
    assert len(set(seeds)) == len(PHASES) + 1 + 2 + 4


def test_a_file_that_vanishes_fails_the_trial_with_one_line_and_harms_nothing_else(tmp_path, tiny_model):
    place = tmp_path / "place"
    place.mkdir()
    foreign_files(place)
    before = contents(place)
    one = trial(place, tmp_path / "out", tiny_model)
    one.put_data()
    spans = []
    for stay in ([], one._here.dataset.paths):
        with one._cold_reads("a phase", one._here) as span:
            spans.append(span)
            for path in stay:
                Path(path).read_bytes()
    assert [span.cache_data for span in spans] == ["cold", "warm"]  # what stays in memory isn't called cold
    for path in one._here.dataset.paths[:20]:
        Path(path).unlink()
    with pytest.raises((reading.ReadError, OSError)):
        one.load()
    reason = read_json(tmp_path / "out" / "failure.json")["reason"]
    assert "\n" not in reason and "No such file or directory" in reason and not (tmp_path / "out" / TRIAL).exists()
    assert contents(place) == before


def test_a_trial_that_skipped_a_step_writes_nothing(tmp_path, tiny_model):
    (tmp_path / "place").mkdir()
    one = trial(tmp_path / "place", tmp_path / "out", tiny_model)
    with pytest.raises(RuntimeError, match="run put_data, load, accelerate, neighbours, control, reload first"):
        one.finish()
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"files": 10}, "files=10 is refused"),
        ({"workers": 0}, "workers=0 is refused"),
        ({"phase_s": 0}, "phase_s=0 is refused"),
        ({"method": "trainer"}, "method='trainer' is refused: a load trial saves by one of torch"),
        ({"wait": "return"}, "wait='return' is refused"),
        ({"file_median_bytes": 100}, "file_median_bytes=100 must lie from file_least_bytes=1024"),
        ({"file_sigma": float("nan")}, "file_sigma=nan is refused"),
        ({"stepz": 1}, "unknown parameter stepz=1"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(settings, words):
    with pytest.raises(ConfigError) as refused:
        LoadTrialConfig.parse(**settings)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_an_emulated_device_too_quick_to_be_charged_is_refused_by_name():
    quick = Target(name="quick", location="emulated:hdd-nas-10gbe?position_s=0&round_trip_s=0.0001")
    with pytest.raises(ConfigError, match=r"target quick=.* is refused .*: it charges a small file 0.4 ms"):
        estimate.of_load(LoadStudyConfig(targets=(quick,)))
    assert estimate.of_load(LoadStudyConfig(targets=(Target(name="nas", location=FAST_NAS),))).seconds > 0
