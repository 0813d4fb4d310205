"""A short causal convolution of each feature along the sequence, which does not cross documents.

Shapes: s sequence, b microbatch, c channels of this rank, k kernel size, tp = tp.size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut


class CausalConvolution(nn.Module):
    """Computes silu(convolution(x)) of each channel by itself; tp cuts the channels.

    Args:
        channels: number of channels over all ranks.
        kernel_size: number of tokens that an output depends on: its own and those before it.
        bias: add a bias to each channel, which starts at zero.
    """

    def __init__(self, channels: int, kernel_size: int, context: LayerContext, *, bias: bool) -> None:
        super().__init__()
        cut = Cut("tp", 0)
        std = 1.0 / math.sqrt(3 * kernel_size)  # of torch's convolutions, whose weights are uniform
        weight = ParameterSpec((channels, kernel_size), cut, std=std, maps_features=False)
        self.weight = new_parameter(weight, context)  # [c, k]
        self.bias = (
            new_parameter(ParameterSpec((channels,), cut, decay=False), context) if bias else None
        )  # [c]

    def forward(self, x: Tensor, starts: Tensor | None = None, before: Tensor | None = None) -> Tensor:
        """Map ``[s, b, c]`` to ``[s, b, c]``; see `causal_convolution`."""
        return F.silu(causal_convolution(x, self.weight, self.bias, starts, before)).to(x.dtype)

    def last_inputs(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """Return the inputs on which later outputs depend: the last k - 1 of ``[s, b, c]``."""
        return with_inputs_before(x, self.weight.shape[1], before)[x.shape[0] :]


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """Return ``sum_j weight[:, k - 1 - j] * x[t - j] + bias`` over the tokens of t's document, in >= fp32.

    Backward keeps x in its own dtype, and the masks of documents.

    Args:
        x: ``[s, b, c]``.
        weight: ``[c, k]``.
        starts: index in x of the first token of each token's document, ``[b, s]``; negative for a document
            that starts in `before`. None if each sample is one document.
        before: inputs before the first token, ``[k - 1, b, c]``; None for zeros.
    """
    (num_tokens, *_), kernel_size = x.shape, weight.shape[1]
    wide = weight.to(torch.promote_types(x.dtype, torch.float32))
    inputs = with_inputs_before(x, kernel_size, before)  # [k - 1 + s, b, c]
    total = None if bias is None else bias.to(wide.dtype)
    for distance in range(kernel_size):
        tap = inputs.narrow(0, kernel_size - 1 - distance, num_tokens) * wide[:, kernel_size - 1 - distance]
        if starts is not None and distance > 0:
            earliest = torch.arange(num_tokens, device=x.device) - distance
            tap = tap * (earliest >= starts).t().unsqueeze(-1)
        total = tap if total is None else total + tap
    assert total is not None
    return total


def with_inputs_before(x: Tensor, kernel_size: int, before: Tensor | None) -> Tensor:
    """Return ``[s, b, c]`` after the k - 1 inputs before it, by default zeros."""
    if before is None:
        return F.pad(x, (0, 0, 0, 0, kernel_size - 1, 0))
    return torch.cat((before, x))
