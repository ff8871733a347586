import math

import pytest

from stallbench.config import PROFILES, ConfigError, StudyConfig, Target, TrialConfig, parse_target

TWO = (Target(name="a", location="/x"), Target(name="b", location="/y"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"every_steps": 0}, "would never save"),
        ({"every_steps": 5, "every_s": 1.0}, "exclude each other"),
        ({"steps": 4, "every_steps": 5}, "steps=4 is fewer than one interval of every_steps=5"),
        ({"steps": 12, "every_steps": 5}, "use steps=10 or steps=15"),
        ({"steps": 5, "every_steps": 5, "warmup_saves": 1}, "nothing would be measured"),
        ({"steps": 4, "every_steps": 1, "warmup_steps": 4}, "all warm-up"),
        ({"steps": 0}, "steps=0 is refused"),
        ({"steps": "many"}, "steps='many' is refused"),
        ({"steps": 2.5}, "steps=2.5 is refused"),
        ({"learning_rate": math.nan}, "learning_rate=nan is refused"),
        ({"save_limit_s": 0}, "save_limit_s=0 is refused"),
        ({"wait": "sometimes"}, "wait='sometimes' is refused"),
        ({"target_name": "a/b"}, "target_name='a/b' is refused: it must be a plain file name"),
        ({"stepz": 4}, "unknown parameter stepz=4; known are: "),
    ],
)
def test_a_bad_trial_is_refused_in_one_line_that_names_field_and_value(values, words):
    with pytest.raises(ConfigError) as refused:
        TrialConfig.parse(**values)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/mnt/nas", "write NAME=DIRECTORY"),
        ("=/mnt/nas", "name='' is refused"),
        ("nas=", "location='' is refused"),
        ("a/b=/mnt", "plain file name"),
        ("..=/mnt", "plain file name"),
        ("a{b}=/mnt", "plain file name"),
        (" a=/mnt", "plain file name"),
        ("x" * 101 + "=/mnt", "at most 100 bytes"),
    ],
)
def test_a_bad_target_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_target(text)


def test_a_target_may_have_spaces_dots_unicode_and_an_equals_sign_in_its_path():
    target = parse_target("my disk.ü=/mnt/a=b c")
    assert (target.name, target.location) == ("my disk.ü", "/mnt/a=b c")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"targets": ()}, "name at least one target"),
        ({"targets": (TWO[0], Target(name="A", location="/z"))}, "stands for more than one target"),
        ({"targets": TWO, "blocks": 0}, "blocks=0 is refused"),
        ({"targets": TWO, "waits": ("return", "return")}, "each may be named once"),
        ({"targets": TWO, "waits": ("never",)}, "refused"),
    ],
)
def test_a_bad_study_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        StudyConfig.parse(**values)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_a_valid_study(profile):
    config = StudyConfig.parse(targets=TWO, **PROFILES[profile])
    assert config.planned_saves > config.warmup_saves
    assert config.trials == config.blocks * 2 * 2


def test_a_local_model_and_data_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").touch()
    (tmp_path / "model").mkdir()
    config = TrialConfig.parse(model="model", dataset="./rows.csv")
    assert (config.model, config.dataset) == (str(tmp_path / "model"), str(tmp_path / "rows.csv"))
    assert TrialConfig.parse(model="owner/name").model == "owner/name"
