"""The kernel in plain PyTorch: a GEMM, our softmax, a GEMM, block by block of queries.

Backward keeps queries, keys, values and one number per query. It recomputes scores and weights block by
block (Dao et al. 2022, section 3.1), and the dropout mask from its counter. Memory is linear in the sequence
length. Causal attention skips the keys after a block's queries, and with a window the keys before.

Graphs of torch.compile call it as one operator, without tracing into it: its blocks would be hundreds of
nodes, and none of them would be fused.

Shapes: s sequence, b microbatch, n query heads of this rank, g its key/value heads, r = n/g, d head size. A
tile has c pairs of a sample and a key/value head. A block has m queries and e consecutive keys, which contain
all keys that these queries see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.attention.kernels import (
    LEAST,
    Block,
    BlockKernel,
    MergedAttention,
    attend_slices,
    differentiable,
)
from megalite.config import ModelConfig
from megalite.kernels import CausalSoftmax
from megalite.kernels.dropout import dropout
from megalite.kernels.flash_attention import Operands, define_attention, operands
from megalite.kernels.packed_heads import empty_gradients, empty_results, gradients_of
from megalite.tensor_parallel.parameter_spec import LayerContext

_MIN_QUERIES = 32  # per block; with fewer, the calls cost more than they save


class Blocking(NamedTuple):
    """Limits of the sizes of blocks and tiles of attention.

    Attributes:
        num_queries: largest number of queries in a block; short sequences have two blocks to skip keys too.
        num_bytes: largest number of bytes in a tile's block of scores.
    """

    num_queries: int
    num_bytes: int

    @staticmethod
    def for_device(device: torch.device, dtype: torch.dtype) -> Blocking:
        """Return the sizes for a device. On a CPU, scores stay in the caches; GPUs were not measured."""
        if device.type == "cpu":
            return Blocking(512 // dtype.itemsize, 2 << 20)
        return Blocking(1024, 1 << 28)

    def blocks(self, seq_length: int) -> Iterator[tuple[int, int]]:
        """Yield the range of queries in each block, ``first <= query < last``."""
        step = self.step(seq_length)
        for first in range(0, seq_length, step):
            yield first, min(first + step, seq_length)

    def step(self, seq_length: int) -> int:
        """Return the number of queries in each block; the last block may have fewer."""
        return min(self.num_queries, max(_MIN_QUERIES, -(-seq_length // 2)))

    def tiles(self, q: Tensor, k: Tensor) -> Iterator[Tile]:
        """Yield the samples and heads to compute together: all, or some heads of one sample."""
        num_samples, num_heads, num_queries, _ = q.shape
        num_groups, num_keys = k.shape[1:3]
        shared = num_heads // num_groups
        of_one = shared * self.step(num_queries) * num_keys * q.element_size()
        if num_samples * num_groups * of_one <= self.num_bytes:
            yield Tile(slice(0, num_samples), slice(0, num_groups), shared)
            return
        step = max(1, self.num_bytes // of_one)
        for sample in range(num_samples):
            for group in range(0, num_groups, step):
                yield Tile(slice(sample, sample + 1), slice(group, min(group + step, num_groups)), shared)

    def parts(self, block: Block, num_samples_and_heads: int, itemsize: int) -> Iterator[Block]:
        """Yield parts of the queries whose scores stay within `num_bytes`, with all keys."""
        most = self.num_bytes // max(1, num_samples_and_heads * len(block.keys) * itemsize)
        step = max(32, min(most, -(-len(block.queries) // 2)))
        for first in range(block.queries.start, block.queries.stop, step):
            yield Block(range(first, min(first + step, block.queries.stop)), block.keys)


class Tile(NamedTuple):
    """Selects samples and key/value heads, with the query heads that share them.

    Attributes:
        shared: number of query heads per key/value head, r.
    """

    samples: slice
    groups: slice
    shared: int

    @property
    def heads(self) -> slice:
        """Return the query heads."""
        return slice(self.groups.start * self.shared, self.groups.stop * self.shared)

    def keys(self, x: Tensor) -> Tensor:
        """Copy ``[b, g, s, d]`` to ``[c, s, d]``, contiguous: GEMMs of strided tensors are slower."""
        return x[self.samples, self.groups].flatten(0, 1).contiguous()

    def queries(self, x: Tensor, first: int, last: int) -> Tensor:
        """Copy a block of ``[b, n, s, d]`` to ``[c, r m, d]``: heads that share keys form one matrix."""
        rows = x[self.samples, self.heads, first:last].unflatten(1, (-1, self.shared))  # [b', g', r, m, d]
        return rows.reshape(-1, self.shared * (last - first), x.shape[-1])

    def put_queries(self, x: Tensor, first: int, last: int, rows: Tensor) -> None:
        """Write a block's ``[c, r m, d]`` into ``[b, n, s, d]``."""
        out = x[self.samples, self.heads, first:last]
        out.copy_(rows.view(out.shape))

    def put_keys(self, x: Tensor, columns: Tensor) -> None:
        """Write a tile's ``[c, d, s]`` into ``[b, g, s, d]``."""
        out = x[self.samples, self.groups]
        out.copy_(columns.transpose(1, 2).view(out.shape))

    def scores(self, x: Tensor, num_queries: int) -> Tensor:
        """View ``[c, r m, e]`` as the tile's ``[b', n', m, e]``, the softmax's layout."""
        num_samples = self.samples.stop - self.samples.start
        return x.view(num_samples, -1, num_queries, x.shape[-1])


def _query_scale(dtype: torch.dtype, scale: float) -> float:
    """Return the part of the scale by which queries are multiplied before the GEMM.

    In fp16 the unscaled scores would overflow. A power of two does not round.
    """
    return 2.0 ** math.floor(math.log2(scale)) if dtype == torch.float16 else 1.0


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: CausalSoftmax,
    blocking: Blocking,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Args:
        q: ``[b, n, s', d]``: s' queries from position `softmax.visible.first` on.
        k, v: ``[b, g, s, d]`` and ``[b, g, s, d']``.
        largest: largest scaled score of each head so far, ``[n]``, which is raised in place; None to skip it.

    Returns:
        The output ``[b, n, s', d']`` and, for backward, the logarithm of each query's sum of exponentials,
        ``[b, n, s']``.
    """
    out, sums = empty_results(q, v)
    factor = _query_scale(q.dtype, softmax.scale)
    softmax = softmax._replace(scale=softmax.scale / factor)
    offset = softmax.visible.first
    for tile in blocking.tiles(q, k):
        keys, values = tile.keys(k).transpose(1, 2), tile.keys(v)
        part = softmax.part(tile.samples, tile.heads)
        for first, last in blocking.blocks(q.shape[2]):
            queries = _times(tile.queries(q, first, last), factor)
            seen = softmax.visible.key_slice(offset + first, offset + last, k.shape[2])
            scores = queries @ keys[:, :, seen]  # [c, r m, e]
            block = tile.scores(scores, last - first)
            if largest is not None:
                _raise_largest(largest[tile.heads], block, part, offset + first, seen.start)
            log_sums = part.weights_(block, offset + first, seen.start)
            sums[tile.samples, tile.heads, first:last] = log_sums
            tile.put_queries(out, first, last, scores @ values[:, seen])
    return out, sums


def _raise_largest(
    largest: Tensor, scores: Tensor, softmax: CausalSoftmax, first: int, first_key: int
) -> None:
    """Raise the largest scaled scores, ``[n]``, to those of a block's visible keys, ``[b, n, m, e]``."""
    num_queries, num_keys = scores.shape[2:]
    queries, keys = range(first, first + num_queries), range(first_key, first_key + num_keys)
    hidden = softmax.visible.hidden(queries, keys, scores.device)  # [b or 1, m, e]
    of_block = scores.masked_fill(hidden[:, None], -torch.inf).amax((0, 2, 3))
    torch.maximum(largest, of_block.to(largest.dtype) * softmax.scale, out=largest)


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    softmax: CausalSoftmax,
    blocking: Blocking,
) -> list[Tensor]:
    """Compute the gradients of queries, keys and values from the output's gradient; `sums` is `attend`'s.

    They are returned as `empty_gradients` allocates them.
    """
    results = empty_gradients(q, k, v)
    grad_q, grad_k, grad_v = gradients_of(results)
    factor = _query_scale(q.dtype, softmax.scale)
    softmax = softmax._replace(scale=softmax.scale / factor)
    offset = softmax.visible.first
    for tile in blocking.tiles(q, k):
        part = softmax.part(tile.samples, tile.heads)
        keys, values = tile.keys(k), tile.keys(v)
        # Transposed tensors make the GEMMs faster. Sums over blocks of queries are in fp32 or fp64.
        sum_k, sum_v = (x.new_zeros(x.mT.shape, dtype=sums.dtype) for x in (keys, values))
        for first, last in blocking.blocks(q.shape[2]):
            queries = _times(tile.queries(q, first, last), factor)
            row_grads = tile.queries(grad, first, last)
            seen = softmax.visible.key_slice(offset + first, offset + last, k.shape[2])
            scores = queries @ keys.transpose(1, 2)[:, :, seen]  # [c, r m, e]
            weight_grads = row_grads @ values.transpose(1, 2)[:, :, seen]
            log_sums = sums[tile.samples, tile.heads, first:last].contiguous()
            block = tile.scores(scores, last - first), tile.scores(weight_grads, last - first)
            part.backward_(*block, log_sums, offset + first, seen.start)
            weights, score_grads = scores, weight_grads  # overwritten in place
            sum_v[:, :, seen] += row_grads.transpose(1, 2) @ weights
            sum_k[:, :, seen] += queries.transpose(1, 2) @ score_grads
            tile.put_queries(grad_q, first, last, _times(score_grads @ keys[:, seen], factor))
        tile.put_keys(grad_k, sum_k)
        tile.put_keys(grad_v, sum_v)
    return results


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, Operands(*rest).softmax(k.shape[2]), Blocking.for_device(q.device, q.dtype))


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, sums: Tensor, *rest: Any
) -> list[Tensor]:
    softmax, blocking = Operands(*rest).softmax(k.shape[2]), Blocking.for_device(q.device, q.dtype)
    return attend_backward(grad, q, k, v, sums, softmax, blocking)


define_attention("attention", _forward, _gradients, keeps_output=False)


class _Blockwise(NamedTuple):
    """Steps of `attend` and `attend_backward` for `differentiable`."""

    softmax: CausalSoftmax
    blocking: Blocking
    largest: Tensor | None = None
    keeps_output: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, self.softmax, self.blocking, self.largest)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return gradients_of(attend_backward(grad, q, k, v, log_sums, self.softmax, self.blocking))


class PlainKernel(BlockKernel):
    """Functions for all positions, masks, head sizes, dtypes, devices and options of the softmax."""

    attends_slices = True

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.blocking = Blocking.for_device(context.device, context.dtype)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: CausalSoftmax,
        largest: Tensor | None = None,
        runs: Sequence[range] | None = None,
    ) -> Tensor:
        """Compute attention; see `Kernel`."""

        def of_slice(queries: Tensor, part: CausalSoftmax) -> Tensor:
            if torch.compiler.is_compiling():
                rest = operands(part, part.visible.first)
                out: Tensor = torch.ops.megalite.attention(queries, k, v, *rest, *part.parameters)[0]
                return out
            return differentiable(queries, k, v, _Blockwise(part, self.blocking, largest))

        return attend_slices(q, softmax, runs, of_slice)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor]:
        """Compute a block; see `BlockKernel`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=wide)
        log_sums = q.new_empty(q.shape[:3], dtype=wide)
        for part in self.blocking.parts(block, q.shape[0] * q.shape[1], wide.itemsize):
            rows, (seen, columns) = part.rows_in(block), part.columns_in(block, softmax)
            scores = _scores(q[:, :, rows], k[:, :, columns], softmax)
            _hide_(scores, part.queries, seen, softmax)
            sums = scores.logsumexp(-1)
            weights = scores.sub_(sums.clamp(min=LEAST)[..., None]).exp_()
            _drop_(weights, part.queries, seen, softmax)
            out[:, :, rows] = _times_keys(weights.to(q.dtype), v[:, :, columns])
            log_sums[:, :, rows] = sums
        return out, log_sums

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: MergedAttention, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a block, in at least fp32; see `BlockKernel`."""
        wide = whole.log_sums.dtype
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for part in self.blocking.parts(block, q.shape[0] * q.shape[1], 2 * wide.itemsize):
            rows, (seen, columns) = part.rows_in(block), part.columns_in(block, softmax)
            queries, keys, row_grads = q[:, :, rows], k[:, :, columns], whole.grad[:, :, rows]
            scores = _scores(queries, keys, softmax)
            slope = softmax.cap_slope(scores)
            _hide_(scores, part.queries, seen, softmax)
            weights = scores.sub_(whole.log_sums[:, :, rows, None]).exp_()
            weight_grads = _products(row_grads, v[:, :, columns]).to(wide)
            dropped = _drop_(weights.clone(), part.queries, seen, softmax) if _drops(softmax) else weights
            # Of a weight w with dropout's factor f, and the gradient g of f w: w (f g - delta).
            score_grads = weight_grads.mul_(dropped).sub_(weights * whole.deltas[:, :, rows, None])
            score_grads.mul_(softmax.scale if slope is None else slope)
            score_grads, dropped = score_grads.to(q.dtype), dropped.to(q.dtype)
            grad_q[:, :, rows] = _times_keys(score_grads, keys)
            grad_k[:, :, columns] += _summed_over_queries(score_grads, queries, keys.shape[1])
            grad_v[:, :, columns] += _summed_over_queries(dropped, row_grads, keys.shape[1])
        return grad_q, grad_k, grad_v


def _products(x: Tensor, k: Tensor) -> Tensor:
    """Return the products of ``[b, n, m, d]`` with ``[b, g, e, d]``, ``[b, n, m, e]``."""
    b, n, m, _ = x.shape
    return (_by_group(x, k.shape[1]) @ k.mT).view(b, n, m, k.shape[2])


def _times_keys(weights: Tensor, v: Tensor) -> Tensor:
    """Return the sums of ``[b, g, e, d]`` with weights ``[b, n, m, e]``, ``[b, n, m, d]``."""
    b, n, m, _ = weights.shape
    return (_by_group(weights, v.shape[1]) @ v).view(b, n, m, v.shape[3])


def _summed_over_queries(weights: Tensor, x: Tensor, num_groups: int) -> Tensor:
    """Return the sums of ``[b, n, m, d]`` over queries and heads of a group, ``[b, g, e, d]``."""
    return _by_group(weights, num_groups).mT @ _by_group(x, num_groups)


def _by_group(x: Tensor, num_groups: int) -> Tensor:
    """Map ``[b, n, m, e]`` to ``[b, g, r m, e]``; e may be 0."""
    b, n, m, e = x.shape
    return x.reshape(b, num_groups, n // num_groups * m, e)


def _scores(q: Tensor, k: Tensor, softmax: CausalSoftmax) -> Tensor:
    """Return the scaled scores with a cap if there is one, in at least fp32, ``[b, n, m, e]``."""
    scores = _products(q, k).to(torch.promote_types(q.dtype, torch.float32))
    if softmax.cap is None:
        return scores.mul_(softmax.scale)
    softmax.cap_(scores)
    return scores


def _hide_(scores: Tensor, queries: range, keys: range, softmax: CausalSoftmax) -> None:
    """Add ALiBi's bias, and set the scores of hidden keys to -inf."""
    if softmax.slopes is not None:
        rows, columns = (torch.arange(x.start, x.stop, device=scores.device) for x in (queries, keys))
        scores += softmax.slopes.to(scores.dtype)[:, None, None] * (columns - rows[:, None])
    visible = softmax.visible
    if visible.starts is None and visible.ends is None and keys.stop <= queries.start + 1:
        return
    scores.masked_fill_(visible.hidden(queries, keys, scores.device)[:, None], -torch.inf)


def _drops(softmax: CausalSoftmax) -> bool:
    return softmax.drop is not None and softmax.drop.p > 0.0


def _drop_(weights: Tensor, queries: range, keys: range, softmax: CausalSoftmax) -> Tensor:
    """Apply dropout to ``[b, n, m, e]`` in place, one head at a time: its index counts heads outermost."""
    if not _drops(softmax):
        return weights
    p, key, samples, base, _ = softmax.drop  # type: ignore[misc]
    s = softmax.seq_length
    for head in range(weights.shape[1]):
        first = base + (head * s + queries.start) * s + keys.start
        rows = weights[:, head].transpose(0, 1)  # [m, b, e]
        rows.copy_(dropout(rows.contiguous(), p, key, samples, base=first, stride=s))
    return weights
