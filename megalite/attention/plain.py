"""The kernel in plain PyTorch: all queries block by block (`blockwise`), or one block of queries and keys.

A block's scores are in memory together, as far as `Blocking.num_bytes` allows.

Shapes: b microbatch, n query heads, g key/value heads, r = n/g, m queries and e keys of a block, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.attention.algebra import LEAST, Block, MergedAttention, attend_slices, differentiable
from megalite.attention.blockwise import Blocking, attend, attend_backward, traced_attend
from megalite.attention.kernels import BlockKernel
from megalite.config import ModelConfig
from megalite.kernels import CausalSoftmax
from megalite.kernels.dropout import dropout
from megalite.kernels.packed_heads import gradients_of
from megalite.tensor_parallel.parameter_spec import LayerContext


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
    """Functions for all positions, masks, head sizes, dtypes, devices, dropout, caps and sinks."""

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
        sinks: Tensor | None = None,
        largest: Tensor | None = None,
        runs: Sequence[range] | None = None,
    ) -> Tensor:
        """Compute attention; see `Kernel`."""

        def of_slice(queries: Tensor, part: CausalSoftmax) -> Tensor:
            if torch.compiler.is_compiling():
                return traced_attend(queries, k, v, part, self.blocking, sinks)
            return differentiable(queries, k, v, _Blockwise(part, self.blocking, largest), sinks)

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
