"""RMSNorm of a recurrence's output after a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return ``norm(x silu(gate)) weight`` over the last dim, in the gate's dtype.

    Args:
        x: ``[..., n]``, of any precision; sums are in at least fp32.
        gate: ``[..., n]``.
        weight: ``[n]``, or ``[..., n]`` if it differs along other dims.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    gated = x.to(wide) * F.silu(gate.to(wide))
    inverse = (gated.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (gated * inverse).to(gate.dtype) * weight
