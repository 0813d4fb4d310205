"""The order in which a GPT dataset's samples are cut from its documents, and drawn.

The stream of a split is its sequences, repeated for as many epochs as needed and shuffled; samples are cut
from it one after the other, and drawn in a shuffled order. The shuffles are those of numpy's RandomState,
number for number, so that a corpus trains in the same order as under Megatron-LM.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data import _index_builder
from megalite.data.build_progress import told
from megalite.data.index_cache import CacheKey, IndexCache, digest_of
from megalite.data.storage import MappedBytes
from megalite.errors import UserError

LAST_EPOCH_THRESHOLD = 0.80
"""Below this share of an epoch the last epoch is shuffled apart, or the few samples taken of it would
displace some of the earlier epochs'."""

_INT32_MAX = 2**31 - 1

_FORMAT = 1
"""Part of the digest: raise it when the same values give other arrays."""


@dataclass(frozen=True)
class EpochPlan:
    """How often the documents are gone through, and how many samples that gives.

    Attributes:
        num_epochs: passes over the documents, the last one partly used.
        num_samples: samples of S + 1 tokens that these epochs hold, at least as many as asked for.
        num_samples_before_last: samples before the last epoch where it is shuffled apart, else None.
    """

    num_epochs: int
    num_samples: int
    num_samples_before_last: int | None


@dataclass(frozen=True)
class GPTIndex:
    """Where each sample's tokens are.

    Attributes:
        document_index: int32 [num_epochs * num_documents], sequence numbers in the order of the stream.
        sample_index: int32 [n + 1, 2], position in document_index and token offset where a sample starts.
        shuffle_index: uint32 [n], the sample that is drawn i-th.
        files: where the arrays are mapped from; none where they were built in memory.
    """

    document_index: npt.NDArray[Any]
    sample_index: npt.NDArray[Any]
    shuffle_index: npt.NDArray[Any]
    files: tuple[MappedBytes, ...] = ()


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> EpochPlan:
    """The smallest number of epochs that holds num_samples samples; one epoch for None.

    A sample's last token is the next one's first, hence the one token more than num_samples * seq_length.

    Raises:
        UserError: there is no token at all.
    """
    if tokens_per_epoch < 1:
        raise UserError("the documents hold no token")
    num_epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    total = (num_epochs * tokens_per_epoch - 1) // seq_length
    if num_samples is None or num_epochs == 1:
        return EpochPlan(num_epochs, total, None)
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    samples_per_epoch = (tokens_per_epoch - 1) // seq_length
    apart = num_samples - before_last < int(LAST_EPOCH_THRESHOLD * samples_per_epoch)
    return EpochPlan(num_epochs, total, before_last if apart else None)


def build_gpt_index(
    sequence_lengths: npt.NDArray[np.int32],
    sequences: range,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    name: str = "the order of samples",
) -> GPTIndex:
    """Builds the three arrays for the given consecutive sequences of a dataset.

    Args:
        sequence_lengths: lengths of all sequences of the dataset, in tokens.
        sequences: those that belong to this split.
        num_samples: at least so many samples, from as many epochs as it takes; None for those of one epoch.
        seq_length: S; a sample holds S + 1 tokens.
        seed: of the shuffles; every dataset and split starts afresh from it.
        name: what a long build calls itself while it tells its progress.

    Raises:
        UserError: the sequences hold no token.
    """
    plan = plan_epochs(_num_tokens(sequence_lengths, sequences), num_samples, seq_length)
    return _build(sequence_lengths, sequences, plan, seq_length, seed, name)


def cached_gpt_index(
    cache: IndexCache,
    prefix: str,
    split_name: str,
    sequence_lengths: npt.NDArray[np.int32],
    sequences: range,
    num_samples: int | None,
    seq_length: int,
    seed: int,
) -> GPTIndex:
    """As `build_gpt_index`, but mapped from a cache where another process or run has built it before.

    The digest is of the split's lengths and of all that the arrays follow from; the samples asked for count
    by the epochs they take, so that a run made a little longer finds its index.
    """
    plan = plan_epochs(_num_tokens(sequence_lengths, sequences), num_samples, seq_length)
    values = {
        **asdict(plan),
        "first_sequence": sequences.start,
        "num_sequences": len(sequences),
        "sequence_lengths_sha256": digest_of(sequence_lengths[sequences.start : sequences.stop]),
        "seq_length": seq_length,
        "seed": seed,
        "format": _FORMAT,
    }
    num_entries = plan.num_epochs * len(sequences) + 3 * plan.num_samples
    key = CacheKey("GPTDataset", split_name, values, num_entries, prefix)
    names = ("document_index", "sample_index", "shuffle_index")
    name = f"the order of the {split_name} split of {prefix}"

    def build() -> dict[str, npt.NDArray[Any]]:
        index = _build(sequence_lengths, sequences, plan, seq_length, seed, name)
        return {name: getattr(index, name) for name in names}

    cached = cache.get(key, names, build)
    return GPTIndex(**cached.arrays, files=cached.files)


def index_bytes(sequences: range, plan: EpochPlan) -> int:
    """Bytes of the three arrays that these sequences have, before anybody builds them."""
    num_documents = plan.num_epochs * len(sequences)
    return (
        num_documents * np.dtype(_document_dtype(sequences)).itemsize
        + (plan.num_samples + 1) * 2 * (8 if _is_wide(num_documents) else 4)
        + plan.num_samples * np.dtype(_shuffle_dtype(plan)).itemsize
    )


def _document_dtype(sequences: range) -> npt.DTypeLike:
    return np.int32 if sequences.stop <= _INT32_MAX else np.int64


def _is_wide(num_documents: int) -> bool:
    """Whether the sample index takes 64 bits to name a place in the document index."""
    return num_documents > _INT32_MAX


def _shuffle_dtype(plan: EpochPlan) -> npt.DTypeLike:
    return np.uint32 if plan.num_samples < 2**32 - 2 else np.int64


def _num_tokens(sequence_lengths: npt.NDArray[np.int32], sequences: range) -> int:
    return int(np.sum(sequence_lengths[sequences.start : sequences.stop], dtype=np.int64))


def _build(
    sequence_lengths: npt.NDArray[np.int32],
    sequences: range,
    plan: EpochPlan,
    seq_length: int,
    seed: int,
    name: str,
) -> GPTIndex:
    """Shuffles the documents, then cuts the samples while they are shuffled in another thread."""
    random = _index_builder.LegacyRandom(seed)
    num_documents = plan.num_epochs * len(sequences)
    with (
        told(name, "documents and samples", 2 * num_documents + plan.num_samples) as progress,
        ThreadPoolExecutor(max_workers=1) as pool,
    ):
        documents = _document_index(sequences, plan, random, progress)
        shuffle = pool.submit(_shuffle_index, plan, random, progress)
        samples = _index_builder.build_sample_index(
            sequence_lengths, documents, seq_length, plan.num_samples, _is_wide(num_documents), progress
        )
        return GPTIndex(documents, samples, shuffle.result())


def _document_index(
    sequences: range,
    plan: EpochPlan,
    random: _index_builder.LegacyRandom,
    progress: _index_builder.Progress,
) -> npt.NDArray[Any]:
    """The sequences of all epochs, shuffled together, but for a last epoch that is shuffled apart."""
    index = _empty(plan.num_epochs * len(sequences), _document_dtype(sequences))
    together = len(index) if plan.num_samples_before_last is None else len(index) - len(sequences)
    for part in (index[:together], index[together:]):
        random.fill_shuffled(part, sequences.start, sequences.stop, progress)
    return index


def _shuffle_index(
    plan: EpochPlan, random: _index_builder.LegacyRandom, progress: _index_builder.Progress
) -> npt.NDArray[Any]:
    """The samples' numbers, those before a last epoch apart from those in it."""
    index = _empty(plan.num_samples, _shuffle_dtype(plan))
    boundary = plan.num_samples if plan.num_samples_before_last is None else plan.num_samples_before_last
    random.fill_shuffled(index[:boundary], 0, boundary, progress)
    random.fill_shuffled(index[boundary:], boundary, plan.num_samples, progress)
    return index


def _empty(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """As `np.empty`, but quicker to fill: most of the time of a small index would go into page faults."""
    dtype = np.dtype(dtype)
    array: npt.NDArray[Any] = _index_builder.empty_bytes(size * dtype.itemsize).view(dtype)
    return array
