"""The texts after many prompts: in batches, which data-parallel replicas share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megalite.data.tokenizer import Tokenizer
from megalite.errors import UserError
from megalite.generation.generator import Generator, Prompt
from megalite.generation.text import TextStream, text_of
from megalite.topology import Topology


@dataclass(frozen=True)
class Completion:
    """The text after one prompt.

    Attributes:
        prompt_number: of the prompt, from 0.
        sample: number among those of the prompt, from 0.
        ids: the new tokens, without the one that ends the text.
        finish_reason: "stop" where the model ended the text, "length" where it had its number of tokens.
    """

    prompt_number: int
    sample: int
    text: str
    ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Writer:
    """Completes prompts with one model; every rank calls the same.

    Args:
        batch_size: prompts that are run together on a replica.
    """

    generator: Generator
    tokenizer: Tokenizer
    topology: Topology
    batch_size: int = 8

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """The text after a prompt, piece by piece as it comes."""
        text = TextStream(self.tokenizer, prompt.ids)
        for step in self.generator([prompt]):
            if step[0] != self.generator.eod:
                yield text.add(step[0])
        yield text.finish()

    def complete(self, prompts: Sequence[Prompt], num_samples: int) -> Iterator[Completion]:
        """The texts after prompts in their order; yielded on the first rank alone.

        Raises:
            UserError: the model's logits are no numbers. On every rank.
        """
        dp = self.topology.dp
        batches = [prompts[i : i + self.batch_size] for i in range(0, len(prompts), self.batch_size)]
        for first in range(0, len(batches), dp.size):
            mine = batches[first + dp.rank : first + dp.rank + 1]
            yield from self._gathered(mine[0] if mine else [], num_samples)

    def _gathered(self, prompts: Sequence[Prompt], num_samples: int) -> list[Completion]:
        """What this and the other replicas make of their batches, on the first rank."""
        try:
            mine: list[Completion] | str = self._batch(prompts, num_samples) if prompts else []
        except UserError as error:
            mine = str(error)
        results: list[list[Completion] | str] = [mine] * self.topology.dp.size
        if self.topology.dp.size > 1:
            dist.all_gather_object(results, mine, group=self.topology.dp.group)
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
