"""Record the contents of corpora and the parts that a run reads, for checkpoints and to compare ranks."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data.blend import normalized, num_samples_to_build
from megalite.data.corpus_sources import SPLIT_NAMES, Blend, Sources
from megalite.data.file_ranges import Entries
from megalite.data.gpt_dataset import EpochPlan, plan_epochs
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.loss_mask import LossMask
from megalite.data.mixture import first_change, sources_read
from megalite.utils.errors import few

_WHOLE_BYTES = 4 << 20
_BLOCK_BYTES = 16 << 10
"""Index arrays up to the first size are hashed whole; of larger ones, as many bytes in spaced blocks."""
_NUM_READERS = 16
_NUM_SAMPLED_SEQUENCES = 8
_NUM_SAMPLED_TOKENS = 1024
_MAX_SHOWN = 5


@dataclass(frozen=True)
class CorpusIdentity:
    """Identity of a corpus by its contents: copies are equal, wherever they are.

    Attributes:
        bin_bytes, sequences, documents: sizes of the corpus.
        index_sha256: hash of lengths, offsets and documents; of a large array, `_WHOLE_BYTES` are hashed.
        tokens_sha256: hash of the first tokens of a few sequences, and of their loss mask if it is read; None
            for a corpus in object storage.
    """

    bin_bytes: int
    sequences: int
    documents: int
    dtype: str
    index_sha256: str
    tokens_sha256: str | None

    @staticmethod
    def of(corpus: IndexedDataset, mask: LossMask | None = None) -> CorpusIdentity:
        """Read and hash at most 12 MB of the index and 8,000 tokens, whatever the corpus's size."""
        index = hashlib.sha256()
        for array in (corpus.sequence_lengths, corpus.sequence_offsets, corpus.document_index):
            for block in _sampled(array):
                index.update(block.data)
            corpus.release()
        tokens = None if corpus.is_remote else hashlib.sha256()
        if tokens is not None and len(corpus):
            for sequence in sorted(set(np.linspace(0, len(corpus) - 1, _NUM_SAMPLED_SEQUENCES, dtype=int))):
                tokens.update(corpus[int(sequence)][:_NUM_SAMPLED_TOKENS].tobytes())
                if mask is not None:
                    tokens.update(mask[int(sequence)][:_NUM_SAMPLED_TOKENS].tobytes())
        return CorpusIdentity(
            corpus.num_tokens * corpus.dtype.itemsize,
            len(corpus),
            corpus.num_documents,
            corpus.dtype.name,
            index.hexdigest(),
            None if tokens is None else tokens.hexdigest(),
        )

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> CorpusIdentity:
        """Return the identity from its JSON record (`asdict`).

        Raises:
            ValueError: it is not the record of an identity.
        """
        if not isinstance(record, Mapping) or set(record) != {field.name for field in fields(CorpusIdentity)}:
            raise ValueError("run.json is damaged: a corpus in it has missing or unknown fields")
        return CorpusIdentity(**record)

    def is_equal(self, other: CorpusIdentity) -> bool:
        """Return whether both are the same corpus, as far as both are known."""
        if None in (self.tokens_sha256, other.tokens_sha256):
            return replace(self, tokens_sha256=other.tokens_sha256) == other
        return self == other

    def __str__(self) -> str:
        return f"{self.sequences:,} sequences in {self.bin_bytes:,} bytes, {_short_digest(asdict(self))}"


def _sampled(array: Entries) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of an array to hash: all of a small array, evenly spaced blocks of a large one."""
    size = array.dtype.itemsize
    num_bytes = len(array) * size
    if num_bytes <= _WHOLE_BYTES:
        yield array[:].view(np.uint8)
        return
    blocks = np.linspace(0, num_bytes - _BLOCK_BYTES, _WHOLE_BYTES // _BLOCK_BYTES, dtype=np.int64)

    def read(begin: int) -> npt.NDArray[np.uint8]:
        first = begin // size
        raw: npt.NDArray[np.uint8] = array[first : -(-(begin + _BLOCK_BYTES) // size)].view(np.uint8)
        return raw[begin - first * size :][:_BLOCK_BYTES]

    with ThreadPoolExecutor(_NUM_READERS) as pool:  # in object storage, each block is a request
        yield from pool.map(read, blocks.tolist())


@dataclass(frozen=True)
class DataRecord:
    """Record of the data that each split reads.

    Attributes:
        sources: blends of each split.
        corpora: identity of every corpus, by its prefix.
        blend_by: how to weight corpora without weights.
        mixture: the mixture that changes during training, of `MixturePlan.record`; None without one.
    """

    sources: Sources
    corpora: Mapping[str, CorpusIdentity]
    blend_by: str
    mixture: Mapping[str, Any] | None = None

    def for_json(self) -> dict[str, Any]:
        """Return the record for a checkpoint."""
        return {
            "corpora": {prefix: asdict(identity) for prefix, identity in self.corpora.items()},
            "splits": {split: [self._blend(blend) for blend in self.sources[split]] for split in SPLIT_NAMES},
            "mixture": self.mixture,
        }

    def for_ranks(self) -> dict[str, str]:
        """Return values that must agree on all ranks that read data, as text for messages."""
        phases = [blend.phases for blend in self.sources["train"]]
        corpora = {f"corpus {prefix}": str(identity) for prefix, identity in self.corpora.items()}
        blends = {split: [self._blend(blend) for blend in self.sources[split]] for split in SPLIT_NAMES}
        texts = {
            f"the data of {split}": f"{_describe(each)}, {_short_digest(each)}"
            for split, each in blends.items()
        }
        return corpora | texts | {"--data-phases": _short_digest(repr(phases))}

    def _blend(self, blend: Blend) -> dict[str, Any]:
        weighs = blend.weights is None and len(blend.sources) > 1
        return {
            "name": blend.name,
            "weights": None if blend.weights is None else normalized(blend.weights),
            "blend_by": self.blend_by if weighs else None,
            "parts": [[source.prefix, source.begin, source.end] for source in blend.sources],
        }


def data_differences(
    saved: Mapping[str, Any], here: Mapping[str, Any], num_consumed: int = 0
) -> tuple[list[str], list[str]]:
    """Compare two records of `DataRecord.for_json`; where corpora are does not matter.

    Args:
        num_consumed: samples that were trained on; of a mixture, what comes later may differ.

    Returns:
        Descriptions of differences in the training data, and in data that is only evaluated on.

    Raises:
        ValueError: a record is damaged.
    """
    try:
        found = {split: _split_differences(saved, here, split) for split in SPLIT_NAMES}
        is_mixed, is_mixed_here = (bool(record.get("mixture")) for record in (saved, here))
        if is_mixed and is_mixed_here:
            found["train"] = _mixture_differences(saved, here, num_consumed)
        elif is_mixed or is_mixed_here:
            ways = [_describe(record["splits"]["train"]) for record in (saved, here)]
            ways[is_mixed_here] += " by --data-phases"
            found["train"] = [f"train {ways[0]} (now {ways[1]})"]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ValueError("run.json is damaged: its corpora cannot be read") from error
    evaluated = [text for split in SPLIT_NAMES[1:] for text in found[split] if text not in found["train"]]
    return found["train"], list(dict.fromkeys(evaluated))


def samples_lost_and_repeated(
    saved: Mapping[str, Any], here: Mapping[str, Any], num_consumed: int, num_samples: int
) -> list[str]:
    """Describe what a change of the training blend does to the samples of each corpus.

    Each corpus is read from its first sample on. Under other weights the run continues at another sample.

    Args:
        saved, here: records of `DataRecord.for_json`.
        num_consumed: number of samples that were trained on with the saved blend.

    Returns:
        A text for each corpus with such samples; none if corpora are weighted by their sizes.
    """
    before, after = _train_shares(saved), _train_shares(here)
    texts = []
    for key, (prefix, share) in after.items():
        num_read = round(before.get(key, (prefix, 0.0))[1] * num_consumed)
        first, end = round(share * num_consumed), round(share * num_samples)
        change = f"{prefix} was read up to about sample {num_read:,} and continues at {first:,}, so that"
        if (num_lost := first - num_read) > 1:
            texts.append(f"{change} {num_lost:,} samples are skipped")
        elif (num_repeated := min(num_read, end) - first) > 1:
            texts.append(f"{change} {num_repeated:,} samples are read again")
    return texts


def reordered_corpora(
    record: Mapping[str, Any], num_consumed: int, num_before: int, num_now: int, seq_length: int
) -> list[str]:
    """Describe the corpora whose samples another length of the run puts in another order.

    The epochs of a corpus are shuffled together, as in Megatron-LM, so that their order depends on their
    number.

    Args:
        record: the record of `DataRecord.for_json`.
        num_consumed: number of samples that were trained on.
        num_before: number of samples of the whole run until now.
        num_now: number of samples of the whole run from now on.
    """
    texts = []
    for (num_bytes, _, _, dtype, *_, begin, end), (prefix, share) in _train_shares(record).items():
        num_tokens = round(num_bytes // np.dtype(dtype).itemsize * (end - begin))
        weighs = share < 1
        before, now = (
            plan_epochs(num_tokens, num_samples_to_build(number, share) if weighs else number, seq_length)
            for number in (num_before, num_now)
        )
        if before != now:
            number = num_read_again(before, now, round(num_consumed * share))
            texts.append(
                f"{prefix} (epochs: {before.num_epochs}, now {now.num_epochs}): about {number:,} of its "
                "samples are read once more than without the change, and as many once less"
            )
    return texts


def num_read_again(before: EpochPlan, now: EpochPlan, num_consumed: int) -> int:
    """Return the expected number of samples that the first order has read and the second one reads again.

    The samples that the second order has before `num_consumed` are not read in it; as many of these were not
    read in the first order either.
    """
    pairs = itertools.product(_times_read(before, num_consumed), _times_read(now, num_consumed))
    mean = sum(max(0, read - skipped) * p * q for (read, p), (skipped, q) in pairs)
    return round(mean * now.num_samples / now.num_epochs)


def _times_read(plan: EpochPlan, num_consumed: int) -> list[tuple[int, float]]:
    """Return how often a text is among the first samples of an order, with the probability of each number."""
    first = plan.num_samples if plan.num_samples_before_last is None else plan.num_samples_before_last
    certain, n = 0, plan.num_epochs - (first < plan.num_samples)
    share = num_consumed / first
    if share > 1:
        certain, n, share = n, 1, min(1, (num_consumed - first) / max(1, plan.num_samples - first))
    return [(certain + k, math.comb(n, k) * share**k * (1 - share) ** (n - k)) for k in range(n + 1)]


def _train_shares(record: Mapping[str, Any]) -> dict[tuple[Any, ...], tuple[str, float]]:
    """Return the prefix of each corpus to train on and its share of the samples, by contents and part."""
    shares = dict[tuple[Any, ...], tuple[str, float]]()
    for blend in record["splits"]["train"]:
        weights = blend["weights"] or ([1.0] if len(blend["parts"]) == 1 else [])
        for weight, (prefix, begin, end) in zip(weights, blend["parts"], strict=False):
            contents = {**record["corpora"][prefix], "tokens_sha256": None}
            part = (*contents.values(), begin, end)
            shares[part] = prefix, weight
    return shares


def _split_differences(saved: Mapping[str, Any], here: Mapping[str, Any], split: str) -> list[str]:
    blends, blends_here = saved["splits"][split], here["splits"][split]
    if [_shape(blend) for blend in blends] != [_shape(blend) for blend in blends_here]:
        return [f"{split} {_describe(blends)} (now {_describe(blends_here)})"]
    pairs = [
        (part[0], part_here[0])
        for blend, blend_here in zip(blends, blends_here, strict=True)
        for part, part_here in zip(blend["parts"], blend_here["parts"], strict=True)
    ]
    return [
        f"corpus {prefix} {one} (now {'' if prefix == prefix_here else f'{prefix_here} '}{other})"
        for prefix, prefix_here in dict.fromkeys(pairs)
        if not (one := CorpusIdentity.from_record(saved["corpora"][prefix])).is_equal(
            other := CorpusIdentity.from_record(here["corpora"][prefix_here])
        )
    ]


def _mixture_differences(saved: Mapping[str, Any], here: Mapping[str, Any], num_consumed: int) -> list[str]:
    """Return the differences of what two mixtures have read so far."""
    change = first_change(saved["mixture"], here["mixture"], num_consumed)
    if change is not None:
        return [f"--data-phases has another past from sample {change:,} on, of {num_consumed:,}"]
    parts, parts_here = (
        dict(zip(record["mixture"]["names"], record["splits"]["train"][0]["parts"], strict=True))
        for record in (saved, here)
    )
    texts = []
    for name in sources_read(saved["mixture"], num_consumed):
        (prefix, *part), (prefix_here, *part_here) = parts[name], parts_here[name]
        one = CorpusIdentity.from_record(saved["corpora"][prefix])
        other = CorpusIdentity.from_record(here["corpora"][prefix_here])
        if part != part_here:
            texts.append(
                f"source {name} from {part[0]:g} to {part[1]:g} (now {part_here[0]:g} to {part_here[1]:g})"
            )
        elif not one.is_equal(other):
            texts.append(f"source {name} {one} (now {other})")
    return texts


def _shape(blend: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the parts that are read and their weights, without the corpora."""
    return blend["weights"], blend["blend_by"], [part[1:] for part in blend["parts"]]


def _describe(blends: Sequence[Mapping[str, Any]]) -> str:
    """Describe the parts of the blends, as in "0.3 a, 0.7 b[0:0.5]"."""
    texts = []
    for blend in blends:
        weights = blend["weights"] or [None] * len(blend["parts"])
        parts = [
            f"{'' if weight is None else f'{weight:.4g} '}{prefix}"
            f"{'' if (begin, end) == (0, 1) else f'[{begin:.6g}:{end:.6g}]'}"
            for weight, (prefix, begin, end) in zip(weights, blend["parts"], strict=True)
        ]
        by = f" by {blend['blend_by']}" if blend["blend_by"] else ""
        texts.append(f"{few(parts, _MAX_SHOWN) or 'nothing'}{by}")
    return "; ".join(texts) or "nothing"


def _short_digest(record: object) -> str:
    return f"digest {hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:8]}"
