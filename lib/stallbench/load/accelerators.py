"""Emulated accelerators: what MLPerf Storage publishes of real ones, a batch and the time that it computes."""

from typing import NamedTuple


class Accelerator(NamedTuple):
    """One emulated accelerator: a step of ``step_s`` seconds that takes ``batch`` samples."""

    name: str
    step_s: float
    batch: int


# computation_time and batch_size of configs/dlio/workload/{resnet50,unet3d}_{h100,a100}.yaml, MLPerf Storage v2.0
# (github.com/mlcommons/storage). ResNet-50's batch of 400 and its time are divided by ten: the same samples a second,
# in steps that a run of seconds can count. Its samples there are 115 kB and U-Net3D's 147 MB; ours are small texts, so
# that only the demand in samples a second is MLPerf's.
ACCELERATORS = (
    Accelerator("ResNet-50, H100", 0.0224, 40),
    Accelerator("ResNet-50, A100", 0.0435, 40),
    Accelerator("U-Net3D, H100", 0.323, 7),
    Accelerator("U-Net3D, A100", 0.636, 7),
)
# What MLPerf Storage asks for of these two (metric.au in the same files).
REQUIRED_USE = 0.90
