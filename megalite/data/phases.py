"""Read the sources and phases of --data-phases, a mixture that changes during a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megalite.config.training import SUFFIXES
from megalite.utils.errors import UserError
from megalite.utils.files import read_yaml_file

_MIXTURES = ("weights", "ramp", "size_exponent", "unimax")
_PHASE_KEYS = ("until", *_MIXTURES, "when_exhausted")


class Source(NamedTuple):
    """Corpus of a mixture.

    Attributes:
        path: prefix of the corpus.
        max_epochs: how often its samples may be read; infinity for any number of times.
    """

    name: str
    path: str
    max_epochs: float = math.inf


class DataPhase(NamedTuple):
    """Mixture of a part of the run, as the file states it.

    Attributes:
        until: number and unit ("tokens", "samples" or "iterations") of its end in the run; None for the end.
        kind: "weights", "ramp", "size_exponent" or "unimax".
        value: weights by source of the first two; the exponent; or the largest number of epochs.
        renormalizes: whether the other sources go on when one runs out; otherwise this is an error.
    """

    until: tuple[float, str] | None
    kind: str
    value: Mapping[str, float] | float
    renormalizes: bool


@dataclass(frozen=True)
class DataPhases:
    """Sources and phases of a file."""

    path: str
    sources: tuple[Source, ...]
    phases: tuple[DataPhase, ...]


def read_phases(path: str) -> DataPhases:
    """Read the file of --data-phases.

    Raises:
        UserError: the file cannot be read, or a value in it is wrong.
    """
    at = f"--data-phases {path}"
    found = read_yaml_file(at, path)
    _check_keys(at, found, ("sources", "phases"), ("sources", "phases"))
    sources = tuple(_source(at, str(name), value) for name, value in _mapping(at, "sources", found).items())
    paths = [source.path for source in sources]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise UserError(f"{at} has two sources with the path {twice}: each would read the same samples")
    if not isinstance(found["phases"], list) or not found["phases"]:
        raise UserError(f"{at}: phases must be a list with at least one phase")
    names = [source.name for source in sources]
    phases = tuple(_phase(f"{at}: phase {i}", each, names) for i, each in enumerate(found["phases"], 1))
    if phases[0].kind == "ramp":
        raise UserError(f"{at}: phase 1 is a ramp, which has nothing to start from: give it weights")
    return DataPhases(path, sources, phases)


def _check_keys(at: str, found: Any, allowed: Sequence[str], needed: Sequence[str]) -> None:
    if not isinstance(found, dict):
        raise UserError(f"{at} must be a mapping with the keys {', '.join(allowed)}")
    if unknown := [key for key in found if key not in allowed]:
        raise UserError(f"{at} has the key {unknown[0]}: use {', '.join(allowed)}")
    if missing := [key for key in needed if key not in found]:
        raise UserError(f"{at} has no {missing[0]}")


def _mapping(at: str, key: str, found: Mapping[str, Any]) -> dict[str, Any]:
    value = found[key]
    if not isinstance(value, dict) or not value:
        raise UserError(f"{at}: {key} must be a mapping from names of sources")
    return value


def _source(at: str, name: str, found: Any) -> Source:
    at = f"{at}: source {name}"
    _check_keys(at, found, ("path", "max_epochs"), ("path",))
    if "/" in name:  # the name is part of file names
        raise UserError(f"{at} has a slash in its name: remove it")
    if not isinstance(found["path"], str):
        raise UserError(f"{at}: path must be the prefix of a .bin/.idx pair")
    max_epochs = _number(f"{at}: max_epochs", found.get("max_epochs", math.inf))
    if not max_epochs > 0:
        raise UserError(f"{at}: max_epochs is {max_epochs:g}: write a number above 0")
    return Source(name, found["path"], max_epochs)


def _number(at: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise UserError(f"{at} is {value}: write a number")
    return float(value)


def _phase(at: str, found: Any, names: Sequence[str]) -> DataPhase:
    _check_keys(at, found, _PHASE_KEYS, ("until",))
    kinds = [kind for kind in _MIXTURES if kind in found]
    if len(kinds) != 1:
        raise UserError(
            f"{at} has {' and '.join(kinds) or 'no mixture'}: write one of {', '.join(_MIXTURES)}"
        )
    (kind,) = kinds
    until = parse_until(at, found["until"])
    if until is None and kind in ("ramp", "unimax"):
        raise UserError(
            f"{at}: {kind} with until: end would change with the length of the run: write a number"
        )
    policy = found.get("when_exhausted", "error")
    if policy not in ("error", "renormalize"):
        raise UserError(f"{at}: when_exhausted is {policy}: write error or renormalize")
    value: Mapping[str, float] | float
    if kind in ("weights", "ramp"):
        value = _weights(f"{at}: {kind}", _mapping(at, kind, found), names)
    elif kind == "size_exponent":
        value = _number(f"{at}: {kind}", found[kind])
        if not 0 <= value < math.inf:
            raise UserError(f"{at}: {kind} is {value:g}: write a number from 0 on")
    else:
        _check_keys(f"{at}: unimax", found[kind], ("max_epochs",), ("max_epochs",))
        value = _number(f"{at}: unimax: max_epochs", found[kind]["max_epochs"])
        if not 0 < value < math.inf:
            raise UserError(f"{at}: unimax: max_epochs is {value:g}: write a number above 0")
    return DataPhase(until, kind, value, policy == "renormalize")


def _weights(at: str, found: Mapping[Any, Any], names: Sequence[str]) -> dict[str, float]:
    for name, weight in found.items():
        if str(name) not in names:
            raise UserError(f"{at} has the unknown source {name}: the sources are {', '.join(names)}")
        if not 0 <= _number(f"{at}: {name}", weight) < math.inf:
            raise UserError(f"{at}: {name} is {weight}: write a weight of at least 0")
    if not sum(found.values()) > 0:
        raise UserError(f"{at} are all 0: give one source a weight")
    return {str(name): float(weight) for name, weight in found.items()}


def parse_until(at: str, value: Any) -> tuple[float, str] | None:
    """Return the number and unit of `2T`, `5000 samples` or `200 iterations`; None for `end`."""
    text = str(value).strip()
    if text == "end":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)(?:\s+(tokens|samples|iterations))?", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise UserError(
            f"{at}: until is {text}: write tokens, as in 2.5T, or 5000 samples, 200 iterations, or end"
        )
    return float(match[1]) * SUFFIXES[match[2].upper()], (match[3] or "tokens").lower()
