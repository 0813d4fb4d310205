"""Generate tokens after prompts, and complete many prompts in batches over data-parallel replicas.

Shapes: s sequence, b sequences, h hidden size, c ranks that hold different tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.attention.cache import CachedCore
from megalite.data.batch.microbatch import Microbatch
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.distributed.collectives import start_all_gather
from megalite.distributed.topology import Topology
from megalite.generate.sampling import Sampler
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
        prompt_number: index of the prompt.
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
