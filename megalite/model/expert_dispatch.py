"""Bring tokens to the ranks that hold their experts, and the experts' outputs back.

Without axes of their own, experts are cut over tp: each rank has a slice of the width of every expert, as of
an MLP, and gets all tokens. Otherwise an expert is on etp of the ep x etp ranks of a group, and a token is
sent to those of its experts. The outputs of the etp ranks are partial, and the token's rank adds them up.

Shapes: s sequence, b microbatch, t = s b tokens of the rank, h hidden size, k experts of a token. A row is a
token for one of its experts, or for one rank's slice of it; n rows are for the experts of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.distributed.axis import AxisSet
from megalite.distributed.collectives import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    start_all_gather,
)
from megalite.model.expert_exchange import ExchangeSizes
from megalite.tensor_parallel.parameter_spec import LayerContext


class Dispatched(NamedTuple):
    """Holds the rows for a rank's experts, those of each expert together.

    Attributes:
        x: ``[n, h]``.
        weights: of the rows in their token's output, ``[n]``.
        ends: number of rows of each of the rank's experts and the experts before it, int32.
        combine: maps outputs of the rows, ``[n, h]``, weighted and partial over the ranks that share an
            expert's width, to the tokens' outputs in the shape of the layer's input.
    """

    x: Tensor
    weights: Tensor
    ends: Tensor
    combine: Callable[[Tensor], Tensor]


def start_dispatch(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    context: LayerContext,
    *,
    capacity_factor: float | None = None,
) -> Callable[[], Dispatched]:
    """Start to bring the rank's tokens to their experts; return a function that waits for the result.

    Messages between ranks of the axes of experts overlap with what the caller computes in between.

    Args:
        x: ``[s, b, h]``, or ``[s/tp, b, h]`` if sequence parallel.
        weights: of each of a token's experts, ``[s, b, k]``.
        experts: their numbers, ``[s, b, k]``; `num_experts` for an expert that drops the token.
        capacity_factor: most tokens of an expert, relative to the mean, if experts can drop tokens.
    """
    axes = context.expert_axes
    if axes is None:
        return partial(_dispatch_within_tp, x, weights, experts, num_experts, context, capacity_factor)
    return _start_to_holders(x, weights, experts, num_experts, axes, capacity_factor, context)


def _dispatch_within_tp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    context: LayerContext,
    capacity_factor: float | None,
) -> Dispatched:
    """Order the tokens of all tensor-parallel ranks, each of which has a slice of every expert."""
    tp, is_cut = context.tp, context.sequence_parallel
    use = gather_from_sequence_parallel if is_cut else copy_to_tensor_parallel
    add_up = (
        reduce_scatter_to_sequence_parallel if is_cut else partial(reduce_from_tensor_parallel, in_place=True)
    )
    x, weights = use(x, tp), use(weights, tp)
    if is_cut and tp.size > 1:
        experts = start_all_gather(experts, tp).wait()
    rows = Rows.of(experts.flatten(0, 1), num_experts, capacity_factor)

    def combine(y: Tensor) -> Tensor:
        return add_up(rows.sums_of_tokens(y).view_as(x), tp)

    return Dispatched(rows.of_tokens(x.flatten(0, 1)), weights.flatten()[rows.order], rows.ends, combine)


def _start_to_holders(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    axes: AxisSet,
    capacity_factor: float | None,
    context: LayerContext,
) -> Callable[[], Dispatched]:
    """Start to send each token to the ranks that hold its experts."""
    ep, etp, holders = axes.axes["ep"], axes.axes["etp"], axes.over("ep", "etp")
    num_own, num_copies = num_experts // ep.size, etp.size
    # Rows are ordered by the rank that gets them, and then by its expert. Dropped rows come last.
    owner, own = experts.div(num_own, rounding_mode="floor"), experts % num_own
    copies = torch.arange(num_copies, device=experts.device)
    keys = (owner.unsqueeze(-1) * num_copies + copies) * num_own + own.unsqueeze(-1)  # [s, b, k, etp]
    sent = Rows.of(keys.flatten(2).flatten(0, 1), num_experts * num_copies, capacity_factor)
    counts = sent.ends.diff(prepend=sent.ends.new_zeros(1))  # of each rank's experts
    sizes = ExchangeSizes(counts.view(holders.size, num_own), holders)
    # The GPU copies the rows while the host waits for the sizes.
    rows = sent.of_tokens(x.flatten(0, 1))
    of_rows = weights.unsqueeze(-1).expand(*weights.shape, num_copies).flatten()[sent.order]
    of_weights = sizes.read(len(sent.order), context.moe_imbalance)
    of_hidden = of_weights._replace(turns=context.turns)
    wait_for_weights, wait_for_rows = of_weights.start(of_rows.unsqueeze(1)), of_hidden.start(rows)

    def wait() -> Dispatched:
        rows, of_rows = wait_for_rows(), wait_for_weights().squeeze(1)
        numbers = torch.arange(num_own, device=x.device).repeat(holders.size)
        numbers = numbers.repeat_interleave(sizes.received.flatten(), output_size=rows.shape[0])
        ordered = Rows.of(numbers.unsqueeze(1), num_own)

        def combine(y: Tensor) -> Tensor:
            returned = of_hidden.reverse().run(ordered.sums_of_tokens(y))
            return sent.sums_of_tokens(returned).view_as(x)

        return Dispatched(ordered.of_tokens(rows), of_rows[ordered.order], ordered.ends, combine)

    return wait


class Rows(NamedTuple):
    """Describes an order of rows in which each expert's are consecutive; each token has k rows.

    Attributes:
        order: row of the token's order, ``token * k + i``, by its place in the experts' order: ``[t k]``, or
            ``[n]`` without dropped rows.
        places: the inverse, ``[t k]``, or the places of the rows that are not dropped, ``[n]``.
        ends: number of rows of each expert and the experts before it, int32 ``[e]``.
        num_selected: k.
        starts: number of rows of the tokens before each token, ``[t]``; None if no rows are dropped.
    """

    order: Tensor
    places: Tensor
    ends: Tensor
    num_selected: int
    starts: Tensor | None = None

    @staticmethod
    def of(experts: Tensor, num_experts: int, capacity_factor: float | None = None) -> Rows:
        """Order the rows of tokens with these experts, ``[t, k]``, without a read by the host.

        Args:
            capacity_factor: drop the rows of numbers from `num_experts` on; the host then reads how many are
                left. Without values, the factor says it: as many as if tokens were even. None to drop none.
        """
        of_rows, order = experts.flatten().sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        numbers = torch.arange(num_experts, device=order.device)
        ends = torch.searchsorted(of_rows, numbers, right=True, out_int32=True)
        if capacity_factor is None:
            return Rows(order, places, ends, experts.shape[1])
        is_kept = experts < num_experts
        of_tokens = is_kept.sum(1)
        if experts.is_meta:
            places = places[: math.ceil(min(1.0, capacity_factor) * len(places))]
        else:
            places = places[is_kept.flatten()]
        return Rows(order[: len(places)], places, ends, experts.shape[1], of_tokens.cumsum(0) - of_tokens)

    def of_tokens(self, x: Tensor) -> Tensor:
        """Copy each token of ``[t, h]`` to its rows, ``[t k, h]``; backward sums its rows' gradients."""
        rows: Tensor = _Copies.apply(x, self)
        return rows

    def sums_of_tokens(self, y: Tensor) -> Tensor:
        """Sum each token's rows of ``[t k, h]`` to ``[t, h]``; backward copies its gradient to its rows."""
        sums: Tensor = _Sums.apply(y, self)
        return sums


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return x[rows.order // rows.num_selected]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sums.apply(grad, ctx.rows), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        if rows.starts is not None:
            return F.embedding_bag(rows.places, y, rows.starts, mode="sum")
        return F.embedding_bag(rows.places.view(-1, rows.num_selected), y, mode="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Copies.apply(grad, ctx.rows), None
