"""Compare the losses, gradients and weights of two runs, within tolerances of each precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megalite.model.routing_record import largest_gap
from megalite.observe.verify.record_run import RunRecord


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that the order of floating-point sums can explain.

    Attributes:
        gradient: of the first gradients; in traces, of all activations and gradients too.
        agrees: with a smaller difference, a tensor of a trace does not depend on any that differs.
    """

    loss: float
    grad_norm: float
    gradient: float
    weight: float
    agrees: float


TOLERANCES = {
    "fp64": Tolerance(loss=1e-11, grad_norm=1e-9, gradient=1e-9, weight=1e-9, agrees=1e-12),
    "fp32": Tolerance(loss=1e-5, grad_norm=1e-4, gradient=1e-3, weight=math.inf, agrees=1e-6),
    "fp16": Tolerance(loss=1e-3, grad_norm=math.inf, gradient=0.05, weight=math.inf, agrees=1e-3),
    "bf16": Tolerance(loss=2e-3, grad_norm=math.inf, gradient=0.1, weight=math.inf, agrees=1e-2),
}
"""Tolerances by params_dtype.

In fp32 and below there is no bound for the weights. If a gradient is as small as its rounding error, Adam
divides it by an equally small value, and the weight moves by the learning rate in a random direction. fp64 is
the proof. In 16 bits, runs diverge over time, so only the first gradient and the loss are compared.
"""


SMALLEST = 1e-6
"""Differences are relative to a tensor's largest magnitude, or to this part of the largest of its phase.

A gradient that is zero but for rounding, such as a key bias', has no digits to compare.
"""
ROUNDING = 1e-12
"""A gradient below this part of the largest one is zero but for rounding.

So is what it adds to its weight. A bias that starts at zero then has no digits to compare: differences of
such weights are relative to the largest weight.
"""


@dataclass(frozen=True)
class RunComparison:
    """Largest relative differences between the run of a layout and the reference.

    Attributes:
        terms: differences of each iteration, by term of the loss.
        gradients: differences by parameter, relative to the largest magnitude of the reference tensor, but at
            least to `SMALLEST` times the largest gradient.
        weights: differences by name, relative to the largest magnitude of the reference tensor, or of all
            weights if the weight's gradient is only rounding (`is_only_rounding`).
        evaluation: differences of the means of an evaluation, by term.
        expert_use: differences of the routers' figures in the last iteration.
        num_before: iterations before the first compared one.
        num_rerouted: number of tokens that went to the reference's experts instead of their own.
        rerouted_gap: largest difference of the scores of these experts.
    """

    terms: Mapping[str, Sequence[float]]
    grad_norm: float
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    num_rerouted: int = 0
    rerouted_gap: float = 0.0
    evaluation: Mapping[str, float] = field(default_factory=dict)
    expert_use: Mapping[str, float] = field(default_factory=dict)
    num_before: int = 0

    @property
    def loss(self) -> float:
        """Return the largest difference of a term in an iteration."""
        return max((value for values in self.terms.values() for value in values), key=nan_last)

    def worst(self, tensors: Mapping[str, float], count: int = 1) -> list[tuple[str, float]]:
        """Return the `count` parameters that differ most, with their differences."""
        return sorted(tensors.items(), key=lambda pair: nan_last(pair[1]), reverse=True)[:count]

    def excesses(self, tolerance: Tolerance) -> list[str]:
        """Describe each difference above its tolerance; empty if the runs are the same."""
        checks = [
            *(
                (f"{name} of the evaluation", value, tolerance.loss)
                for name, value in self.evaluation.items()
            ),
            *((name, value, tolerance.weight) for name, value in self.worst(self.expert_use)),
        ]
        return self.training_excesses(tolerance) + _excesses(checks)

    def training_excesses(self, tolerance: Tolerance) -> list[str]:
        """Describe the differences of losses, gradients and weights, which a trace can locate."""
        gradients, weights = self.worst(self.gradients), self.worst(self.weights)
        checks = [
            *(self._first_excess(name, tolerance.loss) for name in self.terms),
            ("gradient norm", self.grad_norm, tolerance.grad_norm),
            *((f"gradient of {name}", value, tolerance.gradient) for name, value in gradients),
            *((f"weight {name}", value, tolerance.weight) for name, value in weights),
            (
                f"a score at which {self.num_rerouted} tokens change experts",
                self.rerouted_gap,
                tolerance.gradient,
            ),
        ]
        return _excesses(checks)

    def _first_excess(self, name: str, limit: float) -> tuple[str, float, float]:
        """Return the check of a term in the first iteration that exceeds the limit, or in the last one."""
        values = self.terms[name]
        found = next((i for i, value in enumerate(values) if not value <= limit), len(values) - 1)
        return f"{name} of iteration {self.num_before + found + 1}", values[found], limit


def _excesses(checks: Sequence[tuple[str, float, float]]) -> list[str]:
    return [
        f"{name} differs by {value:.1e}, over {limit:.0e}"
        for name, value, limit in checks
        if not value <= limit
    ]


def compare(run: RunRecord, reference: RunRecord) -> RunComparison:
    """Compare a run with the reference. Both must have the same parameters, as full tensors.

    Of a run that was resumed, the iterations since then are compared, and no first gradients.
    """
    since = run.num_before
    assert run.weights.keys() == reference.weights.keys()
    magnitudes = {name: magnitude(full) for name, full in reference.gradients.items()}
    largest = max(magnitudes.values(), default=0.0)
    rounded = {name for name, each in magnitudes.items() if is_only_rounding(each, largest)}
    largest_weight = max(map(magnitude, reference.weights.values()), default=0.0)
    return RunComparison(
        terms=_term_differences(run.terms, reference.terms[since:]),
        grad_norm=max(_relative(run.grad_norms, reference.grad_norms[since:]), key=nan_last),
        gradients={
            name: _difference(run.gradients[name], full, SMALLEST * largest)
            for name, full in reference.gradients.items()
            if since == 0
        },
        weights={
            name: _difference(
                run.weights[name], full, largest_weight if name.removeprefix("ema.") in rounded else 0.0
            )
            for name, full in reference.weights.items()
        },
        num_rerouted=len(run.rerouted),
        rerouted_gap=largest_gap(run.rerouted),
        evaluation=_figure_differences(run.evaluation, reference.evaluation),
        expert_use=_figure_differences(run.expert_use, reference.expert_use),
        num_before=since,
    )


def _term_differences(
    terms: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]]
) -> dict[str, list[float]]:
    """Return the differences by term; NaN for a term that one of the runs does not have.

    An iteration that --iterations-to-skip excludes has no terms, and does not differ.
    """
    names = dict.fromkeys(name for each in (*reference, *terms) for name in each)
    values = {
        name: [[each.get(name, math.nan if each else 0.0) for each in run] for run in (terms, reference)]
        for name in names
    }
    return {name: _relative(*both) for name, both in values.items()}


def _figure_differences(figures: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, float]:
    """Return the differences by name; NaN for a figure that one of the runs does not have."""
    return {name: value for name, (value,) in _term_differences([figures], [reference]).items()}


def _relative(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(values, reference, strict=True)]


def _difference(tensor: Tensor, reference: Tensor, smallest: float = 0.0) -> float:
    scale = reference.abs().max().clamp_min(max(smallest, 1e-30))
    return ((tensor - reference).abs().max() / scale).item()


def nan_last(value: float) -> float:
    """Return a key that sorts NaN above all numbers: a run with NaN is not the same run."""
    return math.inf if math.isnan(value) else value


def magnitude(tensor: Tensor) -> float:
    """Return the largest finite magnitude; 0.0 if there is none."""
    return float(tensor.abs().nan_to_num(0.0, 0.0).max()) if tensor.numel() else 0.0


def is_only_rounding(gradient: float, largest: float) -> bool:
    """Return whether a gradient of this magnitude is zero but for rounding, beside the largest one."""
    return 0.0 < gradient <= ROUNDING * largest
