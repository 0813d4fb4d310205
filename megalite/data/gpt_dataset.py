"""Cut GPT samples from an indexed dataset: runs of consecutive tokens, in a shuffled order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megalite.data import _index_builder
from megalite.data.file_ranges import Entries
from megalite.data.index_cache import CacheKey, IndexCache, digest_of, reported_progress
from megalite.data.indexed_dataset import IndexedDataset, blocks_of
from megalite.data.storage import FilesInUse, MappedBytes
from megalite.utils.errors import UserError

LAST_EPOCH_THRESHOLD = 0.80
"""If less than this share of the last epoch is used, it is shuffled separately: otherwise its few samples
would displace samples of earlier epochs."""

_INT32_MAX = 2**31 - 1

_FORMAT = 1
"""Part of the digest: increase it when the same values give other arrays."""


@dataclass(frozen=True)
class EpochPlan:
    """Numbers of epochs and samples of a split.

    Attributes:
        num_epochs: number of times that the documents are read; the last epoch may be partial.
        num_samples: number of samples of S + 1 tokens in these epochs, at least as many as requested.
        num_samples_before_last: number of samples before a separately shuffled last epoch, else None.
    """

    num_epochs: int
    num_samples: int
    num_samples_before_last: int | None


@dataclass(frozen=True)
class GPTIndex:
    """Positions of each sample's tokens.

    Attributes:
        document_index: int32 or int64 [num_epochs * num_sequences], sequence numbers in the order of the
            stream. Megatron uses this name; `IndexedDataset.document_index` is another array.
        sample_index: int32 or int64 [n + 1, 2], position in document_index and token offset at which a
            sample starts.
        shuffle_index: uint32 or int64 [n], number of the i-th drawn sample.
        files: files that the arrays are mapped from; empty if they were built in memory.
    """

    document_index: npt.NDArray[Any]
    sample_index: npt.NDArray[Any]
    shuffle_index: npt.NDArray[Any]
    files: tuple[MappedBytes, ...] = ()


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> EpochPlan:
    """Return the smallest number of epochs with at least `num_samples` samples; one epoch for None.

    A sample's last token is the next sample's first, so they need num_samples * seq_length + 1 tokens.

    Raises:
        UserError: there are no tokens.
    """
    if tokens_per_epoch < 1:
        raise UserError("the documents hold no tokens: use other documents")
    num_epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    total = (num_epochs * tokens_per_epoch - 1) // seq_length
    if num_samples is None or num_epochs == 1:
        return EpochPlan(num_epochs, total, None)
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    samples_per_epoch = (tokens_per_epoch - 1) // seq_length
    apart = num_samples - before_last < int(LAST_EPOCH_THRESHOLD * samples_per_epoch)
    return EpochPlan(num_epochs, total, before_last if apart else None)


def gpt_index(
    sequence_lengths: Entries,
    sequences: range,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    cache: IndexCache | None = None,
    prefix: str = "",
    split_name: str = "train",
    check_lengths: Callable[[], None] = lambda: None,
) -> GPTIndex:
    """Build the three arrays for consecutive sequences of a corpus, or map them from a cache.

    The digest covers the split's lengths and everything that the arrays depend on. It covers the number of
    epochs instead of the number of samples, so a run that is made a little longer finds its index.

    Args:
        sequence_lengths: lengths of all sequences of the dataset, in tokens.
        sequences: sequences that belong to this split.
        num_samples: build at least this many samples, from as many epochs as needed; None for one epoch.
        seq_length: S; a sample holds S + 1 tokens.
        seed: seed of the shuffles, the same for every dataset and split.
        check_lengths: raises if the lengths have changed; called before a new index is stored.

    Raises:
        UserError: the sequences hold no tokens.
    """
    plan = plan_epochs(count_tokens(sequence_lengths, sequences), num_samples, seq_length)
    name = f"the order of the {split_name} split of {prefix}"
    names = ("document_index", "sample_index", "shuffle_index")

    arguments = (sequence_lengths, sequences, plan, seq_length, seed, name)

    def build() -> dict[str, npt.NDArray[Any]]:
        arrays = _build(*arguments)
        check_lengths()
        return dict(zip(names, arrays, strict=True))

    if cache is None:
        return GPTIndex(*_build(*arguments))
    values = {
        **asdict(plan),
        "first_sequence": sequences.start,
        "num_sequences": len(sequences),
        "sequence_lengths_sha256": digest_of(blocks_of(sequence_lengths, sequences)),
        "seq_length": seq_length,
        "seed": seed,
        "format": _FORMAT,
    }
    num_entries = plan.num_epochs * len(sequences) + 3 * plan.num_samples
    cached = cache.get(CacheKey("GPTDataset", split_name, values, num_entries, prefix), names, build)
    return GPTIndex(**cached.arrays, files=cached.files)


def index_bytes(sequences: range, plan: EpochPlan) -> int:
    """Return the bytes of the three arrays of these sequences, before they are built."""
    stream_length = plan.num_epochs * len(sequences)
    return (
        stream_length * np.dtype(_document_dtype(sequences)).itemsize
        + (plan.num_samples + 1) * 2 * (8 if _is_wide(stream_length) else 4)
        + plan.num_samples * np.dtype(_shuffle_dtype(plan)).itemsize
    )


def _document_dtype(sequences: range) -> npt.DTypeLike:
    return np.int32 if sequences.stop <= _INT32_MAX else np.int64


def _is_wide(stream_length: int) -> bool:
    """Return whether the sample index needs 64 bits for a position in the document index."""
    return stream_length > _INT32_MAX


def _shuffle_dtype(plan: EpochPlan) -> npt.DTypeLike:
    # Megatron-core has the same limit.
    return np.uint32 if plan.num_samples < 2**32 - 2 else np.int64


def count_tokens(sequence_lengths: Entries, sequences: range) -> int:
    """Return the number of tokens in consecutive sequences."""
    return sum(int(np.sum(block, dtype=np.int64)) for block in blocks_of(sequence_lengths, sequences))


def _build(
    sequence_lengths: Entries,
    sequences: range,
    plan: EpochPlan,
    seq_length: int,
    seed: int,
    name: str,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Shuffle the documents, then cut the samples while another thread shuffles their numbers."""
    # The order of random draws is part of the format: first documents, then samples. Cutting draws nothing.
    random = _index_builder.LegacyRandom(seed)
    stream_length = plan.num_epochs * len(sequences)
    with (
        reported_progress(name, "documents and samples", 2 * stream_length + plan.num_samples) as progress,
        ThreadPoolExecutor(max_workers=1) as pool,
    ):
        documents = _document_index(sequences, plan, random, progress)
        shuffle = pool.submit(_shuffle_index, plan, random, progress)
        samples = _index_builder.build_sample_index(
            *(np.asarray(sequence_lengths), documents, seq_length, plan.num_samples),
            *(_is_wide(stream_length), progress),
        )
        return documents, samples, shuffle.result()


def _document_index(
    sequences: range,
    plan: EpochPlan,
    random: _index_builder.LegacyRandom,
    progress: _index_builder.Progress,
) -> npt.NDArray[Any]:
    """Return the sequences of all epochs, shuffled together or with a separately shuffled last epoch."""
    index = _empty(plan.num_epochs * len(sequences), _document_dtype(sequences))
    together = len(index) if plan.num_samples_before_last is None else len(index) - len(sequences)
    for part in (index[:together], index[together:]):
        random.fill_shuffled(part, sequences.start, sequences.stop, progress)
    return index


def _shuffle_index(
    plan: EpochPlan, random: _index_builder.LegacyRandom, progress: _index_builder.Progress
) -> npt.NDArray[Any]:
    """Return the shuffled sample numbers; samples before a separate last epoch come first."""
    index = _empty(plan.num_samples, _shuffle_dtype(plan))
    boundary = plan.num_samples if plan.num_samples_before_last is None else plan.num_samples_before_last
    random.fill_shuffled(index[:boundary], 0, boundary, progress)
    random.fill_shuffled(index[boundary:], boundary, plan.num_samples, progress)
    return index


def _empty(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array like `np.empty`, but faster to fill: page faults would dominate a small build."""
    dtype = np.dtype(dtype)
    array: npt.NDArray[Any] = _index_builder.empty_bytes(size * dtype.itemsize).view(dtype)
    return array


class Dataset(Protocol):
    """Samples by number, int64 [S + 1]: inputs are all tokens but the last, labels all but the first.

    Datasets of other models return the format that their `Samples` read.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@runtime_checkable
class GatherDataset(Protocol):
    """Dataset that reads many samples at a time, faster than one by one."""

    def gather(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples with these numbers, int64 [b, S + 1]."""
        ...


def verify_files(dataset: Dataset) -> None:
    """Check that the files of a dataset have not changed since they were read, if it has a method for this.

    Raises:
        UserError: a file was changed or became unreadable while it was in use.
    """
    getattr(dataset, "verify_files", lambda: None)()


def gather(dataset: Dataset, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return samples of any dataset by their numbers, int64 [b, S + 1]."""
    if isinstance(dataset, GatherDataset):
        return dataset.gather(samples)
    return np.stack([dataset[i] for i in samples.tolist()])


def split_tokens(indexed: IndexedDataset, sequences: range, seq_length: int, split_name: str) -> int:
    """Return the number of tokens of a split.

    Raises:
        UserError: the sequences hold fewer tokens than one sample.
    """
    num_tokens = indexed.count_tokens(sequences)
    if num_tokens < seq_length + 1:
        raise UserError(
            f"the {split_name} split of {indexed.prefix} holds {num_tokens} tokens in {len(sequences)} "
            f"sequences, fewer than the {seq_length + 1} of one sample: use more text, a larger "
            "share in --split, or a smaller --seq-length"
        )
    return num_tokens


class GPTDataset:
    """Samples of one split of one dataset.

    Attributes:
        indexed: the corpus.
        index: document, sample and shuffle index.

    Raises:
        UserError: the sequences hold fewer tokens than one sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocab_size: int | None = None,
        split_name: str = "train",
        cache: IndexCache | None = None,
    ) -> None:
        """Cut the samples; see `gpt_index`.

        Args:
            vocab_size: if set, reading a sample with a token id beyond it raises.
            split_name: name of the split, for messages and file names of the cache.
        """
        self.indexed = indexed
        self._seq_length = seq_length
        self._vocab_size = vocab_size
        split_tokens(indexed, sequences, seq_length, split_name)
        try:
            self.index = gpt_index(
                *(indexed.sequence_lengths, sequences, num_samples, seq_length, seed),
                *(cache, indexed.prefix, split_name, indexed.check_files),
            )
        except IndexError:  # the lengths were checked on opening
            indexed.check_files()
            raise
        self._tokens = indexed.token_source()
        self._files = FilesInUse((*indexed.files, *self.index.files))
        for file in (*indexed.files, *self.index.files):
            file.release()

    def __len__(self) -> int:
        return len(self.index.shuffle_index)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return the index-th sample in the shuffled order; see `gather`."""
        return self.gather(np.array([index], np.int64))[0]

    def gather(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples with these numbers in the shuffled order, int64 [b, S + 1], without the GIL.

        Raises:
            UserError: a token id is outside the vocabulary, or a file of the corpus or the index was
                changed since it was opened.
            IndexError: there is no such sample.
        """
        for sample in samples.tolist():
            if not 0 <= sample < len(self):
                raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        rows = self.index.shuffle_index[samples].astype(np.int64)  # the samples' numbers before shuffling
        if self._tokens is not None:
            text, smallest, largest = self._read_mapped(self._tokens, rows)
        else:
            text = self._read_in_sequences(rows)
            smallest, largest = int(text.min()), int(text.max())
        self._files.check()
        if self._vocab_size is not None and (smallest < 0 or largest >= self._vocab_size):
            self._refuse_token(rows, self._vocab_size)
        return text

    def _read_mapped(
        self, source: _index_builder.TokenSource, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], int, int]:
        """Return the samples of these rows, and their smallest and largest token."""
        text = np.empty((len(rows), self._seq_length + 1), np.int64)
        try:
            smallest, largest = source.gather_samples(
                self.index.document_index, self.index.sample_index.reshape(-1), rows, text
            )
        except IndexError as error:  # corpus and index were checked on opening, and matched
            self._files.verify()
            cache = " and its index in --data-cache-path" if self.index.files else ""
            raise UserError(
                f"{self.indexed.prefix}.idx{cache} changed while in use ({error}): restore the corpus"
                f"{', delete the index' if cache else ''} and start again"
            ) from None
        return text, smallest, largest

    def verify_files(self) -> None:
        self._files.verify()

    def _read_in_sequences(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples of these rows by reading their sequences alone, all at a time."""
        bounds = [self.index.sample_index[row : row + 2].tolist() for row in rows.tolist()]
        numbers = [self.index.document_index[first : last + 1].tolist() for (first, _), (last, _) in bounds]
        read = iter(self.indexed.read([number for of_sample in numbers for number in of_sample]))
        text = np.empty((len(rows), self._seq_length + 1), np.int64)
        for sample, of_sample, ((_, begin), (_, end)) in zip(text, numbers, bounds, strict=True):
            parts = [next(read) for _ in of_sample]
            parts[-1] = parts[-1][: end + 1]
            parts[0] = parts[0][begin:]
            np.concatenate(parts, out=sample)
        return text

    def _refuse_token(self, rows: npt.NDArray[np.int64], vocab_size: int) -> None:
        for row in rows.tolist():
            first, last = self.index.sample_index[row : row + 2, 0].tolist()
            for sequence in self.index.document_index[first : last + 1].tolist():
                self.indexed.check_vocabulary(sequence, self.indexed[sequence], vocab_size)
        raise AssertionError("no token outside the vocabulary")
