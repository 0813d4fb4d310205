"""Find the parts of the corpora that training, validation and test read.

`DataPhases` are the sources and phases of --data-phases, a mixture that changes during a run.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megalite.config import DataConfig
from megalite.config.data import WEIGHTED_SPLIT_FIELDS, split_weights
from megalite.config.option import flag_of
from megalite.config.training import SUFFIXES
from megalite.data.blend import parse_data_path
from megalite.utils.errors import UserError
from megalite.utils.files import parse_json, read_yaml_file

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """Return the weights of train, valid and test, normalised to 1; missing weights are 0.

    Raises:
        UserError: the text is not one to three non-negative numbers with a positive sum.
    """
    weights = split_weights(text)
    if not weights:
        raise UserError(f"--split {text} must be one to three weights with a positive sum, such as 949,50,1")
    full = np.array(weights + [0.0] * (3 - len(weights)))
    train, valid, test = (full / np.sum(full)).tolist()
    return train, valid, test


@dataclass(frozen=True)
class CorpusSource:
    """Sequences of a corpus from `begin` to `end`, as fractions of all sequences."""

    prefix: str
    begin: float = 0.0
    end: float = 1.0

    def sequences(self, num_sequences: int) -> range:
        """Return the selected sequences of a corpus with `num_sequences`; each boundary is rounded."""
        return range(round(self.begin * num_sequences), round(self.end * num_sequences))


@dataclass(frozen=True)
class Blend:
    """Corpora of one dataset and their weights; None to weight them by their size.

    Attributes:
        name: the user's name for the dataset; empty for a split's own dataset.
        given_by: the flag that sets its shares, for messages.
        phases: the phases of --data-phases, whose sources these are; None for a blend that does not change.
    """

    sources: tuple[CorpusSource, ...]
    weights: tuple[float, ...] | None
    name: str = ""
    given_by: str = "--split"
    phases: DataPhases | None = None


Sources = Mapping[str, tuple[Blend, ...]]
"""The blends of each split by its name: at most one to train on, any number to evaluate on."""


def find_sources(data: DataConfig) -> Sources:
    """Return the data that each split reads, from the flags and the files that they name.

    Relative prefixes begin in --aml-data-download-path, if it is set.

    Raises:
        UserError: a file cannot be read, or its contents or a flag's value are malformed.
    """
    sources = _named_sources(data)
    if data.multiple_validation_sets:
        sources = {**sources, "valid": _one_for_each(sources["valid"], data.validation_set_names)}
    folder = data.aml_data_download_path
    if folder is None:
        return sources
    return {split: tuple(_in_folder(blend, folder) for blend in blends) for split, blends in sources.items()}


def _one_for_each(blends: tuple[Blend, ...], names: Sequence[str]) -> tuple[Blend, ...]:
    """Return a named blend for each corpus that a split is evaluated on.

    Raises:
        UserError: the corpora have weights of their own, or not each of them has one name.
    """
    flag = "--multiple-validation-sets"
    for blend in blends:
        if blend.weights is not None and blend.given_by == "--valid-data-path":
            raise UserError(f"--valid-data-path has weights, which {flag} does not use: remove them")
    corpora = [(source, blend) for blend in blends for source in blend.sources]
    names = names or [blend.name or os.path.basename(source.prefix) for source, blend in corpora]
    if len(names) != len(corpora) or len(set(names)) < len(names) or any("/" in name for name in names):
        raise UserError(
            f"{flag} evaluates on {len(corpora)} corpora, and their names are {' '.join(names)}: pass "
            f"--validation-set-names with {len(corpora)} different names without a slash"
        )
    return tuple(
        Blend((source,), None, name, blend.given_by)
        for (source, blend), name in zip(corpora, names, strict=True)
    )


def _in_folder(blend: Blend, folder: str) -> Blend:
    """Return the blend with the folder before its relative prefixes; URLs of object storage are absolute."""
    corpora = (
        source if "://" in source.prefix else replace(source, prefix=os.path.join(folder, source.prefix))
        for source in blend.sources
    )
    return replace(blend, sources=tuple(corpora))


def _named_sources(data: DataConfig) -> Sources:
    """Return the data that each split reads, with the prefixes that the user wrote."""
    if any(getattr(data, name) for name in WEIGHTED_SPLIT_FIELDS):
        return {split: _weighted(data, split) for split in SPLIT_NAMES}
    if data.per_split_data_args_path is not None:
        return _sources_per_split(*_read_per_split(data.per_split_data_args_path))
    if data.train_data_path or data.valid_data_path or data.test_data_path:
        return _sources_per_split(data.train_data_path, data.valid_data_path, data.test_data_path)
    if data.data_phases is not None:
        return _sources_of_phases(read_phases(data.data_phases), data.split)
    data_path: Sequence[str] = data.data_path
    if data.data_args_path is not None:
        data_path = _read(data.data_args_path, "--data-args-path").split()
    return sources_of_one_blend(data_path, data.split)


def sources_of_one_blend(data_path: Sequence[str], split: str) -> Sources:
    """Return one blend for all splits: each split reads its part of every corpus.

    Args:
        split: weights of train, valid and test, such as "949,50,1".
    """
    prefixes, weights = parse_data_path(data_path)
    return {
        name: (
            Blend(
                tuple(CorpusSource(prefix, begin, end) for prefix in prefixes),
                weights,
                given_by=f"--split {split}",
            ),
        )
        for name, (begin, end) in split_bounds(split).items()
    }


def split_bounds(split: str) -> dict[str, tuple[float, float]]:
    """Return the begin and the end of train, valid and test, as fractions of a corpus."""
    bounds = [0.0]
    for share in parse_split(split):
        bounds.append(bounds[-1] + share)
    return dict(zip(SPLIT_NAMES, itertools.pairwise(bounds), strict=True))


def _sources_of_phases(phases: DataPhases, split: str) -> Sources:
    """Return one mixture to train on, and each source by its name to evaluate on."""
    given_by = f"--split {split}"
    parts = {
        name: [CorpusSource(source.path, begin, end) for source in phases.sources]
        for name, (begin, end) in split_bounds(split).items()
    }
    evaluated = {
        name: tuple(
            Blend((part,), None, source.name, given_by)
            for source, part in zip(phases.sources, parts[name], strict=True)
        )
        for name in SPLIT_NAMES[1:]
    }
    return {"train": (Blend(tuple(parts["train"]), None, "", given_by, phases),), **evaluated}


def _sources_per_split(train: Sequence[str], valid: Sequence[str], test: Sequence[str]) -> Sources:
    """Return a blend of whole corpora for each split that has values."""
    sources: dict[str, tuple[Blend, ...]] = dict.fromkeys(SPLIT_NAMES, ())
    for name, values in zip(SPLIT_NAMES, (train, valid, test), strict=True):
        if values:
            flag = f"--{name}-data-path"
            prefixes, weights = parse_data_path(values, flag)
            corpora = tuple(CorpusSource(prefix) for prefix in prefixes)
            sources[name] = (Blend(corpora, weights, given_by=flag),)
    return sources


def parse_weighted_groups(flag: str, groups: Sequence[str]) -> tuple[Blend, ...]:
    """Return the blends of texts of the form "NAME: WEIGHT BEGIN:END PREFIX, WEIGHT BEGIN:END PREFIX".

    Raises:
        UserError: a text does not have this form, or two have the same name.
    """
    blends = tuple(_weighted_group(flag, group) for group in groups)
    names = [blend.name for blend in blends]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{flag} has two groups called {twice}: rename one of them")
    return blends


def _weighted(data: DataConfig, split: str) -> tuple[Blend, ...]:
    field = f"{split}_weighted_split_paths"
    flag, path = flag_of(field), getattr(data, f"{field}_path")
    groups = getattr(data, field) if path is None else _quoted_groups(f"{flag}-path", path)
    blends = parse_weighted_groups(flag, groups)
    if split == "train" and len(blends) > 1:
        names = ", ".join(blend.name for blend in blends)
        raise UserError(
            f"{flag} has {len(blends)} groups, {names}: training takes one group, so put all corpora into it"
        )
    return blends


def _quoted_groups(flag: str, path: str) -> list[str]:
    """Return the texts of a file with one line: "NAME: ..." "NAME2: ..."."""
    lines = _read(path, flag).strip().splitlines()
    fault = f"{flag} {path} must hold one line of groups in double quotes"
    if len(lines) != 1 or not lines[0].startswith('"'):
        raise UserError(f'{fault}: "NAME: WEIGHT BEGIN:END PREFIX, ..." "NAME2: ..."')
    try:
        return shlex.split(lines[0])
    except ValueError as error:
        raise UserError(f"{fault}: {error}") from None


def _weighted_group(flag: str, group: str) -> Blend:
    name, colon, rest = group.partition(":")
    name = name.strip()
    if not name or not colon:
        raise UserError(
            f"{flag} has the group {group!r} without a name: write NAME: WEIGHT BEGIN:END PREFIX, ..."
        )
    if "/" in name:  # the name is part of file names
        raise UserError(f"{flag} has a group called {name}: give it a name without a slash")
    parts = [_weighted_source(flag, name, text) for text in rest.split(",")]
    weights = tuple(weight for weight, _ in parts)
    return Blend(tuple(source for _, source in parts), weights if len(parts) > 1 else None, name, flag)


def _weighted_source(flag: str, name: str, text: str) -> tuple[float, CorpusSource]:
    try:
        weight_text, range_text, prefix = text.split()
        begin_text, end_text = range_text.split(":")
        weight, begin, end = float(weight_text), float(begin_text), float(end_text)
    except ValueError:
        raise UserError(f"{flag} has {text.strip()!r} in {name}: write WEIGHT BEGIN:END PREFIX") from None
    if not 0 < weight < math.inf:
        raise UserError(f"{flag} has weight {weight_text} for {prefix} in {name}: write one greater than 0")
    if not 0 <= begin < end <= 1:
        raise UserError(
            f"{flag} has {range_text} for {prefix} in {name}: write a part from 0 to 1, as in 0:0.95"
        )
    return weight, CorpusSource(prefix, begin, end)


def _read_per_split(path: str) -> tuple[list[str], list[str], list[str]]:
    """Return the values of {"train": [...], "valid": [...], "test": [...]} in JSON; a part may be missing."""
    flag = "--per-split-data-args-path"
    form = f'{flag} {path} must be a JSON object {{"train": [values], "valid": [values], "test": [values]}}'
    try:
        found = parse_json(_read(path, flag), unique_keys=True)
    except ValueError as error:
        raise UserError(f"{form}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(form)
    if unknown := sorted(set(found) - set(SPLIT_NAMES)):
        raise UserError(f"{form}, but has {unknown[0]!r}")
    parts = [found.get(name) or [] for name in SPLIT_NAMES]
    if not all(
        isinstance(part, list) and all(isinstance(value, str | int | float) for value in part)
        for part in parts
    ):
        raise UserError(form)
    train, valid, test = ([str(value) for value in part] for part in parts)
    if not train:
        raise UserError(f'{form}, but has nothing to train on under "train"')
    return train, valid, test


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path} cannot be read: it is not UTF-8 text") from None


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
