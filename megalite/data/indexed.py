"""Reader of indexed datasets: the tokens in PREFIX.bin, and where each sequence lies in PREFIX.idx."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.storage import MappedBytes, is_remote, open_bytes
from megalite.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of documents + 1; then the arrays, unaligned."""

DTYPE_CODES: dict[int, str] = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16",
}  # fmt: skip

_BLOCK = 1 << 20
"""Sequences checked at a time: the checks' temporaries stay small for any number of sequences."""


class _Index(NamedTuple):
    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]  # [N], in tokens
    offsets: npt.NDArray[np.int64]  # [N], in bytes
    document_index: npt.NDArray[np.int64]  # [D], first sequence of each document, then N
    file: MappedBytes


class IndexedDataset:
    """The sequences of one corpus, memory-mapped.

    Opening checks all of the index: the sequences lie back to back and fill the .bin, so that no later access
    can leave it or read tokens of a wrong place.
    The arrays are views of the file, and not aligned. After reading from them or from `tokens` call
    `check_files`: zeros may have taken the place of a part that another process cut off. The files may be in
    object storage: then the index is copied to this machine on opening, and tokens in blocks, as their
    sequences are asked for.

    Attributes:
        prefix: the two files' name or URL without .bin and .idx.
        dtype: the tokens' type in the file.
        sequence_lengths: int32 [N], in tokens.
        sequence_offsets: int64 [N], where each sequence starts in the .bin, in bytes.
        document_index: int64 [D], the first sequence of each document, and N at the end.

    Raises:
        UserError: a file is missing, unreadable, foreign, truncated, or contradicts the other.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        idx_path, bin_path = f"{self.prefix}.idx", f"{self.prefix}.bin"
        self._bin = _open(bin_path)
        num_bytes = len(self._bin.array)
        index = _read_index(idx_path)
        self.dtype = index.dtype
        self.sequence_lengths = index.lengths
        self.sequence_offsets = index.offsets
        self.document_index = index.document_index
        self._idx = index.file
        _check_sequences(idx_path, bin_path, index, num_bytes)
        _check_documents(idx_path, index)
        self._tokens = self._bin.array.view(self.dtype)

    def __len__(self) -> int:
        """The number of sequences, N."""
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """Return the tokens of one sequence.

        Raises:
            UserError: a file became shorter since it was opened.
        """
        begin, length = int(self.sequence_offsets[sequence]), int(self.sequence_lengths[sequence])
        self._bin.fetch(begin, begin + length * self.dtype.itemsize)
        start = begin // self.dtype.itemsize
        tokens = self._tokens[start : start + length].copy()
        self.check_files()
        return tokens

    @property
    def files(self) -> tuple[MappedBytes, MappedBytes]:
        """The .bin and the .idx."""
        return self._bin, self._idx

    def check_files(self) -> None:
        """Check that both files still hold all that was read.

        Raises:
            UserError: one became shorter or unreadable since it was opened.
        """
        for file in self.files:
            file.check()

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens of the .bin, [num_tokens]; from object storage this brings the whole file here."""
        self._bin.fetch(0, len(self._bin.array))
        return self._tokens

    @property
    def is_remote(self) -> bool:
        """Whether the files are in object storage: single sequences are then cheaper than `tokens`."""
        return is_remote(self.prefix)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_documents(self) -> int:
        return len(self.document_index) - 1

    def document_of(self, sequence: int) -> int:
        """The number of the document that a sequence is part of."""
        return int(np.searchsorted(self.document_index, sequence, side="right")) - 1


def _open(path: str) -> MappedBytes:
    try:
        return open_bytes(path)
    except FileNotFoundError:
        raise UserError(f"no such dataset file: {path}{_prefix_hint(path)}") from None


def _prefix_hint(path: str) -> str:
    """What the user may have meant by a prefix that names no file."""
    if is_remote(path):
        return "; give the prefix of a .bin and an .idx file"
    prefix = Path(path).with_suffix("") if path.endswith((".bin", ".idx")) else Path(path)
    if prefix.suffix in (".bin", ".idx"):
        return f"; give the prefix without {prefix.suffix}: {prefix.with_suffix('')}"
    try:
        near = sorted(
            p.stem for p in prefix.parent.iterdir() if p.suffix == ".idx" and p.stem.startswith(prefix.name)
        )
    except OSError:
        near = []
    return (
        f"; did you mean {prefix.parent / near[0]}?"
        if near
        else "; give the prefix of a .bin and an .idx file"
    )


def _read_header(path: str, raw: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """The tokens' type and the two counts.

    Raises:
        UserError: the file is no .idx of the known version with integer tokens.
    """
    head = raw[: HEADER.size].tobytes()
    if head[: len(MAGIC)] != MAGIC:
        raise UserError(f"{path} is not an indexed dataset: it does not begin with {MAGIC!r}")
    if len(head) < HEADER.size:
        raise UserError(f"{path} is truncated: {len(head)} bytes, its header alone takes {HEADER.size}")
    _, version, code, num_sequences, num_document_entries = HEADER.unpack(head)
    if version != VERSION:
        raise UserError(f"{path} has version {version}, only version {VERSION} can be read")
    if code not in DTYPE_CODES:
        raise UserError(
            f"{path} has the unknown dtype code {code}, known are {min(DTYPE_CODES)} to {max(DTYPE_CODES)}"
        )
    dtype = np.dtype(DTYPE_CODES[code]).newbyteorder("<")
    if dtype.kind == "f":
        raise UserError(f"{path} holds {dtype.name} values (dtype code {code}), tokens must be integers")
    return dtype, num_sequences, num_document_entries


def sequence_lengths(prefix: str) -> npt.NDArray[np.int32] | None:
    """Lengths of a corpus's sequences in tokens, from its .idx alone; None where there is none.

    Raises:
        UserError: the file is damaged.
    """
    path = f"{prefix}.idx"
    try:
        open_bytes(path)
    except FileNotFoundError:
        return None
    return _read_index(path).lengths


def _read_index(path: str) -> _Index:
    opened = _open(path)
    raw = opened.array
    opened.fetch(0, len(raw))
    dtype, num_sequences, num_entries = _read_header(path, raw)
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    with_modes = expected + num_sequences
    if len(raw) not in (expected, with_modes):
        fault = "is truncated" if len(raw) < expected else "has bytes beyond its end"
        raise UserError(
            f"{path} {fault}: {num_sequences} sequences and {num_entries} document entries "
            f"take {expected} bytes, the file has {len(raw)}"
        )
    if raw[expected:].any():
        raise UserError(f"{path} is a multimodal dataset: some of its sequences are not text")
    offsets_at = HEADER.size + 4 * num_sequences
    return _Index(
        dtype,
        np.frombuffer(raw, "<i4", num_sequences, HEADER.size),
        np.frombuffer(raw, "<i8", num_sequences, offsets_at),
        np.frombuffer(raw, "<i8", num_entries, offsets_at + 8 * num_sequences),
        opened,
    )


def _check_sequences(idx_path: str, bin_path: str, index: _Index, num_bytes: int) -> None:
    """Check that the sequences lie back to back from the first to the last byte of the .bin.

    Every writer of the format lays them so. Then no offset can lead to a wrong place: one flipped bit in a
    length or an offset contradicts the sequence beside it.

    Raises:
        UserError: a length is negative, an offset is not where the sequence before it ends, or the .bin has
            another size.
    """
    itemsize, end = index.dtype.itemsize, 0
    for first in range(0, len(index.lengths), _BLOCK):
        sizes = index.lengths[first : first + _BLOCK].astype(np.int64)
        sizes *= itemsize
        ends = np.cumsum(sizes)
        ends += end
        starts = ends - sizes
        bad = (sizes < 0) | (starts != index.offsets[first : first + _BLOCK])
        if bad.any():
            i = int(bad.argmax())
            raise UserError(
                f"{idx_path} is damaged: sequence {first + i} has {sizes[i] // itemsize} tokens of "
                f"{itemsize} bytes at byte {index.offsets[first + i]} of {bin_path}, and the one before it "
                f"ends at byte {starts[i]}: sequences must lie back to back; copy or preprocess it again"
            )
        end = int(ends[-1])
    if end != num_bytes:
        raise UserError(
            f"{bin_path} has {num_bytes} bytes, but {idx_path} lists {end // itemsize} tokens of {itemsize} "
            f"bytes, {end} in all: one of the two is truncated or of another dataset; "
            "copy or preprocess it again"
        )


def _check_documents(path: str, index: _Index) -> None:
    documents, num_sequences = index.document_index, len(index.lengths)
    whole = len(documents) > 0 and documents[0] == 0 and documents[-1] == num_sequences
    if not whole or bool((documents[1:] < documents[:-1]).any()):
        raise UserError(f"{path} is damaged: its document index does not ascend from 0 to {num_sequences}")
