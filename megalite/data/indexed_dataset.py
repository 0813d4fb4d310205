"""Read and write indexed datasets: tokens in PREFIX.bin, positions of sequences in PREFIX.idx."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megalite.data._index_builder import TokenSource
from megalite.data.file_ranges import (
    BLOCK,
    DTYPE_CODES,
    HEADER,
    MAGIC,
    VERSION,
    Entries,
    FetchedArray,
    FileRange,
    IndexArrays,
    ListedIndex,
    check_index_documents,
    check_index_sequences,
    fetch_ranges,
    read_header,
    read_ranges,
)
from megalite.data.storage import CACHE_BYTES, MappedBytes, open_bytes
from megalite.utils.errors import UserError
from megalite.utils.files import new_file, open_new
from megalite.utils.object_store import is_remote


class IndexedDataset:
    """Memory-mapped sequences of one corpus.

    Opening checks the whole index: the sequences must be back to back and fill the .bin, so no later access
    can leave the file or read tokens from a wrong position. A reader of tokens by their position in the .bin
    needs no index: without the check, opening takes the same time for any size.
    The arrays are unaligned views of the file. After reading from them or from `tokens`, call `check_files`:
    another process may have written to a file, or truncated it. For files in object storage, opening copies
    the index to this machine, and reading copies the bytes of the sequences.

    Attributes:
        prefix: path or URL of the two files, without .bin and .idx.
        dtype: dtype of the tokens in the file.
        shards: the datasets that the corpus consists of: itself.
        is_shuffled: whether its documents are known to be in a random order.
        sequence_lengths: int32 [N], in tokens.
        sequence_offsets: int64 [N], start of each sequence in the .bin, in bytes.
        document_index: int64 [D + 1], first sequence of each document, and N at the end.

    Raises:
        UserError: a file is missing, unreadable, truncated or in another format, or the files do not match.
    """

    sequence_lengths: Entries
    sequence_offsets: Entries
    document_index: Entries
    shards: tuple[IndexedDataset, ...]
    is_shuffled = False

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        cache_bytes: int = CACHE_BYTES,
        checks_index: bool = True,
        listed: ListedIndex | None = None,
    ) -> None:
        """Open the files.

        Args:
            cache_bytes: limit of the cache of files in object storage.
            checks_index: check the whole index; otherwise, only its sizes are checked, and in object storage
                only the entries that are read are fetched.
            listed: what a list of shards says of the index, which then is not read; only the sizes of both
                files are checked.
        """
        self.prefix = os.fspath(prefix)
        self.shards = (self,)
        idx_path, bin_path = f"{self.prefix}.idx", f"{self.prefix}.bin"
        self._bin = _open(bin_path, cache_bytes)
        index = _read_index(idx_path, cache_bytes, checks_index, listed)
        if listed is None:
            check_index_sequences(idx_path, bin_path, index, len(self._bin.array), checks_index)
            check_index_documents(idx_path, index, checks_index)
        self.dtype, self.sequence_lengths, self.sequence_offsets, self.document_index, self._idx = index
        self._num_tokens = len(self._bin.array) // self.dtype.itemsize

    def __len__(self) -> int:
        """Return the number of sequences, N."""
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """Return the tokens of one sequence; check the files."""
        return self.read([sequence])[0]

    def read(self, sequences: Sequence[int]) -> list[npt.NDArray[Any]]:
        """Return the tokens of several sequences, which are fetched together; check the files read."""
        located = [self.locate(sequence) for sequence in sequences]
        parts = read_ranges([found for _, found in located])
        for number in {number for number, _ in located}:
            self.shards[number].check_files()
        return [part.view(self.dtype) for part in parts]

    def has_checksums(self, of_windows: bool) -> bool:
        """Return whether windows, or else whole sequences, from a store are compared with checksums."""
        return False

    def locate(self, sequence: int) -> tuple[int, FileRange]:
        """Return the number of the shard that holds a sequence, and the sequence's bytes in its .bin."""
        begin, length = int(self.sequence_offsets[sequence]), int(self.sequence_lengths[sequence])
        return 0, FileRange(self._bin, begin, begin + length * self.dtype.itemsize)

    def first_token(self, sequence: int) -> int:
        """Return the number of tokens before a sequence, or all for the number after the last sequence.

        Raises:
            UserError: the index is damaged, which opening has not checked.
        """
        if sequence == len(self):
            return self.num_tokens
        token = int(self.sequence_offsets[sequence]) // self.dtype.itemsize
        if not 0 <= token <= self.num_tokens:
            raise UserError(
                f"the index of {self.prefix} is damaged: sequence {sequence} begins at token {token} of "
                f"{self.num_tokens}; copy or preprocess it again"
            )
        return token

    def count_tokens(self, sequences: range) -> int:
        """Return the number of tokens in consecutive sequences."""
        return self.first_token(sequences.stop) - self.first_token(sequences.start) if sequences else 0

    def token_source(self, reads_index: bool = True) -> TokenSource | None:
        """Return a reader of many samples or spans at a time; None if a file is in object storage.

        Args:
            reads_index: whether to read samples; spans alone need no index.
        """
        if self.is_remote:
            return None
        part = slice(None if reads_index else 0)
        return TokenSource(
            [
                (
                    shard.tokens,
                    np.asarray(shard.sequence_offsets[part]),
                    np.asarray(shard.sequence_lengths[part]),
                )
                for shard in self.shards
            ]
        )

    def release(self) -> None:
        """Take the pages that were read out of this process's memory; see `MappedBytes.release`."""
        for file in self.files:
            file.release()

    def read_tokens(self, first: int, end: int) -> npt.NDArray[Any]:
        """Return consecutive tokens of the corpus, across sequences."""
        return self.read_spans([(first, end)])[0]

    def read_spans(self, spans: Sequence[tuple[int, int]]) -> list[npt.NDArray[Any]]:
        """Return the tokens of each span, from first to end; what is in a store is fetched together."""
        files = [self.ranges_of(first, end) for first, end in spans]
        parts = iter(read_ranges([each for ranges in files for each in ranges]))
        empty = np.empty(0, np.uint8)
        return [np.concatenate([empty, *islice(parts, len(each))]).view(self.dtype) for each in files]

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch the tokens of each span, from first to end, if they are in a store and not in the cache."""
        fetch_ranges([each for first, end in spans for each in self.ranges_of(first, end)])

    def ranges_of(self, first: int, end: int) -> list[FileRange]:
        """Return where consecutive tokens of the corpus are, in order."""
        size = self.dtype.itemsize
        return [FileRange(self._bin, first * size, end * size)]

    def token_blocks(self) -> Iterator[npt.NDArray[Any]]:
        """Yield all tokens, a bounded number at a time."""
        for first in range(0, self.num_tokens, BLOCK):
            yield self.read_tokens(first, min(first + BLOCK, self.num_tokens))

    @property
    def files(self) -> tuple[MappedBytes, ...]:
        """Return the .bin and the .idx."""
        return self._bin, self._idx

    def check_files(self) -> None:
        """Check that no file has changed since it was opened.

        Raises:
            UserError: a file was changed or became unreadable since it was opened.
        """
        for file in self.files:
            file.check()

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """Return all tokens, [num_tokens]: a view if they are mapped, else a copy."""
        return self._bin.array.view(self.dtype) if self.is_mapped else self.read_tokens(0, self.num_tokens)

    @property
    def is_mapped(self) -> bool:
        """Return whether all tokens are one array in memory; otherwise they are read in ranges."""
        return not is_remote(self.prefix)

    @property
    def is_remote(self) -> bool:
        """Return whether a file is in object storage."""
        return any(is_remote(shard.prefix) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_documents(self) -> int:
        return len(self.document_index) - 1

    def document_of(self, sequence: int) -> int:
        """Return the number of the document that a sequence belongs to."""
        return int(np.searchsorted(self.document_index, sequence, side="right")) - 1

    def check_vocabulary(self, sequence: int, tokens: npt.NDArray[Any], vocab_size: int) -> None:
        """Check tokens of a sequence.

        Raises:
            UserError: an id is outside the vocabulary.
        """
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(wrong):
            raise UserError(
                f"document {self.document_of(sequence)} of {self.prefix} has token id {wrong[0]}, outside "
                f"the vocabulary of {vocab_size}: preprocess it with the tokenizer of this model, or pass a "
                "larger --vocab-size"
            )


def _open(path: str, cache_bytes: int = CACHE_BYTES) -> MappedBytes:
    try:
        return open_bytes(path, cache_bytes)
    except FileNotFoundError:
        raise UserError(f"no such dataset file: {path}{_prefix_hint(path)}") from None


def _prefix_hint(path: str) -> str:
    """Return a hint at what the user may have meant by a prefix that names no file."""
    if is_remote(path):
        return "; pass the prefix of a .bin and an .idx file"
    prefix = Path(path).with_suffix("") if path.endswith((".bin", ".idx")) else Path(path)
    if prefix.suffix in (".bin", ".idx"):
        return f"; pass the prefix without {prefix.suffix}: {prefix.with_suffix('')}"
    try:
        near = sorted(
            p.stem for p in prefix.parent.iterdir() if p.suffix == ".idx" and p.stem.startswith(prefix.name)
        )
    except OSError:
        near = []
    if near:
        return f"; did you mean {prefix.parent / near[0]}?"
    return "; pass the prefix of a .bin and an .idx file"


def sequence_lengths(prefix: str) -> npt.NDArray[np.int32] | None:
    """Return the lengths of a corpus's sequences in tokens, from its .idx alone; None if there is no .idx.

    Raises:
        UserError: the file is damaged.
    """
    path = f"{prefix}.idx"
    try:
        open_bytes(path)
    except FileNotFoundError:
        return None
    return np.asarray(_read_index(path).lengths)


def _read_index(
    path: str, cache_bytes: int = CACHE_BYTES, is_whole: bool = True, listed: ListedIndex | None = None
) -> IndexArrays:
    """Read an .idx; `is_whole` fetches all of it, and otherwise entries are fetched when they are read."""
    opened = _open(path, cache_bytes)
    raw = opened.array
    if not is_whole:
        for mapped in opened.mapped:
            mapped.read_randomly()
    if listed is None:
        opened.fetch(0, len(raw) if is_whole else min(len(raw), HEADER.size))
        dtype, num_sequences, num_entries = read_header(path, raw)
    else:
        dtype, num_sequences, num_entries = listed.dtype, listed.num_sequences, listed.num_documents + 1
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    with_modes = expected + num_sequences
    if len(raw) not in (expected, with_modes):
        fault = "is truncated" if len(raw) < expected else "has bytes beyond its end"
        raise UserError(
            f"{path} {fault}: {num_sequences} sequences and {num_entries} document entries "
            f"take {expected} bytes, and the file has {len(raw)}; copy or preprocess it again"
        )
    if listed is None:
        opened.fetch(expected, len(raw))
        if raw[expected:].any():
            raise UserError(
                f"{path} is a multimodal dataset: some of its sequences are not text; pass a dataset of text"
            )
    offsets_at = HEADER.size + 4 * num_sequences
    places = (
        ("<i4", num_sequences, HEADER.size),
        ("<i8", num_sequences, offsets_at),
        ("<i8", num_entries, offsets_at + 8 * num_sequences),
    )
    arrays: list[Entries] = [np.frombuffer(raw, *place) for place in places]
    if listed is not None or (not is_whole and is_remote(path)):
        check = () if listed is None else (listed.check,)
        arrays = [
            FetchedArray(opened, np.asarray(array), at, *check)
            for array, (_, _, at) in zip(arrays, places, strict=True)
        ]
    return IndexArrays(dtype, arrays[0], arrays[1], arrays[2], opened)


_SMALL_VOCAB_SIZE = 65500
_MAX_LENGTH = 2**31 - 1


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which a vocabulary's tokens are written: uint16 if they fit, else int32."""
    return np.dtype("<u2" if vocab_size < _SMALL_VOCAB_SIZE else "<i4")


class IndexedWriter:
    """Writer of PREFIX.bin and PREFIX.idx; the names appear when both files are complete.

    Use it as a context manager: leaving it commits the files, an exception discards them. The .idx is renamed
    last, so a dataset with an .idx is complete.

    Raises:
        UserError: the folder cannot be written, the files exist, or a token or a length does not fit.
    """

    def __init__(self, prefix: str, dtype: npt.DTypeLike, overwrite: bool = False) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._lengths = array("i")
        self._document_ends = array("q", [0])
        self.num_tokens = 0
        existing = [name for name in (f"{prefix}.bin", f"{prefix}.idx") if os.path.exists(name)]
        if existing and not overwrite:
            raise UserError(f"{existing[0]} exists: pass another --output-prefix, or --overwrite")
        try:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._bin = open_new(self._temporary("bin"), 1 << 20)
        except OSError as error:
            raise UserError(f"cannot write {prefix}.bin: {error.strerror}") from None

    @property
    def num_documents(self) -> int:
        return len(self._document_ends) - 1

    def add_document(self, sequences: Sequence[npt.ArrayLike]) -> None:
        """Append one document with any number of sequences, even zero."""
        parts = [np.asarray(sequence) for sequence in sequences]
        for part in parts:
            self._append(part, np.array([part.size]))
        self._document_ends.append(len(self._lengths))

    def add_documents(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Append many documents of one sequence each, from their tokens back to back and their lengths."""
        first = len(self._lengths) + 1
        self._append(tokens, lengths)
        self._document_ends.extend(range(first, len(self._lengths) + 1))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._commit()
        except OSError as failure:
            raise UserError(f"cannot write {self.prefix}.bin and .idx: {failure.strerror}") from None
        finally:
            self._bin.close()
            for temporary in filter(os.path.exists, map(self._temporary, ("bin", "idx"))):
                os.remove(temporary)

    def _append(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        assert int(lengths.sum()) == tokens.size, "lengths must sum to the number of tokens"
        assert not tokens.size or tokens.dtype.kind in "iu", "tokens must be integers"
        if lengths.size and int(lengths.max()) > _MAX_LENGTH:
            raise UserError(f"a sequence of {int(lengths.max())} tokens is too long: at most {_MAX_LENGTH}")
        if tokens.dtype != self.dtype and tokens.size:
            limits, low, high = np.iinfo(self.dtype), int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                wrong = low if low < limits.min else high
                raise UserError(
                    f"token id {wrong} does not fit into {self.dtype.name}, the type of {self.prefix}.bin"
                )
        try:
            self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        except OSError as error:
            raise UserError(f"cannot write {self.prefix}.bin: {error.strerror}") from None
        self._lengths.extend(lengths.tolist())
        self.num_tokens += tokens.size

    def _commit(self) -> None:
        self._bin.flush()
        os.fsync(self._bin.fileno())
        with new_file(self._temporary("idx")) as stream:
            lengths = np.frombuffer(self._lengths, np.int32)
            counts = np.diff(np.frombuffer(self._document_ends, np.int64))
            sizes = len(lengths), len(counts)
            write_index(stream, self.dtype, sizes, lambda: [lengths], lambda: [counts])
        replace_dataset(self.prefix, {kind: self._temporary(kind) for kind in ("bin", "idx")})

    def _temporary(self, extension: str) -> str:
        return f"{self.prefix}.{extension}.{os.getpid()}.tmp"


def write_index(
    stream: BinaryIO,
    dtype: np.dtype[Any],
    sizes: tuple[int, int],
    lengths: Callable[[], Iterable[npt.NDArray[Any]]],
    counts: Callable[[], Iterable[npt.NDArray[Any]]],
) -> None:
    """Write an .idx in constant memory.

    Args:
        stream: the new file.
        sizes: number of sequences and of documents.
        lengths: yields the sequences' lengths, some at a time.
        counts: yields the documents' numbers of sequences, some at a time.
    """
    code = next(code for code, name in DTYPE_CODES.items() if name == dtype.name)
    stream.write(HEADER.pack(MAGIC, VERSION, code, sizes[0], sizes[1] + 1))
    for block in lengths():
        stream.write(block.astype("<i4", copy=False).tobytes())
    end = 0
    for block in lengths():
        ends = end + np.cumsum(block, dtype=np.int64)
        stream.write(((ends - block) * dtype.itemsize).astype("<i8").tobytes())
        end += int(block.sum(dtype=np.int64))
    stream.write(bytes(8))
    end = 0
    for block in counts():
        stream.write((end + np.cumsum(block, dtype=np.int64)).astype("<i8", copy=False).tobytes())
        end += int(block.sum(dtype=np.int64))


def blocks_of(values: Entries, part: range | None = None) -> Iterator[npt.NDArray[Any]]:
    """Yield the values of a mapped array, or of a part of it, a bounded number at a time."""
    part = range(len(values)) if part is None else part
    for first in range(part.start, part.stop, BLOCK):
        yield values[first : min(first + BLOCK, part.stop)]


def replace_dataset(prefix: str, files: Mapping[str, str]) -> None:
    """Rename complete files to PREFIX.{suffix}, in this order, the .idx last; first remove the old .idx.

    A dataset with an .idx is therefore complete, and a new .bin is never read through an old .idx.

    Args:
        files: current names by suffix.

    Raises:
        OSError: a file cannot be renamed.
    """
    assert list(files)[-1] == "idx"
    with suppress(FileNotFoundError):
        os.remove(f"{prefix}.idx")
    for suffix, file in files.items():
        os.replace(file, f"{prefix}.{suffix}")
