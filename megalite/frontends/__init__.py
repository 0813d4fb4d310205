"""Settings of other programs, and their conversion to megalite's: command lines, DeepSpeed, Hugging Face."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from megalite.utils.files import read_yaml_file


@functools.cache
def read_table(path: str) -> Any:
    """Return the content of a YAML file of this package, such as ``megatron/flags.yaml``.

    Raises:
        UserError: the YAML library is missing.
    """
    return read_yaml_file(path, str(Path(__file__).parent / path))


def none_if_default(value: int | None, default: int) -> int | None:
    """Return None for a size that equals its default, so that a model has only one possible config."""
    return None if value == default else value
