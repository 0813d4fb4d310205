"""Settings of other programs, and their conversion to megalite's: command lines, DeepSpeed, Hugging Face."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from megalite.utils.errors import UserError


@functools.cache
def read_table(path: str) -> Any:
    """Return the content of a YAML file of this package, such as ``megatron/flags.yaml``.

    Raises:
        UserError: the YAML library is missing.
    """
    try:
        import yaml  # only a command line with such flags or files needs it
    except ImportError:
        raise UserError(f"{path} cannot be read without PyYAML: pip install pyyaml") from None
    text = (Path(__file__).parent / path).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def none_if_default(value: int | None, default: int) -> int | None:
    """Return None for a size that equals its default, so that a model has only one possible config."""
    return None if value == default else value
