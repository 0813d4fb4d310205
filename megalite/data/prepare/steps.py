"""The steps that remove documents, as the settings name them: filters, and the two kinds of deduplication.

`build_settings` builds dataclasses from mappings of a YAML file: their fields are the keys, and their types
the rules.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from megalite.config.arguments import nearest_hint
from megalite.data.prepare.fingerprints import (
    UNICODE_VERSION,
    exact_keys,
    library,
    minhash_version,
    shingles,
    word_hashes,
)
from megalite.data.preprocessing.documents import (
    RecordError,
    encode_utf8,
    file_states,
    find_inputs,
    parse_record,
    read_records,
)
from megalite.utils.errors import UserError, check_call, first_line

Settings = TypeVar("Settings")


def build_settings(
    kind: type[Settings], where: str, given: object, problems: list[str], **others: Any
) -> Settings | None:
    """Return an object of a dataclass, or None after appending what is wrong to `problems`.

    A field of a dataclass is a section. Numbers are positive, or at least `least` and at most `most` of the
    field's metadata. One text stands for a tuple of one.

    Args:
        where: what the messages begin with.
        others: values of fields that are no keys.
    """
    if not isinstance(given, dict):
        problems.append(f"{where} is {given!r}: write `key: value` lines under it")
        return None
    known = {each.name: each for each in fields(kind) if each.name not in others}  # type: ignore[arg-type]
    before, hints = len(problems), typing.get_type_hints(kind)
    for key in given:
        if key not in known:
            problems.append(f"{where}: {key!r} is unknown{nearest_hint(str(key), known)}")
    values = dict(others)
    for name, each in known.items():
        if name in given:
            values[name] = _value(hints[name], each, f"{where}: {name}", given[name], problems)
        elif each.default is MISSING and each.default_factory is MISSING:
            problems.append(f"{where}: {name} is missing")
    return None if len(problems) > before else kind(**values)


def _value(kind: Any, each: Field[Any], where: str, value: object, problems: list[str]) -> object:
    """Return a value as its field holds it; append what is wrong with it."""
    if isinstance(kind, types.UnionType):
        kind, none = typing.get_args(kind)
        assert none is types.NoneType
        if value is None or value is False:
            return None
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return build_settings(kind, where, value, problems)
    if kind == tuple[str, ...] and isinstance(value, str):
        return (value,)
    least, most = each.metadata.get("least", 1), each.metadata.get("most", 1 << 62)
    is_right, what = {
        str: (isinstance(value, str) and value != "", "a text"),
        bool: (isinstance(value, bool), "true or false"),
        int: (type(value) is int and least <= value <= most, f"a whole number from {least}"),
        float: (type(value) in (int, float) and 0 <= typing.cast(float, value) <= 1, "a number from 0 to 1"),
        list[Any]: (isinstance(value, list), "a list"),
        dict[str, Any]: (isinstance(value, dict), "`key: value` lines under it"),
        tuple[str, ...]: (
            isinstance(value, list) and all(isinstance(item, str) for item in value),
            "a text or a list of texts",
        ),
    }.get(kind) or (value in typing.get_args(kind), " or ".join(map(str, typing.get_args(kind))))
    if not is_right:
        limit = f" to {most}" if kind is int and most < 1 << 62 else ""
        problems.append(f"{where} is {value!r}: write {what}{limit}")
    return tuple(value) if is_right and isinstance(value, list) and kind == tuple[str, ...] else value


@dataclass
class Document:
    """A document while it passes the filters, which may change its text.

    Attributes:
        label: what the language filter found; empty without one.
        matched: the evaluation item that its text contains; empty if it contains none.
    """

    text: str
    metadata: dict[str, str] = field(default_factory=dict)
    label: str = ""
    matched: str = ""


Filter = Callable[[Sequence[Document]], list[str]]
"""Returns why each document is removed; an empty text keeps it."""


def _one_by_one(run: Callable[[Document], str]) -> Filter:
    return lambda documents: list(map(run, documents))


@dataclass(frozen=True)
class CorpusStep:
    """A step with its arguments. A filter has `start`; deduplication is done between documents."""

    name: ClassVar[str]
    main: ClassVar[str]
    """The argument that a value without a name sets."""
    is_filter: ClassVar[bool] = True

    def start(self) -> Filter:
        """Return the function that filters documents; each process calls this once.

        Raises:
            UserError: a package, a file or a function is missing.
        """
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Return the name for reports; it tells apart steps that can be there several times."""
        return f"{self.name} {getattr(self, self.main)}" if self.main in ("filter", "function") else self.name

    def identity(self) -> object:
        """Return what the result depends on besides the arguments, as JSON."""
        return None


@dataclass(frozen=True)
class PythonStep(CorpusStep):
    """A function of the user: it takes a text, and returns whether to keep it, or another text."""

    function: str
    name: ClassVar[str] = "python"
    main: ClassVar[str] = "function"

    def _find(self) -> Callable[[str], Any]:
        module_name, colon, function_name = self.function.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            found: Callable[[str], Any] = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError, ValueError) as error:
            hint = "" if colon else "; write module:function"
            raise UserError(f"the step python: {self.function}: {first_line(error)}{hint}") from None
        check_call(found, self.function, "text")
        return found

    def start(self) -> Filter:
        function = self._find()

        def run(document: Document) -> str:
            result = function(document.text)
            if isinstance(result, str):
                document.text = encode_utf8(result).decode()
            elif result is not None and not isinstance(result, bool | np.bool_):
                raise UserError(
                    f"the step python: {self.function} returned a {type(result).__name__}: return True to "
                    "keep a document, False or None to remove it, or its new text"
                )
            return "" if isinstance(result, str) or result else self.function

        return _one_by_one(run)

    def identity(self) -> object:
        source = getattr(inspect.getmodule(inspect.unwrap(self._find())), "__file__", None)
        return hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else None


_DOWNLOADS = {
    "LanguageFilter": "use the step language, with its model",
    "C4BadWordsFilter": "use the step python, with your list of words",
    "UnigramLogProbFilter": "use the step python, with your table of frequencies",
}
"""Filters of datatrove that fetch what they need, and what to use instead."""
_PROBE = "\n".join(
    f"The {noun} of this town was built by three brothers, and its {noun} is its pride."
    for noun in ("bridge", "harbour", "library", "market", "theatre", "station", "garden", "school", "tower")
)
"""A text that passes the rules of most filters, so that they load all that they need."""


@dataclass(frozen=True)
class DatatroveStep(CorpusStep):
    """A filter class of datatrove, which runs without its pipelines."""

    filter: str
    arguments: dict[str, Any] = field(default_factory=dict)
    name: ClassVar[str] = "datatrove"
    main: ClassVar[str] = "filter"

    def start(self) -> Filter:
        where = f"the step datatrove: {self.filter}"
        if instead := _DOWNLOADS.get(self.filter):
            raise UserError(f"{where} downloads a file: {instead}")
        if "://" in str(self.arguments.get("model_url", "")):
            raise UserError(f"{where}: download the model, and write its path as model_url")
        filters = library("datatrove.pipeline.filters", where)
        document_class = library("datatrove.data", where).Document
        found = getattr(filters, self.filter, None)
        names = [name for name in dir(filters) if name.endswith("Filter")]
        if self.filter not in names or found is None:
            raise UserError(f"{where} is unknown{nearest_hint(self.filter, names)}")
        known = list(inspect.signature(found).parameters)
        for argument in self.arguments:
            if argument not in known:
                raise UserError(f"{where} has no argument {argument!r}{nearest_hint(argument, known)}")

        def run(document: Document) -> str:
            theirs = document_class(text=document.text, id="", metadata=dict(document.metadata))
            try:
                result = built.filter(theirs)
            except (ImportError, AssertionError, OSError) as error:  # packages are loaded at first use
                raise UserError(f"{where} cannot run: {' '.join(str(error).split())}") from None
            keep, reason = result if isinstance(result, tuple) else (result, "")
            document.text = theirs.text
            return "" if keep else str(reason or self.filter)

        try:
            built = found(**self.arguments)
        except (ImportError, TypeError, OSError) as error:
            raise UserError(f"{where} cannot run: {' '.join(str(error).split())}") from None
        run(Document(_PROBE, {"url": "https://example.org"}))
        return _one_by_one(run)

    def identity(self) -> object:
        library("datatrove", f"the step datatrove: {self.filter}")
        return version("datatrove")


@dataclass(frozen=True)
class LanguageStep(CorpusStep):
    """A fastText model that keeps documents of some languages."""

    model: str
    keep: tuple[str, ...]
    minimum: float = 0.65
    name: ClassVar[str] = "language"
    main: ClassVar[str] = "model"

    def start(self) -> Filter:
        fasttext = library("fasttext", "the step language")
        if not os.path.isfile(self.model):
            raise UserError(
                f"the step language: there is no model {self.model}: download lid.176.bin of fastText"
            )
        try:
            fasttext.FastText.eprint = lambda *_: None  # a warning for users of an old version
            predict = fasttext.load_model(self.model).f.predict  # its own wrapper needs an old numpy
        except ValueError as error:
            raise UserError(f"the step language: {first_line(error)}") from None

        def run(document: Document) -> str:
            found = predict(" ".join(document.text.split()) + "\n", 1, 0.0, "strict")
            score, label = found[0] if found else (0.0, "none")
            document.label = label.removeprefix("__label__")
            if document.label in self.keep and score >= self.minimum:
                return ""
            return f"{document.label} {score:.2f}"

        return _one_by_one(run)

    def identity(self) -> object:
        return file_states([self.model]) if os.path.isfile(self.model) else None


@dataclass(frozen=True)
class DecontaminateStep(CorpusStep):
    """Texts of evaluations: a document that shares a run of `ngram` words with one is removed."""

    texts: tuple[str, ...]
    ngram: int = 13
    key: str = "text"
    name: ClassVar[str] = "decontaminate"
    main: ClassVar[str] = "texts"

    def start(self) -> Filter:
        names, texts = [], []
        for path in find_inputs(self.texts):
            for record in read_records(path, [self.key], "line"):
                names.append(f"{path} line {record.number}")
                try:
                    texts.append(parse_record(record, [self.key])[0].decode())
                except RecordError as error:
                    raise UserError(f"the step decontaminate: {names[-1]}: {error}") from None
        hashes, counts = shingles(*word_hashes(texts), self.ngram, or_shorter=False)
        if not len(hashes):
            raise UserError(
                f"the step decontaminate: no text of {', '.join(self.texts)} has {self.ngram} words: lower "
                "its ngram"
            )
        known, first = np.unique(hashes, return_index=True)
        items = np.repeat(np.arange(len(texts)), counts)[first]

        def run(documents: Sequence[Document]) -> list[str]:
            found, counts = shingles(
                *word_hashes([document.text for document in documents]), self.ngram, or_shorter=False
            )
            at = np.minimum(np.searchsorted(known, found), len(known) - 1)
            hits = np.flatnonzero(known[at] == found)
            numbers, first = np.unique(np.repeat(np.arange(len(documents)), counts)[hits], return_index=True)
            for number, item in zip(numbers.tolist(), items[at[hits[first]]].tolist(), strict=True):
                documents[number].matched = names[item]
            return [document.matched for document in documents]

        return run

    def identity(self) -> object:
        files = find_inputs(self.texts)
        return [files, file_states(files), UNICODE_VERSION]


@dataclass(frozen=True)
class ExactStep(CorpusStep):
    """Removal of documents whose text an earlier document has."""

    enabled: bool = True
    name: ClassVar[str] = "exact"
    main: ClassVar[str] = "enabled"
    is_filter: ClassVar[bool] = False

    def start(self) -> Filter:
        exact_keys([""])
        return lambda documents: [""] * len(documents)


@dataclass(frozen=True)
class MinHashStep(CorpusStep):
    """Removal of documents that share a band of their MinHash signature with an earlier one."""

    ngram: int = 5
    bands: int = 14
    rows: int = 8
    name: ClassVar[str] = "minhash"
    main: ClassVar[str] = "ngram"
    is_filter: ClassVar[bool] = False

    def start(self) -> Filter:
        self.identity()
        exact_keys([""])
        return lambda documents: [""] * len(documents)

    def identity(self) -> object:
        return [minhash_version(), UNICODE_VERSION]


STEPS: dict[str, type[CorpusStep]] = {
    kind.name: kind
    for kind in (PythonStep, DatatroveStep, LanguageStep, ExactStep, MinHashStep, DecontaminateStep)
}


def read_steps(entries: object, problems: list[str]) -> tuple[CorpusStep, ...]:
    """Return the steps of the settings; append what is wrong to `problems`.

    Args:
        entries: a list of {name: value} or {name: {argument: value}}, or of a name alone.
    """
    steps: list[CorpusStep] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        name, value = (
            next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, {})
        )
        kind = STEPS.get(name) if isinstance(name, str) else None
        if kind is None:
            hint = nearest_hint(name, STEPS) if isinstance(name, str) else ": write each step as NAME: VALUE"
            problems.append(f"steps: {name!r} is unknown{hint}")
            continue
        if kind is DatatroveStep and isinstance(value, dict) and len(value) == 1:
            ((class_name, arguments),) = value.items()
            value = {"filter": class_name, "arguments": arguments or {}}
        given = value if isinstance(value, dict) else {kind.main: value}
        step = build_settings(kind, f"steps: {name}", given, problems)
        steps += [step] if step and getattr(step, "enabled", True) else []
    dedup = [i for i, step in enumerate(steps) if not step.is_filter]
    if len({steps[i].name for i in dedup}) < len(dedup):
        problems.append("steps: exact and minhash can be there once each")
    elif dedup and dedup[-1] - dedup[0] >= len(dedup):
        problems.append(
            f"steps: {steps[dedup[0] + 1].name} is between exact and minhash, which are found in one pass: "
            "move it before or after both"
        )
    return tuple(steps)
