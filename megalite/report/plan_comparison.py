"""Compare where a run's time went with its plan, or with its own fastest iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.observe.unit_record import ATTENTION, GEMMS, MEMORY_BOUND
from megalite.report.run_folder import Run
from megalite.train.telemetry.time_terms import BUBBLE, IMBALANCE, LAUNCHES, TimeComparison, compare
from megalite.utils.errors import UserError
from megalite.utils.files import parse_json

_COMPUTING = {
    "products": GEMMS,
    "attention": ATTENTION,
    "passes": MEMORY_BOUND,
    "launch": LAUNCHES,
    "offload": LAUNCHES,
}
"""Term of a run that measures each kind of a plan's computation, on a rank of the median stage."""
_WAITING = {
    "tp": "tp wait",
    "cp": "cp wait",
    "ep": "ep wait",
    "dp": "dp wait",
    "pp": "pp wait",
    "bubble": BUBBLE,
}
"""Term of a run that measures each of the other kinds, on the busiest rank."""
_TOLERANCE = 0.01
"""Relative difference in a token's operations that the padding of the vocabulary may cause."""
_PLAN = "pass the output of `megalite plan --json` with the flags of the run"


def time_comparison(run: Run, plan: Path | None = None) -> TimeComparison | None:
    """Compare the run's mean iteration with a plan, or with the run's own fastest iteration.

    Args:
        plan: output of ``megalite plan --json``.

    Returns:
        The comparison; None without a plan if the run has not recorded where its time went.

    Raises:
        UserError: the plan cannot be read or is of another run, or the run has recorded nothing.
    """
    samples = run.history.samples
    if plan is None:
        return compare(samples) if samples else None
    if not samples:
        raise UserError(
            f"--against-plan {plan}: {run.source} does not say where the time of an iteration went: train "
            "with --log-time-breakdown, and with a --log-interval shorter than the run"
        )
    planned = _read(plan)
    _check(planned, plan, run)
    return compare(samples, planned_terms(planned), f"the plan {plan}")


def planned_terms(planned: Mapping[str, Any]) -> dict[str, float]:
    """Return the planned seconds by the terms of a run."""
    busiest = planned["seconds_by_kind"]
    median = planned.get("median_stage_seconds_by_kind", busiest)
    terms = {IMBALANCE: sum(busiest.get(kind, 0.0) - median.get(kind, 0.0) for kind in _COMPUTING)}
    for names, seconds in ((_COMPUTING, median), (_WAITING, busiest)):
        for kind, term in names.items():
            terms[term] = terms.get(term, 0.0) + seconds.get(kind, 0.0)
    return terms


def _read(path: Path) -> dict[str, Any]:
    try:
        planned = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"--against-plan {path} cannot be read ({error.strerror}): {_PLAN}") from None
    except ValueError:
        raise UserError(f"--against-plan {path} is not a plan in JSON: {_PLAN}") from None
    if isinstance(planned, dict) and "layouts" in planned:
        raise UserError(f"--against-plan {path} is a search of layouts: plan the layout of the run")
    names = ("iteration_time_s", "tokens_per_second", "tflops_per_gpu")
    kinds = planned.get("seconds_by_kind") if isinstance(planned, dict) else None
    if not (
        isinstance(kinds, dict)
        and all(type(value) in (int, float) for value in kinds.values())
        and all(type(planned.get(name)) in (int, float) and planned[name] > 0 for name in names)
        and isinstance(planned.get("layout"), dict)
    ):
        raise UserError(f"--against-plan {path} is not a plan of one layout: {_PLAN}")
    return planned


def _check(planned: Mapping[str, Any], path: Path, run: Run) -> None:
    """Check that a plan is of the run's model, number of ranks, batch and layout."""
    sample = run.history.samples[-1]
    differences = []
    of_run = {axis: size for axis, size in sample.layout.items() if axis in planned["layout"]}
    of_plan = {axis: planned["layout"][axis] for axis in of_run}
    if of_run != of_plan:
        differences.append(f"layout {_sizes(of_plan)}, the run {_sizes(of_run)}")
    values = next(row.values for row in reversed(run.history.iterations) if row.sample)
    tokens = planned["tokens_per_second"] * planned["iteration_time_s"]
    trained = values.get("global_batch_size", math.nan) * _ratio(
        values, "consumed_tokens", "consumed_samples"
    )
    if not math.isclose(tokens, trained, rel_tol=1e-6):
        differences.append(f"{tokens:,.0f} tokens per iteration, the run {trained:,.0f}")
    # Both are the operations of a token, divided by the number of ranks.
    in_plan = _ratio(planned, "tflops_per_gpu", "tokens_per_second")
    in_run = _ratio(values, "tflops_per_gpu", "tokens_per_second")
    if of_run == of_plan and not math.isclose(in_plan, in_run, rel_tol=_TOLERANCE):
        ranks = math.prod(sample.layout.values())
        differences.append(
            f"{in_plan * ranks * 1e3:.4g} GFLOP per token, the run {in_run * ranks * 1e3:.4g}: another model"
        )
    if differences:
        raise UserError(f"--against-plan {path} is of another run: it has {'; '.join(differences)}: {_PLAN}")


def _ratio(values: Mapping[str, float], above: str, below: str) -> float:
    return values.get(above, math.nan) / (values.get(below) or math.nan)


def _sizes(layout: Mapping[str, int]) -> str:
    return " ".join(f"{axis} {size}" for axis, size in layout.items())
