"""Attention of some queries with some keys, whose results are merged to attention with all keys.

The softmax of a block is over its own keys. Each query's logarithm of the sum of exponentials says what share
the block has in the whole, so the results of several blocks are merged exactly (Milakov and Gimelshein 2018).

Shapes: b microbatch, n query heads, g key/value heads, r = n/g, m queries and e keys of a block, d head size,
d' size of values. A rank has t queries, and u keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import CausalSoftmax, add_sinks_, sinks_gradient
from megalite.kernels.attention_to_keys import AttentionToKeys
from megalite.kernels.dropout import dropout
from megalite.model.blockwise_attention import Blocking
from megalite.torch_private import (
    cpu_attention,
    cpu_attention_backward,
    flash_attention,
    flash_attention_backward,
)


class Block(NamedTuple):
    """Holds the sample positions of queries and keys: consecutive ones, unless slices are joined.

    Positions between two joined slices are those of other ranks.
    """

    queries: range
    keys: range

    @staticmethod
    def around(queries: Sequence[range], keys: Sequence[range]) -> Block:
        """Return the block from the first to the last position of some slices, in their order."""
        return Block(*(range(runs[0].start, runs[-1].stop) for runs in (queries, keys)))

    def seen(self, softmax: CausalSoftmax) -> range:
        """Return the keys that some query may see, as far as the host knows: documents do not narrow it."""
        visible, keys = softmax.visible, self.keys
        first = keys.start if visible.window is None else self.queries.start - visible.window
        last = keys.stop if visible.ends is not None else self.queries.stop
        return range(max(keys.start, first), max(keys.start, first, min(keys.stop, last)))

    def rows_in(self, block: Block) -> slice:
        """Return the slice of another block's queries that are this block's."""
        first = block.queries.start
        return slice(self.queries.start - first, self.queries.stop - first)

    def columns_in(self, block: Block, softmax: CausalSoftmax) -> tuple[range, slice]:
        """Return the keys that some query may see, and their slice of another block's keys."""
        seen, first = self.seen(softmax), block.keys.start
        return seen, slice(seen.start - first, seen.stop - first)

    def parts(self, num_samples_and_heads: int, itemsize: int, blocking: Blocking) -> Iterator[Block]:
        """Yield parts of the queries whose scores stay within the size of `Blocking`, with all keys."""
        most = blocking.num_bytes // max(1, num_samples_and_heads * len(self.keys) * itemsize)
        step = max(32, min(most, -(-len(self.queries) // 2)))
        for first in range(self.queries.start, self.queries.stop, step):
            yield Block(range(first, min(first + step, self.queries.stop)), self.keys)


class Blocks(Protocol):
    """Declares the interface of the functions that compute a block.

    Attributes:
        joins_slices: whether a block has all queries and keys of a step, instead of one slice of each. This
            is for causal attention without other masks: either no key of the block is later than a query,
            or queries and keys are the same tokens in their order.
    """

    joins_slices: bool

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor]:
        """Return the output ``[b, n, m, d']`` and the logarithms of the sums ``[b, n, m]`` in at least fp32.

        A query that sees no key of the block has an output of 0, and a logarithm of -inf.

        Args:
            q, k, v: ``[b, n, m, d]``, ``[b, g, e, d]`` and ``[b, g, e, d']``.
            softmax: bias, visible keys and dropout, by positions in the whole sample.
        """

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: MergedAttention, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values; the other arguments are those of `forward`.

        Args:
            whole: attention of these queries with all keys.
        """


class MergedAttention(NamedTuple):
    """Holds what backward of a block needs: the results of its queries with all keys, and with a sink.

    Attributes:
        grad: gradient of the output, ``[b, n, m, d']``.
        out: the output, ``[b, n, m, d']``.
        log_sums: logarithms of the sums, ``[b, n, m]``.
        deltas: sums of the output times its gradient, ``[b, n, m]``.
    """

    grad: Tensor
    out: Tensor
    log_sums: Tensor
    deltas: Tensor

    def rows(self, rows: slice) -> MergedAttention:
        """Return the results of some of the queries."""
        return MergedAttention(*(x[:, :, rows] for x in self))


class PlainBlocks:
    """Computes blocks in plain PyTorch: all masks, biases, dropout, dtypes and devices."""

    joins_slices = False

    def __init__(self, blocking: Blocking) -> None:
        self.blocking = blocking

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor]:
        """Compute a block; see `Blocks`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=wide)
        log_sums = q.new_empty(q.shape[:3], dtype=wide)
        for part in block.parts(q.shape[0] * q.shape[1], wide.itemsize, self.blocking):
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
        """Compute the gradients of a block, in at least fp32; see `Blocks`."""
        wide = whole.log_sums.dtype
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for part in block.parts(q.shape[0] * q.shape[1], 2 * wide.itemsize, self.blocking):
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


class FlashBlocks:
    """Computes blocks in PyTorch's kernel of FlashAttention.

    There are no windows, ALiBi, caps or dropout, and a block has tokens of one document. In samples of one
    document, one call computes all blocks of a step.
    """

    joins_slices = True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor]:
        """Compute a block; see `Blocks`."""
        is_causal, wide = block.queries == block.keys, torch.promote_types(q.dtype, torch.float32)
        attention = cpu_attention if q.device.type == "cpu" else flash_attention
        out, log_sums, *_ = attention(q, k, v, 0.0, is_causal, scale=softmax.scale)
        return out.to(wide), log_sums.to(wide)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: MergedAttention, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a block, in the dtype of `q`; see `Blocks`."""
        grad, out, log_sums, _ = whole
        is_causal, scale = block.queries == block.keys, softmax.scale
        arguments = grad, q, k, v, out, log_sums.contiguous()
        if q.device.type == "cpu":
            grads = cpu_attention_backward(*arguments, 0.0, is_causal, scale=scale)
        else:  # the empty tensors are of samples without padding, and the state of a dropout that is off
            none, state = q.new_empty(0, dtype=torch.int32), q.new_zeros(2, dtype=torch.uint64)
            lengths = none, none, q.shape[2], k.shape[2]
            grads = flash_attention_backward(
                *arguments, *lengths, 0.0, is_causal, state, q.new_zeros(()), scale=scale
            )
        return grads


class TritonBlocks:
    """Computes blocks in our Triton kernels: all masks, biases and dropout, on a GPU."""

    joins_slices = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor]:
        """Compute a block; see `Blocks`."""
        size = v.shape[3]
        q, k, v = _of_one_size(q, k, v)
        attention = AttentionToKeys(q, k, v, softmax, block.queries.start, block.keys.start)
        out, log_sums = attention.forward()
        return out[..., :size].to(log_sums.dtype), log_sums

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: MergedAttention, block: Block, softmax: CausalSoftmax
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a block, in the dtype of `q`; see `Blocks`."""
        grad, out, queries, keys, values = _of_one_size(whole.grad, whole.out, q, k, v)
        attention = AttentionToKeys(queries, keys, values, softmax, block.queries.start, block.keys.start)
        grad_q, grad_k, grad_v = attention.backward(grad, out, whole.log_sums.contiguous())
        return grad_q[..., : q.shape[3]], grad_k[..., : k.shape[3]], grad_v[..., : v.shape[3]]


class BlockPlan(Protocol):
    """Computes a rank's blocks, and merges their results."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output ``[b, n, t, d']`` without sinks and the logarithms of the sums, at least fp32.

        Args:
            q, k, v: ``[b, n, t, d]``, ``[b, g, u, d]`` and ``[b, g, u, d']``.
        """

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: MergedAttention
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values.

        Args:
            whole: attention of these queries with all keys.
        """


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, sinks: Tensor | None) -> Tensor:
    """Compute attention in the blocks of a plan, with sinks ``[n]`` if there are some, ``[b, n, t, d']``."""
    out: Tensor = _AttentionInBlocks.apply(q, k, v, plan, sinks)
    return out


class _AttentionInBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, sinks: Tensor | None) -> Tensor:
        out, log_sums = plan.forward(q, k, v)
        if sinks is not None:
            add_sinks_(out, log_sums, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums, *(() if sinks is None else (sinks,)))
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (q, k, v, out, log_sums, *of_sinks) = grads, ctx.saved_tensors
        grad_sinks = None
        if of_sinks and ctx.needs_input_grad[4]:
            grad_sinks = sinks_gradient(grad, out, log_sums, of_sinks[0])
        whole = MergedAttention(grad, out, log_sums, (grad.to(log_sums.dtype) * out).sum(-1))
        return *ctx.plan.backward(q, k, v, whole), None, grad_sinks


def _of_one_size(*heads: Tensor) -> list[Tensor]:
    """Return heads ``[b, n, m, d]`` padded with zeros to the largest size."""
    size = max(x.shape[3] for x in heads)
    return [x if x.shape[3] == size else F.pad(x, (0, size - x.shape[3])) for x in heads]


def merge_(out: Tensor, log_sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Merge the results of another block into `out` and `log_sums`."""
    total = torch.logaddexp(log_sums, more_sums)
    finite = total.clamp(min=LEAST)  # of queries that see no key in both blocks
    out.mul_((log_sums - finite).exp_()[..., None]).addcmul_(more, (more_sums - finite).exp_()[..., None])
    log_sums.copy_(total)


LEAST = -1e30
"""Smallest logarithm of a sum, instead of the -inf of a query without keys: -inf - -inf is no number."""


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
