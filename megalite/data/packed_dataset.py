"""Pack conversations or documents into samples, apart from each other, and whole if they fit.

Of conversations, only answers have a loss.

Shapes: S positions of a sample, b samples of a microbatch, s tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.data.blend import Epochs
from megalite.data.gpt_dataset import Dataset
from megalite.data.index_cache import Arrays, CachedArrays, CacheKey, IndexCache, cached_arrays, digest_of
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.loss_mask import LossMask
from megalite.data.microbatch import Microbatch
from megalite.data.samples import MockDataset, Samples
from megalite.data.storage import FilesInUse
from megalite.kernels.softmax import document_starts
from megalite.utils.errors import UserError
from megalite.utils.log import log

_FORMAT = 2
"""Part of a cached packing's digest: increase it when the same values give another one."""
NUM_FIELDS = 4


@dataclass(frozen=True)
class PackingOptions:
    """Options of packed samples.

    Attributes:
        seq_length: S, number of positions of a sample. A sequence of n tokens takes n - 1 of them: its last
            token is only predicted.
        seed: seed of the samples' order.
        vocab_size: reading a sample with a token id beyond it raises.
        packs: whether samples hold several sequences, or one each.
        long: whether a sequence that does not fit a sample loses its end, is dropped, or is split into
            pieces that fit.
        only_answers: whether only the tokens that the corpus's loss mask selects have a loss.
    """

    seq_length: int
    seed: int
    vocab_size: int
    packs: bool = True
    long: Literal["truncate", "drop", "split"] = "truncate"
    only_answers: bool = True

    def fitting(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the positions that sequences take; 0 for those that are dropped for their length.

        Args:
            lengths: in tokens.
        """
        needed = (lengths.astype(np.int64) - 1).clip(0)
        if self.long == "drop":
            return np.where(needed <= self.seq_length, needed, 0)
        return needed if self.long == "split" else needed.clip(0, self.seq_length)

    def num_samples(self, lengths: npt.NDArray[np.int32]) -> int:
        """Return the number of samples of one epoch; with packing, it is a lower bound."""
        positions = self.fitting(lengths)
        return -(-int(positions.sum()) // self.seq_length) if self.packs else int((positions > 0).sum())

    def random_row(self, generator: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return a sample of sequences of random tokens; some samples end with padding."""
        left, sequences = self.seq_length, []
        while left > 0:
            length = min(left, int(generator.integers(1, self.seq_length // 2 + 2)))
            tokens = generator.integers(0, self.vocab_size, length + 1, dtype=np.int64)
            question = int(generator.integers(0, length))
            has_loss = np.arange(length + 1) > (question if self.only_answers else 0)
            sequences.append((tokens, has_loss))
            left -= length + int(generator.integers(0, 4))
            if not self.packs:
                break
        return sequences_row(sequences, self.seq_length)


class SequencePiece(NamedTuple):
    """Consecutive tokens of a sequence of the corpus: those from `start` on that fit a sample."""

    sequence: int
    start: int


def sequences_row(
    sequences: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]], seq_length: int
) -> npt.NDArray[np.int64]:
    """Place sequences one after the other into a sample, int64 ``[4 S]``.

    The four parts are inputs, labels, the positions' kinds, and the sequence's number in the sample. The kind
    is 2 if the label has a loss, 1 if not, and 0 for the padding at the end, which is a document of its own.
    A row of zeros is a sample of padding only.

    Args:
        sequences: tokens of each, and which of them have a loss.
    """
    row = np.zeros((NUM_FIELDS, seq_length), np.int64)
    begin = 0
    for number, (tokens, has_loss) in enumerate(sequences):
        end = begin + len(tokens) - 1
        row[:, begin:end] = tokens[:-1], tokens[1:], 1 + has_loss[1:], np.full(end - begin, number)
        begin = end
    row[3, begin:] = len(sequences)
    return row.reshape(-1)


class PackedDataset:
    """Samples of one epoch of a corpus's sequences, in a fixed order.

    Attributes:
        indexed: the corpus; each of its sequences is a conversation or a document.
        packing: pieces of each sample, by number: pieces are counted through the sequences.
        num_long: number of sequences that do not fit a sample.
        num_dropped: number of these that are in no sample.

    Raises:
        UserError: there is nothing to learn.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        options: PackingOptions,
        split_name: str = "train",
        cache: IndexCache | None = None,
    ) -> None:
        """Pack the sequences.

        Args:
            sequences: the split's sequences.
            cache: stores and maps the packing; None to build it in memory.
        """
        self.indexed = indexed
        self.sequences = sequences
        self.mask = LossMask(indexed) if options.only_answers else None
        self.options = options
        lengths = indexed.sequence_lengths[sequences.start : sequences.stop]
        self._positions = options.fitting(lengths)
        long = np.flatnonzero(lengths > options.seq_length + 1) + sequences.start
        unanswered = self._unanswered(long)
        self._positions[unanswered - sequences.start] = 0
        counts = -(-self._positions // options.seq_length)
        self._first_pieces = np.concatenate(([0], counts.cumsum()))  # of each sequence, and their number
        cached = self._packed(lengths, unanswered, split_name, cache)
        self.packing = Packing(cached.arrays["items"], cached.arrays["bounds"])
        mask_files = () if self.mask is None else self.mask.files
        self._files = FilesInUse((*indexed.files, *mask_files, *cached.files))
        self.num_long = len(long)
        self.num_dropped = int((self._positions == 0).sum())
        if len(self) == 0:
            found = f"the {split_name} split of {indexed.prefix} has {len(sequences)}"
            if not options.only_answers:
                raise UserError(f"{found} documents, and none of them has two tokens: preprocess it again")
            raise UserError(
                f"{found} conversations, and none of them has an answer within --seq-length "
                f"{options.seq_length}: pass a longer one"
            )

    def _packed(
        self,
        lengths: npt.NDArray[np.int32],
        unanswered: npt.NDArray[np.int64],
        split_name: str,
        cache: IndexCache | None,
    ) -> CachedArrays:
        def build() -> Arrays:
            packing = self._pack()
            self.indexed.check_files()
            return packing._asdict()

        values = {
            **asdict(self.options),
            "first_sequence": self.sequences.start,
            "sequence_lengths_sha256": digest_of([lengths]),
            "unanswered_sha256": digest_of([unanswered]),
            "format": _FORMAT,
        }
        num_items = 2 * int(self._first_pieces[-1])
        key = CacheKey("PackedDataset", split_name, values, num_items, self.indexed.prefix)
        return cached_arrays(cache, key, Packing._fields, build)

    def _unanswered(self, long: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the truncated sequences that have no answer in the part that fits a sample.

        Args:
            long: the sequences that do not fit a sample.
        """
        if self.mask is None or self.options.long != "truncate":
            return np.empty(0, np.int64)
        length = self.options.seq_length + 1
        found = [i for i in long.tolist() if not self.mask[i][1:length].any()]
        return np.array(found, np.int64)

    def _pack(self) -> Packing:
        size = self.options.seq_length
        counts = np.diff(self._first_pieces)
        lengths = np.full(self._first_pieces[-1], size)  # of the pieces: only a sequence's last is shorter
        last = self._first_pieces[1:][counts > 0] - 1
        lengths[last] = (self._positions - (counts - 1) * size)[counts > 0]
        # Pieces of equal length are mixed, and then the samples.
        order = np.random.default_rng(self.options.seed).permutation(len(lengths))
        if not self.options.packs:
            return Packing(order, np.arange(len(order) + 1))
        packing = pack_best_fit(lengths[order], size)
        return Packing(order[packing.items], packing.bounds)

    def use(self) -> str:
        """Describe how the sequences use the samples, for the log."""
        options, size = self.options, self.options.seq_length
        share = int(self._positions.sum()) / max(1, len(self) * size)
        kind = "conversations" if options.only_answers else "documents"
        text = (
            f"{len(self.sequences) - self.num_dropped:,} {kind} of {self.indexed.prefix} in {len(self):,} "
            f"samples, {100 * share:.1f}% of their positions filled"
        )
        if not self.num_long:
            return text
        if options.long == "split":
            return f"{text}; {self.num_long:,} longer than --seq-length {size} are split"
        dropped = min(self.num_dropped, self.num_long)
        return (
            f"{text}; {self.num_long - dropped:,} truncated and {dropped:,} dropped, "
            f"longer than --seq-length {size} (--sft-long-conversations {options.long})"
        )

    def __len__(self) -> int:
        return len(self.packing.bounds) - 1

    def pieces(self, index: int) -> list[SequencePiece]:
        """Return the pieces of a sample, in order."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        first, last = self.packing.bounds[index : index + 2].tolist()
        numbers = self.packing.items[first:last]
        sequences = np.searchsorted(self._first_pieces, numbers, side="right") - 1
        starts = (numbers - self._first_pieces[sequences]) * self.options.seq_length
        return [
            SequencePiece(sequence + self.sequences.start, start)
            for sequence, start in zip(sequences.tolist(), starts.tolist(), strict=True)
        ]

    def tokens_of(self, piece: SequencePiece) -> npt.NDArray[np.int64]:
        """Return the tokens of a piece; the first one of the next piece is its last one."""
        tokens = self.indexed[piece.sequence][self._slice(piece)]
        return np.asarray(tokens, np.int64)

    def _slice(self, piece: SequencePiece) -> slice:
        return slice(piece.start, piece.start + self.options.seq_length + 1)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return a sample, int64 ``[4 S]``; see `sequences_row`.

        Raises:
            UserError: a token id is outside the vocabulary, or a file was changed since it was opened.
            IndexError: there is no such sample.
        """
        read = []
        for piece in self.pieces(index):
            tokens = self.tokens_of(piece)
            self.indexed.check_vocabulary(piece.sequence, tokens, self.options.vocab_size)
            has_loss = np.ones(len(tokens), np.bool_)
            if self.mask is not None:
                has_loss = self.mask[piece.sequence][self._slice(piece)]
            read.append((tokens, has_loss))
        self._files.check()
        return sequences_row(read, self.options.seq_length)

    def verify_files(self) -> None:
        self._files.verify()


class Packing(NamedTuple):
    """Items of each sample.

    Attributes:
        items: int64 ``[n]``, numbers of the items, sample after sample.
        bounds: int64 ``[samples + 1]``, where each sample begins in `items`, and n at the end.
    """

    items: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]


def pack_best_fit(lengths: npt.NDArray[np.int64], size: int) -> Packing:
    """Place each item, the longest first, into the fullest sample that has space for it.

    Best-fit decreasing needs at most 11/9 of the smallest number of samples, and four more (Johnson et al.
    1974). Items of equal length keep their order.

    Args:
        lengths: int64 ``[n]``, from 1 to `size`.
        size: size of a sample.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= size
    order = np.argsort(-lengths, kind="stable")
    sample_of = np.empty(len(lengths), np.int64)
    with_space: dict[int, list[int]] = {}  # samples by their free space
    spaces = 0  # bit i is set if a sample has the free space i
    num_samples = 0
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1  # the lowest bit is the smallest space
            samples = with_space[space]
            sample = samples.pop()
            if not samples:
                spaces ^= 1 << space
        else:
            space, sample = size, num_samples
            num_samples += 1
        sample_of[item] = sample
        if left := space - length:
            with_space.setdefault(left, []).append(sample)
            spaces |= 1 << left
    items = np.argsort(sample_of, kind="stable")
    bounds = np.searchsorted(sample_of[items], np.arange(num_samples + 1))
    return Packing(items, bounds.astype(np.int64))


@dataclass(frozen=True)
class PackedSamples(Samples):
    """Samples of packed conversations or documents, or of one each.

    Attributes:
        marks_padding: every stage must know the padding, because its layers have experts.
    """

    options: PackingOptions
    marks_padding: bool = False

    are_masked = False  # --sft counts tokens while the batch runs
    are_of_documents = True
    are_whole_documents = True

    @property
    def on_every_stage(self) -> bool:
        """Return whether the layers must know the documents or the padding."""
        return self.options.packs or self.marks_padding

    @property
    def seq_length(self) -> int:
        return self.options.seq_length

    def check(self, corpus: IndexedDataset) -> None:
        if self.options.only_answers:
            LossMask(corpus).check(corpus.prefix)

    def num_tokens(self, corpus: IndexedDataset, sequences: range) -> int:
        """Return the positions of one epoch's samples."""
        lengths = corpus.sequence_lengths[sequences.start : sequences.stop]
        return self.options.num_samples(lengths) * self.seq_length

    def dataset(
        self,
        corpus: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        split_name: str,
        cache: IndexCache | None,
    ) -> Epochs:
        packed = PackedDataset(corpus, sequences, self.options, split_name, cache)
        if num_samples is None:
            log.info("%s: %s", split_name, packed.use())
            return Epochs(packed, len(packed), self.options.seed)
        log.info("%s: %.3g epochs of %s", split_name, num_samples / len(packed), packed.use())
        return Epochs(packed, num_samples, self.options.seed)

    def mock(self, num_samples: int, split: int) -> Dataset:
        return MockDataset(num_samples, self.options.seed, split, self.options.random_row)

    def microbatch(self, rows: Tensor, sample_numbers: Tensor) -> Microbatch:
        """Return the microbatch of rows, int64 ``[b, 4 s]``; see `sequences_row`.

        Without packing, a sample is one document whose padding comes last, so that a causal model needs
        neither positions nor documents.
        """
        fields = rows.view(len(rows), NUM_FIELDS, -1).unbind(1)
        tokens, labels, kinds, documents = (field.contiguous() for field in fields)
        mask, is_real = kinds > 1, kinds > 0
        if not self.options.packs:
            return Microbatch(tokens, labels, sample_numbers, loss_mask=mask, is_real=is_real)
        positions = torch.arange(self.seq_length) - document_starts(documents)
        return Microbatch(tokens, labels, sample_numbers, positions, documents, mask, is_real)
