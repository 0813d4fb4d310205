"""Run torch's flash attention of GPUs on CPU, by plain products.

Torch's context parallelism and DTensors know this operator, and not the one that attention calls on CPU. With
it, programs that use them can be judged there, in any precision.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megalite.utils import torch_private


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what `scaled_dot_product_attention` returns, ``[b, heads, s, d]``; keys may have fewer heads."""
    _register_kernels()
    return torch_private.flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]


@functools.cache
def _register_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")  # the kernels live as long as this object
    for operator, kernel in (
        (torch_private.flash_attention, _forward),
        (torch_private.flash_attention_backward, _backward),
    ):
        library.impl(str(operator).removeprefix("aten."), kernel, "CPU")
    return library


def _probabilities(
    q: Tensor, k: Tensor, is_causal: bool, scale: float, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the probabilities and their scores' logsumexp, which is computed if it is None."""
    scores = q @ k.mT * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse.unsqueeze(-1)).exp(), lse


def _repeated(q: Tensor, *others: Tensor) -> list[Tensor]:
    """Return keys and values with as many heads as queries have."""
    return [each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in others]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | int, ...]:
    keys, values = _repeated(q, k, v)
    probabilities, lse = _probabilities(q, keys, is_causal, scale or q.shape[-1] ** -0.5, None)
    none = torch.zeros((), dtype=torch.int64)  # where a GPU's kernel returns its random numbers' state
    out = (probabilities @ values).transpose(1, 2).contiguous().transpose(1, 2)  # as the GPU's is
    return out, lse, none, none, q.shape[2], k.shape[2], none, none, none


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; `out` and `lse` may be of more keys than `k`."""
    scale = scale or q.shape[-1] ** -0.5
    keys, values = _repeated(q, k, v)
    probabilities = _probabilities(q, keys, is_causal, scale, lse)[0]
    grad_scores = probabilities * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
    grad_k, grad_v = (
        each.unflatten(1, (k.shape[1], -1)).sum(2) for each in (grad_scores.mT @ q, probabilities.mT @ grad)
    )
    return grad_scores @ keys, grad_k, grad_v
