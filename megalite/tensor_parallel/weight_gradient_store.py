"""Weight gradients outside of autograd: their accumulation buffer, and the store of deferred gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class MainGrad(NamedTuple):
    """Access to the buffer that accumulates a weight's gradient. The optimizer sets `weight.main_grad`.

    Attributes:
        claim: returns the buffer, in the weight's shape and in its dtype or a wider one, and whether to
            overwrite it (for the first gradient of an iteration) or to add. The caller must do so at once.
        on_added: call after adding a gradient for which autograd runs no hook.
        fixed_buffer: the buffer, if its memory stays the same during training; else None. With it, a bool in
            host memory: whether a graph of torch.compile adds to it. The first one overwrites it and sets
            the bool.
    """

    claim: Callable[[], tuple[Tensor, bool]]
    on_added: Callable[[], None]
    fixed_buffer: tuple[Tensor, Tensor] | None


def main_grad_of(weight: nn.Parameter) -> MainGrad | None:
    """Return the weight's `main_grad`, or None if autograd accumulates its gradient."""
    return getattr(weight, "main_grad", None)


class WeightGradient(NamedTuple):
    """Weight gradient that is computed later.

    Attributes:
        compute: returns the gradient, or None if it was added to the weight's `main_grad`.
    """

    weight: nn.Parameter
    compute: Callable[[], Tensor | None]


class WeightGradientStore:
    """Weight gradients to compute later in backward: W of zero bubble (Qi et al. 2023, section 2).

    The previous stage only waits for the input's gradient, so a rank computes the weights' gradients while it
    would otherwise be idle.
    """

    def __init__(self) -> None:
        self._stored: list[WeightGradient] | None = None

    def put(self, weight: nn.Parameter, compute: Callable[[], Tensor | None]) -> None:
        """Store a gradient; layers call this in a backward pass inside `collect`."""
        assert self._stored is not None, "a backward pass outside of collect()"
        self._stored.append(WeightGradient(weight, compute))

    @contextmanager
    def collect(self) -> Iterator[list[WeightGradient]]:
        """Collect the gradients that layers store during the backward pass in this block."""
        assert self._stored is None, "collect() blocks do not nest"
        stored: list[WeightGradient] = []
        self._stored = stored
        try:
            yield stored
        finally:
            self._stored = None


def run_stored(gradients: Iterable[WeightGradient]) -> None:
    """Compute and accumulate stored gradients in order.

    Autograd accumulates them and runs the weights' hooks as in an ordinary backward pass.
    """
    for weight, compute in gradients:
        with torch.no_grad():  # the saved input requires grad; the gradient must not
            gradient = compute()
        if gradient is not None:
            torch.autograd.backward(weight, gradient)
