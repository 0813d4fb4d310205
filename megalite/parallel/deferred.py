"""What becomes of weights' gradients that autograd does not add up itself.

They are put off from backward to a later piece of work (zero bubble, Qi et al. 2023), or added to somebody's
sums by the product that makes them, or both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Product(NamedTuple):
    """A weight's gradient that is still to be computed.

    Attributes:
        compute: gives the gradient, or nothing where it has added it to the weight's sum.
    """

    weight: nn.Parameter
    compute: Callable[[], Tensor | None]


class GradientSum(NamedTuple):
    """Where the gradients of one weight add up.

    Attributes:
        tensor: the sum, in the weight's shape, as wide as the weight's dtype or wider.
        arrived: to be called once a gradient has been added that autograd knows nothing of.
    """

    tensor: Callable[[], Tensor]
    arrived: Callable[[], None]


class WeightGradients:
    """Where the linear layers of a rank leave their weights' gradients, or the products that make them.

    The stage before waits for this one's input gradient alone: the weights' gradients can fill time in which
    the rank would wait.

    Attributes:
        are_deferred: whether the schedule runs them apart. A layer then keeps its weight out of autograd's
            graph (an edge without a gradient would still fire the weight's hooks) and calls `add`.
        are_fused: whether products may add to `sums`. Where they are not deferred, the edge without a
            gradient is there, and its hooks tell that the microbatch is through with the weight.
        sums: of the gradients of this iteration, by weight; none outside of one, and none where nobody keeps
            them: a weight's gradient is then autograd's to add up.
    """

    def __init__(self, are_deferred: bool = False, are_fused: bool = False) -> None:
        self.are_deferred = are_deferred
        self.are_fused = are_fused
        self.sums: Mapping[nn.Parameter, GradientSum] = {}
        self._pending: list[Product] | None = None

    def add(self, weight: nn.Parameter, compute: Callable[[], Tensor | None]) -> None:
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
        with torch.no_grad():  # the saved input has a graph, which the sum must not join
            gradient = compute()
        if gradient is not None:
            torch.autograd.backward(weight, gradient)
