"""Queries, keys and values as slices of one tensor, and results of attention, as linear layers lay them out.

The kernels of attention write the three gradients into such a tensor, so that nothing concatenates them.

Shapes: s sequence, b samples, n query heads, g key/value heads, r = n/g, d head size. The packed tensor is
``[s, b, g, r + 2, d]``: each key/value head follows its r query heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.utils.torch_private import storage_number

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or their gradients."""


def split_heads(packed: Tensor) -> Heads:
    """Return queries ``[s, b, n, d]``, and keys and values ``[s, b, g, d]``.

    They are views, except for queries with 1 < g < n, whose heads do not have one stride.
    """
    q, k, v = packed.split((packed.shape[3] - 2, 1, 1), dim=3)
    return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)


def join_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the packed tensor of queries, keys and values in the shapes of `split_heads`.

    It is not copied if they already are the slices of one tensor.
    """
    (s, b, n, d), g = q.shape, k.shape[2]
    num_heads = n // g + 2  # of a group
    shape = s, b, g, num_heads, d
    strides = b * g * num_heads * d, g * num_heads * d, num_heads * d, d, 1
    needed = (q.storage_offset() + s * strides[0]) * q.element_size()
    is_one = len({storage_number(x.untyped_storage()) for x in (q, k, v)}) == 1
    if is_one and q.untyped_storage().nbytes() >= needed and (n == g or g == 1):
        packed = q.as_strided(shape, strides)
        if all(_is_same(x, part) for x, part in zip((q, k, v), split_heads(packed), strict=True)):
            return packed
    # PyTorch's cat on CUDA is one kernel for at most 4 dims, but one copy per part for 5.
    parts = [x.reshape(s * b, g, -1, d) for x in (q, k, v)]
    return torch.cat(parts, dim=2).view(shape)


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Return whether two views of one storage are the same elements."""
    return x.storage_offset() == y.storage_offset() and x.stride() == y.stride()


def like_sequence(x: Tensor, size: int | None = None) -> Tensor:
    """Allocate ``[b, n, s, d]`` in the memory order of the hidden states, ``[s, b, n, d]``.

    Args:
        size: d, if it differs from x's.
    """
    b, n, s, d = x.shape
    return x.new_empty((s, b, n, size or d)).permute(1, 2, 0, 3)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the output, and one number per query in at least fp32, for queries ``[b, n, m, d]``.

    Args:
        v: values; the output has the size of their heads.
    """
    return like_sequence(q, v.shape[3]), q.new_empty(
        q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)
    )


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Allocate the gradients of queries ``[b, n, m, d]``, keys ``[b, g, s, d]`` and values ``[b, g, s, d']``.

    Returns:
        A packed tensor, or three tensors if its slices would not be views. `gradients_of` returns all three.
    """
    (b, n, s, d), g = q.shape, k.shape[1]
    if s == k.shape[2] and (n == g or g == 1) and v.shape[3] == d:
        return [q.new_empty((s, b, g, n // g + 2, d))]
    return [like_sequence(q), like_sequence(k), like_sequence(v)]


def gradients_of(allocated: Sequence[Tensor]) -> Heads:
    """Return views of `empty_gradients`: gradients ``[b, n, s, d]``, ``[b, g, s, d]``, ``[b, g, s, d']``."""
    if len(allocated) == 1:
        q, k, v = (x.permute(1, 2, 0, 3) for x in split_heads(allocated[0]))
    else:
        q, k, v = allocated
    return q, k, v


class SplitHeads(torch.autograd.Function):
    """Autograd of `split_heads`; its backward is `join_heads`."""

    @staticmethod
    def forward(ctx: object, packed: Tensor) -> Heads:
        return split_heads(packed)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return join_heads(*grads)
