"""What may be asked of a load study: reads, saves and logs on one target, alone and together, and neighbours."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from stallbench.config import Method, Request, StudyConfig, StudyPlan, Target, TrialPlace, Wait, absolute

# Saves that training waits for, by a method whose whole state can be written from a plain loop.
LOAD_METHODS = ("torch", "safetensors", "dcp", "fast")
BLOCK_BYTES = 4096  # a file takes whole blocks on most file systems


class Load(Request):
    """The load that is put on a target: the part that a trial and a study share."""

    files: int = Field(20_000, ge=50, le=10_000_000, description="small files of the dataset, one sample each")
    file_median_bytes: int = Field(4096, ge=16, description="median of the files' log-normal sizes")
    file_sigma: float = Field(0.6, ge=0, le=3, description="spread of the logarithm of the files' sizes")
    file_least_bytes: int = Field(1024, ge=16, description="sizes below it are raised to it")
    file_most_bytes: int = Field(16384, ge=16, description="sizes above it are cut to it")
    workers: int = Field(2, ge=1, le=64, description="processes that read, of the DataLoader")
    read_batch: int = Field(16, ge=1, description="samples that a worker reads at a time")
    phase_s: float = Field(6.0, gt=0, le=3600, description="seconds of each phase: reads, saves, log, all together")
    save_pause_s: float = Field(0.5, ge=0, description="seconds from the end of a save to the next one")
    log_every_s: float = Field(0.05, gt=0, description="seconds from one line of the log to the next")
    accelerator_s: float = Field(3.0, gt=0, description="seconds of each emulated accelerator's run")
    neighbours: int = Field(4, ge=0, le=64, description="experiments at once, at most: 1, 2, 4 up to it; 0 for none")
    neighbour_s: float = Field(5.0, gt=0, description="seconds that the experiments run beside each other")
    neighbour_step_s: float = Field(0.05, gt=0, description="step time of an experiment's emulated accelerator")
    neighbour_batch: int = Field(8, ge=1, description="samples of an experiment's step")
    iterations: int = Field(2, ge=1, description="iterations of the reload loop")
    iteration_steps: int = Field(4, ge=1, description="training steps of an iteration")
    batch_size: int = Field(8, ge=1, description="rows of a training step")
    max_tokens: int = Field(32, ge=4, description="tokens of a row")
    model: str = Field("all-MiniLM-L6-v2", min_length=1, description="the packaged default or a local folder")
    save_limit_s: float = Field(600.0, gt=0, description="a save that takes longer fails its trial")
    trial_limit_s: int = Field(7200, ge=1, description="a trial that takes longer is stopped and fails")

    @field_validator("model")
    @classmethod
    def _absolute(cls, name: str) -> str:
        return absolute(name)

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if not self.file_least_bytes <= self.file_median_bytes <= self.file_most_bytes:
            raise ValueError(
                f"file_median_bytes={self.file_median_bytes} must lie from file_least_bytes={self.file_least_bytes} to "
                f"file_most_bytes={self.file_most_bytes}"
            )
        return self

    @property
    def counts(self) -> list[int]:
        """How many experiments run at once, in turn: the powers of two up to ``neighbours``."""
        return [1 << power for power in range(self.neighbours.bit_length())]


def _own_method(method: str) -> str:
    if method not in LOAD_METHODS:
        raise ValueError(f"a load trial saves by one of {', '.join(LOAD_METHODS)}")
    return method


def _no_url(target: Target) -> None:
    if target.remote:
        raise ValueError(
            f"target {target.name} is a URL, whose files no process here can read in place; a load study takes "
            "directories, emulated:PROFILE and lab:PROFILE"
        )


class LoadTrialConfig(Load, TrialPlace):
    """One load trial on one target: the parameters of ``04_storage_under_load.ipynb``."""

    method: Method = Field("torch", description="how checkpoints are saved: torch, safetensors, dcp or fast")
    wait: Literal["durable"] = Field("durable", description="a save is over when its bytes are durable")

    @field_validator("method")
    @classmethod
    def _known_method(cls, method: str) -> str:
        return _own_method(method)

    @model_validator(mode="after")
    def _in_place(self) -> Self:
        _no_url(Target(name=self.target_name, location=self.target))
        return self

    @property
    def places(self) -> list[tuple[str, str]]:
        """What else than the target may be named by a path, and so is redacted."""
        return [("model", self.model)]

    @property
    def allow_download(self) -> bool:
        """Nothing is downloaded for a load trial."""
        return False


class LoadStudyConfig(Load, StudyPlan):
    """A load study: one load trial on each target in every block."""

    experiment: Literal["load"] = "load"
    methods: tuple[Method, ...] = Field(("torch",), min_length=1, max_length=1)
    waits: tuple[Wait, ...] = Field(("durable",), min_length=1, max_length=1)
    notebook: ClassVar[str] = "04_storage_under_load.ipynb"
    shared: ClassVar[type[Load]] = Load

    @field_validator("methods")
    @classmethod
    def _known_methods(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_own_method(method) for method in methods)

    @field_validator("waits")
    @classmethod
    def _durable(cls, waits: tuple[str, ...]) -> tuple[str, ...]:
        if waits != ("durable",):
            raise ValueError("a load study waits until a save is durable; leave --wait out")
        return waits

    @model_validator(mode="after")
    def _in_place(self) -> Self:
        for target in self.targets:
            _no_url(target)
        return self

    @property
    def places(self) -> list[tuple[str, str]]:
        """What else than a target may be named by a path, and so is redacted."""
        return [("model", self.model)]


AnyStudy = StudyConfig | LoadStudyConfig

# Wall time of two targets on 2 cores, the emulated NAS being one: quick about 4 minutes, default about 22.
LOAD_PROFILES: dict[str, dict[str, Any]] = {
    "quick": {
        "blocks": 2, "files": 800, "phase_s": 2, "accelerator_s": 1, "neighbours": 2, "neighbour_s": 2, "iterations": 1,
    },
    "default": {"blocks": 3, "files": 4000, "phase_s": 5, "accelerator_s": 2, "neighbour_s": 4},
    "full": {"blocks": 8, "phase_s": 20, "accelerator_s": 6, "neighbour_s": 20},
}  # fmt: skip
