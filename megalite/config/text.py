"""A config as YAML text."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from typing import Any

from megalite.config.config import Config

_UNPRINTABLE = re.compile("[^\x20-\x7e]")
"""Characters that are written as YAML's escapes, which go beyond JSON's 16 bits."""


def to_yaml(config: Config) -> str:
    """The config as YAML, grouped by sub-config, which `--config` reads back to an equal one.

    Written without a YAML library, so that a checkpoint's config needs none: scalars and lists
    are JSON, which YAML contains, but for floats, where YAML 1.1 wants a point before the exponent.
    """
    lines: list[str] = []
    for group in fields(config):
        part = getattr(config, group.name)
        lines.append(f"{group.name}:")
        lines += [f"  {field.name}: {_scalar(getattr(part, field.name))}" for field in fields(part)]
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    if isinstance(value, str):
        return _UNPRINTABLE.sub(
            lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False)
        )
    return json.dumps(value)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[str(value)]
    mantissa, exponent_mark, exponent = repr(value).partition("e")
    if exponent_mark and "." not in mantissa:
        mantissa += ".0"
    return mantissa + exponent_mark + exponent
