"""How far two runs are apart, and what that means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megalite.verify.record import Record


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that the order of floating-point sums alone explains."""

    loss: float
    grad_norm: float
    gradient: float
    weight: float


TOLERANCES = {
    "fp64": Tolerance(loss=1e-11, grad_norm=1e-9, gradient=1e-9, weight=1e-9),
    "fp32": Tolerance(loss=1e-5, grad_norm=1e-4, gradient=1e-3, weight=math.inf),
    "fp16": Tolerance(loss=1e-3, grad_norm=math.inf, gradient=0.05, weight=math.inf),
    "bf16": Tolerance(loss=2e-3, grad_norm=math.inf, gradient=0.1, weight=math.inf),
}
"""By the config's params_dtype.

In fp32 and below no bound holds for the weights: where a gradient is as small as its rounding error, Adam
divides the one by the other, and the weight steps by the learning rate in a direction of chance. fp64 is the
proof. In 16 bits runs drift apart with time: what holds is the first gradient, and the loss.
"""


@dataclass(frozen=True)
class Comparison:
    """Largest relative differences of one layout's run from the reference's.

    Attributes:
        gradients, weights: by parameter, relative to the tensor's largest magnitude in the reference.
    """

    loss: float
    grad_norm: float
    gradients: Mapping[str, float]
    weights: Mapping[str, float]

    def worst(self, tensors: Mapping[str, float], count: int = 1) -> list[tuple[str, float]]:
        """The parameters that differ most, and by how much."""
        return sorted(tensors.items(), key=lambda pair: _nan_first(pair[1]), reverse=True)[:count]

    def excesses(self, tolerance: Tolerance) -> list[str]:
        """What is further apart than rounding explains, in words; nothing where the runs are the same."""
        ((gradient_name, gradient),) = self.worst(self.gradients)
        ((weight_name, weight),) = self.worst(self.weights)
        checks = [
            ("loss", self.loss, tolerance.loss),
            ("gradient norm", self.grad_norm, tolerance.grad_norm),
            (f"gradient of {gradient_name}", gradient, tolerance.gradient),
            (f"weight {weight_name}", weight, tolerance.weight),
        ]
        return [
            f"{what} differs by {value:.1e}, over {limit:.0e}"
            for what, value, limit in checks
            if not value <= limit
        ]


def compare(run: Record, reference: Record) -> Comparison:
    """Compares a run with the reference; both hold the same parameters, as full tensors."""
    assert run.weights.keys() == reference.weights.keys()
    return Comparison(
        loss=_largest_relative(run.losses, reference.losses),
        grad_norm=_largest_relative(run.grad_norms, reference.grad_norms),
        gradients={
            name: _difference(run.gradients[name], full) for name, full in reference.gradients.items()
        },
        weights={name: _difference(run.weights[name], full) for name, full in reference.weights.items()},
    )


def _largest_relative(values: Sequence[float], reference: Sequence[float]) -> float:
    differences = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(values, reference, strict=True)]
    return max(differences, key=_nan_first)


def _difference(tensor: Tensor, reference: Tensor) -> float:
    return ((tensor - reference).abs().max() / reference.abs().max().clamp_min(1e-30)).item()


def _nan_first(value: float) -> float:
    """Sorts NaN above everything: a comparison that fails to compute has failed."""
    return math.inf if math.isnan(value) else value
