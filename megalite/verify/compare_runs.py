"""Run a config in different layouts, compare the runs, and report the differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from megalite.config import Config, ParallelConfig
from megalite.errors import ConfigError, UserError
from megalite.log import log
from megalite.train.run_context import Providers
from megalite.train.verification import record_verified
from megalite.verify.layouts import Layout
from megalite.verify.record_run import RunRecord, record_run


@dataclass(frozen=True)
class Tolerance:
    """Holds the largest relative differences that the order of floating-point sums can explain."""

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
"""Tolerances by params_dtype.

In fp32 and below there is no bound for the weights. If a gradient is as small as its rounding error, Adam
divides it by an equally small value, and the weight moves by the learning rate in a random direction. fp64 is
the proof. In 16 bits, runs diverge over time, so only the first gradient and the loss are compared.
"""


@dataclass(frozen=True)
class RunComparison:
    """Holds the largest relative differences between the run of a layout and the reference.

    Attributes:
        gradients, weights: differences by parameter, relative to the largest magnitude of the reference
            tensor.
    """

    loss: float
    grad_norm: float
    gradients: Mapping[str, float]
    weights: Mapping[str, float]

    def worst(self, tensors: Mapping[str, float], count: int = 1) -> list[tuple[str, float]]:
        """Return the `count` parameters that differ most, with their differences."""
        return sorted(tensors.items(), key=lambda pair: _nan_first(pair[1]), reverse=True)[:count]

    def excesses(self, tolerance: Tolerance) -> list[str]:
        """Describe each difference above its tolerance; empty if the runs are the same."""
        ((gradient_name, gradient),) = self.worst(self.gradients)
        ((weight_name, weight),) = self.worst(self.weights)
        checks = [
            ("loss", self.loss, tolerance.loss),
            ("gradient norm", self.grad_norm, tolerance.grad_norm),
            (f"gradient of {gradient_name}", gradient, tolerance.gradient),
            (f"weight {weight_name}", weight, tolerance.weight),
        ]
        return [
            f"{name} differs by {value:.1e}, over {limit:.0e}"
            for name, value, limit in checks
            if not value <= limit
        ]


def compare(run: RunRecord, reference: RunRecord) -> RunComparison:
    """Compare a run with the reference. Both must have the same parameters, as full tensors."""
    assert run.weights.keys() == reference.weights.keys()
    return RunComparison(
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
    """Return a key that sorts NaN above all numbers: a run with NaN is not the same run."""
    return math.inf if math.isnan(value) else value


FP16_LOSS_SCALE = 4096.0
"""Replaces a dynamic loss scale, whose first iterations overflow and cannot be compared."""

_ROW = "{:<{width}} {:>6} {:>10} {:>10} {:>10} {:<42} {}"


def verify_layouts(
    config: Config,
    layouts: Sequence[Layout],
    num_iterations: int = 5,
    num_worst: int = 1,
    providers: Providers | None = None,
) -> bool:
    """Run the config in each layout and on one rank, and log their differences.

    Args:
        num_iterations: number of iterations of each run.
        num_worst: number of parameters to show for each layout, those with the largest gradient differences.
        providers: providers of a custom model and datasets; by default the config determines them.

    Returns:
        True if every layout trains the same run, up to the order of floating-point sums.

    Raises:
        ConfigError: the config cannot run in some layouts. It is raised before anything runs, and names them
            all.
        UserError: the config cannot run in any layout.
    """
    global_batch_size = config.training.global_batch_size or (
        config.training.micro_batch_size * max(layout.dp for layout in layouts)
    )
    config = with_constant_loss_scale(config)
    configs = _applied(config, (Layout(), *layouts), global_batch_size)
    tolerance = TOLERANCES[config.model.params_dtype]
    log.info(
        "%d iterations of %d samples in %s against one rank; differences are relative",
        num_iterations,
        global_batch_size,
        config.model.params_dtype,
    )
    row = partial(_ROW.format, width=max(14, *(len(str(layout)) for layout in layouts)))
    log.info(row("layout", "ranks", "loss", "grad norm", "gradient", "of parameter", "verdict"))
    reference = record_run(configs[0], num_iterations, 1, providers)
    same: list[ParallelConfig] = []
    num_refused = 0
    for layout, applied in zip(layouts, configs[1:], strict=True):
        try:
            run = record_run(applied, num_iterations, layout.world_size, providers)
        except UserError as error:  # for example, an option that a custom model does not support
            log.info(row(str(layout), layout.world_size, "", "", "", "", f"cannot run: {error}"))
            num_refused += 1
            if num_refused == len(layouts):
                raise
            continue
        comparison = compare(run, reference)
        excesses = comparison.excesses(tolerance)
        if not excesses:
            same.append(applied.parallel)
        _log_rows(row, layout, comparison, "; ".join(excesses) or "the same run", num_worst)
    if providers is not None and config.model.params_dtype in ("fp64", "fp32"):  # 16 bits prove little
        record_verified(providers.model, same)
    return _log_verdict(num_other=len(layouts) - len(same) - num_refused, num_refused=num_refused)


def _log_verdict(num_other: int, num_refused: int) -> bool:
    """Log the verdict on all layouts; return whether all that can run train the same run."""
    if num_other > 0:
        log.info("NOT the same run: see the rows above")
    elif num_refused:
        log.info("every layout that can run trains the same run; %d cannot", num_refused)
    else:
        log.info("every layout trains the same run")
    return num_other == 0


def _applied(config: Config, layouts: Sequence[Layout], global_batch_size: int) -> list[Config]:
    """Return the config of each layout, or raise one error with the problems of all layouts."""
    configs, problems = [], []
    for layout in layouts:
        try:
            configs.append(layout.apply(config, global_batch_size))
        except ConfigError as error:
            problems += [f"layout {layout}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return configs


def with_constant_loss_scale(config: Config) -> Config:
    """Replace a dynamic loss scale with a constant that keeps gradients finite from the first iteration."""
    if config.model.params_dtype != "fp16" or config.optimizer.loss_scale is not None:
        return config
    log.info("all runs use the loss scale %g, because a dynamic one begins with overflows", FP16_LOSS_SCALE)
    optimizer = dataclasses.replace(config.optimizer, loss_scale=FP16_LOSS_SCALE)
    return dataclasses.replace(config, optimizer=optimizer)


def _log_rows(
    row: Callable[..., str], layout: Layout, comparison: RunComparison, verdict: str, num_worst: int
) -> None:
    worst = comparison.worst(comparison.gradients, num_worst)
    loss, norm = f"{comparison.loss:.1e}", f"{comparison.grad_norm:.1e}"
    for i, (name, gradient) in enumerate(worst):
        cells = (str(layout), layout.world_size, loss, norm) if i == 0 else ("", "", "", "")
        log.info(row(*cells, f"{gradient:.1e}", name, verdict if i == 0 else "").rstrip())
