"""New tokens after prompts, a step for all sequences of a batch at a time.

Shapes: s tokens of the longest prompt, b prompts or sequences, t = tp.size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.generation.sampling import Sampler
from megalite.model.cache import CachedCore
from megalite.model.documents import Documents
from megalite.model.stage import GPTStage


@dataclass(frozen=True)
class Prompt:
    """What a sequence begins with.

    Attributes:
        number: among all prompts; it keys the noise, so that a prompt's text is its own in any batch.
        ids: its tokens, one at the least.
        max_new_tokens: after it.
    """

    number: int
    ids: Sequence[int]
    max_new_tokens: int


class Generator:
    """Continues prompts until they end or have their new tokens.

    Args:
        stage: a whole model, made with `CachedCore`.
        eod: the token that ends a sequence; None where none does.

    Attributes:
        num_tokens: that were made so far.
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
        """Yields each step's new tokens by sequence: number ``i * num_samples + j`` is sample j of prompt i.

        A sequence's last token may be `eod`. Every rank of tp yields the same.
        """
        device = self.cache.place.device
        longest = max(len(prompt.ids) for prompt in prompts)
        padding = torch.tensor([longest - len(prompt.ids) for prompt in prompts], device=device)
        capacity = longest + max(prompt.max_new_tokens for prompt in prompts)
        self.cache.begin(capacity, padding if bool(padding.any()) else None)
        tokens = [[0] * (longest - len(prompt.ids)) + list(prompt.ids) for prompt in prompts]
        logits = self._logits(torch.tensor(tokens, device=device))

        limits = [prompt.max_new_tokens for prompt in prompts for _ in range(num_samples)]
        numbers = [prompt.number << 24 | sample for prompt in prompts for sample in range(num_samples)]
        sequences = torch.tensor(numbers, device=device)
        if num_samples > 1:  # they share the prompt's pass
            copies = torch.arange(len(prompts), device=device).repeat_interleave(num_samples)
            self.cache.select(copies)
            logits = logits[copies]
        going = list(range(len(limits)))
        for place in range(max(limits)):
            ids = self.sampler(logits, sequences[going], place)
            found = dict(zip(going, ids.tolist(), strict=True))
            self.num_tokens += len(found)
            yield found
            kept = [i for i, row in enumerate(going) if found[row] != self.eod and place + 1 < limits[row]]
            if not kept:
                return
            if len(kept) < len(going):
                rows = torch.tensor(kept, device=device)
                self.cache.select(rows)
                ids, going = ids[rows], [going[i] for i in kept]
            logits = self._logits(ids[:, None])

    def _logits(self, tokens: Tensor) -> Tensor:
        """``[b, s]`` new tokens -> this rank's logits after the last of them, ``[b, padded/t]``."""
        documents = Documents(position_ids=self.cache.positions(*tokens.shape))
        numbers = tokens.new_zeros(len(tokens))  # they key dropout, of which there is none
        hidden = self.stage.hidden_states(tokens, numbers, None, documents)
        return self.stage.logits(hidden[-1:])[0]
