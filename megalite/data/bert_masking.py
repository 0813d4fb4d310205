"""Make BERT samples from sentences: two segments, cut to a length, with masked words.

Random numbers are drawn in the order of megatron-core 0.16's BERT dataset and from the same generator, so
samples are equal to its samples, token for token. They only depend on a sample's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
