"""Merge several indexed datasets into one, in constant memory, or list them as shards of one corpus."""

from __future__ import annotations

import glob
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megalite.data.indexed_dataset import IndexedDataset, blocks_of, replace_dataset, write_index
from megalite.data.loss_mask import LOSS_MASK, LossMask, has_loss_mask
from megalite.data.sharded_dataset import (
    CHECKSUM_SUFFIX,
    FORMAT,
    LIST_SUFFIX,
    ShardEntry,
    ShardList,
    checksums_of,
    list_path,
    open_dataset,
)
from megalite.data.tokenizers.tokenizer import copy_tokenizer_digest, digest_path, read_tokenizer_digest
from megalite.utils.errors import UserError
from megalite.utils.files import new_file, replace_file, url_problem
from megalite.utils.log import log
from megalite.utils.object_store import is_remote

_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=_|$)")
"""The number of a part, and the number of parts, in the name of a dataset that --partition wrote."""
_BLOCK = 1 << 20
"""Number of index entries to write at a time."""


@dataclass(frozen=True)
class MergeSummary:
    """Counts of a merge's output.

    Attributes:
        prefixes: prefixes of the merged datasets, in order.
    """

    prefixes: tuple[str, ...]
    num_sequences: int
    num_documents: int
    num_tokens: int

    @staticmethod
    def of(prefixes: Iterable[str], sources: Sequence[IndexedDataset]) -> MergeSummary:
        """Return the sums of the shards of the datasets."""
        num_documents = sum(source.num_documents for source in sources)
        num_tokens = sum(source.num_tokens for source in sources)
        return MergeSummary(tuple(prefixes), sum(map(len, sources)), num_documents, num_tokens)


def find_prefixes(names: Sequence[str]) -> list[str]:
    """Return the datasets that prefixes and folders name; datasets of a folder are sorted.

    Raises:
        UserError: a folder holds no dataset, or only one file of a dataset, or a dataset is named twice.
    """
    found: list[str] = []
    for name in names:
        if not os.path.isdir(name):
            found.append(name.removesuffix(".idx").removesuffix(".bin"))
            continue
        bins, indices = (
            {os.path.splitext(path)[0] for path in glob.glob(f"{glob.escape(name)}/*{suffix}")}
            for suffix in (".bin", ".idx")
        )
        if halves := sorted(bins ^ indices):
            raise UserError(f"{halves[0]} has only one of .bin and .idx: complete it, or move it away")
        if not bins:
            raise UserError(f"the folder {name} holds no .bin and .idx files: pass another")
        found += sorted(bins)
    if twice := next((prefix for prefix in found if found.count(prefix) > 1), None):
        raise UserError(f"{twice} is named twice: its documents would count twice; use a weight instead")
    return found


def _check_names(prefixes: Sequence[str], output_prefix: str) -> None:
    """Check that all parts of a corpus are there if one is, and that the output is no URL."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for prefix in prefixes:
        for part in _PART.finditer(os.path.basename(prefix)):
            count = int(part[2])
            others = _PART.sub(lambda each: f"-*-of-{each[2]}", os.path.basename(prefix))
            numbers.setdefault((others, count), set()).add(int(part[1]))
    for (name, count), found in numbers.items():
        first = 0 if 0 in found or count not in found else 1  # other programs count from 1
        if missing := sorted(set(range(first, first + count)) - found):
            listed = ", ".join(f"{number:05}" for number in missing[:8]) + (", ..." if missing[8:] else "")
            raise UserError(
                f"{name} has {count} parts, and the inputs lack {len(missing)} of them ({listed}): pass all "
                "parts, or rename the inputs if this is intended"
            )
    if problem := url_problem(output_prefix):
        raise UserError(f"--output-prefix {problem}")


def merge_datasets(prefixes: Sequence[str], output_prefix: str, overwrite: bool = False) -> MergeSummary:
    """Merge datasets in this order into OUTPUT_PREFIX.bin and .idx.

    The tokens are copied from file to file, the index through blocks of fixed size. The final names appear
    once both files are complete, the .idx last.

    Raises:
        UserError: an input is damaged, the token dtypes differ, the inputs are a part of the parts that their
            names count, the output exists, is an input or a URL, or the disk is full.
    """
    _check_names(prefixes, output_prefix)
    paths = [f"{output_prefix}{suffix}" for suffix in (".bin", ".idx")]
    inputs = {os.path.realpath(f"{prefix}.bin") for prefix in prefixes}
    if os.path.realpath(paths[0]) in inputs:
        raise UserError(f"--output-prefix {output_prefix} is one of the inputs: pass another")
    if not overwrite and (existing := next(filter(os.path.exists, paths), None)):
        raise UserError(f"{existing} exists: pass another --output-prefix, or --overwrite")
    sources = _opened(prefixes)
    digest_source = _source_of_digest([source.prefix for source in sources])
    masks = [file for mask in _loss_masks(sources) for file in mask.files]
    summary = MergeSummary.of(prefixes, sources)
    suffixes = ("bin", *([LOSS_MASK] if masks else []), "idx")
    temporary = {suffix: f"{output_prefix}.{suffix}.{os.getpid()}.tmp" for suffix in suffixes}
    try:
        os.makedirs(os.path.dirname(output_prefix) or ".", exist_ok=True)
        with new_file(temporary["bin"]) as stream:
            _write_blocks((block for source in sources for block in source.token_blocks()), stream)
        if masks:
            with new_file(temporary[LOSS_MASK]) as stream:
                _write_blocks((block for file in masks for block in blocks_of(file.array)), stream)
        with new_file(temporary["idx"]) as stream:
            sizes = summary.num_sequences, summary.num_documents
            write_index(
                stream, sources[0].dtype, sizes, partial(_lengths, sources), partial(_counts, sources)
            )
        for dataset in sources:
            dataset.check_files()
        for file in masks:
            file.check()
        with suppress(FileNotFoundError):  # before the digest changes: it belongs to another dataset
            os.remove(paths[1])
        if digest_source is None:
            Path(digest_path(output_prefix)).unlink(missing_ok=True)
        else:
            copy_tokenizer_digest(digest_source, output_prefix)
        replace_dataset(output_prefix, temporary)
    except OSError as error:
        raise UserError(f"cannot write {output_prefix}.bin and .idx: {error.strerror or error}") from None
    finally:
        for path in filter(os.path.exists, temporary.values()):
            os.remove(path)
    return summary


def list_shards(
    prefixes: Sequence[str],
    output_prefix: str,
    overwrite: bool = False,
    checksums: Callable[[IndexedDataset], tuple[npt.NDArray[np.uint32], str]] | None = None,
    shuffle_seed: int | None = None,
) -> MergeSummary:
    """Write OUTPUT_PREFIX.shards.json and .shards.crc32, which make the datasets one corpus without a copy.

    Shards below the folder of the list are named relative to it, so that they can be moved together.

    Args:
        prefixes: the datasets, in order.
        output_prefix: prefix of the list.
        checksums: returns what `checksums_of` would; None to read the shards.
        shuffle_seed: see `ShardList`.

    Raises:
        UserError: an input is damaged, the token dtypes or tokenizers differ, the inputs are a part of the
            parts that their names count, the output exists or cannot be written.
    """
    _check_names(prefixes, output_prefix)
    output_prefix = output_prefix.removesuffix(LIST_SUFFIX)
    path, folder = list_path(output_prefix), os.path.dirname(os.path.abspath(output_prefix))
    if os.path.exists(f"{output_prefix}.idx"):  # the prefix would still mean this dataset
        raise UserError(
            f"{output_prefix}.idx exists, and it would hide the list: pass another --output-prefix"
        )
    if not overwrite and os.path.exists(path):
        raise UserError(f"{path} exists: pass another --output-prefix, or --overwrite")
    sources = _opened(prefixes)
    digest_source = _source_of_digest([source.prefix for source in sources])
    _loss_masks(sources)
    try:
        os.makedirs(folder, exist_ok=True)
        with replace_file(f"{output_prefix}{CHECKSUM_SUFFIX}") as stream:
            whole, entries = 0, []
            for number, source in enumerate(sources, 1):
                if checksums is None:
                    log.info("reading %s, shard %d of %d", source.prefix, number, len(sources))
                values, sha256 = (checksums or checksums_of)(source)
                stream.write(values.tobytes())
                whole = zlib.crc32(values.data, whole)
                entries.append(_entry(source, folder, sha256))
        digest = None if digest_source is None else read_tokenizer_digest(digest_source)
        listed = ShardList(sources[0].dtype.name, digest, whole, tuple(entries), shuffle_seed)
        with replace_file(path) as stream:
            stream.write(f"{json.dumps({'format': FORMAT, **asdict(listed)}, indent=1)}\n".encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return MergeSummary.of((source.prefix for source in sources), sources)


def _entry(source: IndexedDataset, folder: str, sha256: str) -> ShardEntry:
    name = source.prefix
    if not is_remote(name):
        name = os.path.abspath(name.removeprefix("file://"))
        name = os.path.relpath(name, folder) if name.startswith(os.path.join(folder, "")) else name
    sizes = source.num_documents, len(source), source.num_tokens
    return ShardEntry(name, *sizes, sha256, source.files[1].crc32())


def _opened(prefixes: Sequence[str]) -> list[IndexedDataset]:
    """Return the shards of all datasets, whose token dtypes must be equal: a vocabulary has one dtype."""
    sources = [shard for prefix in prefixes for shard in open_dataset(prefix).shards]
    if not sources:
        raise UserError("there is no dataset to merge: pass prefixes or folders")
    first = sources[0]
    for source in sources[1:]:
        if source.dtype != first.dtype:
            raise UserError(
                f"{first.prefix} holds {first.dtype.name} tokens and {source.prefix} {source.dtype.name}: "
                "they were made with different tokenizers; preprocess one of them again"
            )
    return sources


def _source_of_digest(prefixes: Sequence[str]) -> str | None:
    """Return a dataset that has the tokenizer digest of all of them; None if one has no digest."""
    digests = {prefix: read_tokenizer_digest(prefix) for prefix in prefixes}
    known = {prefix: digest for prefix, digest in digests.items() if digest is not None}
    for prefix, digest in known.items():
        if digest != known[first := next(iter(known))]:
            raise UserError(
                f"{first} and {prefix} were made with different tokenizers: preprocess one of them again"
            )
    return prefixes[0] if len(known) == len(prefixes) else None


def _loss_masks(sources: Sequence[IndexedDataset]) -> list[LossMask]:
    having = [source for source in sources if has_loss_mask(source)]
    if having and len(having) < len(sources):
        other = next(source for source in sources if source not in having)
        raise UserError(
            f"{having[0].prefix} holds conversations and {other.prefix} plain text: merge them separately"
        )
    return [LossMask(source) for source in having]


def _write_blocks(blocks: Iterable[npt.NDArray[Any]], stream: BinaryIO) -> None:
    for block in blocks:
        stream.write(block.tobytes())


def _lengths(sources: Sequence[IndexedDataset]) -> Iterator[npt.NDArray[Any]]:
    for source in sources:
        yield from blocks_of(source.sequence_lengths)


def _counts(sources: Sequence[IndexedDataset]) -> Iterator[npt.NDArray[Any]]:
    for source in sources:
        for first in range(0, source.num_documents, _BLOCK):
            yield np.diff(source.document_index[first : first + _BLOCK + 1])
