"""Generate tokens after prompts, and complete many prompts in batches over data-parallel replicas.

A token is the same on every rank and in any layout: the token with the largest logit / temperature + Gumbel
noise is a sample of the softmax (Gumbel 1954; Maddison et al. 2014). The noise depends only on seed,
sequence, position and token. If another layout rounds logits differently, a token changes with a probability
of about the rounding error. With one random number and a cumulative sum over the vocabulary, this probability
would be larger by a factor of the vocabulary size.

Shapes: s sequence, b sequences, h hidden size, c ranks that hold different tokens of a sequence, v vocabulary
without padding, k candidates, t = tp.size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.attention.cache import CachedCore
from megalite.data.microbatch import Microbatch
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import all_gather_from, start_all_gather
from megalite.distributed.topology import Topology
from megalite.kernels import site_key
from megalite.kernels.philox import random_words
from megalite.model.stage import Stage
from megalite.model.transformer_stage import TransformerStage
from megalite.utils.errors import UserError


def run_in_order(
    stage: Stage, microbatch: Microbatch, run: Callable[[Microbatch, Tensor | None], Tensor]
) -> Tensor:
    """Run a microbatch through this rank's stage, once the stages before it have run.

    Args:
        microbatch: the same on the ranks of all stages.
        run: maps the microbatch and the previous stage's output to the output, on the ranks of each stage.

    Returns:
        This rank's output. All stages but the last also send it to the next, ``[s, b, h]`` or wider.
    """
    pp, hidden = stage.context.topology.pp, None
    if not stage.is_first:
        b, s = microbatch.tokens.shape
        hidden = torch.empty(
            (s, b, stage.config.stage_output_size), dtype=stage.context.dtype, device=stage.context.device
        )
        dist.recv(hidden, pp.ranks[pp.rank - 1], group=pp.group)
    output = run(microbatch, hidden)
    if not stage.is_last:
        dist.send(output.contiguous(), pp.ranks[pp.rank + 1], group=pp.group)
    return output


def broadcast_from_last(x: Tensor, stage: Stage) -> Tensor:
    """Replace a tensor in place with that of the last stage, on the ranks of all stages; return it."""
    pp = stage.context.topology.pp
    if pp.size > 1:
        dist.broadcast(x, pp.ranks[-1], group=pp.group)
    return x


_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8
"""Number of earlier tokens that are decoded with a new one, for spaces and characters of several tokens."""


class TextStream:
    """Decodes tokens one by one, with the tokens before them as context.

    A character that consists of several tokens is returned with the last of them.

    Args:
        prompt: tokens before the first new one; their text is not returned.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._context = list(prompt[-_CONTEXT:])
        self._new: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that this token completes; it can be empty."""
        self._new.append(token)
        text = self._pending()
        if text.endswith(_BROKEN) and len(self._new) < _CONTEXT:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """Return the remaining text; an incomplete character becomes U+FFFD."""
        return self._emit(self._pending())

    def _pending(self) -> str:
        return self._decode(self._context + self._new)[len(self._decode(self._context)) :]

    def _emit(self, text: str) -> str:
        self._context = (self._context + self._new)[-_CONTEXT:]
        self._new = []
        return text


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of new tokens after a prompt."""
    stream = TextStream(tokenizer, prompt)
    return "".join([*map(stream.add, ids), stream.finish()])


@dataclass(frozen=True)
class Prompt:
    """Start of a sequence.

    Attributes:
        number: index among all prompts. It is a key of the noise, so the text does not depend on the batch.
        ids: tokens, at least one.
        max_new_tokens: largest number of tokens to generate.
    """

    number: int
    ids: Sequence[int]
    max_new_tokens: int


class Generator:
    """Generation of tokens after prompts until each sequence ends or has its maximum number of new tokens.

    Args:
        stage: this rank's stage of the model, built with `CachedCore`.
        eod: token that ends a sequence; None if there is none.

    Attributes:
        num_tokens: number of tokens generated so far.
    """

    def __init__(self, stage: TransformerStage, sampler: Sampler, eod: int | None) -> None:
        assert isinstance(stage.core, CachedCore)
        self.stage = stage.eval()
        self.cache = stage.core
        self.sampler = sampler
        self.eod = eod
        self.num_tokens = 0

    @torch.inference_mode()
    def __call__(
        self,
        prompts: Sequence[Prompt],
        num_samples: int = 1,
        is_complete: Callable[[int], bool] = lambda sequence: False,
    ) -> Iterator[dict[int, int]]:
        """Yield the new token of each sequence at each step; ``i * num_samples + j`` is sample j of prompt i.

        The last token of a sequence can be `eod`. All ranks of a replica yield the same tokens.

        Args:
            is_complete: returns whether a sequence ends with the token that was just yielded.

        Raises:
            UserError: a logit is NaN or infinite.
        """
        device = self.cache.context.device
        num_new = max(prompt.max_new_tokens for prompt in prompts)
        hidden = self._read_pieces([prompt.ids for prompt in prompts], num_new)[-1][-1:]
        limits = [prompt.max_new_tokens for prompt in prompts for _ in range(num_samples)]
        numbers = [prompt.number << 24 | sample for prompt in prompts for sample in range(num_samples)]
        sequences = torch.tensor(numbers, device=device)
        if num_samples > 1:  # the prompt runs only once
            copies = torch.arange(len(prompts), device=device).repeat_interleave(num_samples)
            self.cache.select(copies)
            hidden = hidden[:, copies]
        active = list(range(len(limits)))
        for position in range(max(limits)):
            ids = self._next(hidden, sequences[active], position)
            found = dict(zip(active, ids.tolist(), strict=True))
            self.num_tokens += len(found)
            yield found
            kept = [
                i
                for i, row in enumerate(active)
                if found[row] != self.eod and position + 1 < limits[row] and not is_complete(row)
            ]
            if not kept:
                return
            if len(kept) < len(active):
                rows = torch.tensor(kept, device=device)
                self.cache.select(rows)
                ids, active = ids[rows], [active[i] for i in kept]
            hidden = self._hidden_states(ids[:, None])

    def read(self, rows: Sequence[Sequence[int]], num_new: int) -> Tensor:
        """Begin new sequences with these tokens; shorter ones are padded on the left.

        Args:
            num_new: largest number of tokens that follow.

        Returns:
            The output of the stage's last layer, ``[s, b, h]``, the same on all context-parallel ranks.
        """
        *slices, last_piece = self._read_pieces(rows, num_new)
        ranks, own = self.stage.context.topology.position_ranks, self.cache.own_positions
        whole = (own.in_position_order(start_all_gather(x, ranks, of="hidden states").wait()) for x in slices)
        return torch.cat((*whole, last_piece))

    def _read_pieces(self, rows: Sequence[Sequence[int]], num_new: int) -> list[Tensor]:
        """Begin new sequences as `read` does, and return the outputs of the pieces that are read.

        Context-parallel ranks have slices of all pieces but the last, ``[s/c, b, h]``.
        """
        device = self.cache.context.device
        longest = max(map(len, rows))
        padding = torch.tensor([longest - len(row) for row in rows], device=device)
        num_sliced = self.cache.max_sliced_tokens(longest)
        self.cache.begin(longest + num_new, padding if bool(padding.any()) else None, num_sliced)
        tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
        lengths = [each for each in (num_sliced, longest - num_sliced) if each]
        return [self._hidden_states(piece) for piece in tokens.split(lengths, dim=1)]

    def _next(self, hidden: Tensor, sequences: Tensor, position: int) -> Tensor:
        """Choose the token after the hidden states ``[1, b, h]`` on the last stage; return it on all.

        It is the choice of the first context-parallel rank, in case ranks round in other ways.
        """
        if self.stage.is_last:
            ids = self.sampler(self.stage.logits(hidden)[0], sequences, position)
        else:
            ids = torch.empty_like(sequences)
        ranks = self.stage.context.topology.position_ranks
        if ranks.size > 1 and self.stage.is_last:
            dist.broadcast(ids, ranks.ranks[0], group=ranks.group)
        if bool((broadcast_from_last(ids, self.stage) < 0).any()):
            raise UserError("a logit is NaN or infinite: pass --dtype fp32, or load an earlier checkpoint")
        return ids

    def _hidden_states(self, tokens: Tensor) -> Tensor:
        """Return the output ``[s, b, h]`` of the stage's last layer for new tokens ``[b, s]``.

        It is ``[s/c, b, h]`` if context-parallel ranks read them in slices.
        """
        numbers = tokens.new_zeros(len(tokens))  # sample numbers for dropout, which is off
        positions = self.cache.positions(*tokens.shape)
        microbatch = Microbatch(tokens, tokens, numbers, position_ids=positions)  # labels are not read
        return run_in_order(self.stage, self.cache.local_microbatch(microbatch), self.stage.hidden_states)

    def complete(
        self,
        prompts: Sequence[Prompt],
        num_samples: int = 1,
        is_complete: Callable[[Prompt, list[int]], bool] = lambda prompt, ids: False,
    ) -> list[list[int]]:
        """Return the new tokens of each sequence, in the order of `__call__`; the last one can be `eod`.

        Args:
            is_complete: returns whether a sequence ends with these new tokens.
        """
        rows: list[list[int]] = [[] for _ in range(len(prompts) * num_samples)]
        for step in self(
            prompts, num_samples, lambda row: is_complete(prompts[row // num_samples], rows[row])
        ):
            for row, token in step.items():
                rows[row].append(token)
        return rows


@dataclass(frozen=True)
class Completion:
    """Generated text of one prompt.

    Attributes:
        sample: index among the samples of the prompt.
        ids: the new tokens, without the end-of-document token.
        finish_reason: "stop" if the model ended the text, "length" if it reached the maximum number of
            tokens.
    """

    prompt_number: int
    sample: int
    text: str
    ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class CompletionWriter:
    """Completes prompts with one model. Every rank must make the same calls.

    Args:
        batch_size: prompts per batch of a replica.
    """

    generator: Generator
    tokenizer: Tokenizer
    topology: Topology
    batch_size: int = 8

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """Yield the text after a prompt in pieces, as it is generated."""
        text = TextStream(self.tokenizer, prompt.ids)
        for step in self.generator([prompt]):
            if step[0] != self.generator.eod:
                yield text.add(step[0])
        yield text.finish()

    def complete(self, prompts: Sequence[Prompt], num_samples: int) -> Iterator[Completion]:
        """Yield completions in the order of the prompts, on the first rank only.

        Raises:
            UserError: a logit is NaN or infinite. Every rank raises it.
        """
        ranks = self.topology.sample_ranks
        batches = [prompts[i : i + self.batch_size] for i in range(0, len(prompts), self.batch_size)]
        for first in range(0, len(batches), ranks.size):
            mine = batches[first + ranks.rank : first + ranks.rank + 1]
            yield from self._gathered(mine[0] if mine else [], num_samples)

    def _gathered(self, prompts: Sequence[Prompt], num_samples: int) -> list[Completion]:
        """Complete this replica's batch, and return the completions of all replicas on the first rank."""
        try:
            mine: list[Completion] | str = self._batch(prompts, num_samples) if prompts else []
        except UserError as error:
            mine = str(error)
        completions: list[Completion] = []
        for result in self.topology.sample_ranks.gather_objects(mine, "completions"):
            if isinstance(result, str):
                raise UserError(result)
            completions += result
        return completions if self.topology.rank == 0 else []

    def _batch(self, prompts: Sequence[Prompt], num_samples: int) -> list[Completion]:
        completions = []
        for row, ids in enumerate(self.generator.complete(prompts, num_samples)):
            prompt, sample = prompts[row // num_samples], row % num_samples
            is_ended = ids[-1:] == [self.generator.eod]
            ids = ids[:-1] if is_ended else ids
            text, reason = text_of(self.tokenizer, prompt.ids, ids), "stop" if is_ended else "length"
            completions.append(Completion(prompt.number, sample, text, ids, reason))
        return completions


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Attributes:
        temperature: divisor of the logits; 0 chooses the likeliest token.
        top_k: sample from the `top_k` likeliest tokens; 0 for all.
        top_p: of these, sample from the fewest whose probabilities add up to `top_p`; 1 for all.
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
