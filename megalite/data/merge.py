"""Several indexed datasets joined into one, in constant memory."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy.typing as npt

from megalite.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION, IndexedDataset
from megalite.data.storage import require_local
from megalite.data.tokenizer_digest import copy_tokenizer_digest, digest_path, read_tokenizer_digest
from megalite.errors import UserError
from megalite.folders import open_new

_BLOCK = 1 << 20
"""Entries of an index written at a time."""


@dataclass(frozen=True)
class Merged:
    """What a merge wrote.

    Attributes:
        prefixes: the datasets that were joined, in their order.
    """

    prefixes: tuple[str, ...]
    num_sequences: int
    num_documents: int
    num_tokens: int


def find_prefixes(words: Sequence[str]) -> list[str]:
    """The datasets that prefixes and folders name; those of a folder, not of its subfolders, by name.

    Raises:
        UserError: a folder holds no dataset, or half of one, or a dataset is named twice.
    """
    found: list[str] = []
    for word in words:
        if not os.path.isdir(word):
            found.append(word.removesuffix(".idx").removesuffix(".bin"))
            continue
        pairs = [set(map(_stem, glob.glob(f"{glob.escape(word)}/*{ending}"))) for ending in (".bin", ".idx")]
        if halves := sorted(pairs[0] ^ pairs[1]):
            raise UserError(f"{halves[0]} has only one of .bin and .idx: complete it, or move it away")
        if not pairs[0]:
            raise UserError(f"the folder {word} holds no .bin and .idx files")
        found += sorted(pairs[0])
    if twice := next((prefix for prefix in found if found.count(prefix) > 1), None):
        raise UserError(f"{twice} is named twice: its documents would count twice, give it a weight instead")
    return found


def merge_datasets(prefixes: Sequence[str], output_prefix: str, overwrite: bool = False) -> Merged:
    """Joins datasets in the given order into OUTPUT_PREFIX.bin and .idx.

    The tokens go from file to file, the index through blocks of fixed size. Nothing stands under the final
    names until both files are whole, and the .idx is put in place last.

    Raises:
        UserError: an input is damaged, the token types differ, the output exists, is an input or a URL, or
            the disk is full.
    """
    require_local("--output-prefix", output_prefix)
    paths = [f"{output_prefix}{ending}" for ending in (".bin", ".idx")]
    inputs = {os.path.realpath(f"{prefix}.bin") for prefix in prefixes}
    if os.path.realpath(paths[0]) in inputs:
        raise UserError(f"{output_prefix} is one of the inputs: give another --output-prefix")
    if not overwrite and (existing := next(filter(os.path.exists, paths), None)):
        raise UserError(f"{existing} exists: give another --output-prefix, or --overwrite")
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    _check_types(sources)
    of_tokenizer = _shared_digest(prefixes)
    temporary = [f"{path}.{os.getpid()}.tmp" for path in paths]
    try:
        os.makedirs(os.path.dirname(output_prefix) or ".", exist_ok=True)
        _write(temporary[0], lambda stream: _join_tokens(sources, stream))
        _write(temporary[1], lambda stream: _join_indices(sources, stream))
        for dataset in sources:
            dataset.check_files()
        if os.path.exists(paths[1]):
            os.remove(paths[1])  # a new .bin must never be read through an old .idx
        if of_tokenizer is None:
            digest_path(output_prefix).unlink(missing_ok=True)  # of what stood here before
        else:
            copy_tokenizer_digest(of_tokenizer, output_prefix)
        for source, target in zip(temporary, paths, strict=True):
            os.replace(source, target)
    except OSError as error:
        raise UserError(f"cannot write {output_prefix}.bin and .idx: {error.strerror or error}") from None
    finally:
        for path in filter(os.path.exists, temporary):
            os.remove(path)
    return Merged(
        tuple(prefixes),
        sum(map(len, sources)),
        sum(source.num_documents for source in sources),
        sum(source.num_tokens for source in sources),
    )


def _stem(path: str) -> str:
    return os.path.splitext(path)[0]


def _check_types(sources: Sequence[IndexedDataset]) -> None:
    """Refuses token types that differ: a vocabulary has one type, so these are of different ones."""
    if not sources:
        raise UserError("no dataset to merge is given")
    first = sources[0]
    for source in sources[1:]:
        if source.dtype != first.dtype:
            raise UserError(
                f"{first.prefix} holds {first.dtype.name} tokens and {source.prefix} {source.dtype.name}: "
                "they were made with different tokenizers; preprocess one of them again"
            )


def _shared_digest(prefixes: Sequence[str]) -> str | None:
    """The prefix of one whose tokenizer made all of them; None where one of them does not say.

    Raises:
        UserError: two of them were made with different tokenizers.
    """
    digests = {prefix: read_tokenizer_digest(prefix) for prefix in prefixes}
    known = {prefix: digest for prefix, digest in digests.items() if digest is not None}
    for prefix, digest in known.items():
        if digest != known[first := next(iter(known))]:
            raise UserError(f"{first} and {prefix} were made with different tokenizers: preprocess one again")
    return prefixes[0] if len(known) == len(prefixes) else None


def _write(path: str, fill: Callable[[BinaryIO], None]) -> None:
    """Writes a file and closes it once its bytes are on disk."""
    with open_new(path) as stream:
        fill(stream)
        stream.flush()
        os.fsync(stream.fileno())


def _join_tokens(sources: Sequence[IndexedDataset], stream: BinaryIO) -> None:
    for source in sources:
        for block in _blocks(source.tokens):
            stream.write(block.tobytes())


def _join_indices(sources: Sequence[IndexedDataset], stream: BinaryIO) -> None:
    code = {name: code for code, name in DTYPE_CODES.items()}[sources[0].dtype.name]
    num_sequences = sum(map(len, sources))
    num_entries = sum(source.num_documents for source in sources) + 1
    stream.write(HEADER.pack(MAGIC, VERSION, code, num_sequences, num_entries))
    for source in sources:
        _write_blocks(stream, source.sequence_lengths, 0)
    num_bytes = 0
    for source in sources:
        _write_blocks(stream, source.sequence_offsets, num_bytes)
        num_bytes += source.num_tokens * source.dtype.itemsize
    stream.write(bytes(8))
    num_before = 0
    for source in sources:
        _write_blocks(stream, source.document_index[1:], num_before)
        num_before += len(source)


def _write_blocks(stream: BinaryIO, values: npt.NDArray[Any], shift: int) -> None:
    for block in _blocks(values):
        stream.write((block + block.dtype.type(shift)).tobytes())


def _blocks(values: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for first in range(0, len(values), _BLOCK):
        yield values[first : first + _BLOCK]
