"""Measure how many minutes a model waits for its storage."""

from importlib.metadata import version

__version__ = version("stallbench")
