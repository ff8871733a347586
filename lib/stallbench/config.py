"""What a user may ask for: every parameter of a trial and of a study, with its default, validated in one place."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
RESULTS = ROOT / "results"
EMULATED = "emulated:"
LAB = "lab:"
MANIFEST = "stallbench-manifest.json"  # says of a checkpoint that it is complete
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
DATA_SUFFIXES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}

Wait = Literal["return", "durable"]
Method = Literal[
    "trainer", "model-only", "adapter-only",
    "torch", "safetensors", "dcp", "dcp-async", "dcp-async-process", "staged", "fast", "fast-async",
]  # fmt: skip
METHODS: dict[str, str] = {
    "trainer": "transformers.Trainer as shipped: its own layout, no fsync, no commit",
    "model-only": "the Trainer as shipped with save_only_model: training can't be resumed as it was",
    "adapter-only": "the Trainer as shipped, a LoRA adapter (peft) and nothing else: the base model isn't saved",
    "torch": "torch.save of the full state",
    "safetensors": "safetensors.torch.save_file of the full state",
    "dcp": "torch.distributed.checkpoint",
    "dcp-async": "torch.distributed.checkpoint, asynchronous, in a thread",
    "dcp-async-process": "torch.distributed.checkpoint, asynchronous, in a process",
    "staged": "safetensors to a local folder, then a copy to the target beside training",
    "fast": "ours: safetensors past the page cache, several writes deep",
    "fast-async": "ours: one copy in memory, then as fast, beside training",
}
# Saves of the Trainer's own, which the study doesn't change.
AS_SHIPPED = ("trainer", "model-only", "adapter-only")
SNAPSHOTS = ("dcp-async", "dcp-async-process", "fast-async")  # keep a copy of the state in memory
PAST_THE_CACHE = ("fast", "fast-async")  # write by direct I/O
ASYNCHRONOUS = (*SNAPSHOTS, "staged")
REMOTE = ("staged", "dcp", "torch", "safetensors")  # can write to a URL


class ConfigError(ValueError):
    """A request that is refused before anything runs; the message is one line and names field, value and way out."""


class Request(BaseModel):
    """A frozen model that refuses unknown parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, **values: Any) -> Self:
        """Validate ``values``.

        Raises
        ------
        ConfigError
            With one line that names the field, the value and the way out.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_one_line(error, cls)) from None


def _one_line(error: ValidationError, cls: type[BaseModel]) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown parameter {field}={first['input']!r}; known are: {', '.join(cls.model_fields)}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and not field:
        return message
    if first["type"] == "missing":
        return f"{field} is missing; name it"
    shown = isinstance(first["input"], str | int | float) and "://" not in str(first["input"])  # it may hold a secret
    value = f"={first['input']!r}" if shown else ""
    return f"{field}{value} is refused: {message}"


class Target(Request):
    """A named place that holds checkpoints and data.

    ``location`` is a directory, a URL that fsspec knows (``s3://bucket/prefix``, ``sftp://host/path``),
    ``emulated:PROFILE`` for an in-process emulated device, or ``lab:PROFILE`` for one on real kernel I/O.
    """

    name: str
    location: str

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not name or name != name.strip() or name in {".", ".."} or re.search(r"[/\\\x00-\x1f{}]", name):
            raise ValueError("it must be a plain file name, without / \\ { } and without spaces at its ends")
        if len(name.encode()) > 100:
            raise ValueError("it must be at most 100 bytes long")
        return name

    @field_validator("location")
    @classmethod
    def _some_location(cls, location: str) -> str:
        if not location.strip():
            raise ValueError("give a directory, a URL, emulated:PROFILE or lab:PROFILE")
        url = _URL.fullmatch(location)
        if url and (re.match(r"[^:]*:(?!\d+(/|$)).*@", url[2]) or re.search(r"[?#]", url[2])):
            raise ValueError("a URL with a password or a signature; leave it to AWS_*, ~/.aws or the SSH agent")
        if url and not url[2].strip("/"):
            raise ValueError("name what lies behind the scheme, as in s3://bucket/prefix")
        return location

    @property
    def emulated(self) -> bool:
        """Whether the place is an in-process emulated device."""
        return self.location.startswith(EMULATED)

    @property
    def lab(self) -> bool:
        """Whether the place is a lab's, which a study brings up and down."""
        return self.location.startswith(LAB)

    @property
    def scheme(self) -> str:
        """The scheme of a URL; empty for anything else."""
        url = _URL.fullmatch(self.location)
        return url[1] if url else ""

    @property
    def remote(self) -> bool:
        """Whether the place is a URL, which has no directory on this machine."""
        return bool(self.scheme)

    @property
    def mounted(self) -> bool:
        """Whether the place is a directory of the user's."""
        return not (self.emulated or self.lab or self.remote)


def _check_methods(targets: Iterable[Target], methods: Iterable[str]) -> None:
    remote = [target.name for target in targets if target.remote]
    unfit = [method for method in methods if method not in REMOTE]
    if remote and unfit:
        raise ValueError(f"method={unfit[0]!r} can't write to the URL of target {remote[0]}; use {', '.join(REMOTE)}")


def parse_target(text: str) -> Target:
    """Read ``NAME=DIRECTORY``, ``NAME=URL``, ``NAME=emulated:PROFILE`` or ``NAME=lab:PROFILE``.

    Raises
    ------
    ConfigError
        If the text has no ``=``, an empty part, or a name that is not a plain file name.
    """
    name, equals, location = text.partition("=")
    if not equals:
        raise ConfigError(f"target={text!r} is refused: write NAME=DIRECTORY, for example nas=/mnt/nas")
    return Target.parse(name=name, location=location)


def absolute(name: str) -> str:
    """Make a local path absolute, since a trial runs in another folder; other names stay as they are.

    Raises
    ------
    ValueError
        If it names a data file that isn't there.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() in DATA_SUFFIXES and not path.is_file():
        raise ValueError("there is no such file; name one that exists")
    return str(path.absolute()) if path.exists() else name


class Workload(Request):
    """What is trained, how long, and how often it is saved: the part that a trial and a study share."""

    steps: int = Field(30, ge=1, description="optimizer steps of one trial")
    every_steps: int = Field(5, ge=0, description="save after this many steps; 0 to save by time")
    every_s: float = Field(
        0.0, ge=0, description="save when this many seconds have passed since the last save; 0 to save by steps"
    )
    keep: int = Field(
        2, ge=1, description="checkpoints that stay on the target; older ones are deleted outside the save"
    )
    settle: bool = Field(True, description="begin no save before the last is durable; the pause counts as nothing")
    warmup_saves: int = Field(3, ge=0, description="first saves that are recorded, but not counted")
    warmup_steps: int = Field(2, ge=0, description="first steps that are recorded, but not counted")
    batch_size: int = Field(8, ge=1, description="rows of a step")
    max_tokens: int = Field(32, ge=4, description="tokens of a row")
    learning_rate: float = Field(5e-5, gt=0, description="AdamW's peak learning rate")
    model: str = Field(
        "all-MiniLM-L6-v2", min_length=1, description="the packaged default, a Hub name or a local folder"
    )
    dataset: str = Field(
        "python-docstrings",
        min_length=1,
        description="the built-in text set, a datasets name, or a CSV, JSON or Parquet",
    )
    text_column: str = Field("text", min_length=1, description="the dataset's text column")
    label_column: str = Field("label", min_length=1, description="the dataset's label column")
    eval_rows: int = Field(64, ge=1, description="rows held out for the evaluation")
    staging: str = Field("", description="fast local folder for method staged; empty for the temporary one")
    save_limit_s: float = Field(600.0, gt=0, description="a save that takes longer fails its trial")
    trial_limit_s: int = Field(7200, ge=1, description="a trial that takes longer is stopped and fails")
    allow_download: bool = Field(False, description="let a Hub name be downloaded")

    @field_validator("model", "dataset")
    @classmethod
    def _absolute(cls, name: str) -> str:
        return absolute(name)

    @field_validator("staging")
    @classmethod
    def _staging_folder(cls, folder: str) -> str:
        if folder and not Path(folder).expanduser().is_dir():
            raise ValueError("there is no such directory; make it, or leave it empty")
        return str(Path(folder).expanduser().absolute()) if folder else ""

    @model_validator(mode="after")
    def _intervals(self) -> Self:
        if self.every_steps and self.every_s:
            raise ValueError(
                f"every_steps={self.every_steps} and every_s={self.every_s:g} exclude each other; set one of them to 0"
            )
        if not self.every_steps and not self.every_s:
            raise ValueError("every_steps=0 with every_s=0 would never save; set one of them above 0")
        if self.every_steps:
            self._whole_intervals()
        if self.steps <= self.warmup_steps:
            raise ValueError(f"steps={self.steps} are all warm-up (warmup_steps={self.warmup_steps}); use more steps")
        return self

    def _whole_intervals(self) -> None:
        if self.steps < self.every_steps:
            raise ValueError(
                f"steps={self.steps} is fewer than one interval of every_steps={self.every_steps}; "
                "no checkpoint would be saved"
            )
        if self.steps % self.every_steps:
            down = self.steps // self.every_steps * self.every_steps
            raise ValueError(
                f"steps={self.steps} is not a multiple of every_steps={self.every_steps}; "
                f"use steps={down} or steps={down + self.every_steps}"
            )
        if self.steps // self.every_steps <= self.warmup_saves:
            raise ValueError(
                f"steps={self.steps} gives {self.steps // self.every_steps} saves, and "
                f"warmup_saves={self.warmup_saves} of them are not counted; nothing would be measured, use more steps"
            )

    @property
    def planned_saves(self) -> int | None:
        """Saves of one trial, or None where the interval is a time."""
        return self.steps // self.every_steps if self.every_steps else None


class TrialPlace(Request):
    """Where one trial runs and where its results go: what every kind of trial names."""

    target: str = Field("emulated:hdd-nas-1gbe", description="a directory, a URL, or emulated:PROFILE")
    target_name: str = Field("target", description="how results call the target")
    seed: int = Field(0, ge=0, description="seed of weights, order and dropout")
    block: int = Field(0, ge=0, description="block of the study that the trial belongs to")
    attempt: int = Field(1, ge=1, description="attempt at the block")
    claim_id: str = Field("", description="the folder that a study made on the target; empty when the trial runs alone")
    out: str = Field("", description="folder of the results; empty for a fresh one under results/alone")
    show_paths: bool = Field(False, description="keep paths in the results")

    @field_validator("target_name")
    @classmethod
    def _plain_target_name(cls, name: str) -> str:
        return Target._plain_name(name)

    @field_validator("target")
    @classmethod
    def _some_target(cls, location: str) -> str:
        return Target._some_location(location)

    @model_validator(mode="after")
    def _methods_fit(self) -> Self:
        _check_methods([Target(name=self.target_name, location=self.target)], [self.method])
        return self

    @classmethod
    def from_namespace(cls, namespace: Mapping[str, Any]) -> Self:
        """Validate the parameters that the notebook's tagged cell left in ``namespace`` (its ``globals()``).

        Raises
        ------
        ConfigError
            If a parameter is missing or refused.
        """
        return cls.parse(**{name: namespace[name] for name in cls.model_fields if name in namespace})


class TrialConfig(Workload, TrialPlace):
    """One fine-tuning run on one target under one condition: the parameters of ``01_finetune_trial.ipynb``."""

    method: Method = Field("trainer", description="how checkpoints are saved; stallbench run --help lists the methods")
    wait: Wait = Field("durable", description="return: go on when the save call is back; durable: when its bytes are")

    @property
    def places(self) -> list[tuple[str, str]]:
        """What else than the target may be named by a path, and so is redacted."""
        return [("model", self.model), ("data", self.dataset), ("staging", self.staging)]


class StudyPlan(Request):
    """What every study names: targets x methods x wait rules, one trial of each in every block."""

    targets: tuple[Target, ...] = Field(description="the first is compared with each of the others")
    methods: tuple[Method, ...] = Field(("trainer",), min_length=1)
    waits: tuple[Wait, ...] = Field(("return", "durable"), min_length=1)
    blocks: int = Field(5, ge=1)
    seed: int = Field(0, ge=0)
    control: bool = Field(False, description="allow the same place twice: an A/A control")

    @field_validator("targets")
    @classmethod
    def _distinct(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        if not targets:
            raise ValueError("name at least one target, for example --target nas=/mnt/nas")
        names = [target.name.casefold() for target in targets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the name {name!r} stands for more than one target; give each its own")
        return targets

    @field_validator("waits", "methods")
    @classmethod
    def _once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("each may be named once")
        return names

    @model_validator(mode="after")
    def _some_condition(self) -> Self:
        _check_methods(self.targets, self.methods)
        idle = [method for method in self.methods if method not in {method for method, _ in self.conditions}]
        if idle:
            raise ValueError(
                f"method={idle[0]!r} saves beside training, which wait={self.waits[0]} rules out; add wait=return"
            )
        return self

    @property
    def conditions(self) -> list[tuple[Method, Wait]]:
        """Methods and wait rules that are run together.

        An asynchronous save that training waits for is none: its durable time is measured with ``wait=return``.
        """
        pairs = [(method, wait) for method in self.methods for wait in self.waits]
        return [(method, wait) for method, wait in pairs if wait == "return" or method not in ASYNCHRONOUS]

    @property
    def trials(self) -> int:
        """Trials of the whole study."""
        return self.blocks * len(self.targets) * len(self.conditions)


class StudyConfig(Workload, StudyPlan):
    """A study of saves, blocks in seeded random order."""

    experiment: Literal["saves"] = "saves"
    notebook: ClassVar[str] = "01_finetune_trial.ipynb"
    shared: ClassVar[type[Workload]] = Workload

    @property
    def places(self) -> list[tuple[str, str]]:
        """What else than a target may be named by a path, and so is redacted."""
        return [("model", self.model), ("data", self.dataset), ("staging", self.staging)]


DEFAULT_DISK = ROOT / ".target"
DEFAULT_TARGETS = (f"disk={DEFAULT_DISK}", "nas=emulated:hdd-nas-1gbe")

# Wall time on 2 cores: quick about 3 minutes, default about 9, full about an hour.
PROFILES: dict[str, dict[str, Any]] = {
    "quick": {"blocks": 2, "steps": 8, "every_steps": 2},
    "default": {"blocks": 5, "steps": 30, "every_steps": 5},
    "full": {"blocks": 10, "steps": 240, "every_steps": 20},
}
