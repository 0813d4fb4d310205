"""Pretraining of language models with tensor, pipeline and data parallelism.

The library's public names are those of `__init__.pyi`; docs/python_api.md shows how they are used. Each is
imported when it is first used, so that a program which needs no torch starts without it.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_IMPORTS = {
    alias.asname: (node.module, alias.name)
    for node in _stub.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module and the name there of each public name."""

__all__ = [*sorted(filter(None, _IMPORTS)), "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in _IMPORTS:
        raise AttributeError(f"module 'megalite' has no attribute {name!r}")
    module, defined = _IMPORTS[name]
    globals()[name] = getattr(importlib.import_module(str(module)), defined)
    return globals()[name]


def __dir__() -> list[str]:
    return __all__
