"""Trainers that know nothing of us: watched, and saving by one of our methods."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments, set_seed

import stallbench
from stallbench.checkpointing import commit
from stallbench.config import ConfigError
from stallbench.results import load_study
from stallbench.training import fingerprint


@pytest.fixture
def make(tmp_path, tiny_model, tiny_data):
    """Make a user's own Trainer on a tiny model."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = load_dataset("csv", data_files=str(tiny_data), split="train", cache_dir=str(tmp_path / "cache"))
    rows = rows.class_encode_column("label").map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=8, padding="max_length"), batched=True
    )

    def build(name: str = "out", **arguments) -> Trainer:
        set_seed(0)
        values = {"max_steps": 8, "save_steps": 2, "save_total_limit": 2, "per_device_train_batch_size": 2, "seed": 0}
        values |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
        values |= {"lr_scheduler_type": "constant"}  # else its length would change each step
        return Trainer(
            model=AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2),
            args=TrainingArguments(str(tmp_path / name), **values | arguments),
            train_dataset=rows,
        )

    return build


def checkpoints(trainer: Trainer) -> list[str]:
    return sorted(path.name for path in Path(trainer.args.output_dir).iterdir())


def test_a_watched_training_is_recorded_and_otherwise_as_it_was(make, tmp_path):
    plain, watched = make("plain"), make("watched")
    stallbench.watch(watched, out=tmp_path / "study")
    for trainer in (plain, watched):
        set_seed(0)
        trainer.train()
    assert fingerprint(watched) == fingerprint(plain)
    assert checkpoints(watched) == checkpoints(plain) == ["checkpoint-6", "checkpoint-8"]
    study = load_study(tmp_path / "study")
    assert list(study.events.step) == [2, 4, 6, 8] and list(study.events.warmup) == [True, False, False, False]
    assert (study.events.durable_s >= study.events.stall_s).all() and (study.events.size_bytes > 5e6).all()
    assert len(study.spans[study.spans.kind == "step"]) == 8
    assert str(tmp_path) not in (tmp_path / "study" / "study.json").read_text()


def test_a_second_run_adds_a_block_and_another_study_is_not_touched(make, tmp_path):
    for name in ("one", "two"):
        trainer = make(name)
        stallbench.watch(trainer, out=tmp_path / "study")
        trainer.train()
    study = load_study(tmp_path / "study")
    assert sorted(study.counted.block) == [1, 2] and study.request["blocks"] == 2
    other = make("three")
    stallbench.checkpoint(other, method="fast")
    stallbench.watch(other, out=tmp_path / "study")
    with pytest.warns(UserWarning, match="not recorded: out='study' holds saves by another method"):
        other.train()
    assert other.state.global_step == 8 and len(load_study(tmp_path / "study").counted) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    with pytest.raises(ConfigError, match="holds another study, or something else; name a fresh folder"):
        stallbench.watch(make("four"), out=tmp_path / "mine")


def test_what_fails_in_the_recording_costs_no_training(make, tmp_path, monkeypatch):
    trainer = make()
    stallbench.watch(trainer, out=tmp_path / "study")

    def broken(folder: Path) -> None:
        raise FileNotFoundError("deleted by the Trainer meanwhile")

    monkeypatch.setattr("stallbench.recording.sync_tree", broken)
    with pytest.warns(UserWarning, match="a save has no durable time: deleted by the Trainer meanwhile"):
        trainer.train()
    events = load_study(tmp_path / "study").events
    assert len(events) == 4 and events.durable_s.isna().all() and events.returned_s.notna().all()


def test_files_that_a_callback_puts_into_the_checkpoint_stay(make):
    from transformers import TrainerCallback

    class Adapter(TrainerCallback):
        def on_save(self, args, state, control, **_) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(exist_ok=True)
            (folder / "adapter.txt").write_text(str(state.global_step))

    trainer = make()
    stallbench.checkpoint(trainer, method="fast-async")
    trainer.add_callback(Adapter())
    trainer.train()
    folder = Path(trainer.args.output_dir, "checkpoint-8")
    assert (folder / "adapter.txt").read_text() == "8" and commit.manifest(folder)


def test_two_trainings_of_one_trainer_are_two_blocks(make, tmp_path):
    trainer = make()
    stallbench.watch(trainer, out=tmp_path / "study")
    trainer.train()
    trainer.args.max_steps = 12
    trainer.train(resume_from_checkpoint=True)
    study = load_study(tmp_path / "study")
    steps = study.spans[study.spans.kind == "step"]
    assert list(steps[steps.block == 1].step) == list(range(1, 9))
    assert list(steps[steps.block == 2].step) == [9, 10, 11, 12]
    assert list(steps[steps.block == 2].warmup) == [True, True, False, False]


@pytest.mark.parametrize("order", ["checkpoint first", "watch first"])
def test_a_method_of_ours_saves_keeps_and_resumes_as_the_trainer_would(make, tmp_path, order):
    unbroken = make("unbroken")
    set_seed(0)
    unbroken.train()
    broken = make("broken", max_steps=4)
    attach = [
        lambda: stallbench.checkpoint(broken, method="fast-async"),
        lambda: stallbench.watch(broken, out=tmp_path / "study"),
    ]
    for call in attach if order == "checkpoint first" else attach[::-1]:
        call()
    set_seed(0)
    broken.train()
    assert checkpoints(broken) == ["checkpoint-2", "checkpoint-4"]
    assert all(commit.manifest(Path(broken.args.output_dir, name)) for name in checkpoints(broken))
    study = load_study(tmp_path / "study")
    assert list(study.events.step) == [2, 4] and (study.phases.kind == "snapshot").any()

    resumed = make("broken")
    stallbench.checkpoint(resumed, method="dcp")
    resumed.train(resume_from_checkpoint=True)
    ours, theirs = fingerprint(resumed), fingerprint(unbroken)
    assert {part: ours[part] for part in ("weights", "optimizer", "step")} == {
        part: theirs[part] for part in ("weights", "optimizer", "step")
    }
    assert checkpoints(resumed) == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("turbo", {}, "method='turbo' is unknown here; known are: torch, safetensors"),
        ("trainer", {}, "method='trainer' is unknown here"),
        ("fast", {"save_only_model": True}, "method='fast' can't serve save_only_model"),
        ("fast", {"metric_for_best_model": "loss"}, "method='fast' can't serve metric_for_best_model"),
        (
            "fast",
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2},
            "method='fast' can't serve load_best_model_at_end",
        ),
    ],
)
def test_what_a_method_cannot_serve_is_refused_before_training(make, method, arguments, words):
    if "load_best_model_at_end" in arguments:
        trainer = make()
        trainer.args.load_best_model_at_end = True
    else:
        trainer = make(**arguments)
    with pytest.raises(ConfigError, match=words):
        stallbench.checkpoint(trainer, method=method)


def test_a_trainer_class_with_saves_of_its_own_is_refused(make):
    class Special(Trainer):
        def _save_checkpoint(self, model, trial) -> None:
            super()._save_checkpoint(model, trial)

    trainer = make()
    trainer.__class__ = Special
    with pytest.raises(ConfigError, match="a Trainer class with saves or restores of its own"):
        stallbench.checkpoint(trainer, method="fast")


def test_a_second_method_on_one_trainer_is_refused(make):
    trainer = make()
    stallbench.checkpoint(trainer, method="fast")
    with pytest.raises(ConfigError, match="saves by one of our methods already"):
        stallbench.checkpoint(trainer, method="torch")


def test_two_ranks_record_and_resume_and_the_slowest_counts(tmp_path, tiny_model, tiny_data):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys
            from datasets import load_dataset
            from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
            tokenizer = AutoTokenizer.from_pretrained({str(tiny_model)!r})
            rows = load_dataset("csv", data_files={str(tiny_data)!r}, split="train", cache_dir=sys.argv[1] + "/cache")
            rows = rows.class_encode_column("label").map(
                lambda b: tokenizer(b["text"], truncation=True, max_length=8, padding="max_length"), batched=True)
            arguments = TrainingArguments(sys.argv[1] + "/out", max_steps=int(sys.argv[2]), save_steps=2, report_to=[],
                disable_tqdm=True, use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=2)
            trainer = Trainer(AutoModelForSequenceClassification.from_pretrained({str(tiny_model)!r}, num_labels=2),
                arguments, train_dataset=rows)
            import stallbench
            stallbench.checkpoint(trainer, method="fast-async")
            stallbench.watch(trainer, out=sys.argv[1] + "/study" + sys.argv[2])
            trainer.train(resume_from_checkpoint=len(sys.argv) > 3)
            os.write(1, f"step {{trainer.state.global_step}}\\n".encode())  # whole, whatever the other rank writes
            """
        )
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for arguments in (["4"], ["6", "resume"]):
        done = subprocess.run(
            [*launch, str(tmp_path), *arguments], capture_output=True, text=True, timeout=200, env=environment
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count(f"step {arguments[0]}") == 2
    [trial] = (tmp_path / "study4" / "trials").iterdir()
    assert sorted(path.name for path in trial.glob("*.parquet")) == ["spans-1.parquet", "spans.parquet"]
    study = load_study(tmp_path / "study4")
    assert list(study.events.step) == [2, 4]
    assert sorted(study.spans[study.spans.kind == "step"].step) == [1, 2, 3, 4]
