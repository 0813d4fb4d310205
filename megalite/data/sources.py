"""Which part of which corpus each split reads, from the ways in which users say it."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config import DataConfig
from megalite.config.data import WEIGHTED_SPLIT_FIELDS
from megalite.config.flags import flag_of
from megalite.data.blend import parse_data_path
from megalite.data.splits import SPLIT_NAMES, parse_split
from megalite.errors import UserError
from megalite.parsing import parse_json


@dataclass(frozen=True)
class Source:
    """A part of a corpus: the sequences from `begin` to `end`, as fractions of all of them."""

    prefix: str
    begin: float = 0.0
    end: float = 1.0

    def sequences(self, num_sequences: int) -> range:
        """The part of a corpus of so many sequences; each boundary is rounded by itself."""
        return range(round(self.begin * num_sequences), round(self.end * num_sequences))


@dataclass(frozen=True)
class Blend:
    """Corpora that one dataset is drawn from, and their weights; None to weigh them by their size.

    Attributes:
        name: what the user calls it; empty where it is simply its split's.
        given_by: the flag that its shares come from, for messages.
    """

    sources: tuple[Source, ...]
    weights: tuple[float, ...] | None
    name: str = ""
    given_by: str = "--split"


Sources = Mapping[str, tuple[Blend, ...]]
"""The blends of each split by its name: none or one to train on, any number to evaluate on."""


def find_sources(data: DataConfig) -> Sources:
    """What each split reads, by whichever of the config's ways it is given; its files are read here.

    Raises:
        UserError: a file cannot be read, or what it or a flag holds is malformed.
    """
    if any(getattr(data, name) for name in WEIGHTED_SPLIT_FIELDS):
        return {split: _weighted(data, split) for split in SPLIT_NAMES}
    if data.per_split_data_args_path is not None:
        return sources_per_split(*_per_split_words(data.per_split_data_args_path))
    if data.train_data_path or data.valid_data_path or data.test_data_path:
        return sources_per_split(data.train_data_path, data.valid_data_path, data.test_data_path)
    words: Sequence[str] = data.data_path
    if data.data_args_path is not None:
        words = _read(data.data_args_path, "--data-args-path").split()
    return sources_of_one_blend(words, data.split)


def sources_of_one_blend(words: Sequence[str], split: str) -> Sources:
    """One blend for all splits, each of which takes its part of every corpus.

    Args:
        words: those of --data-path.
        split: weights of train, valid and test, such as "949,50,1".
    """
    prefixes, weights = parse_data_path(words)
    bounds = [0.0]
    for share in parse_split(split):
        bounds.append(bounds[-1] + share)
    return {
        name: (
            Blend(
                tuple(Source(prefix, begin, end) for prefix in prefixes),
                _tuple(weights),
                given_by=f"--split {split}",
            ),
        )
        for name, (begin, end) in zip(SPLIT_NAMES, itertools.pairwise(bounds), strict=True)
    }


def sources_per_split(train: Sequence[str], valid: Sequence[str], test: Sequence[str]) -> Sources:
    """A blend for each split, of whole corpora; none for a split without words."""
    sources = {}
    for name, words in zip(SPLIT_NAMES, (train, valid, test), strict=True):
        flag = f"--{name}-data-path"
        prefixes, weights = parse_data_path(words, flag) if words else ([], None)
        blend = Blend(tuple(Source(prefix) for prefix in prefixes), _tuple(weights), given_by=flag)
        sources[name] = (blend,) if prefixes else ()
    return sources


def parse_weighted_groups(flag: str, groups: Sequence[str]) -> tuple[Blend, ...]:
    """Blends from texts of the form "NAME: WEIGHT BEGIN:END PREFIX, WEIGHT BEGIN:END PREFIX".

    Raises:
        UserError: a text is not of that form, or two have the same name.
    """
    blends = tuple(_weighted_group(flag, group) for group in groups)
    names = [blend.name for blend in blends]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{flag} has two groups called {twice}: give each a name of its own")
    return blends


def _weighted(data: DataConfig, split: str) -> tuple[Blend, ...]:
    field = f"{split}_weighted_split_paths"
    flag, path = flag_of(field), getattr(data, f"{field}_path")
    groups = getattr(data, field) if path is None else _quoted_groups(f"{flag}-path", path)
    blends = parse_weighted_groups(flag, groups)
    if split == "train" and len(blends) > 1:
        names = ", ".join(blend.name for blend in blends)
        raise UserError(
            f"{flag} has {len(blends)} groups, {names}: training has one, put all corpora into it"
        )
    return blends


def _quoted_groups(flag: str, path: str) -> list[str]:
    """The texts of a file with one line: "NAME: ..." "NAME2: ..."."""
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
            f"{flag} has the group {group!r} without a name: give NAME: WEIGHT BEGIN:END PREFIX, ..."
        )
    if "/" in name:  # it is part of file names
        raise UserError(f"{flag} has a group called {name}: give it a name without a slash")
    parts = [_weighted_source(flag, name, text) for text in rest.split(",")]
    weights = tuple(weight for weight, _ in parts)
    return Blend(tuple(source for _, source in parts), weights if len(parts) > 1 else None, name, flag)


def _weighted_source(flag: str, name: str, text: str) -> tuple[float, Source]:
    words = text.split()
    try:
        weight_word, range_word, prefix = words
        begin_word, end_word = range_word.split(":")
        weight, begin, end = float(weight_word), float(begin_word), float(end_word)
    except ValueError:
        raise UserError(
            f"{flag} has {text.strip()!r} in {name}, where WEIGHT BEGIN:END PREFIX must stand"
        ) from None
    if not 0 < weight < math.inf:
        raise UserError(f"{flag} has weight {weight_word} for {prefix} in {name}: give one greater than 0")
    if not 0 <= begin < end <= 1:
        raise UserError(
            f"{flag} has {range_word} for {prefix} in {name}: give a part from 0 to 1, as in 0:0.95"
        )
    return weight, Source(prefix, begin, end)


def _per_split_words(path: str) -> tuple[list[str], list[str], list[str]]:
    """The words of a JSON object {"train": [...], "valid": [...], "test": [...]}; a part may be missing."""
    flag = "--per-split-data-args-path"
    form = f'{flag} {path} must be a JSON object {{"train": [words], "valid": [words], "test": [words]}}'
    try:
        found = parse_json(_read(path, flag))
    except ValueError as error:
        raise UserError(f"{form}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(form)
    if unknown := sorted(set(found) - set(SPLIT_NAMES)):
        raise UserError(f"{form}, but has {unknown[0]!r}")
    words = [found.get(name) or [] for name in SPLIT_NAMES]
    if not all(
        isinstance(part, list) and all(isinstance(w, str | int | float) for w in part) for part in words
    ):
        raise UserError(form)
    train, valid, test = ([str(word) for word in part] for part in words)
    if not train:
        raise UserError(f'{form}, but has nothing to train on under "train"')
    return train, valid, test


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path} cannot be read: it is no UTF-8 text") from None


def _tuple(weights: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if weights is None else tuple(weights)
