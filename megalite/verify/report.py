"""The table of a verification, a row a layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from megalite.config import Config
from megalite.errors import ConfigError
from megalite.log import log
from megalite.verify.compare import TOLERANCES, Comparison, compare
from megalite.verify.layout import Layout
from megalite.verify.record import record_run

FP16_LOSS_SCALE = 4096.0
"""In place of a dynamic one, which begins with iterations that overflow: nothing could be compared."""

_ROW = "{:<{width}} {:>6} {:>10} {:>10} {:>10} {:<42} {}"


def verify_layouts(
    config: Config, layouts: Sequence[Layout], num_iterations: int, num_worst: int = 1
) -> bool:
    """Runs the config in each layout and on one rank, and logs how far apart they are.

    Args:
        num_iterations: of each run.
        num_worst: parameters to show for each layout, those whose gradients differ most.

    Returns:
        Whether every layout's run is the reference's up to the order of floating-point sums.

    Raises:
        ConfigError: the config cannot run in some of the layouts: told of each before the first of them runs.
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
    reference = record_run(configs[0], num_iterations, 1)
    same = True
    for layout, applied in zip(layouts, configs[1:], strict=True):
        comparison = compare(record_run(applied, num_iterations, layout.world_size), reference)
        excesses = comparison.excesses(tolerance)
        same = same and not excesses
        _log_rows(row, layout, comparison, "; ".join(excesses) or "the same run", num_worst)
    log.info("every layout trains the same run" if same else "NOT the same run: see the rows above")
    return same


def _applied(config: Config, layouts: Sequence[Layout], global_batch_size: int) -> list[Config]:
    """The config in each layout."""
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
    """The config, its loss scale one whose gradients are finite from the first iteration on."""
    if config.model.params_dtype != "fp16" or config.optimizer.loss_scale is not None:
        return config
    log.info("the loss scale is %g in all runs: a dynamic one begins with overflows", FP16_LOSS_SCALE)
    optimizer = dataclasses.replace(config.optimizer, loss_scale=FP16_LOSS_SCALE)
    return dataclasses.replace(config, optimizer=optimizer)


def _log_rows(
    row: Callable[..., str], layout: Layout, comparison: Comparison, verdict: str, num_worst: int
) -> None:
    worst = comparison.worst(comparison.gradients, num_worst)
    loss, norm = f"{comparison.loss:.1e}", f"{comparison.grad_norm:.1e}"
    for i, (name, gradient) in enumerate(worst):
        cells = (str(layout), layout.world_size, loss, norm) if i == 0 else ("", "", "", "")
        log.info(row(*cells, f"{gradient:.1e}", name, verdict if i == 0 else "").rstrip())
