"""The algebra of attention on pairs (out, lse), the same for every kernel: slices, merges, gradients.

A kernel computes attention of some queries with some keys. The softmax is over these keys alone, and the
logarithm of each query's sum of exponentials (lse, `log_sums`) says what share they have in the whole.
Results with different keys are therefore merged exactly (Milakov and Gimelshein 2018), and other terms of the
sum are added last.

Shapes: b microbatch, n query heads, g key/value heads, m queries and e keys of a block, d head size, d' size
of values. A rank has t queries, and u keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.kernels import CausalSoftmax
from megalite.kernels.softmax import finish_, parameter_gradient

LEAST = -1e30
"""Smallest logarithm of a sum, instead of the -inf of a query without keys: -inf - -inf is no number."""


class Block(NamedTuple):
    """Positions of queries and keys in the sample: consecutive ones, unless slices are joined.

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


def merge_(out: Tensor, log_sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Merge attention of the same queries with other keys into `out` and `log_sums`."""
    total = torch.logaddexp(log_sums, more_sums)
    finite = total.clamp(min=LEAST)  # of queries that see no key in both blocks
    out.mul_((log_sums - finite).exp_()[..., None]).addcmul_(more, (more_sums - finite).exp_()[..., None])
    log_sums.copy_(total)


def attend_slices(
    q: Tensor,
    softmax: CausalSoftmax,
    runs: Sequence[range] | None,
    attend: Callable[[Tensor, CausalSoftmax], Tensor],
) -> Tensor:
    """Compute attention of the queries ``[b, n, t, d]``, one slice after another if they are slices.

    Args:
        runs: positions of the slices; None if the queries are consecutive.
        attend: maps consecutive queries, the first of which is at `VisibleKeys.first`, to their output.
    """
    if runs is None:
        return attend(q, softmax)
    slices = zip(q.split([len(run) for run in runs], dim=2), runs, strict=True)
    visible = softmax.visible
    outs = (attend(x, softmax._replace(visible=visible._replace(first=run.start))) for x, run in slices)
    return torch.cat([x.permute(2, 0, 1, 3) for x in outs]).permute(1, 2, 0, 3)  # tokens outermost


class Computation(Protocol):
    """Declares the interface of attention of queries with all keys that they see, without autograd.

    Attributes:
        softmax: scale, bias, visible keys, dropout and parameters.
        keeps_output: whether `backward` needs the output.
    """

    @property
    def softmax(self) -> CausalSoftmax: ...

    @property
    def keeps_output(self) -> bool: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output ``[b, n, t, d']`` and the logarithms of the sums over keys, at least fp32.

        Args:
            q, k, v: ``[b, n, t, d]``, ``[b, g, u, d]`` and ``[b, g, u, d']``.
        """

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values.

        Args:
            grad: gradient of the output.
            out, log_sums: the results of the whole softmax; the output is None if not `keeps_output`.
        """


def differentiable(q: Tensor, k: Tensor, v: Tensor, computation: Computation) -> Tensor:
    """Compute attention by the whole softmax, ``[b, n, t, d']``."""
    out: Tensor = _Attention.apply(q, k, v, computation, *computation.softmax.parameters)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, computation: Computation, *parameters: Tensor
    ) -> Tensor:
        out, log_sums = computation.forward(q, k, v)
        finish_(out, log_sums, *parameters)
        out = out.to(q.dtype)
        keeps_output = computation.keeps_output or any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(q, k, v, out if keeps_output else None, log_sums, *parameters)
        ctx.computation = computation
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (q, k, v, out, log_sums, *parameters) = grads, ctx.saved_tensors
        of_parameters = [
            parameter_gradient(grad, out, log_sums, parameter) if is_needed else None
            for parameter, is_needed in zip(parameters, ctx.needs_input_grad[4:], strict=True)
        ]
        return *ctx.computation.backward(grad, q, k, v, out, log_sums), None, *of_parameters


class MergedAttention(NamedTuple):
    """Results of a block's queries by the whole softmax, which the block's backward needs.

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
