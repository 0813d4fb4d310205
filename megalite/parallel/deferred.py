"""Weights' gradients put off from backward to a later piece of work (zero bubble, Qi et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Product(NamedTuple):
    """A weight's gradient that is still to be computed."""

    weight: nn.Parameter
    compute: Callable[[], Tensor]


class WeightGradients:
    """Where the linear layers of a rank leave the products that make their weights' gradients.

    The stage before waits for this one's input gradient alone: the weights' gradients can fill time in which
    the rank would wait.

    Attributes:
        are_deferred: whether the schedule runs them apart. A layer then keeps its weight out of autograd's
            graph (an edge without a gradient would still fire the weight's hooks) and calls `add`.
    """

    def __init__(self, are_deferred: bool = False) -> None:
        self.are_deferred = are_deferred
        self._pending: list[Product] | None = None

    def add(self, weight: nn.Parameter, compute: Callable[[], Tensor]) -> None:
        """Keeps a product for later; called in the backward pass of a `collected` block."""
        assert self._pending is not None, "a backward pass outside of collected()"
        self._pending.append(Product(weight, compute))

    @contextmanager
    def collected(self) -> Iterator[list[Product]]:
        """Collects the products of the backward pass in this block."""
        assert self._pending is None, "collected() blocks do not nest"
        pending: list[Product] = []
        self._pending = pending
        try:
            yield pending
        finally:
            self._pending = None


def run_deferred(pending: Iterable[Product]) -> None:
    """Computes and accumulates what was put off, in the order in which it came.

    The accumulation is autograd's own, hooks included: nobody after it can tell the difference.
    """
    for weight, compute in pending:
        torch.autograd.backward(weight, compute())
