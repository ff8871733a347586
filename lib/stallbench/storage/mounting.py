"""What it takes to mount a block device of our own: programs, and a way to run them that can't hang."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 60


def lacking(what: str, programs: dict[str, str]) -> str:
    """Say in one line why a block device of our own can't be mounted here; empty when it can.

    Parameters
    ----------
    what
        What needs it, as the sentence's subject.
    programs
        Debian's package by program.
    """
    if sys.platform != "linux":
        return f"{what} needs Linux"
    if os.geteuid() != 0:
        return f"{what} needs root, to mount a file system"
    devices = [device for device in ("/dev/fuse", "/dev/loop-control") if not Path(device).exists()]
    if devices:
        return f"{what} needs {' and '.join(devices)}"
    packages = {package for program, package in programs.items() if not shutil.which(program)}
    if "nbdkit" in packages or subprocess.run(["nbdkit", "--dump-plugin", "python"], capture_output=True).returncode:
        packages.add("nbdkit-plugin-python")
    return f"{what} needs packages: apt-get install {' '.join(sorted(packages))}" if packages else ""


def run_program(*command: str) -> str:
    """Run a program and give what it printed.

    Raises
    ------
    RuntimeError
        With what it complained about.
    subprocess.TimeoutExpired
        After ``TIMEOUT_S`` seconds.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()
