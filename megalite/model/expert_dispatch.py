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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.distributed.axis import Axis
from megalite.distributed.collectives import (
    OverlapSlots,
    Pending,
    all_to_all,
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from megalite.kernels import copy_to_rows, sum_rows
from megalite.model.grouped_linear import even_sizes
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.utils.hardware.host_memory import AsyncValues

_OF_EXPERTS = "tokens of experts"
"""Name of the tensors for the report of a hang."""


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


@dataclass(frozen=True)
class Transfer(ABC):
    """Moves a tensor between the ranks of an axis, and its gradient back.

    Attributes:
        overlap_slots: lets another action of the pipeline run before a wait for the tensor; None without.
    """

    axis: Axis
    overlap_slots: OverlapSlots | None = None

    @abstractmethod
    def begin(self, x: Tensor) -> Pending:
        """Start to move `x`, without autograd."""

    @abstractmethod
    def reverse(self) -> Transfer:
        """Return the transfer of the gradient, which also brings the experts' outputs back."""

    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to move `x`; return a function that waits for what the rank receives.

        What the caller computes in between overlaps with the messages, and so does its backward: autograd
        runs nodes that are ready in the reverse order of forward. It starts to send the gradient back, then
        computes the gradients of what the caller computed, and then waits.
        """
        if self.axis.size == 1:
            return lambda: x
        messages = _MessagesInFlight(self)
        sent = _Start.apply(x, messages)
        return lambda: _Finish.apply(sent, messages)

    def run(self, x: Tensor) -> Tensor:
        """Move `x`; backward moves its gradient in the other direction."""
        return self.start(x)()


@dataclass(frozen=True, kw_only=True)
class Exchange(Transfer):
    """Exchanges rows ``[n, m]`` by an all-to-all.

    Attributes:
        send, receive: number of rows to each rank of the axis, and from each rank.
    """

    send: Sequence[int]
    receive: Sequence[int]

    def begin(self, x: Tensor) -> Pending:
        width = x.shape[1]
        send, receive = ([count * width for count in counts] for counts in (self.send, self.receive))
        pending = start_all_to_all(x.flatten(), send, receive, self.axis, of=_OF_EXPERTS)
        return pending._replace(tensor=pending.tensor.view(-1, width))

    def reverse(self) -> Exchange:
        return replace(self, send=self.receive, receive=self.send)


@dataclass(frozen=True)
class TokenGather(Transfer):
    """Gathers the tokens ``[s, ...]`` of all ranks along the first dim."""

    def begin(self, x: Tensor) -> Pending:
        return start_all_gather(x, self.axis, of=_OF_EXPERTS)

    def reverse(self) -> TokenReduceScatter:
        return TokenReduceScatter(self.axis, self.overlap_slots)


@dataclass(frozen=True)
class TokenReduceScatter(Transfer):
    """Sums the ranks' ``[size s, ...]``, and leaves each rank its own tokens."""

    def begin(self, x: Tensor) -> Pending:
        return start_reduce_scatter(x, self.axis, of=_OF_EXPERTS)

    def reverse(self) -> TokenGather:
        return TokenGather(self.axis, self.overlap_slots)


class ExchangeSizes:
    """Exchanges how many rows each rank sends, and copies the sums to the host, which an all-to-all needs.

    On a GPU, the host can queue other work while the copy runs.

    Attributes:
        received: number of rows from each rank for each of the rank's experts, ``[ranks, own experts]``.
    """

    def __init__(self, counts: Tensor, axis: Axis) -> None:
        """Start the copy.

        Args:
            counts: number of rows for each expert of each rank, ``[ranks, experts of a rank]``.
        """
        sizes = [counts.shape[1]] * axis.size
        self.received = all_to_all(counts.flatten(), sizes, sizes, axis, of="rows of experts").view_as(counts)
        self._axis = axis
        self._on_host = AsyncValues(torch.cat((counts.sum(1), self.received.sum(1))))

    def read(self, num_rows: int, imbalance: float) -> Exchange:
        """Wait for the copy, and return the exchange of the rows.

        Args:
            num_rows: rows that the rank sends.
            imbalance: rows that the rank receives, relative to those that it sends, if they have no values.
        """
        if self.received.is_meta:  # without values: as even as possible
            send, receive = (even_sizes(n, self._axis.size) for n in (num_rows, round(imbalance * num_rows)))
        else:
            sizes = self._on_host.read()
            send, receive = sizes[: self._axis.size], sizes[self._axis.size :]
        return Exchange(self._axis, send=send, receive=receive)


class _MessagesInFlight:
    """Messages of a transfer that are in flight: of `x` in forward, of its gradient in backward."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.pending: Pending | None = None

    def start(self, x: Tensor, transfer: Transfer) -> Tensor:
        """Start to move `x`, and return what the rank receives, which has not arrived."""
        self.pending = transfer.begin(x)
        return self.pending.tensor

    def wait(self) -> Tensor:
        """Wait for what the rank receives, and return it."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        if self.transfer.overlap_slots is not None:
            self.transfer.overlap_slots.yield_slot()
        return pending.wait()


class _Start(torch.autograd.Function):
    """Starts a transfer and returns its input; backward waits for the gradient that `_Finish` moves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: _MessagesInFlight) -> Tensor:
        ctx.messages = messages
        messages.start(x, messages.transfer)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.messages.wait(), None


class _Finish(torch.autograd.Function):
    """Waits for what the rank receives; backward starts to move the gradient in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: _MessagesInFlight) -> Tensor:
        ctx.messages = messages
        return messages.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        messages: _MessagesInFlight = ctx.messages
        return messages.start(grad.contiguous(), messages.transfer.reverse()), None
