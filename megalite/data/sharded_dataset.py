"""Read a corpus in many shards as one dataset: PREFIX.shards.json lists the shards in order.

A shard is an ordinary .bin and .idx. The list holds what identifies each shard. PREFIX.shards.crc32 has for
each shard the CRC-32 of the bytes of each sequence, and then of each piece of its .bin, little-endian uint32.
The samples of a run do not depend on how many shards the corpus has: they are those of the shards merged into
one file.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data.file_ranges import DTYPE_CODES, Check, Entries, FetchedArray, FileRange, ListedIndex
from megalite.data.indexed_dataset import IndexedDataset, blocks_of, sequence_lengths
from megalite.data.storage import CACHE_BYTES, MappedBytes, exists, open_bytes, read_small
from megalite.utils.errors import UserError
from megalite.utils.files import parse_json
from megalite.utils.object_store import is_remote

LIST_SUFFIX = ".shards.json"
CHECKSUM_SUFFIX = ".shards.crc32"
FORMAT = 2
"""Version of the list; a newer one is refused. Lists of version 1 have no checksums of pieces."""
PIECE_BYTES = 16 << 10
"""Bytes of a .bin with one checksum: a window is read with the rest of its first and last piece."""
_CHECKED_BYTES = 32 << 20
"""Bytes to read at a time for checksums."""
_NUM_OPENERS = 16
"""Number of shards to open at a time: in object storage, each takes several requests."""


@dataclass(frozen=True)
class ShardEntry:
    """One shard of a list.

    Attributes:
        name: prefix of its .bin and .idx, relative to the folder of the list, or a URL or an absolute path.
        documents, sequences, tokens: sizes of the shard.
        sha256: SHA-256 of the .bin, as the command sha256sum prints it.
        idx_crc32: CRC-32 of the .idx, which is verified whenever the corpus is opened.
    """

    name: str
    documents: int
    sequences: int
    tokens: int
    sha256: str
    idx_crc32: int


@dataclass(frozen=True)
class ShardList:
    """Contents of PREFIX.shards.json.

    Attributes:
        dtype: name of the tokens' dtype.
        tokenizer: digest of the tokenizer that made all shards; None if it is not known.
        checksums_crc32: CRC-32 of PREFIX.shards.crc32.
        shuffle_seed: seed of the order of the documents; None if this is that of the input, or not known.
        piece_bytes: bytes of each piece of a .bin, but for the last one; None without checksums of pieces.
    """

    dtype: str
    tokenizer: str | None
    checksums_crc32: int
    shards: tuple[ShardEntry, ...]
    shuffle_seed: int | None = None
    piece_bytes: int | None = PIECE_BYTES


def list_path(prefix: str) -> str:
    """Return the path or URL of the list of a corpus in shards, whose prefix may already name it."""
    return f"{prefix.removesuffix(LIST_SUFFIX)}{LIST_SUFFIX}"


def is_sharded(prefix: str) -> bool:
    """Return whether a prefix is that of a list of shards: it names the list, or has a list and no .idx."""
    return prefix.endswith(LIST_SUFFIX) or (not exists(f"{prefix}.idx") and exists(list_path(prefix)))


def open_dataset(
    prefix: str | os.PathLike[str], cache_bytes: int = CACHE_BYTES, checks_index: bool = True
) -> IndexedDataset:
    """Open the corpus of a prefix: a .bin and an .idx, or a list of shards.

    Args:
        cache_bytes: limit of the cache of files in object storage.
        checks_index: see `IndexedDataset`.

    Raises:
        UserError: see `IndexedDataset` and `ShardedDataset`.
    """
    path = os.fspath(prefix)
    return (ShardedDataset if is_sharded(path) else IndexedDataset)(path, cache_bytes, checks_index)


def corpus_lengths(prefix: str) -> npt.NDArray[np.int32] | None:
    """Return the lengths of a corpus's sequences in tokens, from .idx files alone; None if one is missing.

    Raises:
        UserError: a file is damaged.
    """
    if not is_sharded(prefix):
        return sequence_lengths(prefix)
    parts = [sequence_lengths(shard_prefix(prefix, each.name)) for each in read_list(prefix).shards]
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


def shard_prefix(prefix: str, name: str) -> str:
    """Return the prefix of a shard, given the list's prefix and the shard's name in it."""
    return name if "://" in name else os.path.join(os.path.dirname(prefix), name)


def is_in_store(prefix: str) -> bool:
    """Return whether a corpus, or a shard of its list, is in object storage.

    Raises:
        UserError: its list is damaged.
    """
    if is_remote(prefix) or not is_sharded(prefix):
        return is_remote(prefix)
    return any(is_remote(shard_prefix(prefix, each.name)) for each in read_list(prefix).shards)


def read_list(prefix: str) -> ShardList:
    """Read PREFIX.shards.json.

    Raises:
        UserError: there is no such list, or it is damaged or of a newer format.
    """
    path = list_path(prefix)
    try:
        record = parse_json(read_small(path))
        if not 1 <= record["format"] <= FORMAT:
            raise UserError(f"{path} has format {record['format']}; only formats up to {FORMAT} can be read")
        shards = tuple(ShardEntry(**entry) for entry in record["shards"])
        sizes = [size for each in shards for size in (each.documents, each.sequences, each.tokens)]
        if not shards or record["dtype"] not in DTYPE_CODES.values() or min(sizes) < 0:
            raise ValueError("it lists no shards, or sizes that cannot be")
        if (piece_bytes := record.get("piece_bytes")) is not None and piece_bytes < 1:
            raise ValueError("its pieces have no bytes")
        whole = record["dtype"], record["tokenizer"], record["checksums_crc32"]
        return ShardList(*whole, shards, record.get("shuffle_seed"), piece_bytes)
    except FileNotFoundError:
        raise UserError(f"no such list of shards: {path}; write it with merge-datasets --list") from None
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read {path} ({type(error).__name__}: {error}): write it again with merge-datasets --list"
        ) from None


class JoinedArray:
    """One array in several parts, which are read where they are: only what is requested is joined.

    Args:
        parts: one-dimensional arrays of one dtype.
        shifts: numbers to add to the values of each part; None to add nothing.
        sizes: numbers of values to take of each part; None for all.
    """

    def __init__(
        self,
        parts: Sequence[Entries],
        shifts: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._parts = parts
        self._shifts = [0] * len(parts) if shifts is None else shifts
        self._starts = np.cumsum([0, *(map(len, parts) if sizes is None else sizes)])
        self.dtype = parts[0].dtype

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int | slice) -> Any:
        """Return one entry, or a copy of consecutive ones."""
        if not isinstance(index, slice):
            if not 0 <= index < len(self):
                raise IndexError(f"entry {index} of {len(self)}")
            part = int(np.searchsorted(self._starts, index, side="right")) - 1
            return self._parts[part][index - self._starts[part]] + self._shifts[part]
        first, stop, step = index.indices(len(self))
        assert step == 1, "only consecutive entries can be joined"
        result, end = np.empty(max(0, stop - first), self.dtype), 0
        part = int(np.searchsorted(self._starts, first, side="right")) - 1
        while end < len(result):
            at = first + end - int(self._starts[part])
            size = int(self._starts[part + 1] - self._starts[part])
            values = self._parts[part][at : min(at + len(result) - end, size)]
            np.add(values, self._shifts[part], out=result[end : end + len(values)])
            end, part = end + len(values), part + 1
        return result

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        joined: npt.NDArray[Any] = self[:]
        return joined if dtype is None else joined.astype(dtype, copy=False)


def checksums_of(shard: IndexedDataset) -> tuple[npt.NDArray[np.uint32], str]:
    """Return the CRC-32 of each sequence and then of each piece, and the SHA-256 of the .bin."""
    checksums, pieces, digest = list[int](), list[int](), hashlib.sha256()
    size = shard.dtype.itemsize
    for lengths, starts in zip(
        blocks_of(shard.sequence_lengths), blocks_of(shard.sequence_offsets), strict=True
    ):
        begins, ends = starts.tolist(), (starts + lengths.astype(np.int64) * size).tolist()
        while begins:  # the sequences of some MB at a time, but at least one
            count = max(1, bisect_right(ends, begins[0] + _CHECKED_BYTES))
            base = begins[0]
            data = shard.read_tokens(base // size, ends[count - 1] // size).view(np.uint8).data
            digest.update(data)
            for begin in range(-(base % PIECE_BYTES), len(data), PIECE_BYTES):
                if begin >= 0:
                    pieces.append(0)
                pieces[-1] = zlib.crc32(data[max(0, begin) : begin + PIECE_BYTES], pieces[-1])
            checksums += [
                zlib.crc32(data[begin - base : end - base])
                for begin, end in zip(begins[:count], ends[:count], strict=True)
            ]
            begins, ends = begins[count:], ends[count:]
    return np.array([*checksums, *pieces], "<u4"), digest.hexdigest()


class ShardedDataset(IndexedDataset):
    """Corpus of several shards, read as one.

    Opening checks each shard against the list and its whole index, or only its sizes. The indices stay in the
    shards' files, which all processes of a machine share: a shard is found by a binary search.

    Attributes:
        prefix: prefix of the list, as the user wrote it.

    Raises:
        UserError: the list or a shard is missing or damaged, or a shard is not the one that was listed.
    """

    def __init__(self, prefix: str, cache_bytes: int = CACHE_BYTES, checks_index: bool = True) -> None:
        self.prefix = prefix
        listed = read_list(prefix)
        self.is_shuffled = listed.shuffle_seed is not None
        with ThreadPoolExecutor(_NUM_OPENERS) as pool:
            opened = partial(_open_shard, prefix, listed.dtype, cache_bytes, checks_index)
            shards = pool.map(opened, listed.shards)
            self.shards = tuple(shards)
        self.dtype = self.shards[0].dtype
        num_bytes = [shard.num_tokens * self.dtype.itemsize for shard in self.shards]
        num_sequences = [len(shard) for shard in self.shards]
        self._first_sequences: list[int] = np.cumsum([0, *num_sequences]).tolist()
        self._first_tokens = np.cumsum([0, *(shard.num_tokens for shard in self.shards)])
        self.sequence_lengths: Entries = JoinedArray([shard.sequence_lengths for shard in self.shards])
        self.sequence_offsets: Entries = JoinedArray(
            [shard.sequence_offsets for shard in self.shards], np.cumsum([0, *num_bytes[:-1]]).tolist()
        )
        documents = [shard.document_index for shard in self.shards]
        self.document_index: Entries = JoinedArray(
            [*documents, np.zeros(1, np.int64)],
            self._first_sequences,
            [*(len(index) - 1 for index in documents), 1],
        )
        self._piece_bytes = listed.piece_bytes
        counts = [
            len(shard) + (-(-size // self._piece_bytes) if self._piece_bytes else 0)
            for shard, size in zip(self.shards, num_bytes, strict=True)
        ]
        self._first_checksums: list[int] = np.cumsum([0, *counts]).tolist()
        count = self._first_checksums[-1]
        self._checksums = _open_checksums(prefix, listed, count, cache_bytes, checks_index)
        self.release()

    @property
    def files(self) -> tuple[MappedBytes, ...]:
        """Return the files of all shards, and the checksums."""
        return *(file for shard in self.shards for file in shard.files), self._checksums

    def has_checksums(self, of_windows: bool) -> bool:
        return not of_windows or self._piece_bytes is not None

    @property
    def is_mapped(self) -> bool:
        return False

    @property
    def num_tokens(self) -> int:
        return int(self._first_tokens[-1])

    def locate(self, sequence: int) -> tuple[int, FileRange]:
        number = min(bisect_right(self._first_sequences, sequence), len(self.shards)) - 1
        local = sequence - self._first_sequences[number]
        _, found = self.shards[number].locate(local)
        if not self.shards[number].is_remote:
            return number, found
        at = 4 * (self._first_checksums[number] + local)
        return number, found._replace(check=Check(found.begin, found.end, self._checksums, at))

    def ranges_of(self, first: int, end: int) -> list[FileRange]:
        ranges: list[FileRange] = []
        number = int(np.searchsorted(self._first_tokens, first, side="right")) - 1
        while number < len(self.shards) and (start := int(self._first_tokens[number])) < end:
            shard = self.shards[number]
            for found in shard.ranges_of(max(0, first - start), min(end - start, shard.num_tokens)):
                check = None
                if shard.is_remote and (size := self._piece_bytes):
                    piece = found.begin // size
                    at = 4 * (self._first_checksums[number] + len(shard) + piece)
                    stop = min(-(-found.end // size) * size, len(found.file.array))
                    check = Check(piece * size, stop, self._checksums, at, size)
                ranges.append(found._replace(check=check))
            number += 1
        return ranges

    def first_altered(self) -> str | None:
        """Return which document differs from the checksums of the list, as text; None if all are equal."""
        checksums = FetchedArray(self._checksums, self._checksums.array.view("<u4"), 0)
        for number, shard in enumerate(self.shards):
            at = self._first_checksums[number]
            differs = checksums_of(shard)[0][: len(shard)] != checksums[at : at + len(shard)]
            if differs.any():
                document = self.document_of(self._first_sequences[number] + int(differs.argmax()))
                return (
                    f"{shard.prefix}.bin is not the file that {list_path(self.prefix)} lists: document "
                    f"{document} of the corpus differs; restore it, or list the shards again"
                )
        return None

    def document_of(self, sequence: int) -> int:
        number, _ = self.locate(sequence)
        before = sum(shard.num_documents for shard in self.shards[:number])
        return before + self.shards[number].document_of(sequence - self._first_sequences[number])


def _open_shard(
    prefix: str, dtype: str, cache_bytes: int, checks_index: bool, entry: ShardEntry
) -> IndexedDataset:
    """Open a shard, and check that it is the one that was listed.

    Without `checks_index`, only the sizes of its files are checked now, and its index once entries are read.
    """
    check_shard = partial(_check_shard, prefix, dtype, cache_bytes, entry)
    if checks_index:
        return check_shard(True)
    name, stored = shard_prefix(prefix, entry.name), np.dtype(dtype).newbyteorder("<")
    check = cache(lambda: check_shard(False).release())
    listed = ListedIndex(stored, entry.sequences, entry.documents, check)
    shard = IndexedDataset(name, cache_bytes, False, listed)
    if (num_bytes := len(shard.files[0].array)) != entry.tokens * stored.itemsize:
        raise UserError(
            f"{name}.bin has {num_bytes} bytes, and {list_path(prefix)} lists {entry.tokens} tokens of "
            f"{stored.itemsize} bytes: restore the shard, or list the shards again"
        )
    return shard


def _check_shard(
    prefix: str, dtype: str, cache_bytes: int, entry: ShardEntry, checks_index: bool
) -> IndexedDataset:
    """Open a shard, and check that it is the one that was listed, as far as its index and sizes tell."""
    path = list_path(prefix)
    shard = IndexedDataset(shard_prefix(prefix, entry.name), cache_bytes, checks_index)
    sizes = shard.num_documents, len(shard), shard.num_tokens, shard.dtype.name
    if sizes != (entry.documents, entry.sequences, entry.tokens, dtype):
        raise UserError(
            f"{shard.prefix} has {sizes[0]} documents and {sizes[2]} tokens ({sizes[3]}), and {path} lists "
            f"{entry.documents} and {entry.tokens} ({dtype}): restore the shard, or list the shards again"
        )
    if checks_index and shard.files[1].crc32() != entry.idx_crc32:
        raise UserError(
            f"{shard.prefix}.idx is not the file that {path} lists: restore it, or list the shards again"
        )
    return shard


def _open_checksums(
    prefix: str, listed: ShardList, count: int, cache_bytes: int, checks_index: bool
) -> MappedBytes:
    """Open PREFIX.shards.crc32, and check that it has this number of checksums, or also its own."""
    path = f"{prefix.removesuffix(LIST_SUFFIX)}{CHECKSUM_SUFFIX}"
    try:
        file = open_bytes(path, cache_bytes)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: copy it, or list the shards again") from None
    is_valid = len(file.array) == 4 * count
    if is_valid and checks_index:
        file.fetch(0, len(file.array))
        is_valid = file.crc32() == listed.checksums_crc32
    if not is_valid:
        raise UserError(f"{path} does not belong to {list_path(prefix)}: list the shards again")
    return file
