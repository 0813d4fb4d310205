"""The next token by a model's logits: the same on every rank, and in any layout.

The token drawn is that of the largest logit / temperature + Gumbel noise, which draws by the softmax (Gumbel
1954; Maddison et al. 2014). The noise is a function of seed, sequence, place and token alone. Where another
layout rounds logits otherwise, a draw changes with a probability of about that rounding error. By one random
number and sums over the vocabulary, it would be as many times more as there are tokens.

Shapes: b sequences, v vocabulary without padding, k candidates, t = tp.size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.errors import UserError
from megalite.kernels import site_key
from megalite.kernels.philox import random_words
from megalite.parallel.collectives import gather_from
from megalite.topology import Axis


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_k: only so many of the likeliest tokens are candidates; 0 for all.
        top_p: of these only the fewest whose probabilities come to this; 1 for all.
        seed: of the noise.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            UserError: a value is out of its range, or asks for nothing because the temperature is 0.
        """
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature {self.temperature} must be 0 (the likeliest token) or above")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k} must be 0 (all tokens) or above")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"--top-p {self.top_p} must be above 0 and at most 1 (all tokens)")
        if self.temperature == 0 and (self.top_k > 1 or self.top_p < 1.0):
            raise UserError(
                f"--temperature 0 takes the likeliest token: --top-k {self.top_k} and --top-p {self.top_p} "
                "change nothing, leave them out"
            )


class Sampler:
    """Chooses the next token of each sequence.

    Args:
        vocab_size: columns of the logits from here on are padding, and never chosen.
        tp: what the vocabulary is cut over.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, tp: Axis) -> None:
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.tp = tp
        self.key = site_key(sampling.seed, "generation.sampling")
        self.choose = likeliest if sampling.temperature == 0 else self._draw
        is_whole = sampling.top_k == 0 and sampling.top_p == 1.0
        self.candidates = self._all if is_whole else self._best

    def __call__(self, logits: Tensor, sequences: Tensor, place: int) -> Tensor:
        """Chooses a token for each sequence.

        Args:
            logits: ``[b, padded/t]``, this rank's columns.
            sequences: int64 ``[b]``, a number of each sequence: equal ones get equal noise.
            place: number of the token in its sequence's new text, from 0.

        Returns:
            int64 ``[b]``: what the first rank of tp has chosen.

        Raises:
            UserError: a logit is NaN or infinite.
        """
        full = gather_from(logits, self.tp)[:, : self.vocab_size].double()
        if not bool(full.isfinite().all()):
            raise UserError("a logit is NaN or infinite: give --dtype fp32, or load an earlier checkpoint")
        ids = self.choose(full, sequences, place)
        if self.tp.size > 1:
            dist.broadcast(ids, self.tp.ranks[0], group=self.tp.group)
        return ids

    def _draw(self, logits: Tensor, sequences: Tensor, place: int) -> Tensor:
        scores, ids = self.candidates(logits / self.sampling.temperature)  # [b, k] and [b or 1, k]
        first = place * self.vocab_size + ids
        words = random_words(first, 1, sequences[:, None], self.key).squeeze(-1)  # [b, k]
        uniform = (words.double() + 0.5) * 2.0**-32
        winner = (scores - (-uniform.log()).log()).argmax(-1, keepdim=True)
        return ids.expand_as(scores).gather(-1, winner).squeeze(-1)

    def _all(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Every token."""
        return scores, torch.arange(self.vocab_size, device=scores.device)[None]

    def _best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens by number, of these the likeliest by probability; one at the least."""
        count = min(self.sampling.top_k or self.vocab_size, self.vocab_size)
        scores, ids = scores.topk(count)
        probabilities = scores.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of the likelier ones
        surplus = before >= self.sampling.top_p
        surplus[:, 0] = False
        return scores.masked_fill(surplus, -torch.inf), ids


def likeliest(logits: Tensor, sequences: Tensor, place: int) -> Tensor:
    """The token of the largest logit."""
    return logits.argmax(-1)
