"""Find the positions in the corpora of a sample's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from megalite.data.bert_dataset import BertDataset
from megalite.data.blend import BlendedDataset
from megalite.data.epochs import Epochs
from megalite.data.fill_in_middle import FillInMiddleDataset
from megalite.data.gpt_dataset import Dataset, GPTDataset
from megalite.data.packed_dataset import PackedDataset
from megalite.utils.errors import UserError


@dataclass(frozen=True)
class SampleSpan:
    """Consecutive tokens of a sample in one sequence of a corpus.

    Attributes:
        prefix: prefix of the corpus.
        document: number of the document in the corpus.
        sequence: number of the sequence in the corpus; equals `document` if documents have one sequence each.
        offset: position of the first of these tokens in the sequence.
        tokens: the token ids.
    """

    prefix: str
    document: int
    sequence: int
    offset: int
    tokens: npt.NDArray[Any]


def sample_spans(dataset: Dataset, index: int) -> list[SampleSpan]:
    """Return the spans that make up a sample, in order; their tokens joined are the sample's tokens.

    With fill-in-the-middle, they are the spans of the sample before its documents are cut. For BERT, they are
    the complete sentences, in the document's order, before they are cut, swapped and masked. In
    packed samples, they are the parts of conversations or documents that the sample holds.

    Raises:
        UserError: the dataset does not come from a corpus.
        IndexError: there is no such sample.
    """
    if isinstance(dataset, FillInMiddleDataset):
        return sample_spans(dataset.plain, index)
    if isinstance(dataset, BlendedDataset):
        number = int(dataset.dataset_index[index])
        return sample_spans(dataset.datasets[number], int(dataset.dataset_sample_index[index]))
    if isinstance(dataset, GPTDataset):
        return _gpt_spans(dataset, index)
    if isinstance(dataset, BertDataset):
        return _bert_spans(dataset, index)
    if isinstance(dataset, Epochs):
        return sample_spans(dataset.dataset, dataset.number(index))
    if isinstance(dataset, PackedDataset):
        return _packed_spans(dataset, index)
    raise UserError("these samples do not come from a corpus: their tokens are random (--mock-data)")


def _gpt_spans(dataset: GPTDataset, index: int) -> list[SampleSpan]:
    if not 0 <= index < len(dataset):
        raise IndexError(f"sample {index} of a dataset of {len(dataset)}")
    indexed = dataset.indexed
    row = int(dataset.index.shuffle_index[index])
    (first, begin), (last, end) = dataset.index.sample_index[row : row + 2].tolist()
    spans = []
    for position in range(first, last + 1):
        sequence = int(dataset.index.document_index[position])
        start = begin if position == first else 0
        tokens = indexed[sequence][start : end + 1 if position == last else None]
        if len(tokens):
            spans.append(SampleSpan(indexed.prefix, indexed.document_of(sequence), sequence, start, tokens))
    return spans


def _bert_spans(dataset: BertDataset, index: int) -> list[SampleSpan]:
    if not 0 <= index < len(dataset):
        raise IndexError(f"sample {index} of a dataset of {len(dataset)}")
    indexed = dataset.indexed
    first, last, _ = dataset.sample_index[index].tolist()
    return [
        SampleSpan(indexed.prefix, indexed.document_of(sequence), sequence, 0, indexed[sequence])
        for sequence in range(first, last)
        if indexed.sequence_lengths[sequence] > 0
    ]


def _packed_spans(dataset: PackedDataset, index: int) -> list[SampleSpan]:
    indexed = dataset.indexed
    return [
        SampleSpan(
            indexed.prefix,
            indexed.document_of(piece.sequence),
            piece.sequence,
            piece.start,
            dataset.tokens_of(piece),
        )
        for piece in dataset.pieces(index)
    ]
