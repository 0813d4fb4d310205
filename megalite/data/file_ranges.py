"""Read parts of files, mapped or fetched from object storage: ranges of several, and the arrays of an .idx.

Ranges of files in a store are fetched together, and checked; entries of an array are fetched where they are
read.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megalite.data._index_builder import check_sequences, is_ascending
from megalite.data.storage import CachedBytes, MappedBytes, fetch_missing
from megalite.utils.errors import UserError

_CHECKSUM_BYTES = 64 << 10
"""Bytes of checksums to fetch at a time."""
_MAX_ATTEMPTS = 5


class Check(NamedTuple):
    """Bytes from `begin` to `end` of a file, in pieces with a CRC-32 each, or in one.

    The checksums are little-endian uint32 from byte `at` of their file on.
    """

    begin: int
    end: int
    checksums: MappedBytes
    at: int
    piece_bytes: int = sys.maxsize

    @property
    def end_of_checksums(self) -> int:
        return self.at + 4 * -(-(self.end - self.begin) // self.piece_bytes)

    def damaged(
        self, data: npt.NDArray[np.uint8], listed: npt.NDArray[np.uint8]
    ) -> list[tuple[int, int, int]]:
        """Return the begin and end of each piece that does not have its checksum, and where the checksum is.

        Args:
            data: the bytes from `begin` to `end`.
            listed: the bytes of their checksums.
        """
        begins = range(0, len(data), self.piece_bytes)
        found = [zlib.crc32(data[begin : begin + self.piece_bytes].data) for begin in begins]
        differs = np.flatnonzero(np.array(found, "<u4") != listed.view("<u4")).tolist()
        starts = [(self.begin + begins[number], self.at + 4 * number) for number in differs]
        return [(start, min(start + self.piece_bytes, self.end), at) for start, at in starts]


class FileRange(NamedTuple):
    """Bytes from `begin` to `end` of a file, and a check of bytes that include them if there is one."""

    file: MappedBytes
    begin: int
    end: int
    check: Check | None = None

    @property
    def checked(self) -> tuple[int, int]:
        """Return the begin and the end of the bytes to read."""
        return (self.begin, self.end) if self.check is None else self.check[:2]


def read_ranges(ranges: Sequence[FileRange]) -> list[npt.NDArray[np.uint8]]:
    """Return copies of ranges of files; what is missing of those in a store is fetched in one go.

    Bytes from a store that do not have their checksum are fetched once again.

    Raises:
        UserError: see `CachedBytes.fetch`, or bytes are wrong again.
    """
    parts: dict[int, npt.NDArray[np.uint8]] = {}
    damaged = set[tuple[MappedBytes, int]]()
    for _ in range(_MAX_ATTEMPTS):  # another process may remove what was fetched
        fetch_ranges([each for i, each in enumerate(ranges) if i not in parts])
        for i, each in enumerate(ranges):
            file, check, (begin, end) = each.file, each.check, each.checked
            if i in parts or (part := file.copy(begin, end)) is None:
                continue
            if check is not None:
                if (listed := check.checksums.copy(check.at, check.end_of_checksums)) is None:
                    continue
                if wrong := check.damaged(part, listed):
                    assert isinstance(file, CachedBytes), "only bytes from a store are checked"
                    for start, stop, at in wrong:
                        if (file, start) in damaged:
                            raise file.damaged(start, stop)
                        damaged.add((file, start))
                        file.forget(start, stop)
                        check.checksums.forget(at, at + 4)  # either may be wrong
                    continue
            parts[i] = part[each.begin - begin : each.end - begin]
        if len(parts) == len(ranges):
            return [parts[i] for i in range(len(ranges))]
    raise UserError("the cache cannot hold the samples of one batch: raise --data-cache-bytes")


def fetch_ranges(ranges: Sequence[FileRange]) -> None:
    """Fetch what the cache lacks of ranges of files in a store, in one go; see `CachedBytes.fetch`."""
    wanted: dict[CachedBytes, dict[tuple[int, int], None]] = {}
    for each in ranges:
        spans = [(each.file, *each.checked)]
        if each.check is not None:
            sums, size = each.check.checksums, _CHECKSUM_BYTES
            last = -(-each.check.end_of_checksums // size) * size
            spans.append((sums, each.check.at // size * size, min(last, len(sums.array))))
        for file, begin, end in spans:
            if isinstance(file, CachedBytes):
                wanted.setdefault(file, {})[begin, end] = None
    fetch_missing({file: list(found) for file, found in wanted.items()})


MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of documents + 1; unaligned arrays follow."""

DTYPE_CODES: dict[int, str] = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16",
}  # fmt: skip
BLOCK = 1 << 20
"""Number of sequences to check at a time, which bounds the memory of the checks."""


class Entries(Protocol):
    """Array of the entries of an index, in one file or in several."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def __array__(self, *args: Any, **kwargs: Any) -> npt.NDArray[Any]: ...


class FetchedArray:
    """One-dimensional array in a file, of which only what is requested is fetched.

    Args:
        values: the array in the file's mapping.
        offset: its first byte in the file.
        check: called before values are read.
    """

    def __init__(
        self,
        file: MappedBytes,
        values: npt.NDArray[Any],
        offset: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._file, self._values, self._offset, self._check = file, values, offset, check
        self.dtype = values.dtype

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int | slice) -> Any:
        """Return one entry, or a view of consecutive ones."""
        part = index if isinstance(index, slice) else slice(index, index + 1)
        first, stop, _ = part.indices(len(self))
        if first < stop:
            self._check()
        begin, end = (self._offset + number * self.dtype.itemsize for number in (first, stop))
        self._file.fetch(begin, max(begin, end))
        return self._values[index]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self[:]
        return values if dtype is None else values.astype(dtype, copy=False)


class IndexArrays(NamedTuple):
    """Arrays of N sequences and D documents, and their file."""

    dtype: np.dtype[Any]
    lengths: Entries  # [N], in tokens
    offsets: Entries  # [N], in bytes
    document_index: Entries  # [D + 1], first sequence of each document, then N
    file: MappedBytes


class ListedIndex(NamedTuple):
    """Index of a shard, as the list of shards has it.

    Attributes:
        check: checks the .idx; called whenever entries of it are read.
    """

    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int
    check: Callable[[], None]


def read_header(path: str, raw: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """Return the dtype of the tokens, the number of sequences, and the number of documents + 1."""
    head = raw[: HEADER.size].tobytes()
    if head[: len(MAGIC)] != MAGIC:
        raise UserError(f"{path} is not an indexed dataset: it does not begin with {MAGIC!r}")
    if len(head) < HEADER.size:
        raise UserError(f"{path} is truncated: it has {len(head)} bytes, and its header alone {HEADER.size}")
    _, version, code, num_sequences, num_document_entries = HEADER.unpack(head)
    if version != VERSION:
        raise UserError(f"{path} has version {version}; only version {VERSION} can be read")
    if code not in DTYPE_CODES:
        raise UserError(
            f"{path} has the unknown dtype code {code}; {min(DTYPE_CODES)} to {max(DTYPE_CODES)} are known"
        )
    dtype = np.dtype(DTYPE_CODES[code]).newbyteorder("<")
    if dtype.kind == "f":
        raise UserError(f"{path} holds {dtype.name} values (dtype code {code}); tokens must be integers")
    return dtype, num_sequences, num_document_entries


def check_index_sequences(
    idx_path: str, bin_path: str, index: IndexArrays, num_bytes: int, is_whole: bool
) -> None:
    """Check that the sequences are back to back from the first to the last byte of the .bin.

    Every writer of the format places them like this. The check finds every wrong offset: one flipped bit in
    a length or an offset contradicts the neighbouring sequence.

    Args:
        is_whole: check all sequences; otherwise only where the last one ends.
    """
    itemsize, count = index.dtype.itemsize, len(index.lengths)
    checked = 0 if is_whole else max(0, count - 1)
    end = 0 if checked == 0 else int(index.offsets[checked])
    while checked < count:
        block = slice(checked, min(checked + BLOCK, count))
        number, end = check_sequences(index.lengths[block], index.offsets[block], itemsize, end)
        index.file.release()
        checked += number
        if checked < block.stop:
            raise UserError(
                f"{idx_path} is damaged: sequence {checked} has {index.lengths[checked]} tokens of "
                f"{itemsize} bytes at byte {index.offsets[checked]} of {bin_path}, and the one before it "
                f"ends at byte {end}: sequences must be back to back; copy or preprocess it again"
            )
    if end != num_bytes:
        raise UserError(
            f"{bin_path} has {num_bytes} bytes, but {idx_path} lists {end // itemsize} tokens of {itemsize} "
            f"bytes, {end} in all: one of the two is truncated or belongs to another dataset; "
            "copy or preprocess them again"
        )


def check_index_documents(path: str, index: IndexArrays, is_whole: bool) -> None:
    """Check that the documents ascend from 0 to the number of sequences, or without `is_whole` their ends."""
    documents, num_sequences = index.document_index, len(index.lengths)
    is_valid = len(documents) > 0 and documents[0] == 0 and documents[len(documents) - 1] == num_sequences
    for first in range(0, len(documents), BLOCK) if is_whole else ():
        is_valid &= is_ascending(documents[first : first + BLOCK + 1])
        index.file.release()
    index.file.release()  # without the loop too: a corpus may have thousands of shards
    if not is_valid:
        raise UserError(
            f"{path} is damaged: its document index does not ascend from 0 to {num_sequences}; "
            "copy or preprocess it again"
        )
