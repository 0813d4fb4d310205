"""80% intervals of planned times and memories, by kind of run, and the measurement that narrows them."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megalite.plan.iteration_time import IterationTime
from megalite.plan.planned_run import PlannedRun

FILE = Path(__file__).with_name("errors.json")
"""Errors of plans of published runs by kind of run; `benchmarks/planner_errors.py` writes it."""
HOST_BOUND = 0.05
"""Share of an iteration that a GPU waits for the host's launches from which on a run is launch-bound."""
OTHER = "all kinds"
"""Kind of all published runs together, for a kind of which there are too few."""
RATES, LINKS = "the rates of this GPU (--calibrate)", "its links (--node-gbps, --network-gbps)"
HOST_LINK = "the host link (--gpu-set host_link_bandwidth)"
_MEASURED_BY = {
    **dict.fromkeys(("gemms", "attention", "memory_bound", "launch"), RATES),
    "offload": HOST_LINK,
}
"""What a user can measure and pass, by kind of `WorkSeconds`; all others are communication, over `LINKS`."""


class ErrorRange(NamedTuple):
    """Errors of 80% of the published runs of a kind, as shares of the published values.

    Attributes:
        settings: number of settings, of which releases of a program repeat some.
    """

    least: float
    most: float
    settings: int

    def around(self, planned: float) -> tuple[float, float]:
        """Return the interval around a planned value."""
        return planned / (1 + self.most), planned / (1 + self.least)


class Interval(NamedTuple):
    """Interval of a planned value, the kind of runs that it comes from, and the number of their settings."""

    low: float
    high: float
    kind: str
    settings: int


def kind_of_run(run: PlannedRun, time: IterationTime) -> str:
    """Return the kind of a run: its layers, the format of their GEMMs, and whether it is launch-bound."""
    gemms = (gemm for layer in run.units.layers.values() for gemm in layer.forward.gemms)
    layers = "experts" if run.config.model.has_experts else "dense"
    bits = "8 or 4 bits" if any(gemm.element_bytes < 2 for gemm in gemms) else "16 bits"
    is_launch_bound = time.work.launch > HOST_BOUND * time.seconds
    return f"{layers}, {bits}{', launch-bound' if is_launch_bound else ''}"


@cache
def error_ranges(quantity: str) -> dict[str, ErrorRange]:
    """Return the ranges of the errors of `time` or `memory`, by kind of run."""
    kinds = json.loads(FILE.read_text(encoding="utf-8"))[quantity]
    return {kind: ErrorRange(**values) for kind, values in kinds.items()}


def interval(quantity: str, planned: float, kind: str) -> Interval:
    """Return the 80% interval of a planned `time` or `memory`."""
    ranges = error_ranges(quantity)
    known = kind if kind in ranges else OTHER
    return Interval(*ranges[known].around(planned), known, ranges[known].settings)


def narrowing(run: PlannedRun, time: IterationTime) -> tuple[str, float]:
    """Return the measurement on which most of a planned time depends, and its share of the time."""
    shares = Counter[str]()
    for kind, seconds in time.work._asdict().items():
        shares[_MEASURED_BY.get(kind, LINKS)] += seconds / time.seconds
    if run.cluster.gpu.product_share == 1.0:  # its rates are measured
        del shares[RATES]
    return max(shares.items(), key=lambda item: item[1])
