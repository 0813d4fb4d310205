"""Complete many prompts in batches, distributed over data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.distributed.topology import Topology
from megalite.errors import UserError
from megalite.generate.generator import Generator, Prompt, TextStream, text_of


@dataclass(frozen=True)
class Completion:
    """Holds the generated text of one prompt.

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
        results: list[list[Completion] | str] = [mine] * self.topology.sample_ranks.size
        if self.topology.sample_ranks.size > 1:
            dist.all_gather_object(results, mine, group=self.topology.sample_ranks.group)
        completions: list[Completion] = []
        for result in results:
            if isinstance(result, str):
                raise UserError(result)
            completions += result
        return completions if self.topology.rank == 0 else []

    def _batch(self, prompts: Sequence[Prompt], num_samples: int) -> list[Completion]:
        rows: list[list[int]] = [[] for _ in range(len(prompts) * num_samples)]
        for step in self.generator(prompts, num_samples):
            for row, token in step.items():
                rows[row].append(token)
        return [
            self._completion(prompts[row // num_samples], row % num_samples, ids)
            for row, ids in enumerate(rows)
        ]

    def _completion(self, prompt: Prompt, sample: int, ids: list[int]) -> Completion:
        is_ended = bool(ids) and ids[-1] == self.generator.eod
        ids = ids[:-1] if is_ended else ids
        text = text_of(self.tokenizer, prompt.ids, ids)
        return Completion(prompt.number, sample, text, ids, "stop" if is_ended else "length")
