"""The causal convolution before a recurrence: each channel mixes a token with the few tokens before it.

Shapes: s tokens, b microbatch, c channels that this rank computes, k tokens that the convolution sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.attention.exchange import HeadExchange
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut


class ShortConvolution(nn.Module):
    """Computes silu(sum_i weight_i * x[t - k + 1 + i] + bias) for each channel; tp cuts the channels.

    A context-parallel rank computes the channels of its heads.

    Tokens before the start of a document count as zeros. The sums are in at least fp32, and backward keeps x
    in its own dtype.

    Args:
        channels: channels of all ranks.
        kernel: k.
        bias: add a bias to each channel, which starts at zero.
    """

    def __init__(
        self, channels: int, kernel: int, std: float, context: LayerContext, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.exchange = HeadExchange(context)
        cut = Cut("tp", 0)
        spec = ParameterSpec((channels, kernel), cut, std=std, maps_features=False)
        self.weight = new_parameter(spec, context)  # [channels/tp, k]
        self.bias = (
            new_parameter(ParameterSpec((channels,), cut, decay=False), context) if bias else None
        )  # [channels/tp]

    def forward(
        self, x: Tensor, starts: Tensor | None = None, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mix the tokens ``[s, b, c]``.

        Args:
            starts: see `PositionInfo`.
            before: inputs before x, ``[b, k - 1, c]``; by default zeros.

        Returns:
            The result, ``[s, b, c]``, and the last inputs, ``[b, k - 1, c]``.
        """
        own, wide = self.exchange.own, torch.promote_types(x.dtype, torch.float32)
        weight = own(self.weight).to(wide)  # [c, k]
        num_tokens, past = x.shape[0], weight.shape[1] - 1
        if before is None:
            before = x.new_zeros(x.shape[1], past, x.shape[2])
        padded = torch.cat((before.transpose(0, 1), x))  # [k - 1 + s, b, c]
        y = x * weight[:, past]
        for distance in range(1, past + 1):
            shifted = padded[past - distance : past - distance + num_tokens]
            product = shifted * weight[:, past - distance]
            if starts is not None:
                product = product.where(is_within(starts, distance), 0.0)
            y = y + product
        if self.bias is not None:
            y = y + own(self.bias).to(wide)
        return F.silu(y).to(x.dtype), padded[num_tokens:].transpose(0, 1)


def is_within(starts: Tensor, distance: int) -> Tensor:
    """Return which tokens have a token of their document at a distance before them, ``[s, b, 1]``."""
    positions = torch.arange(starts.shape[1], device=starts.device)
    return (positions - distance >= starts).t().unsqueeze(-1)
