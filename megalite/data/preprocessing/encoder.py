"""Encode pieces of the input into a worker's shards."""

from __future__ import annotations

import importlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from megalite.data.preprocessing.conversations import ConversationEncoder, EncodedConversation
from megalite.data.preprocessing.documents import DocumentRecord, RecordError, parse_records
from megalite.data.preprocessing.input_plan import InputPiece, PreprocessJob, locate
from megalite.data.preprocessing.shards import (
    Column,
    EncodedDocuments,
    Extent,
    ShardWriter,
    empty_column,
    join_extents,
    pack,
)
from megalite.data.tokenizers.tokenizer import end_of_document, special_ids
from megalite.utils.errors import UserError

_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 4096
MAX_MESSAGES = 10
"""Number of skipped documents to name in the log; all are counted."""


class CannotWrite(UserError):
    """Raised when the disk is full or cannot be written."""


@dataclass
class ColumnResult:
    """Result of one piece for one column."""

    extent: Extent
    num_text_bytes: int = 0
    num_unknown: int = 0
    num_ends: int = 0
    """Number of end-of-document tokens in the texts themselves."""
    num_special: int = 0
    """Number of documents whose text holds the text of a special token, which becomes the token."""
    first_special: tuple[str, str, int, str] | None = None
    """The first of them: file, "line" or "row", number in the piece, and text of the token."""
    histogram: list[int] = field(default_factory=list)
    """Number of documents of 2^i to 2^(i+1) - 1 tokens, for each i."""
    num_empty: int = 0
    """Number of documents without a token, which are not written."""


@dataclass
class PieceResult:
    """Result of one piece; its size does not depend on the piece's."""

    columns: list[ColumnResult]
    num_bytes: int
    num_skipped: int
    bad: list[tuple[str, str, int, str]]
    """The first few skipped records: file, "line" or "row", number in the piece, and reason."""
    num_input_bytes: int
    checksum: int


class Encoder:
    """Encoder of pieces, which it appends to its own shards; a context manager, and called with a piece."""

    def __init__(self, job: PreprocessJob, folder: str) -> None:
        self._job = job
        self._tokenizer = job.build_tokenizer()
        self._dtypes = job.column_dtypes(self._tokenizer)
        self._conversations = (
            ConversationEncoder(self._tokenizer, job.json_keys[0], job.now) if job.chat else None
        )
        self._eod = self._tokenizer.eod if job.append_eod else None
        # A chat template writes special tokens itself, and may end turns by the end-of-document token.
        special: set[int] = set() if job.chat else special_ids(self._tokenizer)
        self._end = None if job.chat else end_of_document(self._tokenizer)
        self._special = sorted(special)
        self._special_but_end = np.array(sorted(special - {self._end}), self._dtypes[0])
        self._unknown: int | None = self._tokenizer.unk
        self._split: Callable[[str], list[str]] | None = (
            sentence_splitter(job.sentence_language, job.keep_newlines) if job.sentence_language else None
        )
        self._stack = ExitStack()
        name = secrets.token_hex(6)  # differs from the names of an earlier run and of other workers
        try:
            self._shards = [
                self._stack.enter_context(ShardWriter(folder, f"{name}-{k}"))
                for k in range(len(self._dtypes))
            ]
        except OSError as error:
            raise self._cannot_write(error) from None

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, piece: InputPiece) -> PieceResult:
        """Encode one piece.

        Raises:
            UserError: its files cannot be read, the shards cannot be written, or a record is bad and bad
                records are not skipped.
        """
        columns = [ColumnResult(self._append(k, empty_column(dtype))) for k, dtype in enumerate(self._dtypes)]
        result = PieceResult(columns, 0, 0, [], piece.num_input_bytes, piece.checksum)
        for batch, num_bytes in batches(piece.records(self._job)):
            result.num_bytes += num_bytes
            good, encoded = self._encode_batch(piece, batch, result)
            for k, documents in enumerate(encoded):
                self._add(columns[k], k, documents, good)
        try:
            for shard in self._shards:
                shard.flush()
        except OSError as error:
            raise self._cannot_write(error) from None
        return result

    def _encode_batch(
        self, piece: InputPiece, batch: list[DocumentRecord], result: PieceResult
    ) -> tuple[list[DocumentRecord], list[EncodedDocuments]]:
        """Return the good records and their documents by column; bad records are skipped and counted."""
        if self._conversations is not None:
            return batch, self._encode_conversations(self._conversations, piece, batch, result)
        good: list[DocumentRecord] = []
        rows: list[list[bytes]] = []
        for record, row in zip(batch, parse_records(batch, self._job.json_keys), strict=True):
            if isinstance(row, RecordError):
                self._skip_or_fail(piece, record, row, result)
                continue
            good.append(record)
            rows.append(row)
        try:
            return good, self._encode_rows(rows)
        except UserError:  # the tokenizer refuses some text: find out which one
            kept = [
                (record, row)
                for record, row in zip(good, rows, strict=True)
                if self._is_encodable(piece, record, row, result)
            ]
            return [record for record, _ in kept], self._encode_rows([row for _, row in kept])

    def _encode_conversations(
        self,
        encoder: ConversationEncoder,
        piece: InputPiece,
        batch: list[DocumentRecord],
        result: PieceResult,
    ) -> list[EncodedDocuments]:
        """Return the encoded conversations, and their loss masks."""
        good: list[EncodedConversation] = []
        for record, encoded in zip(batch, encoder.encode(batch), strict=True):
            if isinstance(encoded, RecordError):
                self._skip_or_fail(piece, record, encoded, result)
            else:
                good.append(encoded)
        num_text_bytes = sum(each.num_text_bytes for each in good)
        return [
            EncodedDocuments([each.ids for each in good], [1] * len(good), num_text_bytes),
            EncodedDocuments([each.is_answer for each in good], [1] * len(good), 0),
        ]

    def _is_encodable(
        self, piece: InputPiece, record: DocumentRecord, row: list[bytes], result: PieceResult
    ) -> bool:
        try:
            self._encode_rows([row])
        except UserError as error:
            self._skip_or_fail(piece, record, error, result)
            return False
        return True

    def _encode_rows(self, rows: list[list[bytes]]) -> list[EncodedDocuments]:
        return [self._encode_texts([row[k] for row in rows]) for k in range(len(self._shards))]

    def _encode_texts(self, texts: list[bytes]) -> EncodedDocuments:
        if self._split is None:
            arrays = self._tokenizer.encode_arrays(texts)
            return EncodedDocuments(arrays, [1] * len(arrays), sum(map(len, texts)))
        split = [self._split(text.decode()) for text in texts]
        sequences = [sentence.encode() for sentence in itertools.chain.from_iterable(split)]
        arrays = self._tokenizer.encode_arrays(sequences)
        return EncodedDocuments(arrays, list(map(len, split)), sum(map(len, sequences)))

    def _add(
        self, column: ColumnResult, k: int, documents: EncodedDocuments, records: list[DocumentRecord]
    ) -> None:
        packed = pack(documents, self._dtypes[k], self._eod)
        if self._unknown is not None and k < len(self._job.json_keys):
            column.num_unknown += int((packed.tokens == self._unknown).sum())
        num_ends = 0
        if self._end is not None:
            num_appended = 0 if self._eod is None else len(packed.sequences)
            num_ends = int(np.count_nonzero(packed.tokens == self._end)) - num_appended
            column.num_ends += num_ends
        if num_ends or (self._special_but_end.size and np.isin(packed.tokens, self._special_but_end).any()):
            self._count_special(column, documents, records)
        column.num_text_bytes += documents.num_text_bytes
        column.num_empty += len(documents.counts) - len(packed.sequences)
        column.histogram = add_counts(column.histogram, _histogram(packed))
        column.extent = join_extents(column.extent, self._append(k, packed))

    def _count_special(
        self, column: ColumnResult, documents: EncodedDocuments, records: list[DocumentRecord]
    ) -> None:
        """Count the documents whose own tokens are special, and keep the place of the first."""
        sequences = iter(documents.sequences)
        for record, count in zip(records, documents.counts, strict=True):
            ids = np.concatenate([*itertools.islice(sequences, count), np.empty(0, np.int64)])
            if len(found := ids[np.isin(ids, self._special)]):
                column.num_special += 1
                text = self._tokenizer.decode([int(found[0])])
                place = record.source, "row" if record.kind == "row" else "line", record.number
                column.first_special = column.first_special or (*place, text)

    def _append(self, k: int, column: Column) -> Extent:
        try:
            return self._shards[k].append(column)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> CannotWrite:
        return CannotWrite(f"cannot write {self._job.stem}: {error.strerror}")

    def _skip_or_fail(
        self, piece: InputPiece, record: DocumentRecord, error: Exception, result: PieceResult
    ) -> None:
        what = "row" if record.kind == "row" else "line"
        if not self._job.skip_bad_records:
            message = f"{record.source}, {what} {locate(piece, record.number)}: {error}"
            raise UserError(f"{message}; correct it, or skip bad documents with --on-error skip")
        result.num_skipped += 1
        if len(result.bad) < MAX_MESSAGES:
            result.bad.append((record.source, what, record.number, str(error)))


def batches(records: Iterable[DocumentRecord]) -> Iterator[tuple[list[DocumentRecord], int]]:
    """Yield some records at a time, and their bytes."""
    batch: list[DocumentRecord] = []
    num_bytes = 0
    for record in records:
        batch.append(record)
        num_bytes += record.num_bytes
        if num_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch, num_bytes
            batch, num_bytes = [], 0
    if batch:
        yield batch, num_bytes


def _histogram(column: Column) -> list[int]:
    """Count documents by the power of two in their number of tokens."""
    if not column.sequences.size:
        return []
    first = np.cumsum(column.sequences) - column.sequences
    lengths = np.add.reduceat(column.lengths.astype(np.int64), first)
    return [int(count) for count in np.bincount(np.frexp(lengths)[1] - 1)]


def add_counts(first: list[int], second: list[int]) -> list[int]:
    """Return the element-wise sum of two lists, the shorter one padded with zeros."""
    return [a + b for a, b in itertools.zip_longest(first, second, fillvalue=0)]


def sentence_splitter(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return the function that splits a text into its sentences.

    Args:
        language: ISO 639 code, such as "en"; a language without rules uses the rules of its nearest relative.
        keep_newlines: append the newlines and spaces after each sentence to it, except the last; otherwise
            sentences have no surrounding white space.

    Raises:
        UserError: the library is not installed.
    """
    try:
        segment = importlib.import_module("sentencex").segment
    except ImportError:
        raise UserError(
            "--split-sentences needs a package that is not installed: pip install sentencex"
        ) from None

    def split(text: str) -> list[str]:
        sentences = [sentence for part in segment(language, text) if (sentence := part.strip())]
        if not keep_newlines:
            return sentences
        starts, end = [], 0
        for sentence in sentences:
            starts.append(text.index(sentence, end))
            end = starts[-1] + len(sentence)
        return [text[start:stop] for start, stop in itertools.pairwise([*starts, end])]

    return split
