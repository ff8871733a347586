"""Measure how long a model waits for its storage.

``stallbench.watch(trainer, out=DIR)`` records a ``transformers.Trainer`` of your own, and
``stallbench.checkpoint(trainer, method=NAME)`` lets it save by another method.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

__version__ = version("stallbench")
_ATTACHED = ("watch", "checkpoint")


def __getattr__(name: str) -> Any:
    """Import what needs torch and transformers only where it is asked for: the command line starts without."""
    if name in _ATTACHED:
        return getattr(import_module("stallbench.attach"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
