"""Move tokens or rows between the ranks that hold experts, while the ranks compute something else.

A row is a token for one of its experts; see `expert_dispatch`. n rows leave a rank or arrive there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.distributed.axis import Axis
from megalite.distributed.collectives import (
    Pending,
    all_to_all,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from megalite.distributed.overlap_slots import OverlapSlots
from megalite.hardware.host_memory import AsyncValues
from megalite.model.grouped_linear import even_sizes

_OF_EXPERTS = "tokens of experts"
"""Name of the tensors for the report of a hang."""


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
