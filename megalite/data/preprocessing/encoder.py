"""Encodes pieces of the input into a worker's shards."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data.documents import Record, RecordError, parse_record
from megalite.data.indexed_writer import token_dtype
from megalite.data.preprocessing.job import PreprocessJob
from megalite.data.preprocessing.pieces import Piece, locate
from megalite.data.preprocessing.sentences import sentence_splitter
from megalite.data.preprocessing.shard import COUNTS, Column, Extent, ShardWriter, join_extents
from megalite.errors import UserError

_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 4096
MAX_MESSAGES = 10
"""Skipped documents that are named one by one; all are counted."""
_MAX_LENGTH = 2**31 - 1


@dataclass
class ColumnResult:
    """What one piece has given for one key."""

    extent: Extent
    num_text_bytes: int = 0
    num_unknown: int = 0
    histogram: list[int] = field(default_factory=list)
    """Number of documents of 2^i to 2^(i+1) - 1 tokens, for each i."""


@dataclass
class PieceResult:
    """What one piece has given; small, whatever the piece."""

    columns: list[ColumnResult]
    num_bytes: int
    num_skipped: int
    bad: list[tuple[str, str, int, str]]
    """The first few of the skipped records: file, "line" or "row", its number in the piece, and why."""
    num_input_bytes: int
    checksum: int


class Encoder:
    """Parses and tokenizes pieces, and appends them to shards of its own; a context manager."""

    def __init__(self, job: PreprocessJob, folder: str) -> None:
        self._job = job
        self._tokenizer = job.build_tokenizer()
        self._dtype = token_dtype(self._tokenizer.vocab_size)
        self._eod = self._tokenizer.eod if job.append_eod else None
        self._unknown: int | None = getattr(self._tokenizer, "unk", None)
        self._split: Callable[[str], list[str]] | None = (
            sentence_splitter(job.sentence_language) if job.sentence_language else None
        )
        self._stack = ExitStack()
        name = secrets.token_hex(6)  # never that of an earlier run's, or of another worker
        try:
            self._shards = [
                self._stack.enter_context(ShardWriter(folder, f"{name}-{k}"))
                for k in range(len(job.json_keys))
            ]
        except OSError as error:
            raise self._cannot_write(error) from None

    def __enter__(self) -> Encoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def encode(self, piece: Piece) -> PieceResult:
        """Encodes one piece.

        Raises:
            UserError: its files cannot be read or the shards not written, or a record is bad and none are
                skipped.
        """
        columns = [ColumnResult(self._append(k, _empty(self._dtype))) for k in range(len(self._shards))]
        result = PieceResult(columns, 0, 0, [], piece.num_input_bytes, piece.checksum)
        for batch in _batches(piece.records(self._job)):
            result.num_bytes += sum(record.num_bytes for record in batch)
            rows = self._encode_batch(piece, batch, result)
            for k, column in enumerate(columns):
                self._add(column, k, [ids[k] for ids in rows])
        try:
            for shard in self._shards:
                shard.flush()
        except OSError as error:
            raise self._cannot_write(error) from None
        return result

    def _encode_batch(
        self, piece: Piece, batch: list[Record], result: PieceResult
    ) -> list[list[list[list[int]]]]:
        """Ids by record, key and sequence; bad records are left out, and counted."""
        good: list[Record] = []
        texts: list[list[list[str]]] = []
        for record in batch:
            try:
                row = parse_record(record, self._job.json_keys)
            except RecordError as error:
                self._skip_or_fail(piece, record, error, result)
                continue
            good.append(record)
            texts.append([self._split(text) if self._split else [text] for text in row])
        try:
            rows = self._encode_texts(texts)
        except UserError:  # some text is nothing for this tokenizer: find out which
            rows, known = [], texts
            texts = []
            for record, row_texts in zip(good, known, strict=True):
                try:
                    rows += self._encode_texts([row_texts])
                    texts.append(row_texts)
                except UserError as error:
                    self._skip_or_fail(piece, record, error, result)
        for row_texts in texts:
            for column, sequences in zip(result.columns, row_texts, strict=True):
                column.num_text_bytes += sum(map(_num_bytes, sequences))
        return rows

    def _encode_texts(self, texts: list[list[list[str]]]) -> list[list[list[list[int]]]]:
        flat = [text for row in texts for sequences in row for text in sequences]
        ids = iter(self._tokenizer.encode_batch(flat))
        return [[[next(ids) for _ in sequences] for sequences in row] for row in texts]

    def _add(self, column: ColumnResult, k: int, documents: list[list[list[int]]]) -> None:
        packed = _pack(documents, self._dtype, self._eod)
        if self._unknown is not None:
            column.num_unknown += int((packed.tokens == self._unknown).sum())
        column.histogram = _add_counts(column.histogram, _histogram(packed))
        column.extent = join_extents(column.extent, self._append(k, packed))

    def _append(self, k: int, column: Column) -> Extent:
        try:
            return self._shards[k].append(column)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self._job.stem}: {error.strerror}; what was unfinished is removed")

    def _skip_or_fail(self, piece: Piece, record: Record, error: Exception, result: PieceResult) -> None:
        what = "row" if record.kind == "row" else "line"
        if not self._job.skip_bad_records:
            message = f"{record.source}, {what} {locate(piece, record.number)}: {error}"
            raise UserError(f"{message}; mend it, or leave such documents out with --on-error skip")
        result.num_skipped += 1
        if len(result.bad) < MAX_MESSAGES:
            result.bad.append((record.source, what, record.number, str(error)))


def encode_in_one_thread() -> None:
    """Keeps tokenizers' engines from starting a thread a core in each worker."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    num_bytes = 0
    for record in records:
        batch.append(record)
        num_bytes += record.num_bytes
        if num_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _empty(dtype: np.dtype[Any]) -> Column:
    return Column(np.empty(0, dtype), np.empty(0, COUNTS), np.empty(0, COUNTS))


def _pack(documents: list[list[list[int]]], dtype: np.dtype[Any], eod: int | None) -> Column:
    """The tokens back to back; sequences and documents without tokens are left out, also with an eod.

    The ids' lists are this function's to lengthen.
    """
    full = [sequences for sequences in ([ids for ids in d if len(ids)] for d in documents) if sequences]
    if eod is not None:
        for sequences in full:
            sequences[-1].append(eod)
    flat = list(itertools.chain.from_iterable(full))
    lengths = np.fromiter(map(len, flat), np.int64, len(flat))
    if lengths.size and int(lengths.max()) > _MAX_LENGTH:
        raise UserError(f"a sequence of {int(lengths.max())} tokens is too long: at most {_MAX_LENGTH}")
    try:
        tokens: npt.NDArray[Any] = np.fromiter(itertools.chain.from_iterable(flat), dtype, int(lengths.sum()))
    except OverflowError:
        largest = max(max(ids) for ids in flat)
        raise UserError(
            f"token id {largest} does not fit into {dtype.name}, the type of the output"
        ) from None
    return Column(tokens, lengths.astype(COUNTS), np.fromiter(map(len, full), COUNTS, len(full)))


def _histogram(column: Column) -> list[int]:
    """Documents by the power of two in their number of tokens."""
    if not column.sequences.size:
        return []
    first = np.cumsum(column.sequences) - column.sequences
    lengths = np.add.reduceat(column.lengths.astype(np.int64), first)
    return [int(count) for count in np.bincount(np.frexp(lengths)[1] - 1)]


def _add_counts(first: list[int], second: list[int]) -> list[int]:
    return [a + b for a, b in itertools.zip_longest(first, second, fillvalue=0)]
