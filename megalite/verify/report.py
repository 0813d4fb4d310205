"""The table of a verification, a row a layout."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config import Config
from megalite.log import log
from megalite.verify.compare import TOLERANCES, Comparison, compare
from megalite.verify.layout import Layout
from megalite.verify.record import record_run

_ROW = "{:<14} {:>6} {:>10} {:>10} {:>10} {:<42} {}"


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
        UserError: the config cannot run in one of the layouts: told before the first of them runs.
    """
    global_batch_size = config.training.global_batch_size or (
        config.training.micro_batch_size * max(layout.dp for layout in layouts)
    )
    configs = [layout.apply(config, global_batch_size) for layout in (Layout(), *layouts)]
    tolerance = TOLERANCES[config.model.params_dtype]
    log.info(
        "%d iterations of %d samples in %s against one rank; differences are relative",
        num_iterations,
        global_batch_size,
        config.model.params_dtype,
    )
    log.info(_ROW.format("layout", "ranks", "loss", "grad norm", "gradient", "of parameter", "verdict"))
    reference = record_run(configs[0], num_iterations, 1)
    same = True
    for layout, applied in zip(layouts, configs[1:], strict=True):
        comparison = compare(record_run(applied, num_iterations, layout.world_size), reference)
        excesses = comparison.excesses(tolerance)
        same = same and not excesses
        _log_rows(layout, comparison, "; ".join(excesses) or "the same run", num_worst)
    log.info("every layout trains the same run" if same else "NOT the same run: see the rows above")
    return same


def _log_rows(layout: Layout, comparison: Comparison, verdict: str, num_worst: int) -> None:
    worst = comparison.worst(comparison.gradients, num_worst)
    loss, norm = f"{comparison.loss:.1e}", f"{comparison.grad_norm:.1e}"
    for i, (name, gradient) in enumerate(worst):
        cells = (str(layout), layout.world_size, loss, norm) if i == 0 else ("", "", "", "")
        log.info(_ROW.format(*cells, f"{gradient:.1e}", name, verdict if i == 0 else "").rstrip())
