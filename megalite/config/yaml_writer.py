"""Write a config as YAML text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from megalite.config.config import Config

_UNPRINTABLE = re.compile("[^\x20-\x7e]")


def to_yaml(config: Config, unset: Collection[str] = ()) -> str:
    """Return the config as YAML, grouped by sub-config; `--config` reads it back to an equal config.

    Fields in `unset` are omitted, since a field in the file counts as set; they must have their defaults.

    Writing a checkpoint must not need a YAML library, so scalars and lists are written as JSON, a subset of
    YAML. Floats are the exception: YAML 1.1 needs a point before the exponent.
    """
    lines: list[str] = []
    for group in fields(config):
        part = getattr(config, group.name)
        values = [
            f"  {field.name}: {yaml_value(getattr(part, field.name))}"
            for field in fields(part)
            if field.name not in unset
        ]
        lines += [f"{group.name}:", *values] if values else []
    return "\n".join(lines) + "\n"


def yaml_value(value: Any) -> str:
    """Return a scalar or a tuple of scalars as YAML in one line."""
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(yaml_value(item) for item in value) + "]"
    if isinstance(value, str):
        # YAML's escapes are not limited to 16 bits as JSON's are.
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
