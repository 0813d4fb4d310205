"""Bring tokens to the ranks that hold their experts, and the experts' outputs back.

Without axes of their own, experts are cut over tp: each rank has a slice of the width of every expert, as of
an MLP, and gets all tokens. Otherwise an expert is on etp of the ep x etp ranks of a group, and a token is
sent to those of its experts, or to all of the ranks. The outputs of the etp ranks are partial, and add up to
the token's.

Shapes: s sequence, b microbatch, t = s b tokens of the rank, h hidden size, k experts of a token. A row is a
token for one of its experts, or for one rank's slice of it; n rows are for the experts of a rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.distributed.collectives import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    start_all_gather,
)
from megalite.kernels import copy_to_rows, sum_rows
from megalite.model.expert_exchange import ExchangeSizes, TokenGather
from megalite.tensor_parallel.parameter_spec import LayerContext


class Dispatched(NamedTuple):
    """Rows for a rank's experts, those of each expert together.

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


class Dispatcher(ABC):
    """Brings tokens to their experts, and the experts' outputs back.

    A layer has the one that `dispatcher_for` builds. To exchange rows by another library, assign a subclass
    of your own to `MixtureOfExperts.dispatcher`.

    Args:
        num_experts: number of experts on all ranks.
    """

    def __init__(self, num_experts: int, context: LayerContext) -> None:
        self.num_experts = num_experts
        self.context = context

    @abstractmethod
    def start(
        self, x: Tensor, weights: Tensor, experts: Tensor, capacity_factor: float | None = None
    ) -> Callable[[], Dispatched]:
        """Start to bring the rank's tokens to their experts; return a function that waits for the result.

        Messages overlap with what the caller computes in between. Both x and weights need gradients.

        Args:
            x: ``[s, b, h]``, or ``[s/tp, b, h]`` if sequence parallel.
            weights: of each of a token's experts, ``[s, b, k]``.
            experts: their numbers, ``[s, b, k]``; `num_experts` for an expert that drops the token.
            capacity_factor: most tokens of an expert, relative to the mean, if experts can drop tokens.
        """


class SlicedExpertsDispatcher(Dispatcher):
    """Orders the tokens of all tensor-parallel ranks, each of which has a slice of every expert."""

    def start(
        self, x: Tensor, weights: Tensor, experts: Tensor, capacity_factor: float | None = None
    ) -> Callable[[], Dispatched]:
        return partial(self._gather, x, weights, experts, capacity_factor)

    def _gather(
        self, x: Tensor, weights: Tensor, experts: Tensor, capacity_factor: float | None
    ) -> Dispatched:
        tp, is_cut = self.context.tp, self.context.sequence_parallel
        use = gather_from_sequence_parallel if is_cut else copy_to_tensor_parallel
        add_up = (
            reduce_scatter_to_sequence_parallel
            if is_cut
            else partial(reduce_from_tensor_parallel, in_place=True)
        )
        x, weights = use(x, tp), use(weights, tp)
        if is_cut:
            experts = start_all_gather(experts, tp).wait()
        rows = Rows.of(experts.flatten(0, 1), self.num_experts, kept_share(capacity_factor))

        def combine(y: Tensor) -> Tensor:
            return add_up(rows.sums_of_tokens(y).view_as(x), tp)

        return Dispatched(rows.of_tokens(x.flatten(0, 1)), weights.flatten()[rows.order], rows.ends, combine)


class AllToAllDispatcher(Dispatcher):
    """Sends each token to the ranks that hold its experts, by the axes of experts."""

    def start(
        self, x: Tensor, weights: Tensor, experts: Tensor, capacity_factor: float | None = None
    ) -> Callable[[], Dispatched]:
        axes = self.context.expert_axes
        assert axes is not None
        ep, etp, holders = axes.axes["ep"], axes.axes["etp"], axes.over("ep", "etp")
        num_own, num_copies = self.num_experts // ep.size, etp.size
        # Rows are ordered by the rank that gets them, and then by its expert. Dropped rows come last.
        owner, own = experts.div(num_own, rounding_mode="floor"), experts % num_own
        copies = torch.arange(num_copies, device=experts.device)
        keys = (owner.unsqueeze(-1) * num_copies + copies) * num_own + own.unsqueeze(-1)  # [s, b, k, etp]
        num_parts = self.num_experts * num_copies
        sent = Rows.of(keys.flatten(2).flatten(0, 1), num_parts, kept_share(capacity_factor))
        counts = sent.ends.diff(prepend=sent.ends.new_zeros(1))  # of each rank's experts
        sizes = ExchangeSizes(counts.view(holders.size, num_own), holders)
        # The GPU copies the rows while the host waits for the sizes.
        rows = sent.of_tokens(x.flatten(0, 1))
        of_rows = weights.unsqueeze(-1).expand(*weights.shape, num_copies).flatten()[sent.order]
        of_weights = sizes.read(len(sent.order), self.context.moe_imbalance)
        of_hidden = replace(of_weights, overlap_slots=self.context.overlap_slots)
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


class AllGatherDispatcher(Dispatcher):
    """Gathers the tokens of all ranks that hold experts, and copies those of the rank's own experts.

    The sizes of the messages do not depend on the router. The messages are smaller than those of an
    all-to-all if the ranks are fewer than the rows of a token, k etp.
    """

    def start(
        self, x: Tensor, weights: Tensor, experts: Tensor, capacity_factor: float | None = None
    ) -> Callable[[], Dispatched]:
        axes = self.context.expert_axes
        assert axes is not None
        ep, holders = axes.axes["ep"], axes.over("ep", "etp")
        num_own = self.num_experts // ep.size
        of_hidden = TokenGather(holders, self.context.overlap_slots)
        numbers = start_all_gather(experts, holders, of="numbers of experts")
        wait_for_weights, wait_for_tokens = TokenGather(holders).start(weights), of_hidden.start(x)

        def wait() -> Dispatched:
            tokens, of_rows = wait_for_tokens(), wait_for_weights()
            shape, own = tokens.shape, numbers.wait() - ep.rank * num_own
            own = own.masked_fill((own < 0) | (own >= num_own), num_own)
            rows = Rows.of(own.flatten(0, 1), num_own, self._own_share(ep.size, capacity_factor))

            def combine(y: Tensor) -> Tensor:
                return of_hidden.reverse().run(rows.sums_of_tokens(y).view(shape))

            x = rows.of_tokens(tokens.flatten(0, 1))
            return Dispatched(x, of_rows.flatten()[rows.order], rows.ends, combine)

        return wait

    def _own_share(self, num_ranks: int, capacity_factor: float | None) -> float | None:
        """Return the share of all rows that the experts of one of the ranks keep; None for all of them."""
        kept = kept_share(capacity_factor)
        if num_ranks == 1:
            return kept
        return min(1.0, self.context.moe_imbalance / num_ranks) * (1.0 if kept is None else kept)


DISPATCHERS: Mapping[str, type[Dispatcher]] = {
    "alltoall": AllToAllDispatcher,
    "allgather": AllGatherDispatcher,
}
"""The dispatchers for experts on axes of their own, by --moe-token-dispatcher-type."""


def dispatcher_for(num_experts: int, context: LayerContext) -> Dispatcher:
    """Return the dispatcher for the way in which a layout cuts experts."""
    if context.expert_axes is None:
        return SlicedExpertsDispatcher(num_experts, context)
    return DISPATCHERS[context.moe_token_dispatcher_type](num_experts, context)


def kept_share(capacity_factor: float | None) -> float | None:
    """Return the share of the rows that even tokens keep with a capacity; None without one."""
    return None if capacity_factor is None else min(1.0, capacity_factor)


class Rows(NamedTuple):
    """Order of rows in which each expert's are consecutive; each token has k rows.

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
    def of(experts: Tensor, num_experts: int, share: float | None = None) -> Rows:
        """Order the rows of tokens with these experts, ``[t, k]``, without a read by the host.

        Args:
            share: drop the rows of numbers from `num_experts` on; the host then reads how many are left.
                Without values, it is this share of all rows. None to drop none.
        """
        of_rows, order = experts.flatten().sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        numbers = torch.arange(num_experts, device=order.device)
        ends = torch.searchsorted(of_rows, numbers, right=True, out_int32=True)
        if share is None:
            return Rows(order, places, ends, experts.shape[1])
        is_kept = experts < num_experts
        of_tokens = is_kept.sum(1)
        places = places[slice(math.ceil(share * len(places))) if experts.is_meta else is_kept.flatten()]
        return Rows(order[: len(places)], places, ends, experts.shape[1], of_tokens.cumsum(0) - of_tokens)

    def of_tokens(self, x: Tensor) -> Tensor:
        """Copy each token of ``[t, h]`` to its rows, ``[n, h]``; backward sums its rows' gradients."""
        return copy_to_rows(x, self.places, self.starts, self.num_selected)

    def sums_of_tokens(self, y: Tensor) -> Tensor:
        """Sum each token's rows of ``[n, h]`` to ``[t, h]``; backward copies its gradient to its rows."""
        return sum_rows(y, self.places, self.starts, self.num_selected)


def capacity_of(num_choices: Tensor, num_experts: int, factor: float) -> Tensor:
    """Return the largest number of tokens of an expert in a sample: `factor` times the mean, rounded up.

    Args:
        num_choices: int64, choices of the sample's tokens.
    """
    return (num_choices.double() * factor / num_experts).ceil().long()


def within_capacity(experts: Tensor, priorities: Tensor, num_experts: int, factor: float) -> Tensor:
    """Return which choices are within their expert's capacity, bool ``[S, b, k]``.

    An expert takes the choices with the highest priorities. Of equal ones, earlier positions come first.

    Args:
        experts: ``[S, b, k]``, different for each token; e for those of padding, which has no part in it.
        priorities: ``[S, b, k]``.
        factor: see `capacity_of`.
    """
    length, num_samples, topk = experts.shape
    # [b, S k], first ordered by priority, then by expert.
    of_samples, values = (each.transpose(0, 1).flatten(1) for each in (experts, priorities))
    order = values.sort(dim=1, descending=True, stable=True).indices
    by_expert = of_samples.gather(1, order).sort(dim=1, stable=True)
    order = order.gather(1, by_expert.indices)
    numbers = torch.arange(num_experts + 1, device=experts.device).expand(num_samples, -1).contiguous()
    # Of each expert's choices, and of padding's, [b, e + 1].
    starts = torch.searchsorted(by_expert.values.contiguous(), numbers)
    capacity = capacity_of(starts[:, -1:], num_experts, factor)  # [b, 1]
    places = torch.arange(length * topk, device=experts.device) - starts.gather(1, by_expert.values)
    is_kept = torch.empty_like(places, dtype=torch.bool).scatter_(1, order, places < capacity)
    return is_kept.unflatten(1, (length, topk)).transpose(0, 1)
