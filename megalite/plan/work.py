"""Seconds of a piece of work, by what they go into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Seconds of one rank; they come one after the other.

    Attributes:
        products: products of matrices.
        attention: the product of queries, keys and values, softmax and all.
        passes: what is bound by memory: norms, activations, sums, the optimizer.
        tp: waiting for tensor-parallel ranks.
        dp: waiting for replicas.
        pp: waiting for messages between stages.
        launch: waiting for the processor that starts the kernels.
    """

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    tp: float = 0.0
    dp: float = 0.0
    pp: float = 0.0
    launch: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: Work) -> Work:
        return Work(
            *(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def __mul__(self, factor: float) -> Work:
        return Work(*(value * factor for value in vars(self).values()))


def total_work(works: Iterable[Work]) -> Work:
    """One after the other."""
    total = Work()
    for work in works:
        total += work
    return total


@dataclass(frozen=True)
class Passes:
    """One microbatch through something: forward, the input's gradient, and the weights' gradients."""

    forward: Work = Work()
    backward_input: Work = Work()
    backward_weight: Work = Work()

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def __mul__(self, factor: float) -> Passes:
        return Passes(self.forward * factor, self.backward_input * factor, self.backward_weight * factor)

    @property
    def backward(self) -> Work:
        return self.backward_input + self.backward_weight
