"""stallbench: how many minutes does a model wait for its storage?"""

from importlib.metadata import version

__version__ = version("stallbench")
