"""BERT samples: pairs of segments with masked words, from a corpus of sentences or at random.

Shapes: b samples of a microbatch, s tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.data.bert_dataset import BertDataset, BertOptions
from megalite.data.bert_masking import WordPieces
from megalite.data.gpt_dataset import Dataset, count_tokens, gather
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import UserError
from megalite.microbatch import Microbatch

_SPECIAL = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}
_NUM_CHECKED = 100
"""Number of a corpus's first documents to check: one of them must have several sentences."""


def word_pieces(tokenizer: Tokenizer) -> WordPieces:
    """Return the properties of a vocabulary that BERT samples need.

    Raises:
        UserError: the vocabulary lacks BERT's special tokens.
    """
    special = {name: tokenizer.token_id(token) for name, token in _SPECIAL.items()}
    missing = [_SPECIAL[name] for name, number in special.items() if number is None]
    if missing or not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError(
            f"the tokenizer has no token {', '.join(missing) or 'of word pieces'}, which BERT's samples "
            "need: pass --tokenizer-type BertWordPieceLowerCase (or BertWordPieceCase) and --vocab-file "
            "vocab.txt"
        )
    names = [tokenizer.token_name(i) or "" for i in range(tokenizer.vocab_size)]
    continues = np.array([name.startswith("##") for name in names])
    return WordPieces(continues, **special)  # type: ignore[arg-type]  # no value is None


@dataclass(frozen=True)
class BertSamples:
    """Samples with two segments of one document and some words masked."""

    options: BertOptions

    on_every_stage = True  # attention must know the padding
    are_masked = True
    are_of_documents = True
    are_whole_documents = False

    @property
    def seq_length(self) -> int:
        return self.options.seq_length

    def check(self, corpus: IndexedDataset) -> None:
        sizes = np.diff(corpus.document_index[: _NUM_CHECKED + 1])
        if self.options.has_two_segments and len(sizes) and sizes.max() < 2:
            raise UserError(
                f"the first documents of {corpus.prefix} have one sequence each, and BERT's samples need "
                "several sentences: preprocess it with --split-sentences, or pass --bert-no-binary-head"
            )

    def num_tokens(self, corpus: IndexedDataset, sequences: range) -> int:
        return count_tokens(corpus.sequence_lengths, sequences)

    def dataset(
        self,
        corpus: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        split_name: str,
        cache: IndexCache | None,
    ) -> BertDataset:
        return BertDataset(corpus, sequences, num_samples, self.options, split_name, cache)

    def mock(self, num_samples: int, split: int) -> MockSentences:
        return MockSentences(num_samples, split, self.options)

    def read(self, dataset: Dataset, numbers: npt.NDArray[np.int64]) -> Microbatch:
        return self.microbatch(torch.from_numpy(gather(dataset, numbers)), torch.from_numpy(numbers))

    def microbatch(self, text: Tensor, sample_numbers: Tensor) -> Microbatch:
        """Return the microbatch of packed rows, int64 ``[b, 3 s + 2]``; see `packed_row`."""
        s = self.seq_length
        tokens, token_types, labels = (part.contiguous() for part in text[:, : 3 * s].split(s, dim=1))
        is_padding = torch.arange(s) >= text[:, -2:-1]
        positions = (labels < 0).char().argsort(dim=1, stable=True)  # positions with a label come first
        positions = positions[:, : self.options.max_predictions].contiguous()
        labels = labels.gather(1, positions)
        has_loss = labels >= 0
        return Microbatch(
            tokens,
            labels.where(has_loss, 0),
            sample_numbers,
            document_ids=is_padding.long(),
            loss_mask=has_loss,
            is_real=~is_padding,
            label_positions=positions,
            token_types=token_types,
            order_labels=text[:, -1].contiguous(),
        )

    def marked(self, microbatch: Microbatch) -> Microbatch:
        return microbatch


class MockSentences:
    """Sentences of random tokens; a sample depends on the seed, the split and its number."""

    def __init__(self, num_samples: int, split: int, options: BertOptions) -> None:
        self._num_samples = num_samples
        self._split = split
        self._options = options

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        options = self._options
        generator = np.random.default_rng((options.seed, self._split, index))
        # Some samples are cut, and others end with padding.
        lengths = generator.integers(1, options.max_tokens // 2 + 2, size=generator.integers(2, 5))
        first = max(options.pieces.mask, options.pieces.sep, options.pieces.cls, options.pieces.pad) + 1
        sentences = [
            generator.integers(first, options.pieces.vocab_size, length, dtype=np.int64) for length in lengths
        ]
        return options.row(sentences, options.max_tokens, int(generator.integers(2**32)))
