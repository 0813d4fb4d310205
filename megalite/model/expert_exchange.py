"""Exchange rows between the ranks that hold experts, while the ranks compute something else.

A row is a token for one of its experts; see `expert_dispatch`. n rows leave a rank or arrive there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.distributed.axis import Axis
from megalite.distributed.collectives import Pending, all_to_all, start_all_to_all
from megalite.distributed.turns import Turns
from megalite.hardware.async_values import AsyncValues
from megalite.model.grouped_linear import even_sizes


class Exchange(NamedTuple):
    """Describes an all-to-all of rows.

    Attributes:
        send, receive: number of rows to each rank of the axis, and from each rank.
        turns: lets another action of the pipeline run before a wait for rows; None without.
    """

    send: Sequence[int]
    receive: Sequence[int]
    axis: Axis
    turns: Turns | None = None

    def reverse(self) -> Exchange:
        """Return the exchange that brings the rows back."""
        return self._replace(send=self.receive, receive=self.send)

    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to exchange the rows of ``[n, m]``; return a function that waits for the received rows.

        What the caller computes in between overlaps with the messages, and so does its backward: autograd
        runs nodes that are ready in the reverse order of forward. It starts to send the rows' gradients back,
        then computes the gradients of what the caller computed, and then waits.
        """
        if self.axis.size == 1:
            return lambda: x
        messages = _RowMessages(self)
        sent = _Start.apply(x, messages)
        return lambda: _Finish.apply(sent, messages)

    def run(self, x: Tensor) -> Tensor:
        """Exchange the rows of ``[n, m]``; backward exchanges their gradients in the other direction."""
        return self.start(x)()


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
        return Exchange(send, receive, self._axis)


class _RowMessages:
    """Holds the messages of an exchange that are in flight: of rows in forward, of gradients in backward."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.pending: Pending | None = None

    def start(self, x: Tensor, exchange: Exchange) -> Tensor:
        """Start to exchange ``[n, m]``, and return the rows, which have not arrived."""
        width = x.shape[1]
        send, receive = ([count * width for count in counts] for counts in (exchange.send, exchange.receive))
        self.pending = start_all_to_all(x.flatten(), send, receive, exchange.axis, of="tokens of experts")
        return self.pending.tensor.view(-1, width)

    def wait(self) -> Tensor:
        """Wait for the rows, and return them as one dim."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        if self.exchange.turns is not None:
            self.exchange.turns.yield_turn()
        return pending.wait()


class _Start(torch.autograd.Function):
    """Starts an exchange and returns its input; backward waits for the gradients that `_Finish` exchanges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: _RowMessages) -> Tensor:
        ctx.messages = messages
        messages.start(x, messages.exchange)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.messages.wait().view_as(grad), None


class _Finish(torch.autograd.Function):
    """Waits for the rows; backward starts to exchange their gradients in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: _RowMessages) -> Tensor:
        ctx.messages = messages
        return messages.wait().view(-1, x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        messages: _RowMessages = ctx.messages
        return messages.start(grad.contiguous(), messages.exchange.reverse()), None
