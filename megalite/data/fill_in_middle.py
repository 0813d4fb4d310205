"""Fill-in-the-middle: documents of training samples with their middle moved to the end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.gpt import Dataset, gather
from megalite.data.tokenizer import Tokenizer
from megalite.errors import UserError

Tokens = npt.NDArray[np.int64]


class FillInMiddle(NamedTuple):
    """How documents are turned round.

    Attributes:
        rate: share of the documents that are.
        spm_rate: of these, the share in the order suffix, prefix, middle; else prefix, suffix, middle.
        prefix, middle, suffix: ids of the tokens that mark the parts.
        seed: of the choices.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    seed: int


class FillInMiddleDataset:
    """Another dataset's samples, in which some documents are cut in three and put together in another order.

    Each document of a sample, or part of one, is chosen with a probability of `rate`, and cut between two
    characters (not tokens) drawn evenly; the orders are PSM and variant 2 of SPM in Bavarian et al. 2022,
    "Efficient Training of Language Models to Fill in the Middle". A sample keeps its length: what the marks
    push out of it is cut off its end. Every choice is a function of the seed and the sample's number alone.

    Args:
        plain: the dataset.
        tokenizer: the one that it was made with.

    Attributes:
        plain: as given.
    """

    def __init__(self, plain: Dataset, tokenizer: Tokenizer, how: FillInMiddle) -> None:
        self.plain = plain
        self._tokenizer = tokenizer
        self._how = how

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, index: int) -> Tokens:
        return self._turned(self.plain[index], index)

    def gather(self, samples: npt.NDArray[np.int64]) -> Tokens:
        """The samples of these numbers, int64 [b, S + 1]."""
        plain = gather(self.plain, samples)
        return np.stack([self._turned(row, i) for row, i in zip(plain, samples.tolist(), strict=True)])

    def _turned(self, sample: Tokens, index: int) -> Tokens:
        rng = np.random.default_rng((self._how.seed, index))
        ends = np.flatnonzero(sample == self._tokenizer.eod)
        pieces = []
        start = 0
        for end in [*ends.tolist(), len(sample)]:
            document = sample[start:end]
            chosen = rng.random() < self._how.rate and len(document) > 0
            pieces += [self._permuted(document, rng) if chosen else document, sample[end : end + 1]]
            start = end + 1
        turned = np.concatenate(pieces)[: len(sample)]
        missing = len(sample) - len(turned)  # where the parts take fewer tokens than the whole did
        return np.pad(turned, (0, missing), constant_values=self._tokenizer.eod)

    def _permuted(self, document: Tokens, rng: np.random.Generator) -> Tokens:
        text = self._tokenizer.decode(document.tolist())
        first, second = sorted(rng.integers(0, len(text) + 1, 2).tolist())
        is_suffix_first = rng.random() < self._how.spm_rate
        if "\ufffd" in text:  # begins or ends inside a character: its tokens could not be had back
            return document
        prefix, middle, suffix = (
            np.array(ids, np.int64)
            for ids in self._tokenizer.encode_batch([text[:first], text[first:second], text[second:]])
        )
        mark_prefix, mark_middle, mark_suffix = self._how.prefix, self._how.middle, self._how.suffix
        if is_suffix_first:
            return np.concatenate([[mark_prefix, mark_suffix], suffix, [mark_middle], prefix, middle])
        return np.concatenate([[mark_prefix], prefix, [mark_suffix], suffix, [mark_middle], middle])


def find_marks(tokenizer: Tokenizer, names: dict[str, str]) -> tuple[int, int, int]:
    """Ids of the three marks.

    Args:
        tokenizer: whose vocabulary they are in.
        names: of the prefix, middle and suffix token, by the flags that give them.

    Raises:
        UserError: one is no token of the vocabulary, or two are the same.
    """
    ids = {flag: tokenizer.token_id(name) for flag, name in names.items()}
    lacking = [f"{flag} {names[flag]}" for flag, found in ids.items() if found is None]
    if lacking:
        raise UserError(f"{', '.join(lacking)}: no token of the vocabulary; name those that it has for this")
    prefix, middle, suffix = (found for found in ids.values() if found is not None)
    if len({prefix, middle, suffix}) < 3:
        raise UserError(f"{', '.join(names)} name the same token twice: give three different ones")
    return prefix, middle, suffix
