"""Cut the samples of a run from a corpus, draw random ones or check a program's own, and make microbatches.

`DocumentEnds` finds the documents inside a sample, for their positions, attention and loss.

Shapes: b samples of a microbatch, s tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.data.gpt_dataset import Dataset, GPTDataset, gather
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.microbatch import Microbatch
from megalite.data.window_dataset import WindowDataset
from megalite.utils.errors import UserError, kind_of

NUM_CHECKED = 16
"""Number of a corpus's documents to check for the end-of-document token."""


@dataclass(frozen=True)
class DocumentEnds:
    """Finder of the documents of packed samples by their end-of-document tokens, as in Megatron-LM.

    Such a token belongs to the document that it ends. A sample's first tokens are a document of their own,
    even if most of that document is in the sample before.

    Attributes:
        eod: id of the token that ends a document.
        reset_position_ids: positions count from 0 in each document.
        reset_attention_mask: tokens attend within their document only.
        eod_mask_loss: inputs equal to `eod` have no loss: the next document's first token is not learned.
        on_every_stage: whether the layers need the documents, not only the embedding and the loss.
    """

    eod: int
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    on_every_stage: bool

    def marked(self, microbatch: Microbatch) -> Microbatch:
        """Return the microbatch with the requested fields, computed on its device without waiting."""
        is_end = microbatch.tokens == self.eod  # [b, s]
        return replace(
            microbatch,
            position_ids=position_ids(is_end) if self.reset_position_ids else None,
            document_ids=document_ids(is_end) if self.reset_attention_mask else None,
            loss_mask=~is_end if self.eod_mask_loss else None,
        )


def document_ids(is_end: Tensor) -> Tensor:
    """Count the document ends before each token in its sample, int64 ``[b, s]``."""
    ends = is_end.long()
    return ends.cumsum(1) - ends


def position_ids(is_end: Tensor) -> Tensor:
    """Count the tokens before each token in its document, int64 ``[b, s]``."""
    positions = torch.arange(is_end.shape[1], device=is_end.device)
    after_end = torch.where(is_end, positions + 1, 0)  # where the next document starts
    starts = after_end.cummax(1).values.roll(1, 1)
    starts[:, 0] = 0
    return positions - starts


def check_ends(corpus: IndexedDataset, eod: int) -> None:
    """Refuse a corpus without end-of-document tokens: its documents cannot be found in a sample.

    Raises:
        UserError: none of its first documents ends with `eod`.
    """
    lasts = corpus.document_index[1 : NUM_CHECKED + 1] - 1
    sequences = [corpus[last] for last in lasts.tolist() if last >= 0]
    tokens = [int(sequence[-1]) for sequence in sequences if len(sequence)]
    if tokens and eod not in tokens:
        raise UserError(
            f"no document of {corpus.prefix} ends with the tokenizer's end-of-document token {eod}: "
            "preprocess it with --append-eod, or train without --reset-position-ids, --reset-attention-mask "
            "and --eod-mask-loss"
        )


class Samples:
    """Samples of a kind of model.

    Attributes:
        are_of_documents: whether corpora are split into training and evaluation by complete documents, or
            by sequences.
        are_whole_documents: whether a sample holds whole documents, and padding. Then an evaluation reads
            each sample of its split at most once: it begins at the first one, and samples after the last one
            are empty. A dataset logs by itself how much of its corpus is used.
        are_windows: whether samples are windows of the corpus as it lies, in epochs that are shuffled apart
            (--sample-order windows).
    """

    are_of_documents = False
    are_whole_documents = False
    are_windows: bool = False

    if TYPE_CHECKING:  # at run time, it would stand in the way of a field of this name

        @property
        def seq_length(self) -> int: ...

    @property
    def on_every_stage(self) -> bool:
        """Return whether every pipeline stage needs the samples, or only the first and the last."""
        return True

    @property
    def are_masked(self) -> bool:
        """Return whether losses are means over a number of predictions that depends on the global batch."""
        return False

    def check(self, corpus: IndexedDataset) -> None:
        """Refuse a corpus that cannot be read as these samples.

        Raises:
            UserError: the message says what the corpus lacks, and how to make it.
        """

    def num_tokens(self, corpus: IndexedDataset, sequences: range) -> int:
        """Return the tokens of one epoch of some sequences: about `seq_length` for each sample."""
        return corpus.count_tokens(sequences)

    def dataset(
        self,
        corpus: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        split_name: str,
        cache: IndexCache | None,
    ) -> Dataset:
        """Order at least this many samples of some sequences of a corpus; None for one epoch."""
        raise NotImplementedError

    def mock(self, num_samples: int, split: int) -> Dataset:
        """Return samples of random tokens, which differ between splits."""
        raise NotImplementedError

    def microbatch(self, rows: Tensor, sample_numbers: Tensor) -> Microbatch:
        """Return the microbatch of the rows of a dataset, int64 ``[b, …]``."""
        raise NotImplementedError

    def read(self, dataset: Dataset, numbers: npt.NDArray[np.int64]) -> Microbatch:
        """Read samples by number, int64 ``[b]``, into a microbatch on the host."""
        return self.microbatch(torch.from_numpy(gather(dataset, numbers)), torch.from_numpy(numbers))

    def marked(self, microbatch: Microbatch) -> Microbatch:
        """Return the microbatch with the fields that are computed on its device."""
        return microbatch


@dataclass(frozen=True)
class GPTSamples(Samples):
    """Samples of s + 1 consecutive tokens, across documents.

    Attributes:
        seed: seed of the order, the same for all datasets and splits.
        vocab_size: reading a sample with a token id beyond it raises.
        ends: finds the documents in samples; corpora that do not mark document ends are then refused.
        shuffle_block: see `WindowDataset`.
    """

    seq_length: int
    seed: int
    vocab_size: int | None = None
    ends: DocumentEnds | None = None
    are_windows: bool = False
    shuffle_block: int = 1

    are_masked = False  # --eod-mask-loss counts tokens while the batch runs

    @property
    def on_every_stage(self) -> bool:
        return self.ends is not None and self.ends.on_every_stage

    def check(self, corpus: IndexedDataset) -> None:
        if self.ends is not None:
            check_ends(corpus, self.ends.eod)

    def dataset(
        self,
        corpus: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        split_name: str,
        cache: IndexCache | None,
    ) -> GPTDataset | WindowDataset:
        seq_length, seed, vocab_size = self.seq_length, self.seed, self.vocab_size
        if self.are_windows:
            order = seed, vocab_size, split_name, self.shuffle_block
            return WindowDataset(corpus, sequences, num_samples, seq_length, *order)
        return GPTDataset(corpus, sequences, num_samples, seq_length, seed, vocab_size, split_name, cache)

    def mock(self, num_samples: int, split: int) -> Dataset:
        assert self.vocab_size is not None
        eod = None if self.ends is None else self.ends.eod
        draw = partial(random_tokens, seq_length=self.seq_length, vocab_size=self.vocab_size, eod=eod)
        return MockDataset(num_samples, self.seed, split, draw)

    def microbatch(self, rows: Tensor, sample_numbers: Tensor) -> Microbatch:
        return Microbatch.of(rows, sample_numbers)

    def marked(self, microbatch: Microbatch) -> Microbatch:
        return microbatch if self.ends is None else self.ends.marked(microbatch)


@dataclass(frozen=True)
class FieldSamples(Samples):
    """Samples of your own dataset, which returns a `Microbatch`'s fields by name.

    A sample is a mapping of each field to an array ``[s]``: bool for `loss_mask` and `is_real`, int64 for the
    others. With a loss mask the loss is the mean over the tokens of the whole global batch that have a loss.
    Routers of experts ignore tokens that are padding: those with False in `is_real`.

    Args:
        fields: fields of each sample: tokens and labels, and optionally loss_mask, position_ids and is_real.

    Raises:
        UserError: there are no such fields, or is_real without loss_mask.
    """

    fields: tuple[str, ...] = ("tokens", "labels", "loss_mask")

    seq_length = 0  # samples are not cut from a corpus

    def __post_init__(self) -> None:
        needed = {"tokens", "labels"}
        if not needed <= set(self.fields) <= needed | {"loss_mask", "position_ids", "is_real"}:
            raise UserError(
                f"a sample's fields are {', '.join(self.fields)}: it needs tokens and labels, and may have "
                "loss_mask, position_ids and is_real"
            )
        if "is_real" in self.fields and not self.are_masked:
            raise UserError(
                "a sample's fields have is_real and no loss_mask, so that padding would have a loss: "
                "add loss_mask"
            )

    @property
    def are_masked(self) -> bool:
        return "loss_mask" in self.fields

    def check(self, corpus: IndexedDataset) -> None:
        raise UserError(f"{corpus.prefix} has no fields of samples: pass a dataset provider")

    def mock(self, num_samples: int, split: int) -> Dataset:
        raise UserError("--mock-data has no fields of samples: pass a dataset provider")

    def read(self, dataset: Dataset, numbers: npt.NDArray[np.int64]) -> Microbatch:
        samples = [dataset[i] for i in numbers.tolist()]
        stacked: dict[str, Any] = {
            name: torch.from_numpy(np.stack([each[name] for each in samples])) for name in self.fields
        }
        return Microbatch(sample_numbers=torch.from_numpy(numbers), **stacked)


NUM_ENDS = 4
"""Average number of document ends in a sample."""


class MockDataset:
    """Random samples; a sample depends on the seed, the split and its number.

    Args:
        split: number of the split, so that splits differ.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        split: int,
        draw: Callable[[np.random.Generator], npt.NDArray[np.int64]],
    ) -> None:
        self._num_samples = num_samples
        self._key = (seed, split)
        self._draw = draw

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return self._draw(np.random.default_rng((*self._key, index)))


def random_tokens(
    generator: np.random.Generator, seq_length: int, vocab_size: int, eod: int | None = None
) -> npt.NDArray[np.int64]:
    """Return uniformly random tokens, int64 ``[s + 1]``.

    Args:
        eod: if set, the token that ends documents of random length: on average NUM_ENDS per sample.
    """
    tokens = generator.integers(0, vocab_size, seq_length + 1, dtype=np.int64)
    if eod is not None:
        tokens[generator.random(len(tokens)) < NUM_ENDS / len(tokens)] = eod
    return tokens


class CheckedDataset:
    """Samples of a dataset, unchanged; samples that the model cannot read are refused.

    Args:
        name: name of the dataset, for messages.
        lengths: length of each field of a sample; the key is empty if a sample is one array.
        vocab_size: tokens and labels must be smaller than this.
    """

    def __init__(self, dataset: Dataset, name: str, lengths: Mapping[str, int], vocab_size: int) -> None:
        self._dataset = dataset
        self._name = name
        self._lengths = lengths
        self._vocab_size = vocab_size
        # Values are smaller than these; None for bools.
        self._limits = {"loss_mask": None, "is_real": None, "position_ids": max(lengths.values())}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            UserError: it has other fields, lengths or dtypes than the run's samples, or a value out of range.
        """
        sample = self._dataset[index]
        if "" in self._lengths:
            self._check(index, "", sample)
            return sample
        if not isinstance(sample, Mapping) or not self._lengths.keys() <= sample.keys():
            has = (
                f"the fields {', '.join(map(str, sample))}"
                if isinstance(sample, Mapping)
                else kind_of(sample)
            )
            raise UserError(f"{self._of(index)} is {has}: it needs the fields {', '.join(self._lengths)}")
        for name in self._lengths:
            self._check(index, name, sample[name])
        return sample

    def _check(self, index: int, field: str, values: Any) -> None:
        array = np.asarray(values)
        limit = self._limits.get(field, self._vocab_size)
        wanted = np.bool_ if limit is None else np.int64
        length = self._lengths[field]
        if array.shape != (length,) or array.dtype != wanted:
            more = "" if field else ", one token more than --seq-length"
            raise UserError(
                f"{self._of(index, field)} has shape {list(array.shape)} in {array.dtype}: it needs shape "
                f"[{length}] in {np.dtype(wanted)}{more}"
            )
        if limit is None:
            return
        smallest, largest = int(array.min()), int(array.max())
        if smallest < 0 or largest >= limit:
            more = "make the dataset for this model, or change the model's size"
            if field == "labels" and smallest < 0:
                more = "set labels without a loss to any token id, and loss_mask to False there"
            what = "positions" if field == "position_ids" else "token ids"
            size = f"--seq-length is {limit}" if field == "position_ids" else f"the vocabulary has {limit}"
            raise UserError(
                f"{self._of(index, field)} has {what} from {smallest} to {largest}, and {size}: {more}"
            )

    def _of(self, index: int, field: str = "") -> str:
        return f"{field} of sample {index} of the {self._name} dataset".removeprefix(" of ")
