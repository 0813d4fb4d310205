"""Record beside a program's file that its own model was verified in tensor-parallel layouts."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from megalite.config import ParallelConfig
from megalite.errors import first_line
from megalite.log import log
from megalite.model.stage import StageProvider, is_own_model, provider_name
from megalite.train.run_context import RunContext

FILE_ENDING = ".verified.json"
"""The record of ``my_model.py`` is ``my_model.verified.json``; it is valid until the program changes."""


def warn_if_unverified(run: RunContext) -> None:
    """Warn if the run trains its own model with tensor parallelism and it was not verified in such a layout.

    There a layer that lacks a collective has a wrong gradient, and no error shows it.
    """
    model, parallel = run.providers.model, run.config.parallel
    if model is None or not is_own_model(model) or run.topology.tp.size == 1 or run.topology.rank > 0:
        return
    if _kind_of(parallel) in _verified(model):
        return
    layout = f"tp{parallel.tp}{'+sp' if parallel.sequence_parallel else ''}"
    log.warning(
        "%s trains with --tp %d and was not verified in this layout: a missing collective gives wrong "
        "gradients without an error. Run once: python %s … --params-dtype fp64 --verify-layouts %s",
        provider_name(model),
        parallel.tp,
        sys.argv[0],
        layout,
    )


def record_verified(provider: StageProvider | None, layouts: Iterable[ParallelConfig]) -> None:
    """Record that a model of your own trains the same run in these layouts as on one rank."""
    kinds = {_kind_of(layout) for layout in layouts if layout.tp > 1}
    if (
        provider is None
        or not is_own_model(provider)
        or not kinds
        or (source := _source_of(provider)) is None
    ):
        return
    record = {"sha256": _digest(source), "verified": sorted(kinds | _verified(provider))}
    path = source.with_suffix(FILE_ENDING)
    try:
        path.write_text(json.dumps(record) + "\n")
    except OSError as error:
        log.warning("%s cannot be written (%s): runs with --tp will warn", path, first_line(error))


def _kind_of(parallel: ParallelConfig) -> str:
    """Return the properties of a tensor-parallel layout that a model's code depends on."""
    return "tp+sp" if parallel.sequence_parallel else "tp"


def _verified(provider: StageProvider) -> set[str]:
    """Return the kinds of layout in which the current version of the provider's file was verified."""
    if (source := _source_of(provider)) is None:
        return set()
    try:
        record = json.loads(source.with_suffix(FILE_ENDING).read_text())
        return set(record["verified"]) if record["sha256"] == _digest(source) else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _source_of(provider: StageProvider) -> Path | None:
    """Return the file that defines a provider; None in an interactive session."""
    defined = provider if inspect.isclass(provider) or inspect.isfunction(provider) else type(provider)
    try:
        file = inspect.getsourcefile(defined)
    except TypeError:
        return None
    return Path(file) if file is not None and Path(file).is_file() else None


def _digest(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()
