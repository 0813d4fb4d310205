"""Sample the next token from a model's logits: the same token on every rank and in any layout.

The token with the largest logit / temperature + Gumbel noise is a sample of the softmax (Gumbel 1954;
Maddison et al. 2014). The noise depends only on seed, sequence, position and token. If another layout rounds
logits differently, a token changes with a probability of about the rounding error. With one random number and
a cumulative sum over the vocabulary, this probability would be larger by a factor of the vocabulary size.

Shapes: b sequences, v vocabulary without padding, k candidates, t = tp.size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.axis import Axis
from megalite.distributed.collectives import all_gather_from
from megalite.kernels import site_key
from megalite.kernels.philox import random_words
from megalite.utils.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Attributes:
        temperature: divisor of the logits; 0 chooses the likeliest token.
        top_k: sample from the `top_k` likeliest tokens; 0 for all.
        top_p: of these, sample from the fewest whose probabilities add up to `top_p`; 1 for all.
        seed: seed of the noise.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            UserError: a value is out of range, or has no effect because the temperature is 0.
        """
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature {self.temperature} must be 0 (the likeliest token) or above")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k} must be 0 (all tokens) or above")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"--top-p {self.top_p} must be above 0 and at most 1 (all tokens)")
        if self.temperature == 0 and (self.top_k > 1 or self.top_p < 1.0):
            raise UserError(
                f"--temperature 0 chooses the likeliest token: --top-k {self.top_k} and --top-p {self.top_p} "
                "have no effect, drop them"
            )


class Sampler:
    """Chooses the next token of each sequence.

    Args:
        vocab_size: size of the vocabulary without padding, which is never chosen.
        tp: the axis over which the vocabulary is sharded.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, tp: Axis) -> None:
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.tp = tp
        self.key = site_key(sampling.seed, "generation.sampling")
        self.choose = likeliest if sampling.temperature == 0 else self._draw
        is_whole = sampling.top_k == 0 and sampling.top_p == 1.0
        self.candidates = self._all if is_whole else self._best

    def __call__(self, logits: Tensor, sequences: Tensor, position: int) -> Tensor:
        """Choose a token for each sequence.

        Args:
            logits: ``[b, padded/t]``, this rank's columns.
            sequences: int64 ``[b]``, number of each sequence; equal numbers have equal noise.
            position: index of the token in the new text of the sequence.

        Returns:
            int64 ``[b]``, the choice of the first rank of tp; -1 if a logit is NaN or infinite.
        """
        full = all_gather_from(logits, self.tp)[:, : self.vocab_size].double()
        ids = self.choose(full, sequences, position).masked_fill(~full.isfinite().all(-1), -1)
        if self.tp.size > 1:
            dist.broadcast(ids, self.tp.ranks[0], group=self.tp.group)
        return ids

    def _draw(self, logits: Tensor, sequences: Tensor, position: int) -> Tensor:
        scores, ids = self.candidates(logits / self.sampling.temperature)  # [b, k] and [b or 1, k]
        first = position * self.vocab_size + ids
        words = random_words(first, 1, sequences[:, None], self.key).squeeze(-1)  # [b, k]
        uniform = (words.double() + 0.5) * 2.0**-32
        winner = (scores - (-uniform.log()).log()).argmax(-1, keepdim=True)
        return ids.expand_as(scores).gather(-1, winner).squeeze(-1)

    def _all(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores, torch.arange(self.vocab_size, device=scores.device)[None]

    def _best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and ids of the top-k tokens; scores beyond top-p are -inf, except the first."""
        count = min(self.sampling.top_k or self.vocab_size, self.vocab_size)
        scores, ids = scores.topk(count)
        probabilities = scores.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # sum over the likelier tokens
        surplus = before >= self.sampling.top_p
        surplus[:, 0] = False
        return scores.masked_fill(surplus, -torch.inf), ids


def likeliest(logits: Tensor, sequences: Tensor, position: int) -> Tensor:
    """Return the token with the largest logit."""
    return logits.argmax(-1)
