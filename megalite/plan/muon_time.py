"""Estimate the time in which Muon exchanges and orthogonalizes matrices."""

from __future__ import annotations

from megalite.plan.communication import Group
from megalite.plan.layer_time import WorkSeconds, gemm_seconds
from megalite.plan.planned_run import PlannedRun
from megalite.plan.units import sizes_of


def muon_seconds(run: PlannedRun) -> WorkSeconds:
    """Return the time to exchange and orthogonalize the matrices of the pipeline rank with the most of them.

    The ranks of a stage share the matrices out, so no rank is faster than the largest matrix. Two all-to-alls
    move the elements that a rank updates.
    """
    weights = max((run.matrices_of(units) for units in run.ranks), key=len)
    if not weights:
        return WorkSeconds()
    group = Group(run.cluster, run.tp * run.num_sharing, 1, run.program.one_adapter)
    seconds = [_orthogonalization_seconds(run, *shape) for each in weights for shape in each.matrices]
    elements = run.sharded(sizes_of(weights), from_stage=1)
    return WorkSeconds(
        gemms=max(sum(seconds) / group.size, *seconds),
        dp=2 * group.gather_seconds(elements * run.element_bytes) if group.size > 1 else 0.0,
    )


def _orthogonalization_seconds(run: PlannedRun, rows: int, columns: int) -> float:
    """Return the seconds of the three GEMMs of each step of Newton-Schulz iteration."""
    small, large = sorted((rows, columns))
    sizes = (small, small, large), (small, small, small), (small, large, small)
    gemms = sum(gemm_seconds(run.cluster.gpu, *each, element_bytes=run.element_bytes) for each in sizes)
    return run.config.optimizer.muon_num_ns_steps * gemms
