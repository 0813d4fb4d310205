"""Attention as products of blocks of queries, with our causal softmax between them.

What is kept for backward are queries, keys, values and one number a query; scores and weights are made again
block by block (Dao et al. 2022, section 3.1), dropout by its counter. So memory grows with the sequence and
not with its square, and keys after a block's queries cost nothing.

Shapes: s sequence, b microbatch, n query heads of this rank, g its key/value heads, r = n/g, d head size; of
a tile c pairs of a sample and a key/value head; of a block m queries, and e keys, all up to its last query.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.kernels import CausalSoftmax
from megalite.parallel.shard import Placement

_MIN_QUERIES = 32  # of a block: fewer are not worth the calls


class Blocking(NamedTuple):
    """How attention is cut up.

    Attributes:
        num_queries: of a block, at the most; short sequences make two, so that keys are left out there too.
        num_bytes: that a tile's block of scores should not exceed.
    """

    num_queries: int
    num_bytes: int

    @staticmethod
    def on(place: Placement) -> Blocking:
        """What is fast there: on a CPU a block of scores stays in the caches; on a GPU not measured."""
        if place.device.type == "cpu":
            return Blocking(512 // place.dtype.itemsize, 2 << 20)
        return Blocking(1024, 1 << 28)

    def blocks(self, seq_length: int) -> Iterator[tuple[int, int]]:
        """First and last query, this one not counted, of each block."""
        step = self.step(seq_length)
        for first in range(0, seq_length, step):
            yield first, min(first + step, seq_length)

    def step(self, seq_length: int) -> int:
        """Queries of each block but the last, which may have fewer."""
        return min(self.num_queries, max(_MIN_QUERIES, -(-seq_length // 2)))

    def tiles(self, q: Tensor, num_groups: int) -> Iterator[Tile]:
        """Samples and heads that are computed together: all of them, or some of one sample."""
        num_samples, num_heads, seq_length, _ = q.shape
        shared = num_heads // num_groups
        of_one = shared * self.step(seq_length) * seq_length * q.element_size()
        if num_samples * num_groups * of_one <= self.num_bytes:
            yield Tile(slice(0, num_samples), slice(0, num_groups), shared)
            return
        step = max(1, self.num_bytes // of_one)
        for sample in range(num_samples):
            for group in range(0, num_groups, step):
                yield Tile(slice(sample, sample + 1), slice(group, min(group + step, num_groups)), shared)


class Tile(NamedTuple):
    """Some samples and key/value heads, and the query heads that share each.

    Attributes:
        shared: query heads of a key/value head, r.
    """

    samples: slice
    groups: slice
    shared: int

    @property
    def heads(self) -> slice:
        """Its query heads."""
        return slice(self.groups.start * self.shared, self.groups.stop * self.shared)

    def keys(self, x: Tensor) -> Tensor:
        """``[b, g, s, d]`` -> ``[c, s, d]``, contiguous: products of strided tensors are slower."""
        return x[self.samples, self.groups].flatten(0, 1).contiguous()

    def queries(self, x: Tensor, first: int, last: int) -> Tensor:
        """``[b, n, s, d]`` -> a block's ``[c, r m, d]``, contiguous too: heads that share keys are as one."""
        rows = x[self.samples, self.heads, first:last].unflatten(1, (-1, self.shared))  # [b', g', r, m, d]
        return rows.reshape(-1, self.shared * (last - first), x.shape[-1])

    def put_queries(self, x: Tensor, first: int, last: int, rows: Tensor) -> None:
        """Writes a block's ``[c, r m, d]`` into ``[b, n, s, d]``."""
        out = x[self.samples, self.heads, first:last]
        out.copy_(rows.view(out.shape))

    def put_keys(self, x: Tensor, columns: Tensor) -> None:
        """Writes a tile's ``[c, d, s]`` into ``[b, g, s, d]``."""
        out = x[self.samples, self.groups]
        out.copy_(columns.transpose(1, 2).view(out.shape))

    def scores(self, x: Tensor, num_queries: int) -> Tensor:
        """``[c, r m, e]`` -> ``[b', n', m, e]``, as the softmax takes them."""
        num_samples = self.samples.stop - self.samples.start
        return x.view(num_samples, -1, num_queries, x.shape[-1])


def like_sequence(x: Tensor) -> Tensor:
    """An empty ``[b, n, s, d]`` in the memory order of the hidden states, ``[s, b, n, d]``."""
    b, n, s, d = x.shape
    return x.new_empty((s, b, n, d)).permute(1, 2, 0, 3)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for what `attend` makes of queries ``[b, n, s, d]``."""
    return like_sequence(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _before_product(dtype: torch.dtype, scale: float) -> float:
    """The part of the scale that queries take before they meet keys: without it fp16 would overflow early.

    A power of two, which rounds nothing.
    """
    return 2.0 ** math.floor(math.log2(scale)) if dtype == torch.float16 else 1.0


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def attend(
    q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax, blocking: Blocking
) -> tuple[Tensor, Tensor]:
    """The product, ``[b, n, s, d]``, and what its backward needs of it, ``[b, n, s]``."""
    out, sums = empty_results(q)
    factor = _before_product(q.dtype, softmax.scale)
    softmax = softmax._replace(scale=softmax.scale / factor)
    for tile in blocking.tiles(q, k.shape[1]):
        keys, values = tile.keys(k).transpose(1, 2), tile.keys(v)
        part = softmax.part(tile.samples, tile.heads)
        for first, last in blocking.blocks(q.shape[2]):
            queries = _times(tile.queries(q, first, last), factor)
            scores = queries @ keys[:, :, :last]  # [c, r m, e]
            log_sums = part.weights_(tile.scores(scores, last - first), first)
            sums[tile.samples, tile.heads, first:last] = log_sums
            tile.put_queries(out, first, last, scores @ values[:, :last])
    return out, sums


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    softmax: CausalSoftmax,
    blocking: Blocking,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    grad_q, grad_k, grad_v = (like_sequence(x) for x in (q, k, v))
    factor = _before_product(q.dtype, softmax.scale)
    softmax = softmax._replace(scale=softmax.scale / factor)
    for tile in blocking.tiles(q, k.shape[1]):
        part = softmax.part(tile.samples, tile.heads)
        keys, values = tile.keys(k), tile.keys(v)
        # Transposed, as the products are faster so; sums over blocks of queries in fp32 at the least.
        sum_k, sum_v = keys.new_zeros((2, keys.shape[0], keys.shape[2], keys.shape[1]), dtype=sums.dtype)
        for first, last in blocking.blocks(q.shape[2]):
            queries = _times(tile.queries(q, first, last), factor)
            grads_of_rows = tile.queries(grad, first, last)
            weights = queries @ keys.transpose(1, 2)[:, :, :last]  # scores, still
            scores = grads_of_rows @ values.transpose(1, 2)[:, :, :last]  # gradients of the weights
            log_sums = sums[tile.samples, tile.heads, first:last].contiguous()
            block = tile.scores(weights, last - first), tile.scores(scores, last - first)
            part.backward_(*block, log_sums, first)
            sum_v[:, :, :last] += grads_of_rows.transpose(1, 2) @ weights
            sum_k[:, :, :last] += queries.transpose(1, 2) @ scores
            tile.put_queries(grad_q, first, last, _times(scores @ keys[:, :last], factor))
        tile.put_keys(grad_k, sum_k)
        tile.put_keys(grad_v, sum_v)
    return grad_q, grad_k, grad_v
