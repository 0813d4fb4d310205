"""Mistakes of command lines, for tests of flags and rules."""

from __future__ import annotations

import shlex

from megalite.config import check_config
from megalite.frontends.command_line import parse
from megalite.utils.errors import ConfigError


def mistakes_of(line: str, world_size: int | None = None) -> list[str]:
    """Return what is wrong with a command line and its config."""
    try:
        check_config(parse(shlex.split(line))[0], world_size)
    except ConfigError as error:
        return list(error.problems)
    return []
