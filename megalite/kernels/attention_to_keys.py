"""Compute attention with a slice of the keys, in the operators of `flash_attention`.

Ring attention merges the results of all slices.

Shapes: b samples, n query heads, g key/value heads, m queries and e keys of a slice, d head size.
"""

import torch
from torch import Tensor

from megalite.kernels.flash_attention import operands
from megalite.kernels.packed_heads import gradients_of
from megalite.kernels.softmax import CausalSoftmax


def attend_keys(
    q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax, first: int, first_key: int
) -> tuple[Tensor, Tensor]:
    """Return attention with a slice of the keys, and the logarithms of its sums ``[b, n, m]``; no autograd.

    A query that sees no key of the slice has an output of 0, and a logarithm of -inf.

    Args:
        q: ``[b, n, m, d]``, the queries from position `first` on.
        k, v: ``[b, g, e, d]``, the keys from position `first_key` on.
    """
    out, log_sums = torch.ops.megalite.flash_attention(q, k, v, *operands(softmax, first, first_key))
    return out, log_sums


def attend_keys_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    softmax: CausalSoftmax,
    first: int,
    first_key: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a slice of the keys adds to the gradients of q, k and v.

    Args:
        grad: gradient of `out`.
        out, log_sums: results of these queries with all keys.
    """
    return gradients_of(
        torch.ops.megalite.flash_attention_backward(
            grad, q, k, v, out, log_sums, *operands(softmax, first, first_key)
        )
    )
