"""Generate tokens after prompts, and decode them to text as they are generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.generate.sampling import Sampler
from megalite.microbatch import Microbatch
from megalite.model.gpt_stage import GPTStage
from megalite.model.kv_cache import CachedCore

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
    """Holds the start of a sequence.

    Attributes:
        number: index among all prompts. It is a key of the noise, so the text does not depend on the batch.
        ids: tokens, at least one.
        max_new_tokens: largest number of tokens to generate.
    """

    number: int
    ids: Sequence[int]
    max_new_tokens: int


class Generator:
    """Generates tokens after prompts until each sequence ends or has its maximum number of new tokens.

    Args:
        stage: a whole model, built with `CachedCore`.
        eod: token that ends a sequence; None if there is none.

    Attributes:
        num_tokens: number of tokens generated so far.
    """

    def __init__(self, stage: GPTStage, sampler: Sampler, eod: int | None) -> None:
        assert stage.is_first and stage.is_last and isinstance(stage.core, CachedCore)
        self.stage = stage.eval()
        self.cache = stage.core
        self.sampler = sampler
        self.eod = eod
        self.num_tokens = 0

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Prompt], num_samples: int = 1) -> Iterator[dict[int, int]]:
        """Yield the new token of each sequence at each step; ``i * num_samples + j`` is sample j of prompt i.

        The last token of a sequence can be `eod`. All ranks of tp yield the same tokens.
        """
        device = self.cache.context.device
        longest = max(len(prompt.ids) for prompt in prompts)
        padding = torch.tensor([longest - len(prompt.ids) for prompt in prompts], device=device)
        capacity = longest + max(prompt.max_new_tokens for prompt in prompts)
        self.cache.begin(capacity, padding if bool(padding.any()) else None)
        tokens = [[0] * (longest - len(prompt.ids)) + list(prompt.ids) for prompt in prompts]
        logits = self._logits(torch.tensor(tokens, device=device))

        limits = [prompt.max_new_tokens for prompt in prompts for _ in range(num_samples)]
        numbers = [prompt.number << 24 | sample for prompt in prompts for sample in range(num_samples)]
        sequences = torch.tensor(numbers, device=device)
        if num_samples > 1:  # the prompt runs only once
            copies = torch.arange(len(prompts), device=device).repeat_interleave(num_samples)
            self.cache.select(copies)
            logits = logits[copies]
        active = list(range(len(limits)))
        for position in range(max(limits)):
            ids = self.sampler(logits, sequences[active], position)
            found = dict(zip(active, ids.tolist(), strict=True))
            self.num_tokens += len(found)
            yield found
            kept = [
                i for i, row in enumerate(active) if found[row] != self.eod and position + 1 < limits[row]
            ]
            if not kept:
                return
            if len(kept) < len(active):
                rows = torch.tensor(kept, device=device)
                self.cache.select(rows)
                ids, active = ids[rows], [active[i] for i in kept]
            logits = self._logits(ids[:, None])

    def _logits(self, tokens: Tensor) -> Tensor:
        """Return this rank's logits ``[b, padded/t]`` after the last of the new tokens ``[b, s]``."""
        numbers = tokens.new_zeros(len(tokens))  # sample numbers for dropout, which is off
        positions = self.cache.positions(*tokens.shape)
        microbatch = Microbatch(tokens, tokens, numbers, position_ids=positions)  # labels are not read
        hidden = self.stage.hidden_states(microbatch, None)
        return self.stage.logits(hidden[-1:])[0]
