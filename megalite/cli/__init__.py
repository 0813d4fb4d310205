"""Dataclasses <-> flags <-> YAML.

`parse` makes a config of a command line; `run_main` ends a program on a user's mistake.
"""

from megalite.cli.parse import parse
from megalite.cli.report import run_main

__all__ = ["parse", "run_main"]
