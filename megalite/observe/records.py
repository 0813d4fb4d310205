"""Records of units, from memory, from the disk, or by running the unit."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from megalite.config import LayerSpec
from megalite.observe.unit_record import PhaseRecord, UnitKey, UnitRecord, from_json

_PACKAGES = ("attention", "config", "data", "distributed", "kernels", "model", "observe", "tensor_parallel")
"""Packages that determine what a record contains."""
_MAX_BYTES = 32 << 20
"""Size of a file of records from which on it is written anew."""


@lru_cache(maxsize=8192)
def unit_record(key: UnitKey) -> UnitRecord:
    """Return what the unit of a key does for one microbatch.

    Everything that a unit does grows by the same amount with each sample of a microbatch. Therefore only
    microbatches of one and two samples run.

    Raises:
        UserError: the program's own model cannot run on meta tensors.
    """
    if key.micro_batch_size > 2:
        one, two = (unit_record(replace(key, micro_batch_size=size)) for size in (1, 2))
        extended = _extended(one, two, key.micro_batch_size)
        if extended is not None:
            return extended
    found = _load(key)
    if found is not None:
        with suppress(KeyError, TypeError, ValueError):
            return from_json(UnitRecord, found)
    from megalite.observe.record_unit import record_unit  # imports torch

    record = record_unit(key)
    _store(key, asdict(record))
    return record


@lru_cache(maxsize=64)
def kinds_of_layers(key: UnitKey) -> tuple[int, ...]:
    """Return, for each layer of the model, the number of the first layer of its kind."""
    if key.provider is not None:
        from megalite.observe.record_unit import layer_kinds  # imports torch

        return layer_kinds(key)
    first: dict[LayerSpec, int] = {}
    return tuple(first.setdefault(spec, number) for number, spec in enumerate(key.model.layer_specs))


def _extended(one: UnitRecord, two: UnitRecord, size: int) -> UnitRecord | None:
    """Return the record of `size` samples; None if the unit runs other operators for two than for one."""

    def extend(first: Any, second: Any) -> Any:
        if isinstance(first, tuple):
            items = [extend(*pair) for pair in zip(first, second, strict=True)]
            return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
        if isinstance(first, PhaseRecord | UnitRecord):
            names = [each.name for each in fields(first)]
            return type(first)(*(extend(getattr(first, name), getattr(second, name)) for name in names))
        if isinstance(first, int | float) and not isinstance(first, bool):
            return first + (second - first) * (size - 1)
        return first

    def operators(record: UnitRecord) -> list[Any]:
        counts = [(each.num_operators, each.num_kernels) for each in record.phases()]
        return counts + [each.part for each in record.saved]

    return extend(one, two) if operators(one) == operators(two) else None


def _load(key: UnitKey) -> Any:
    line = _known().get(_name(key)) if _is_kept(key) else None
    with suppress(ValueError):  # a line that two processes wrote at once
        return line and json.loads(line)[1]


def _store(key: UnitKey, found: Any) -> None:
    if not _is_kept(key):
        return
    path = _path()
    with suppress(OSError):  # a read-only home directory
        path.parent.mkdir(parents=True, exist_ok=True)
        is_full = path.exists() and path.stat().st_size > _MAX_BYTES
        line = json.dumps([_name(key), found]) + "\n"
        with path.open("w" if is_full else "a", encoding="utf-8") as file:
            file.write(line)


def _is_kept(key: UnitKey) -> bool:
    """Return whether the disk keeps a record: not of a program's own model; of a run, only by rank 0."""
    distributed = sys.modules.get("torch.distributed")
    is_first = distributed is None or not distributed.is_initialized() or distributed.get_rank() == 0
    return key.provider is None and is_first


def _name(key: UnitKey) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()


@cache
def _known() -> dict[str, str]:
    """Return the lines of the file by the names of their keys, with which they begin."""
    with suppress(OSError, UnicodeDecodeError):
        return {line[2:66]: line for line in _path().read_text(encoding="utf-8").splitlines()}
    return {}


@cache
def _path() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megalite"
    return folder / f"records-{_code_version()}.jsonl"


def _code_version() -> str:
    """Return a hash of the code that makes records: torch's version, and the sources' sizes and times."""
    root = Path(__file__).parents[1]
    hashed = hashlib.sha256(metadata.version("torch").encode())
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            status = path.stat()
            hashed.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
    return hashed.hexdigest()[:16]
