"""One microbatch, from the data loader to the pipeline's stages.

Shapes: b samples of the microbatch, s tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """The input of one forward pass.

    Attributes:
        tokens: int64 ``[b, s]``, the inputs.
        labels: int64 ``[b, s]``, the token that follows each input.
        sample_numbers: int64 ``[b]``, the samples' numbers in the whole run: they key the dropout.
        position_ids: int64 ``[b, s]``, positions within documents; None for positions within the sample.
        document_ids: int64 ``[b, s]``, equal within a document; None if attention crosses documents.
        loss_mask: bool ``[b, s]``, False for tokens without a loss; None if all tokens have one.
    """

    tokens: Tensor
    labels: Tensor
    sample_numbers: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    loss_mask: Tensor | None = None

    @staticmethod
    def of(text: Tensor, sample_numbers: Tensor) -> Microbatch:
        """Split int64 ``[b, s + 1]`` tokens into inputs and labels."""
        return Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), sample_numbers)

    def pin_memory(self) -> Microbatch:
        """Copy to page-locked memory: a copy from any other memory waits for all work of the GPU."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Microbatch:
        """Start the copy to the device, on its current stream; torch keeps pinned memory until it is done."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Microbatch:
        def optional(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        return Microbatch(
            function(self.tokens),
            function(self.labels),
            function(self.sample_numbers),
            optional(self.position_ids),
            optional(self.document_ids),
            optional(self.loss_mask),
        )
