"""What a study ran on: hardware, limits of the page cache, software; no path, host or user name."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import cpuinfo
import psutil

from stallbench.config import ROOT

PACKAGES = (
    "stallbench", "torch", "transformers", "datasets", "accelerate", "safetensors", "papermill", "nbclient",
    "jupyterlab", "matplotlib", "pandas", "pyarrow", "scipy", "numpy",
)  # fmt: skip


def capture() -> dict[str, Any]:
    """Describe this machine as plain values.

    Sizes are in bytes. ``dirty_limits`` are the kernel's own settings: below ``dirty_background_bytes`` a buffered
    write runs at the speed of memory, above ``dirty_bytes`` the writer is throttled (Linux, admin-guide/sysctl/vm).
    """
    import torch

    memory = psutil.virtual_memory()
    accelerator = torch.accelerator.current_accelerator()
    return {
        "cpu": cpuinfo.get_cpu_info().get("brand_raw") or platform.processor() or "unknown",
        "cores": psutil.cpu_count(),
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "accelerator": _accelerator_name(accelerator),
        "virtual_machine": _virtual_machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "dirty_limits": dirty_limits(memory.available),
        "root": hasattr(os, "geteuid") and os.geteuid() == 0,
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "git_commit": git_commit(),
    }


def provenance() -> str:
    """Say in a few lines which versions and commit made a notebook."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return f"Python {platform.python_version()} on {platform.system()}, commit {git_commit()}\n{versions}"


def _accelerator_name(accelerator: Any) -> str:
    import torch

    if accelerator is None:
        return "none"
    return torch.cuda.get_device_name(accelerator) if accelerator.type == "cuda" else accelerator.type


def _virtual_machine() -> str:
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return "unknown"
    return "yes" if "hypervisor" in flags.split() else "no"


def dirty_limits(available_bytes: int) -> dict[str, int]:
    """Give the page cache's write-back limits in bytes, empty where the system doesn't tell."""
    settings = Path("/proc/sys/vm")
    limits = {}
    for name in ("dirty_background", "dirty"):
        try:
            absolute = int((settings / f"{name}_bytes").read_text())
            ratio = int((settings / f"{name}_ratio").read_text())
        except (OSError, ValueError):
            return {}
        limits[f"{name}_bytes"] = absolute or available_bytes * ratio // 100
    return limits


def git_commit() -> str:
    """Give the checkout's commit, with ``+`` where files beside the results differ; ``unknown`` outside one."""
    try:
        git = ["git", "-C", str(ROOT)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", ".", ":!results"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit[:12] + ("+" if changed else "")
