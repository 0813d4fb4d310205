"""Compute attention with a slice of the keys, in the operators of `flash_attention`.

Ring attention merges the results of all slices.

Shapes: b samples, n query heads, g key/value heads, m queries and e keys of a slice, d head size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.kernels.flash_attention import operands
from megalite.kernels.packed_heads import gradients_of
from megalite.kernels.softmax import CausalSoftmax


class AttentionToKeys(NamedTuple):
    """Attention of consecutive queries to a slice of the keys; no autograd.

    Attributes:
        q: ``[b, n, m, d]``, the queries from position `first` on.
        k, v: ``[b, g, e, d]``, the keys from position `first_key` on.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax: CausalSoftmax
    first: int
    first_key: int

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output, and the logarithms of its sums ``[b, n, m]``.

        A query that sees no key of the slice has an output of 0, and a logarithm of -inf.
        """
        out, log_sums = torch.ops.megalite.flash_attention(*self[:3], *self._operands())
        return out, log_sums

    def backward(self, grad: Tensor, out: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the slice adds to the gradients of q, k and v.

        Args:
            grad: gradient of `out`.
            out, log_sums: results of these queries with all keys.
        """
        return gradients_of(
            torch.ops.megalite.flash_attention_backward(grad, *self[:3], out, log_sums, *self._operands())
        )

    def _operands(self) -> tuple[Any, ...]:
        return operands(self.softmax, self.first, self.first_key)
