"""BERT samples: pairs of segments with masked words, from a corpus of sentences or at random.

The order of a corpus's samples is that of megatron-core 0.16's BERT dataset.

Shapes: b samples of a microbatch, s tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.config import Config
from megalite.config.model.transformer import NUM_BERT_SPECIAL
from megalite.data import _index_builder
from megalite.data.batch.microbatch import Microbatch
from megalite.data.bert_masking import BertSample, WordPieces, make_sample
from megalite.data.gpt_dataset import Dataset
from megalite.data.index_cache import (
    Arrays,
    CachedArrays,
    CacheKey,
    IndexCache,
    cached_arrays,
    digest_of,
    reported_progress,
)
from megalite.data.indexed_dataset import IndexedDataset, blocks_of
from megalite.data.samples import MockDataset, Samples
from megalite.data.storage import FilesInUse
from megalite.data.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.utils.errors import UserError

_SPECIAL = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}
_NUM_CHECKED = 100
"""Number of a corpus's first documents to check: one of them must have several sentences."""
_FORMAT = 2
"""Part of a cached order's digest: increase it when the same values give another order."""


@dataclass(frozen=True)
class BertOptions:
    """Options of BERT samples.

    Attributes:
        seq_length: number of tokens in a sample, padding included.
        seed: seed of the samples' order, and of the random numbers of each sample.
        mask_prob: share of the tokens to predict.
        short_seq_prob: share of the samples that are made shorter than the others.
        has_two_segments: whether samples have two segments, in a random order, or one.
    """

    seq_length: int
    seed: int
    pieces: WordPieces
    mask_prob: float
    short_seq_prob: float
    has_two_segments: bool

    @property
    def max_tokens(self) -> int:
        """Return the largest number of tokens in both segments together."""
        return self.seq_length - NUM_BERT_SPECIAL

    @property
    def max_predictions(self) -> int:
        """Return the largest number of tokens to predict in a sample."""
        return max(1, int(self.mask_prob * self.max_tokens))

    @property
    def min_sentences(self) -> int:
        """Return the smallest number of sentences in a sample."""
        return 2 if self.has_two_segments else 1

    def random_row(self, generator: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return a sample of random sentences; some samples are cut, and others end with padding."""
        lengths = generator.integers(1, self.max_tokens // 2 + 2, size=generator.integers(2, 5))
        first = max(self.pieces.mask, self.pieces.sep, self.pieces.cls, self.pieces.pad) + 1
        sentences = [
            generator.integers(first, self.pieces.vocab_size, length, dtype=np.int64) for length in lengths
        ]
        return self.row(sentences, self.max_tokens, int(generator.integers(2**32)))

    def row(
        self, sentences: list[npt.NDArray[np.int64]], max_tokens: int, seed: int
    ) -> npt.NDArray[np.int64]:
        """Return one sample as a packed row; see `packed_row`.

        Args:
            sentences: sentences of one document.
            max_tokens: largest number of tokens in both segments of this sample.
            seed: seed of the sample's random numbers.
        """
        random = np.random.RandomState(seed % 2**32)
        sample = make_sample(
            sentences, max_tokens, self.pieces, self.mask_prob, self.has_two_segments, random
        )
        return packed_row(sample, self.seq_length, self.pieces.pad)


def packed_row(sample: BertSample, seq_length: int, pad: int) -> npt.NDArray[np.int64]:
    """Pack a sample as int64 [3 s + 2]: padded tokens, types and labels, then length and order."""
    row = np.empty(3 * seq_length + 2, np.int64)
    for part, (values, padding) in zip(
        row[:-2].reshape(3, seq_length),
        ((sample.tokens, pad), (sample.token_types, 0), (sample.labels, -1)),
        strict=True,
    ):
        part[: len(values)] = values
        part[len(values) :] = padding
    row[-2:] = len(sample.tokens), sample.is_swapped
    return row


class BertDataset:
    """Samples of one split of one dataset of sentences.

    Attributes:
        indexed: the corpus, with one sequence for each sentence.
        sample_index: int64 [n, 3], first sentence, sentence after the last, and largest number of tokens.

    Raises:
        UserError: no document has enough sentences.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        options: BertOptions,
        split_name: str = "train",
        cache: IndexCache | None = None,
    ) -> None:
        """Order the samples.

        Args:
            sequences: the split's sentences; its documents are complete.
            num_samples: build at least this many; None for the samples of one epoch.
            cache: stores and maps the order; None to build it in memory.
        """
        self.indexed = indexed
        self.options = options
        cached = self._ordered(sequences, num_samples, split_name, cache)
        self.sample_index = cached.arrays["sample_index"]
        self._files = FilesInUse((*indexed.files, *cached.files))
        if len(self.sample_index) == 0:
            raise UserError(
                f"the {split_name} split of {indexed.prefix} has no document of "
                f"{options.min_sentences} or more sentences of 1 to 512 tokens: preprocess it with "
                "--split-sentences, or give the split a larger share in --split"
            )

    def _ordered(
        self, sequences: range, num_samples: int | None, split_name: str, cache: IndexCache | None
    ) -> CachedArrays:
        options, lengths = self.options, self.indexed.sequence_lengths
        all_bounds = np.asarray(self.indexed.document_index)
        bounds = all_bounds[(all_bounds >= sequences.start) & (all_bounds <= sequences.stop)]
        name = f"the order of the {split_name} split of {self.indexed.prefix}"
        arguments: dict[str, Any] = {
            "num_samples": -1 if num_samples is None else num_samples,
            "max_tokens": options.max_tokens,
            "short_prob": options.short_seq_prob,
            "min_sentences": options.min_sentences,
            "seed": options.seed,
        }

        def build() -> Arrays:
            try:
                with reported_progress(name, "documents", max(0, len(bounds) - 1)) as progress:
                    rows = _index_builder.build_sentence_samples(
                        bounds, np.asarray(lengths), **arguments, progress=progress
                    )
            finally:  # if lengths changed meanwhile, the order may end early and must not be kept
                self.indexed.check_files()
            return {"sample_index": rows}

        values = {
            **arguments,
            "document_bounds_sha256": digest_of([bounds]),
            "sequence_lengths_sha256": digest_of(blocks_of(lengths, sequences)),
            "format": _FORMAT,
        }
        num_entries = 3 * max(len(sequences), num_samples or 0)
        key = CacheKey("BertDataset", split_name, values, num_entries, self.indexed.prefix)
        return cached_arrays(cache, key, ("sample_index",), build)

    def __len__(self) -> int:
        return len(self.sample_index)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return a sample, int64 [3 s + 2]; see `packed_row`.

        Raises:
            UserError: a token id is outside the vocabulary.
            IndexError: there is no such sample.
        """
        first, last, max_tokens = self.sample_index[index].tolist()
        try:
            sentences = [np.asarray(read, np.int64) for read in self.indexed.read(range(first, last))]
        except IndexError:  # the order matched the corpus when it was opened
            self._files.verify()
            raise
        self._files.check()
        for number, sentence in enumerate(sentences, first):
            self.indexed.check_vocabulary(number, sentence, self.options.pieces.vocab_size)
        kept = [sentence for sentence in sentences if len(sentence)]
        return self.options.row(kept, max_tokens, self.options.seed + index)

    def verify_files(self) -> None:
        self._files.verify()


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
class BertSamples(Samples):
    """Samples with two segments of one document and some words masked."""

    options: BertOptions

    are_masked = True
    are_of_documents = True

    @staticmethod
    def of(config: Config, tokenizer: Tokenizer | None) -> BertSamples:
        """Return the samples of a run.

        Raises:
            UserError: the tokenizer is not a WordPiece tokenizer with BERT's special tokens.
        """
        model, data = config.model, config.data
        assert model.vocab_size is not None
        is_null = data.resolved_tokenizer_type == "NullTokenizer"
        pieces = WordPieces.mock(model.vocab_size) if tokenizer is None or is_null else word_pieces(tokenizer)
        return BertSamples(
            BertOptions(
                model.seq_length,
                config.training.seed,
                pieces,
                model.mask_prob,
                data.short_seq_prob,
                has_two_segments=model.bert_binary_head,
            )
        )

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

    def dataset(
        self,
        corpus: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        split_name: str,
        cache: IndexCache | None,
    ) -> BertDataset:
        return BertDataset(corpus, sequences, num_samples, self.options, split_name, cache)

    def mock(self, num_samples: int, split: int) -> Dataset:
        return MockDataset(num_samples, self.options.seed, split, self.options.random_row)

    def microbatch(self, rows: Tensor, sample_numbers: Tensor) -> Microbatch:
        """Return the microbatch of packed rows, int64 ``[b, 3 s + 2]``; see `packed_row`."""
        s = self.seq_length
        tokens, token_types, labels = (part.contiguous() for part in rows[:, : 3 * s].split(s, dim=1))
        is_padding = torch.arange(s) >= rows[:, -2:-1]
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
            order_labels=rows[:, -1].contiguous(),
        )
