"""RMSNorm of a recurrent mixer's output, multiplied by a gate before or after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool) -> Tensor:
    """Return ``norm(x silu(gate)) weight``, or ``norm(x) weight silu(gate)``, over the last dim.

    Args:
        x: ``[..., n]``, of any precision; sums are in at least fp32.
        gate: ``[..., n]``, which gives the result its dtype.
        weight: ``[n]``, or ``[..., n]`` if it is not the same for all.
        gate_first: multiply by the gate before the norm (Mamba-2), instead of after it (Gated DeltaNet).
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    x, factor = x.to(wide), F.silu(gate.to(wide))
    if gate_first:
        x = x * factor
    x = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    x = x.to(gate.dtype) * weight
    return x if gate_first else (x * factor).to(gate.dtype)
