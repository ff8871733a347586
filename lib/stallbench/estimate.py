"""What a study will do before it does it: whether its targets can serve, bytes written, and a first guess of time."""

from dataclasses import dataclass

from stallbench import workload
from stallbench.config import EMULATED, ConfigError, StudyConfig, Target
from stallbench.lab import building as lab
from stallbench.lab import profile as lab_profile
from stallbench.load import dataset
from stallbench.load.config import AnyStudy, LoadStudyConfig
from stallbench.storage import emulated, preflight, targets

# For the first guess of a study's length only; progress corrects it. Read off a 2-core machine.
_KERNEL_START_S, _STEP_S, _DIRECTORY_BYTES_PER_S, _RESTORE_AND_CHECKS_S = 7.0, 0.15, 3e8, 5.0
_LOAD_START_S, _LOAD_PHASES, _ACCELERATORS, _SECONDS_PER_FILE = 20.0, 7, 4, 2e-3
# Below this the chain's own cost, some 0.2 ms a file, would be more than a fifth of what is charged.
LEAST_CHARGE_S = 1e-3


@dataclass(frozen=True)
class Preview:
    """What a study will do: bytes written on each target (None where that can't be known yet), seconds.

    ``facts`` says in lines what each target is.
    """

    written_bytes: int | None
    seconds: float
    facts: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class Needs:
    """What a study keeps on a target at once, and writes to it in all (None: unknown), bytes; and its seconds."""

    kept_bytes: int
    written_bytes: int | None
    seconds: float
    warnings: list[str]


def preview(config: AnyStudy) -> Preview:
    """Check the targets and say what will run.

    Raises
    ------
    ConfigError
        If a target can't serve.
    """
    for target in config.targets:
        if target.lab:
            lab.require(target.location)
    needs = of_load(config) if config.experiment == "load" else of_saves(config)
    warnings = targets.check(config.targets, needs.kept_bytes, config.control)
    found = [preflight.examine(target, probe=False) for target in config.targets]
    facts = [line for one in found for line in preflight.lines(one)]
    warnings += preflight.warnings(found)
    if len(config.targets) == 1:
        warnings.append("one target: the report describes it and compares nothing; add a second --target")
    warnings += needs.warnings
    if config.blocks == 1:
        warnings.append("one block: figures come without an interval; use --blocks 3 or more")
    return Preview(needs.written_bytes, needs.seconds * config.blocks, facts, warnings)


def of_saves(config: StudyConfig) -> Needs:
    """Estimate a study of saves; its ``seconds`` are those of one block."""
    warnings = []
    for method in config.methods:
        workload.check_memory(method, config.model)
    if config.warmup_saves <= config.keep:
        warnings.append(
            f"warmup_saves={config.warmup_saves}: saves up to the first deletion (keep={config.keep}) touch fresh "
            f"memory and are no measure of later ones; use --set warmup_saves={config.keep + 1}"
        )
    kept_bytes = max(workload.planned_bytes(config, method, wait) or 0 for method, wait in config.conditions)
    one_save = {method: workload.checkpoint_bytes(config.model, method) for method in config.methods}
    saves = config.planned_saves
    known = saves is not None and None not in one_save.values()
    written_bytes = sum(one_save[method] for method, _ in config.conditions) * saves * config.blocks if known else None
    seconds = sum(
        _KERNEL_START_S
        + config.steps * _STEP_S
        + _RESTORE_AND_CHECKS_S
        # The restore reads the last checkpoint once more, and the raw limit takes about one more.
        + ((saves or 1) + 2) * (one_save[method] or 0) / _bytes_per_s(target)
        for target in config.targets
        for method, _ in config.conditions
    )
    return Needs(kept_bytes, written_bytes, seconds, warnings)


def of_load(config: LoadStudyConfig) -> Needs:
    """Estimate a load study; its ``seconds`` are those of one block, with a share of making the data.

    Raises
    ------
    ConfigError
        If an emulated target's charge is too small to be kept, or a target has too few inodes for the files.
    """
    one_save = workload.checkpoint_bytes(config.model, config.methods[0]) or 0
    data_bytes = dataset.needed_bytes(config)
    seconds, written_bytes = 0.0, 0
    for target in config.targets:
        _check_charge(target)
        dataset.check_inodes(target.name, targets.directory(target), config)
        rate, position_s = _bytes_per_s(target), _charge_s(target)
        save_s = one_save / rate
        saves = 2 * max(2, config.phase_s / (save_s + config.save_pause_s)) + config.iterations
        saves += 2 * sum(config.counts)
        seconds += _LOAD_START_S + config.files * (_SECONDS_PER_FILE + position_s) / config.blocks
        seconds += _LOAD_PHASES * config.phase_s + _ACCELERATORS * config.accelerator_s + saves * save_s / 2
        seconds += len(config.counts) * 2 * (config.neighbour_s + 2)
        written_bytes = max(written_bytes, int(saves * one_save) * config.blocks + data_bytes)
    kept_bytes = data_bytes + max(3, *config.counts, 3) * one_save
    return Needs(kept_bytes, written_bytes, seconds, [])


def _check_charge(target: Target) -> None:
    if target.emulated and _charge_s(target) < LEAST_CHARGE_S:
        raise ConfigError(
            f"target {target.name}={target.location!r} is refused for a load study: it charges a small file "
            f"{_charge_s(target) * 1e3:.2g} ms, less than the {LEAST_CHARGE_S * 1e3:g} ms that an in-process device "
            "can keep; give position_s or round_trip_s, or use lab:PROFILE"
        )


def _charge_s(target: Target) -> float:
    if not target.emulated:
        return 0.0
    try:
        profile = emulated.parse_profile(target.location.removeprefix(EMULATED))
    except ValueError as error:
        raise ConfigError(f"target {target.name}={target.location!r} is refused: {error}") from None
    return profile.position_s + profile.round_trip_s * profile.round_trips_per_file


def _bytes_per_s(target: Target) -> float:
    try:
        if target.emulated:
            return emulated.parse_profile(target.location.removeprefix(EMULATED)).sustained_bytes_per_s
        if target.lab:
            return lab_profile.parse(target.location).sustained_bytes_per_s
    except ValueError as error:
        raise ConfigError(f"target {target.name}={target.location!r} is refused: {error}") from None
    return _DIRECTORY_BYTES_PER_S
