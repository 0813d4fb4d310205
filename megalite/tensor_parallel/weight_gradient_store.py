"""Weight gradients outside of autograd: the buffer that accumulates them, and the store of deferred ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class MainGrad(NamedTuple):
    """Give access to the buffer that accumulates a weight's gradient: the optimizer sets `weight.main_grad`.

    Attributes:
        claim: returns the buffer, in the weight's shape, in the weight's dtype or a wider one, and whether a
            gradient overwrites it, as the first of an iteration, or is added. The caller does so at once.
        on_added: call after adding a gradient for which autograd runs no hook.
        fixed_buffer: the buffer, if it is the same memory in all of training; else None. A graph of
            torch.compile adds to it.
    """

    claim: Callable[[], tuple[Tensor, bool]]
    on_added: Callable[[], None]
    fixed_buffer: Tensor | None


def main_grad_of(weight: nn.Parameter) -> MainGrad | None:
    """Return the weight's `main_grad`, or None if autograd accumulates its gradient."""
    return getattr(weight, "main_grad", None)


class WeightGradient(NamedTuple):
    """Hold a weight gradient that is computed later.

    Attributes:
        compute: returns the gradient, or None if it has added it to the weight's `main_grad`.
    """

    weight: nn.Parameter
    compute: Callable[[], Tensor | None]


class WeightGradientStore:
    """Store the weight gradients of a backward pass for later: W of zero bubble (Qi et al. 2023, section 2).

    The previous stage waits only for the input's gradient, so a rank computes the weights' gradients while it
    would otherwise wait.
    """

    def __init__(self) -> None:
        self._stored: list[WeightGradient] | None = None

    def put(self, weight: nn.Parameter, compute: Callable[[], Tensor | None]) -> None:
        """Store a gradient; called by layers in a backward pass inside `collect`."""
        assert self._stored is not None, "a backward pass outside of collect()"
        self._stored.append(WeightGradient(weight, compute))

    @contextmanager
    def collect(self) -> Iterator[list[WeightGradient]]:
        """Collect the gradients that the backward pass in this block stores."""
        assert self._stored is None, "collect() blocks do not nest"
        stored: list[WeightGradient] = []
        self._stored = stored
        try:
            yield stored
        finally:
            self._stored = None


def run_stored(gradients: Iterable[WeightGradient]) -> None:
    """Compute and accumulate stored gradients in the order in which they were stored.

    Autograd accumulates them and runs the weights' hooks as in an ordinary backward pass.
    """
    for weight, compute in gradients:
        with torch.no_grad():  # the saved input requires grad; the gradient must not
            gradient = compute()
        if gradient is not None:
            torch.autograd.backward(weight, gradient)
