"""BERT samples: pairs of segments with masked words, from a corpus of sentences or at random.

The order of a corpus's samples is that of megatron-core 0.16's BERT dataset. So are the random numbers that
cut and mask a sample, from the same generator: samples are equal to its samples, token for token. They only
depend on a sample's number.

Shapes: b samples of a microbatch, s tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.config import Config
from megalite.config.model.transformer import NUM_BERT_SPECIAL
from megalite.data import _index_builder
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
from megalite.data.microbatch import Microbatch
from megalite.data.samples import MockDataset, Samples
from megalite.data.storage import FilesInUse
from megalite.data.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.utils.errors import UserError

Ids = npt.NDArray[np.int64]

MAX_NGRAM = 3
"""Largest number of consecutive words that are masked together, as in Megatron-LM's pretrain_bert.py."""
_KEEP = 0.5
"""Share of the masked tokens without a mask token that keep their id; the others get a random one."""
_MASK = 0.8


def _ngram_bounds() -> npt.NDArray[np.float64]:
    """Return the cumulated probabilities of 1, 2, … words, each proportional to 1 / n."""
    probabilities = 1.0 / (np.arange(MAX_NGRAM) + 1)
    # Normalise three times, as the original code and numpy's `choice` do: the bits must be the same.
    probabilities = probabilities / probabilities.sum()
    bounds = (probabilities / probabilities.sum()).cumsum()
    result: npt.NDArray[np.float64] = bounds / bounds[-1]
    return result


_NGRAM_BOUNDS = _ngram_bounds()


@dataclass(frozen=True)
class WordPieces:
    """WordPiece vocabulary.

    Attributes:
        continues: bool ``[vocab_size]``, whether a token continues the word of the previous token.
        cls, sep, mask, pad: ids of the special tokens.
    """

    continues: npt.NDArray[np.bool_]
    cls: int
    sep: int
    mask: int
    pad: int

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens."""
        return len(self.continues)

    @staticmethod
    def mock(vocab_size: int) -> WordPieces:
        """Return a vocabulary for random tokens, a third of which continue a word."""
        return WordPieces(np.arange(vocab_size) % 3 == 2, cls=1, sep=3, mask=4, pad=0)


@dataclass(frozen=True)
class BertSample:
    """One sample before padding.

    Attributes:
        tokens: input tokens, some of them masked.
        token_types: 0 for the first segment, 1 for the second.
        labels: the original token at positions to predict, else -1.
        is_swapped: whether the segments are in the wrong order.
    """

    tokens: Ids
    token_types: Ids
    labels: Ids
    is_swapped: bool


def make_sample(
    sentences: Sequence[npt.NDArray[np.integer]],
    max_tokens: int,
    pieces: WordPieces,
    mask_prob: float,
    has_two_segments: bool,
    random: np.random.RandomState,
) -> BertSample:
    """Make a sample from the sentences of one document.

    Args:
        sentences: the sentences, at least two if the sample has two segments.
        max_tokens: largest number of tokens in both segments, without the special tokens.
        mask_prob: share of the tokens to predict.
        random: generator seeded by the sample's number.
    """
    pivot, is_swapped = len(sentences), False
    if has_two_segments:
        pivot = random.randint(low=1, high=len(sentences)) if len(sentences) >= 3 else 1
        is_swapped = bool(random.random_sample() < 0.5)
    first, second = (_joined(part) for part in (sentences[:pivot], sentences[pivot:]))
    if is_swapped:
        first, second = second, first
    first, second = _cut(first, second, max_tokens, random)
    cls, sep = [pieces.cls], [pieces.sep]
    tokens = np.concatenate([cls, first, sep, *((second, sep) if len(second) else ())])
    token_types = np.zeros(len(tokens), np.int64)
    token_types[len(first) + 2 :] = 1
    masked, labels = mask_words(tokens, max_tokens, pieces, mask_prob, random)
    return BertSample(masked, token_types, labels, is_swapped)


def _joined(sentences: Sequence[npt.NDArray[np.integer]]) -> Ids:
    return np.concatenate([np.empty(0, np.int64), *sentences]).astype(np.int64)


def _cut(first: Ids, second: Ids, max_tokens: int, random: np.random.RandomState) -> tuple[Ids, Ids]:
    """Cut tokens from either end of the longer segment until both have `max_tokens` together."""
    begins, ends = [0, 0], [len(first), len(second)]
    lengths = [len(first), len(second)]
    for _ in range(sum(lengths) - max_tokens):
        longer = 0 if lengths[0] > lengths[1] else 1
        lengths[longer] -= 1
        if random.random_sample() < 0.5:
            begins[longer] += 1
        else:
            ends[longer] -= 1
    return first[begins[0] : ends[0]], second[begins[1] : ends[1]]


def mask_words(
    tokens: Ids, max_tokens: int, pieces: WordPieces, mask_prob: float, random: np.random.RandomState
) -> tuple[Ids, Ids]:
    """Mask whole words, in groups of up to `MAX_NGRAM`: 80% as the mask token, 10% as random tokens.

    Returns:
        The masked tokens, and labels: the original token of each masked token, else -1.
    """
    words = _words(tokens, pieces)
    limit = min(mask_prob * max_tokens, max(1, round(len(tokens) * mask_prob)))
    order = np.arange(len(words))
    random.shuffle(order)
    masked, labels = tokens.copy(), np.full(len(tokens), -1, np.int64)
    num_masked = 0
    for word in order.tolist():
        if num_masked >= limit:
            break
        num_words = int(_NGRAM_BOUNDS.searchsorted(random.random_sample(), side="right")) + 1
        places = _largest_group(words[word : word + num_words], limit - num_masked)
        if not places or any(labels[place] >= 0 for place in places):
            continue
        for place in places:
            labels[place] = tokens[place]
            if random.random_sample() < _MASK:
                masked[place] = pieces.mask
            elif random.random_sample() >= _KEEP:
                masked[place] = random.randint(0, pieces.vocab_size)
        num_masked += len(places)
    return masked, labels


def _words(tokens: Ids, pieces: WordPieces) -> list[list[int]]:
    """Return the positions of each word's tokens, without special tokens."""
    words: list[list[int]] = []
    is_special = (tokens == pieces.cls) | (tokens == pieces.sep)
    continues = pieces.continues[tokens]
    for place in np.flatnonzero(~is_special).tolist():
        if continues[place] and words:
            words[-1].append(place)
        else:
            words.append([place])
    return words


def _largest_group(words: Sequence[list[int]], limit: float) -> list[int]:
    """Return the tokens of as many words, from the first on, as have at most `limit` tokens; may be empty."""
    for num_words in range(len(words), 0, -1):
        places = [place for word in words[:num_words] for place in word]
        if len(places) <= limit:
            return places
    return []


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
