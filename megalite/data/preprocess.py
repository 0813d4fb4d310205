"""Text files to indexed datasets: reads in order, encodes in worker processes, writes in order."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megalite.data.documents import Record, RecordError, find_inputs, parse_record, read_records
from megalite.data.indexed_writer import IndexedWriter, token_dtype
from megalite.data.tokenizer import Tokenizer, TokenizerFiles, build_tokenizer
from megalite.errors import UserError
from megalite.log import log

_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 4096
_MAX_MESSAGES = 10
"""Skipped documents that are named one by one; all are counted."""


@dataclass(frozen=True)
class PreprocessJob:
    """What to make of which files; the result does not depend on the number of workers."""

    inputs: tuple[str, ...]
    """Files, globs and folders."""
    output_prefix: str
    """The output is {output_prefix}_{json_key}_document.bin and .idx."""
    tokenizer_type: str | None
    """Kind of tokenizer; None for the one that its files are for."""
    tokenizer_files: TokenizerFiles = field(default_factory=TokenizerFiles)
    """Where the tokenizer is."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the JSON objects to extract, each to a dataset of its own."""
    append_eod: bool = False
    """End each document with the end-of-document token."""
    workers: int = 1
    """Processes that encode."""
    text_documents: str = "file"
    """One document of a .txt file: the file, a line, or a paragraph."""
    skip_bad_records: bool = False
    """Count and skip what is no valid document, instead of giving up."""
    overwrite: bool = False
    """Replace existing output."""

    def prefix(self, json_key: str) -> str:
        return f"{self.output_prefix}_{json_key}_document"


@dataclass
class Progress:
    """What is done so far.

    Attributes:
        num_documents: written, of the key with the most.
        num_tokens: written, over all keys.
        num_bytes: of text read, uncompressed.
        num_skipped: bad records.
        seconds: since the start.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_skipped: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Encoded:
    """The documents of one batch: for each key their tokens back to back, and the length of each."""

    columns: list[tuple[npt.NDArray[Any], npt.NDArray[np.int32]]]
    num_bytes: int
    skipped: list[str]


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def preprocess(job: PreprocessJob, on_progress: Callable[[Progress], None] | None = None) -> Progress:
    """Tokenizes all documents; each output appears under its name once it is whole.

    Args:
        job: what to do.
        on_progress: called after each batch.

    Raises:
        UserError: the tokenizer or an input cannot be read, the output exists or cannot be written, a record
            is bad (unless these are skipped), or there is no document at all.
    """
    tokenizer = _tokenizer(job)
    if job.append_eod:
        _ = tokenizer.eod  # a vocabulary without one is told before any work
    inputs = find_inputs(job.inputs)
    started, progress = time.monotonic(), Progress()
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = [
            stack.enter_context(IndexedWriter(job.prefix(key), dtype, job.overwrite)) for key in job.json_keys
        ]
        records = (r for path in inputs for r in read_records(path, job.json_keys, job.text_documents))
        for encoded in _map_in_order(functools.partial(_encode, job), _batches(records), job.workers):
            for writer, (tokens, lengths) in zip(writers, encoded.columns, strict=True):
                writer.add_documents(tokens, lengths)
            _advance(progress, writers, encoded)
            progress.seconds = time.monotonic() - started
            if on_progress:
                on_progress(progress)
        for key, writer in zip(job.json_keys, writers, strict=True):
            if writer.num_documents == 0:
                raise UserError(
                    f"the input has no document with text under the key {key!r}: nothing is written"
                )
    return progress


def _advance(progress: Progress, writers: list[IndexedWriter], encoded: _Encoded) -> None:
    for message in encoded.skipped[: max(0, _MAX_MESSAGES - progress.num_skipped)]:
        log.warning("skipped %s", message)
    progress.num_documents = max(writer.num_documents for writer in writers)
    progress.num_tokens = sum(writer.num_tokens for writer in writers)
    progress.num_bytes += encoded.num_bytes
    progress.num_skipped += len(encoded.skipped)


@functools.lru_cache(maxsize=1)
def _tokenizer(job: PreprocessJob) -> Tokenizer:
    """Built once in each process."""
    files = job.tokenizer_files
    return build_tokenizer(
        job.tokenizer_type,
        tokenizer_model=files.tokenizer_model,
        vocab_file=files.vocab_file,
        merge_file=files.merge_file,
        name_or_path=files.name_or_path,
        vocab_size=files.vocab_size,
    )


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


def _encode(job: PreprocessJob, batch: list[Record]) -> _Encoded:
    """Parses and tokenizes one batch; runs in the workers."""
    tokenizer, skipped = _tokenizer(job), list[str]()
    good: list[Record] = []
    texts: list[list[str]] = []
    for record in batch:
        try:
            texts.append(parse_record(record, job.json_keys))
            good.append(record)
        except RecordError as error:
            _skip_or_fail(job, record, error, skipped)
    try:
        rows = _encode_texts(tokenizer, texts)
    except UserError:  # some text is nothing for this tokenizer: find out which
        rows = []
        for record, row in zip(good, texts, strict=True):
            try:
                rows += _encode_texts(tokenizer, [row])
            except UserError as error:
                _skip_or_fail(job, record, error, skipped)
    dtype, eod = token_dtype(tokenizer.vocab_size), tokenizer.eod if job.append_eod else None
    columns = [_pack([row[k] for row in rows], dtype, eod) for k in range(len(job.json_keys))]
    return _Encoded(columns, sum(record.num_bytes for record in batch), skipped)


def _encode_texts(tokenizer: Tokenizer, texts: list[list[str]]) -> list[list[list[int]]]:
    """Ids by record and key."""
    ids = iter(tokenizer.encode_batch(list(itertools.chain.from_iterable(texts))))
    return [[next(ids) for _ in row] for row in texts]


def _pack(
    documents: list[list[int]], dtype: np.dtype[Any], eod: int | None
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """The tokens back to back, and the lengths; a document without tokens is left out, also with an eod."""
    full = [ids if eod is None else [*ids, eod] for ids in documents if ids]
    lengths = np.fromiter(map(len, full), np.int32, len(full))
    num_tokens = int(lengths.sum(dtype=np.int64))
    return np.fromiter(itertools.chain.from_iterable(full), dtype, num_tokens), lengths


def _skip_or_fail(job: PreprocessJob, record: Record, error: Exception, skipped: list[str]) -> None:
    message = f"{record.source}, {'row' if record.kind == 'row' else 'line'} {record.number}: {error}"
    if not job.skip_bad_records:
        raise UserError(f"{message}; mend it, or leave such documents out with --on-error skip")
    skipped.append(message)


def _encode_in_one_thread() -> None:
    """Keeps the tokenizers library from starting a thread a core in each worker."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def _map_in_order(
    function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int
) -> Iterator[_Result]:
    """The results in the items' order, with at most two items a worker under way: memory stays bounded."""
    if workers == 1:
        yield from map(function, items)
        return
    pending: deque[Future[_Result]] = deque()
    # spawn: the threads of the tokenizers library do not survive a fork
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _encode_in_one_thread) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                f"a worker died, out of memory perhaps: try less than --workers {workers}"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
