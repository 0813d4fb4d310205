"""The passes over a corpus, and what each does for one of its tasks.

A document's number is that of its piece and its place in the piece, which orders documents like the input. A
document is removed if an earlier one has its text (exact), or one of its keys (minhash), even if the earlier
one is removed itself. So the result needs no connected components, and later input cannot change it.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data._index_builder import permute
from megalite.data.indexed_dataset import IndexedDataset, IndexedWriter, replace_dataset, token_dtype
from megalite.data.prepare.exchange import ExchangeWriter, read_blocks_for, read_records_for
from megalite.data.prepare.fingerprints import band_keys, exact_keys
from megalite.data.prepare.plan import CorpusPlan
from megalite.data.prepare.report import MAX_GROUPS, SOURCE, Facts, new_facts, note_example, place_of
from megalite.data.prepare.steps import Document, Filter, MinHashStep
from megalite.data.preprocessing.documents import DocumentRecord, RecordError, parse_records
from megalite.data.preprocessing.encoder import batches
from megalite.data.preprocessing.input_plan import InputPiece
from megalite.data.sharded_dataset import checksums_of
from megalite.data.tokenizers import IdArray
from megalite.data.tokenizers.tokenizer import NullTokenizer, Tokenizer, special_ids
from megalite.data.window_dataset import round_keys
from megalite.utils.errors import UserError
from megalite.utils.files import new_file, replace_file

KEPT, BAD = 255, 254
"""What stands for a document instead of the number of the step that removed it."""
_KEY = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("piece", "<u4"), ("document", "<u4"), ("count", "<u4"), ("step", "u1")]
)
"""Key of a document, and the number of documents of its block that have it."""
_REMOVED = np.dtype([("document", "<u4"), ("step", "u1")])
_TOKENIZED = np.dtype([("position", "<u8"), ("length", "<u4"), ("source", SOURCE)])
_BLOCK_KEYS = 1 << 20
_BLOCK_TOKENS = 1 << 24
_CHUNK_TOKENS = 1 << 22


Documents = Sequence[Document | RecordError]
"""Documents of consecutive records; an error for a bad record."""


class PassWorker:
    """Runner of tasks; a context manager, called with the name of a pass and the number of its task."""

    def __init__(self, plan: CorpusPlan) -> None:
        self._plan = plan
        self._files = {name: number for number, name in enumerate(plan.states)}

    def __enter__(self) -> PassWorker:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, task: tuple[str, int]) -> int:
        """Run a task unless it is done, and return its number.

        Raises:
            UserError: an input cannot be read or has changed, or a file cannot be written.
        """
        name, number = task
        run = {"sign": self._sign, "match": self._match, "tokenize": self._tokenize, "shard": self._shard}
        path = self._plan.done_path(name, number)
        try:
            if not path.exists():
                facts = run[name](number)
                with replace_file(path) as stream:
                    stream.write(json.dumps(facts).encode())
        except OSError as error:
            raise UserError(f"cannot write {self._plan.folder}: {error.strerror or error}") from None
        return number

    @cached_property
    def _filters(self) -> list[Filter]:
        return [step.start() for step in self._plan.job.steps]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._plan.job.source.build_tokenizer()

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        return token_dtype(self._tokenizer.vocab_size)

    def documents(self, piece: InputPiece) -> Iterator[tuple[list[DocumentRecord], Documents]]:
        """Yield some records of a piece at a time, and their documents."""
        job = self._plan.job.source
        try:
            for records, _ in batches(piece.records(job)):
                documents: list[Document | RecordError] = []
                for record, texts in zip(records, parse_records(records, job.json_keys), strict=True):
                    if not isinstance(texts, RecordError):
                        decoded = [text.decode() for text in texts]
                        metadata = dict(zip(job.json_keys[1:], decoded[1:], strict=True))
                        documents.append(Document(decoded[0], metadata))
                    elif job.skip_bad_records:
                        documents.append(texts)
                    else:
                        place = place_of(piece, record.source, record.number)
                        raise UserError(f"{place}: {texts}; correct it, or set on_error to skip")
                yield records, documents
        except UserError as error:
            raise UserError(str(error).replace("another --json-keys", "another column as text")) from None

    # Pass sign: the numbers of the steps that removed documents, and the keys of the rest.

    def _sign(self, number: int) -> Facts:
        plan, piece = self._plan, self._plan.pieces[number]
        facts = new_facts(len(plan.job.steps))
        removed, is_changed = bytearray(), bytearray()
        with ExchangeWriter(plan.path("sign", number, "keys"), plan.num_ranges) as writer:
            block: list[npt.NDArray[Any]] = []
            for records, documents in self.documents(piece):
                before = [
                    str(document) if isinstance(document, RecordError) else document.text
                    for document in documents
                ]
                by = np.array(
                    [BAD if isinstance(each, RecordError) else KEPT for each in documents], np.uint8
                )
                for i in np.flatnonzero(by == BAD).tolist():
                    place = place_of(piece, records[i].source, records[i].number)
                    note_example(facts["bad_examples"], place, "", before[i])
                facts["documents"] += len(documents)
                facts["bad"] += int(np.count_nonzero(by == BAD))
                facts["bytes"] += sum(
                    len(document.text.encode()) for document in _select(documents, by == KEPT)
                )
                self._filter(plan.job.early, piece, records, documents, by, facts)
                block += self._keys(number, len(removed), documents, by)
                removed += by.tobytes()
                is_changed += bytes(
                    int(isinstance(document, Document) and document.text != text)
                    for document, text in zip(documents, before, strict=True)
                )
                if sum(map(len, block)) >= _BLOCK_KEYS:
                    self._write_keys(block, removed, writer)
                    block = []
            self._write_keys(block, removed, writer)
        with replace_file(plan.path("sign", number, "removed")) as stream:
            stream.write(removed + is_changed)
        plan.check_input(piece)
        return facts

    def _filter(
        self,
        steps: range,
        piece: InputPiece,
        records: Sequence[DocumentRecord],
        documents: Documents,
        by: npt.NDArray[np.uint8],
        facts: Facts,
    ) -> None:
        """Apply filters to the documents that are kept, and write the numbers of steps to `by`."""
        for k in steps:
            numbers, passing = np.flatnonzero(by == KEPT).tolist(), _select(documents, by == KEPT)
            if not passing:
                return
            for i, document, reason in zip(numbers, passing, self._filters[k](passing), strict=True):
                if self._plan.job.steps[k].name == "language":
                    facts["languages"][document.label] = facts["languages"].get(document.label, 0) + 1
                if reason:
                    by[i] = k
                    _count_removed(facts, k, piece, records[i], document, reason)
                    if document.matched:
                        found = facts["contaminated"]
                        found[document.matched] = found.get(document.matched, 0) + 1

    def _keys(
        self, piece: int, first: int, documents: Documents, by: npt.NDArray[np.uint8]
    ) -> Iterator[npt.NDArray[Any]]:
        """Yield the keys of the documents that are kept, one array for each kind."""
        numbers = np.flatnonzero(by == KEPT)
        texts = [document.text for document in _select(documents, by == KEPT)]
        for name, k in self._plan.job.dedup.items() if texts else ():
            step, having = self._plan.job.steps[k], np.arange(len(texts))
            if isinstance(step, MinHashStep):
                keys, having = band_keys(texts, step.ngram, step.bands, step.rows)
                having = np.repeat(having, step.bands)
            else:
                assert name == "exact"
                keys = exact_keys(texts)
            records = np.empty(len(keys), _KEY)
            records["high"], records["low"] = keys[:, 0], keys[:, 1]
            records["piece"], records["document"] = piece, first + numbers[having]
            records["count"], records["step"] = 1, k
            yield records

    def _write_keys(
        self, block: Sequence[npt.NDArray[Any]], removed: bytearray, writer: ExchangeWriter
    ) -> None:
        """Write each key once, for the first document of the block that has it; remove the others."""
        if block:
            records = np.concatenate(block)
            order, begins = sort_by_key(records)
            firsts, others = records[order[begins]], records[np.delete(order, begins)]
            firsts["count"] = np.diff(begins, append=len(order))
            np.minimum.at(np.frombuffer(removed, np.uint8), others["document"], others["step"])
            writer.add((firsts["high"] % np.uint64(self._plan.num_ranges)).astype(np.int64), firsts)

    # Pass match: the documents that have a key of an earlier one, for one range of keys.

    def _match(self, number: int) -> Facts:
        plan = self._plan
        signed = [plan.path("sign", piece, "keys") for piece in range(len(plan.pieces))]
        groups: list[list[int]] = []
        with ExchangeWriter(plan.path("match", number, "removed"), len(plan.pieces)) as writer:
            for records in _by_key_range(read_records_for(signed, number, _KEY)):
                order, begins = sort_by_key(records)
                others = records[np.delete(order, begins)]
                removed = np.empty(len(others), _REMOVED)
                removed["document"], removed["step"] = others["document"], others["step"]
                writer.add(others["piece"].astype(np.int64), removed)
                sizes = np.add.reduceat(records["count"][order], begins)
                for i in np.argsort(-sizes.astype(np.int64), kind="stable")[:MAX_GROUPS].tolist():
                    first = records[order[begins[i]]]
                    if sizes[i] > 1:
                        names = ("step", "piece", "document")
                        groups.append([int(sizes[i]), *(int(first[name]) for name in names)])
        return {"groups": sorted(groups, key=lambda group: -group[0])[:MAX_GROUPS]}

    # Pass tokenize: the tokens of the documents that are kept, for each shard.

    def _tokenize(self, number: int) -> Facts:
        plan, piece = self._plan, self._plan.pieces[number]
        signed = np.fromfile(plan.path("sign", number, "removed"), np.uint8)
        removed, is_changed = signed[: len(signed) // 2], signed[len(signed) // 2 :]
        matched = [plan.path("match", i, "removed") for i in range(plan.num_ranges)]
        pairs = read_records_for(matched, number, _REMOVED)
        np.minimum.at(removed, pairs["document"], pairs["step"])
        facts, first = new_facts(len(plan.job.steps)), 0
        with (
            ExchangeWriter(plan.path("tokenize", number, "documents"), plan.job.shards) as writer,
            ExchangeWriter(plan.path("tokenize", number, "tokens"), plan.job.shards) as tokens,
        ):
            block: list[tuple[npt.NDArray[Any], list[IdArray]]] = []
            size = 0
            for records, documents in self.documents(piece):
                by = removed[first : first + len(records)]
                if len(by) < len(records):
                    break  # the file has changed: check_input below names it
                changing = _select(documents, (is_changed[first : first + len(records)] > 0) & (by == KEPT))
                for k in plan.job.early if changing else ():  # repeat the changes of their texts
                    self._filters[k](changing)
                is_duplicate = np.isin(by, list(plan.job.dedup.values()))
                duplicates = _select(documents, is_duplicate)
                for i, document in zip(np.flatnonzero(is_duplicate).tolist(), duplicates, strict=True):
                    _count_removed(facts, int(by[i]), piece, records[i], document, "")
                self._filter(plan.job.late, piece, records, documents, by, facts)
                block.append(self._encode(number, first, records, documents, by, facts))
                size += int(block[-1][0]["length"].sum())
                first += len(records)
                if size >= _BLOCK_TOKENS:
                    self._write_tokens(block, writer, tokens)
                    block, size = [], 0
            self._write_tokens(block, writer, tokens)
        plan.check_input(piece)
        return facts

    def _encode(
        self,
        number: int,
        first: int,
        records: Sequence[DocumentRecord],
        documents: Documents,
        by: npt.NDArray[np.uint8],
        facts: Facts,
    ) -> tuple[npt.NDArray[Any], list[IdArray]]:
        """Return the records of the documents that have tokens, and their tokens."""
        piece = self._plan.pieces[number]
        end = self._tokenizer.eod if self._plan.job.append_eod else None
        numbers = np.flatnonzero(by == KEPT)
        texts = [
            self._without_special(document.text, piece, records[i], facts)
            for i, document in zip(numbers.tolist(), _select(documents, by == KEPT), strict=True)
        ]
        flat = self._tokenizer.encode_arrays([part.encode() for parts in texts for part in parts])
        encoded, at = [], 0
        for parts in texts:
            encoded.append(np.concatenate(flat[at : at + len(parts)]) if len(parts) > 1 else flat[at])
            at += len(parts)
        has_tokens = np.array([len(ids) > 0 for ids in encoded], bool)
        facts["empty"] += int(np.count_nonzero(~has_tokens))
        numbers = numbers[has_tokens] if len(numbers) else numbers
        encoded = [ids for ids in encoded if len(ids)]
        if end is not None:
            last = np.array([end], self._dtype)
            encoded = [np.concatenate([ids.astype(self._dtype, copy=False), last]) for ids in encoded]
        found = np.empty(len(numbers), _TOKENIZED)
        before, total = self._totals
        found["position"] = before[number] + first + numbers
        if self._plan.job.shuffle is not None:
            keys = round_keys("prepare", self._plan.job.shuffle)
            found["position"] = permute(found["position"].astype(np.int64), total, keys)
        found["length"] = [len(ids) for ids in encoded]
        found["source"]["file"] = [self._files[records[i].source] for i in numbers.tolist()]
        found["source"]["begin"] = getattr(piece, "begin", 0)
        found["source"]["number"] = [records[i].number for i in numbers.tolist()]
        facts["kept"] += len(found)
        facts["tokens"] += int(found["length"].sum())
        facts["kept_bytes"] += sum(len(part.encode()) for parts in texts for part in parts)
        return found, encoded

    @cached_property
    def _totals(self) -> tuple[npt.NDArray[np.int64], int]:
        plan = self._plan
        done = (plan.done_path("sign", number) for number in range(len(plan.pieces)))
        counts = np.array([json.loads(path.read_bytes())["documents"] for path in done], np.int64)
        return np.cumsum(counts) - counts, int(counts.sum())

    @cached_property
    def _special_names(self) -> re.Pattern[str] | None:
        """Return a pattern of the names that the tokenizer reads as special tokens; None without any."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, NullTokenizer):
            return None  # its text consists of ids
        named = {tokenizer.decode([i]): i for i in special_ids(tokenizer)}
        names = [name for name, i in named.items() if name and tokenizer.encode(name) == [i]]
        longest_first = sorted(names, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if names else None

    def _without_special(
        self, text: str, piece: InputPiece, record: DocumentRecord, facts: Facts
    ) -> list[str]:
        """Return the parts of a text to encode separately, after what the settings do to special tokens.

        To escape a name, the text is cut after its first character: neither part has the name.
        """
        pattern, action = self._special_names, self._plan.job.special_tokens_in_text
        found = list(pattern.finditer(text)) if pattern else []
        if not found:
            return [text]
        facts["special"]["documents"] += 1
        facts["special"]["tokens"] += len(found)
        place = place_of(piece, record.source, record.number)
        note_example(facts["special"]["examples"], place, text[found[0].start() :], found[0][0])
        assert pattern is not None
        if action == "drop":
            while pattern.search(text):  # what remains may be joined to a name
                text = pattern.sub("", text)
            return [text]
        parts, begin = [], 0
        while action == "escape" and (match := pattern.search(text, begin)):
            parts.append(text[begin : match.start() + 1])
            begin = match.start() + 1
        return [*parts, text[begin:]]

    def _write_tokens(
        self,
        block: Sequence[tuple[npt.NDArray[Any], list[IdArray]]],
        writer: ExchangeWriter,
        tokens: ExchangeWriter,
    ) -> None:
        """Write the documents and the tokens of a block, each to its shard."""
        if not block:
            return
        documents = np.concatenate([found for found, _ in block])
        encoded = [ids for _, arrays in block for ids in arrays]
        num_shards, total = self._plan.job.shards, self._totals[1]
        shards = documents["position"].astype(np.int64) * num_shards // total
        counts = np.zeros(num_shards, np.int64)
        np.add.at(counts, shards, documents["length"])
        ordered = [encoded[i] for i in np.argsort(shards, kind="stable").tolist()]
        joined = np.concatenate([np.empty(0, self._dtype), *(ids.astype(self._dtype) for ids in ordered)])
        writer.add(shards, documents)
        tokens.add_ordered(counts, joined)

    # Pass shard: one shard of the corpus, in its order.

    def _shard(self, number: int) -> Facts:
        plan, size = self._plan, len(self._plan.pieces)
        paths = [plan.path("tokenize", piece, "documents") for piece in range(size)]
        documents = read_records_for(paths, number, _TOKENIZED)
        lengths = documents["length"].astype(np.int64)
        starts, order = np.cumsum(lengths) - lengths, np.argsort(documents["position"])
        unsorted = plan.path("shard", number, f"{secrets.token_hex(4)}.tokens")
        prefix = plan.path("shard", number, secrets.token_hex(4))
        try:
            with new_file(unsorted) as stream:
                for piece in range(size):
                    path = plan.path("tokenize", piece, "tokens")
                    for block in read_blocks_for(path, number, self._dtype):
                        stream.write(block.data)
            tokens = np.memmap(unsorted, self._dtype, "r") if len(order) else np.empty(0, self._dtype)
            with IndexedWriter(str(prefix), self._dtype) as writer:
                chunk_of_each = np.cumsum(lengths[order]) // _CHUNK_TOKENS
                for chunk in np.split(order, np.flatnonzero(np.diff(chunk_of_each)) + 1):
                    parts = [tokens[starts[i] : starts[i] + lengths[i]] for i in chunk.tolist()]
                    writer.add_documents(np.concatenate([tokens[:0], *parts]), lengths[chunk])
        finally:
            unsorted.unlink(missing_ok=True)
        checksums, sha256 = checksums_of(IndexedDataset(prefix))
        for kind, values in (("sources", documents["source"][order]), ("crc32", checksums)):
            with replace_file(plan.path("shard", number, kind)) as stream:
                stream.write(values.tobytes())
        final = plan.path("shard", number, "bin").with_suffix("")
        replace_dataset(str(final), {kind: f"{prefix}.{kind}" for kind in ("bin", "idx")})
        return {"kept": len(order), "tokens": int(lengths.sum()), "sha256": sha256}


def _select(documents: Documents, is_selected: npt.NDArray[np.bool_]) -> list[Document]:
    selected = itertools.compress(documents, is_selected.tolist())
    return [document for document in selected if isinstance(document, Document)]


def _by_key_range(records: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield the records of consecutive ranges of keys, some `_BLOCK_KEYS` each: sorting needs memory."""
    if not len(records):
        return
    high = records["high"]
    first, last = int(high.min()), int(high.max())
    width = (last - first) // -(-len(records) // _BLOCK_KEYS) + 1
    for begin in range(first, last + 1, width):
        yield records[(high >= np.uint64(begin)) & (high <= np.uint64(min(begin + width - 1, last)))]


def sort_by_key(records: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the order of records by key, and where in this order each key begins.

    Args:
        records: in the order of the documents, which those of one key keep.
    """
    order = np.lexsort((records["low"], records["high"]))  # stable
    is_first = np.ones(len(order), bool)
    for name, combine in (("high", np.logical_and), ("low", np.logical_or)):
        values = records[name][order]
        differs = values[1:] != values[:-1]
        combine(is_first[1:], differs, out=is_first[1:])
    return order, np.flatnonzero(is_first)


def _count_removed(
    facts: Facts, step: int, piece: InputPiece, record: DocumentRecord, document: Document, reason: str
) -> None:
    entry = facts["steps"][step]
    entry["documents"] += 1
    entry["bytes"] += len(document.text.encode())
    note_example(entry["examples"], place_of(piece, record.source, record.number), document.text, reason)
