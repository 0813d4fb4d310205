"""Record beside a program's file that its own model was verified in layouts with --tp and with --cp."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from megalite.config import ParallelConfig
from megalite.model.stage import StageProvider, is_own_model, provider_name
from megalite.train.run_context import RunContext
from megalite.utils.errors import first_line
from megalite.utils.log import log

FILE_ENDING = ".verified.json"
"""The record of ``my_model.py`` is ``my_model.verified.json``; it is valid until the program changes."""


def warn_if_unverified(run: RunContext) -> None:
    """Warn if the run trains its own model over tp or cp and it was not verified in such a layout.

    There a layer that lacks a collective has a wrong output or gradient, and no error shows it.
    """
    model, parallel = run.providers.model, run.config.parallel
    if model is None or not is_own_model(model) or run.topology.rank > 0:
        return
    verified = _verified(model)
    names = {kind: name for kind, name in _layouts(parallel).items() if kind not in verified}
    if not names:
        return
    sizes = {"tp": parallel.tp, "cp": parallel.cp}
    reason = "a missing collective gives wrong gradients"
    if "cp" in names:
        reason = "a layer that mixes tokens of one rank alone computes another model"
    log.warning(
        "%s trains with %s and was not verified in this layout: %s, without an error. Run once: python %s … "
        "--params-dtype fp64 --verify-layouts %s",
        provider_name(model),
        " ".join(f"--{axis} {size}" for axis, size in sizes.items() if size > 1),
        reason,
        sys.argv[0],
        ",".join(names.values()),
    )


def record_verified(provider: StageProvider | None, layouts: Iterable[ParallelConfig]) -> None:
    """Record that a model of your own trains the same run in these layouts as on one rank."""
    kinds = {kind for layout in layouts for kind in _layouts(layout)}
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
        log.warning("%s cannot be written (%s): runs with --tp or --cp will warn", path, first_line(error))


def _layouts(parallel: ParallelConfig) -> dict[str, str]:
    """Return the layouts to verify for a layout, by the properties of it that a model's code depends on."""
    names = {}
    if parallel.tp > 1:
        sequence = "+sp" if parallel.sequence_parallel else ""
        names[f"tp{sequence}"] = f"tp{parallel.tp}{sequence}"
    if parallel.cp > 1:
        names["cp"] = f"cp{parallel.cp}"
    return names


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
