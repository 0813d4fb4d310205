"""Apply fill-in-the-middle: move the middle of documents in training samples to their end."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.gpt_dataset import Dataset, gather, verify_files
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.utils.errors import UserError

Tokens = npt.NDArray[np.int64]


class FillInMiddle(NamedTuple):
    """Settings of fill-in-the-middle.

    Attributes:
        rate: share of the documents to permute.
        spm_rate: share of these in the order suffix, prefix, middle; the others are prefix, suffix, middle.
        prefix, middle, suffix: ids of the tokens that mark the parts.
        seed: seed of the random choices.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    seed: int


class FillInMiddleDataset:
    """Samples of another dataset with some documents cut into three parts and reordered.

    Each document of a sample, or part of one, is chosen with a probability of `rate`, and cut between two
    characters (not tokens) drawn evenly; the orders are PSM and variant 2 of SPM in Bavarian et al. 2022,
    "Efficient Training of Language Models to Fill in the Middle". A sample keeps its length: tokens that the
    marks push beyond its end are cut off. Every choice only depends on the seed and the sample's number.

    Args:
        plain: the other dataset.
        tokenizer: the one that the dataset was made with.

    Attributes:
        plain: the other dataset.
    """

    def __init__(self, plain: Dataset, tokenizer: Tokenizer, settings: FillInMiddle) -> None:
        self.plain = plain
        self._tokenizer = tokenizer
        self._settings = settings
        self._lock = Lock()  # not every tokenizer may be used in several threads, which read ahead

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, index: int) -> Tokens:
        return self._permute(self.plain[index], index)

    def gather(self, samples: npt.NDArray[np.int64]) -> Tokens:
        """Return the samples with these numbers, int64 [b, S + 1]."""
        plain = gather(self.plain, samples)
        return np.stack([self._permute(row, i) for row, i in zip(plain, samples.tolist(), strict=True)])

    def verify_files(self) -> None:
        verify_files(self.plain)

    def _permute(self, sample: Tokens, index: int) -> Tokens:
        rng = np.random.default_rng((self._settings.seed, index))
        ends = np.flatnonzero(sample == self._tokenizer.eod)
        pieces = []
        start = 0
        for end in [*ends.tolist(), len(sample)]:
            document = sample[start:end]
            chosen = rng.random() < self._settings.rate and len(document) > 0
            pieces += [self._permute_document(document, rng) if chosen else document, sample[end : end + 1]]
            start = end + 1
        permuted = np.concatenate(pieces)[: len(sample)]
        missing = len(sample) - len(permuted)  # the parts may encode to fewer tokens than the whole
        return np.pad(permuted, (0, missing), constant_values=self._tokenizer.eod)

    def _permute_document(self, document: Tokens, rng: np.random.Generator) -> Tokens:
        with self._lock:
            text = self._tokenizer.decode(document.tolist())
        first, second = sorted(rng.integers(0, len(text) + 1, 2).tolist())
        is_suffix_first = rng.random() < self._settings.spm_rate
        if "\ufffd" in text:  # it begins or ends inside a character and could not be encoded again
            return document
        with self._lock:
            encoded = self._tokenizer.encode_batch([text[:first], text[first:second], text[second:]])
        prefix, middle, suffix = (np.array(ids, np.int64) for ids in encoded)
        settings = self._settings
        mark_prefix, mark_middle, mark_suffix = settings.prefix, settings.middle, settings.suffix
        if is_suffix_first:
            return np.concatenate([[mark_prefix, mark_suffix], suffix, [mark_middle], prefix, middle])
        return np.concatenate([[mark_prefix], prefix, [mark_suffix], suffix, [mark_middle], middle])


def find_marks(tokenizer: Tokenizer, names: dict[str, str]) -> tuple[int, int, int]:
    """Return the ids of the three marks.

    Args:
        tokenizer: tokenizer whose vocabulary must contain them.
        names: names of the prefix, middle and suffix token, by the flags that set them.

    Raises:
        UserError: a name is not a token of the vocabulary, or two are the same.
    """
    ids = {flag: tokenizer.token_id(name) for flag, name in names.items()}
    lacking = [f"{flag} {names[flag]}" for flag, found in ids.items() if found is None]
    if lacking:
        raise UserError(
            f"{', '.join(lacking)}: not in the tokenizer's vocabulary; pass the names of its tokens for this"
        )
    prefix, middle, suffix = (found for found in ids.values() if found is not None)
    if len({prefix, middle, suffix}) < 3:
        raise UserError(f"{', '.join(names)} name the same token twice: pass three different ones")
    return prefix, middle, suffix
