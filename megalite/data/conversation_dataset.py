"""Pack conversations into samples, each conversation whole and apart from the others.

Shapes: S positions of a sample.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from megalite.data.index_cache import Arrays, CachedArrays, CacheKey, IndexCache, digest_of
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.loss_mask import LossMask
from megalite.data.packing import Packing, one_per_sample, pack_best_fit
from megalite.data.storage import FilesInUse
from megalite.errors import UserError

_FORMAT = 1
"""Part of a cached packing's digest: increase it when the same values give another one."""
NUM_FIELDS = 4


@dataclass(frozen=True)
class ConversationOptions:
    """Holds the options of samples of conversations.

    Attributes:
        seq_length: S, number of positions of a sample. A conversation of n tokens takes n - 1 of them: its
            last token is only predicted.
        seed: seed of the samples' order.
        vocab_size: reading a sample with a token id beyond it raises.
        packs: whether samples hold several conversations, or one each.
        drops_long: whether conversations that do not fit a sample are dropped, or lose their end.
    """

    seq_length: int
    seed: int
    vocab_size: int
    packs: bool = True
    drops_long: bool = False

    def fitting(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the positions that conversations take; 0 for those that are dropped for their length.

        Args:
            lengths: in tokens.
        """
        needed = lengths.astype(np.int64) - 1
        if self.drops_long:
            return np.where(needed <= self.seq_length, needed, 0).clip(0)
        return needed.clip(0, self.seq_length)

    def num_samples(self, lengths: npt.NDArray[np.int32]) -> int:
        """Return the number of samples of one epoch; with packing, it is a lower bound."""
        positions = self.fitting(lengths)
        return -(-int(positions.sum()) // self.seq_length) if self.packs else int((positions > 0).sum())


def conversations_row(
    conversations: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]], seq_length: int
) -> npt.NDArray[np.int64]:
    """Place conversations one after the other into a sample, int64 ``[4 S]``.

    The four parts are inputs, labels, whether a label is in an answer, and the conversation's number in the
    sample. The padding at the end is a document of its own, and has no loss.

    Args:
        conversations: tokens of each, and which of them belong to answers.
    """
    row = np.zeros((NUM_FIELDS, seq_length), np.int64)
    begin = 0
    for number, (tokens, is_answer) in enumerate(conversations):
        end = begin + len(tokens) - 1
        row[:, begin:end] = tokens[:-1], tokens[1:], is_answer[1:], np.full(end - begin, number)
        begin = end
    row[-1, begin:] = len(conversations)
    return row.reshape(-1)


class ConversationDataset:
    """Reads the samples of one epoch of a corpus's conversations, in a fixed order.

    Attributes:
        indexed: the corpus; each of its sequences is a conversation.
        packing: sequences of each sample.
        num_long: number of conversations that do not fit a sample.
        num_dropped: number of these that are in no sample.

    Raises:
        UserError: there is no answer to learn.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        options: ConversationOptions,
        split_name: str = "train",
        cache: IndexCache | None = None,
    ) -> None:
        """Pack the conversations.

        Args:
            sequences: the split's conversations.
            cache: stores and maps the packing; None to build it in memory.
        """
        self.indexed = indexed
        self.mask = LossMask(indexed)
        self.options = options
        cached = self._packed(sequences, split_name, cache)
        self.packing = Packing(cached.arrays["items"], cached.arrays["bounds"])
        self._files = FilesInUse((*indexed.files, self.mask.file, *cached.files))
        self.num_long = len(self._long(sequences))
        self.num_dropped = len(sequences) - len(self.packing.items)
        if len(self) == 0:
            raise UserError(
                f"the {split_name} split of {indexed.prefix} has {len(sequences)} conversations, and none of "
                f"them has an answer within --seq-length {options.seq_length}: pass a longer one"
            )

    def _packed(self, sequences: range, split_name: str, cache: IndexCache | None) -> CachedArrays:
        lengths = self.indexed.sequence_lengths[sequences.start : sequences.stop]
        unanswered = self._unanswered(sequences)

        def build() -> Arrays:
            positions = self.options.fitting(lengths)
            positions[unanswered - sequences.start] = 0
            packing = self._pack(sequences, positions)
            self.indexed.check_files()
            return packing._asdict()

        if cache is None:
            return CachedArrays(build())
        values = {
            **asdict(self.options),
            "first_sequence": sequences.start,
            "sequence_lengths_sha256": digest_of(lengths),
            "unanswered_sha256": digest_of(unanswered),
            "format": _FORMAT,
        }
        key = CacheKey("ConversationDataset", split_name, values, 2 * len(sequences), self.indexed.prefix)
        return cache.get(key, Packing._fields, build)

    def _long(self, sequences: range) -> npt.NDArray[np.int64]:
        """Return the conversations that do not fit a sample."""
        lengths = self.indexed.sequence_lengths[sequences.start : sequences.stop]
        return np.flatnonzero(lengths > self.options.seq_length + 1) + sequences.start

    def _unanswered(self, sequences: range) -> npt.NDArray[np.int64]:
        """Return the truncated conversations that have no answer in the part that fits a sample."""
        if self.options.drops_long:
            return np.empty(0, np.int64)
        length = self.options.seq_length + 1
        found = [i for i in self._long(sequences).tolist() if not self.mask[i][1:length].any()]
        return np.array(found, np.int64)

    def _pack(self, sequences: range, positions: npt.NDArray[np.int64]) -> Packing:
        """Pack the conversations.

        Args:
            positions: positions that each conversation takes; 0 for those that are dropped.
        """
        # Conversations of equal length are mixed, and then the samples.
        random = np.random.default_rng(self.options.seed)
        kept = random.permutation(np.flatnonzero(positions))
        if self.options.packs:
            packing = pack_best_fit(positions[kept], self.options.seq_length)
        else:
            packing = one_per_sample(len(kept))
        return Packing(kept[packing.items] + sequences.start, packing.bounds)

    def use(self) -> str:
        """Describe how the conversations use the samples, for the log."""
        filled = int(self.options.fitting(self.indexed.sequence_lengths[self.packing.items]).sum())
        share = filled / max(1, len(self) * self.options.seq_length)
        text = (
            f"{len(self.packing.items):,} conversations of {self.indexed.prefix} in {len(self):,} samples, "
            f"{100 * share:.1f}% of their positions filled"
        )
        if not self.num_long:
            return text
        long = "drop" if self.options.drops_long else "truncate"
        return (
            f"{text}; {self.num_long - self.num_dropped:,} truncated and {self.num_dropped:,} dropped, "
            f"longer than --seq-length {self.options.seq_length} (--sft-long-conversations {long})"
        )

    def __len__(self) -> int:
        return len(self.packing.bounds) - 1

    def conversations(self, index: int) -> list[int]:
        """Return the sequences of a sample, in order."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        first, last = self.packing.bounds[index : index + 2].tolist()
        found: list[int] = self.packing.items[first:last].tolist()
        return found

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return a sample, int64 ``[4 S]``; see `conversations_row`.

        Raises:
            UserError: a token id is outside the vocabulary, or a file was changed since it was opened.
            IndexError: there is no such sample.
        """
        length = self.options.seq_length + 1
        read = [
            (self._tokens(sequence)[:length], self.mask[sequence][:length])
            for sequence in self.conversations(index)
        ]
        self._files.check()
        return conversations_row(read, self.options.seq_length)

    def _tokens(self, sequence: int) -> npt.NDArray[np.int64]:
        tokens = np.asarray(self.indexed[sequence], np.int64)
        wrong = tokens[(tokens < 0) | (tokens >= self.options.vocab_size)]
        if len(wrong):
            raise UserError(
                f"document {self.indexed.document_of(sequence)} of {self.indexed.prefix} has token id "
                f"{wrong[0]}, outside the vocabulary of {self.options.vocab_size}: preprocess it with the "
                "tokenizer of this model, or pass a larger --vocab-size"
            )
        return tokens

    def verify_files(self) -> None:
        self._files.verify()
