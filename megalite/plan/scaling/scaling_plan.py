"""Plan a run on several numbers of nodes, with a batch that grows with them or stays the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megalite.config import Config
from megalite.errors import UserError
from megalite.plan.estimate import RunPlan
from megalite.plan.plan_request import Request
from megalite.plan.planned_run import Cluster, run_problems

Mode = Literal["weak", "strong"]
MODES: tuple[Mode, ...] = ("weak", "strong")
"""Weak: each node has the same share of the batch. Strong: the batch is the same on any number of nodes."""


@dataclass(frozen=True)
class ScalingPoint:
    """Describes a run of a scaling table, planned or measured.

    Attributes:
        series: the network of a plan; or planned or measured.
        seconds: seconds per iteration; None if the run failed.
        memory_bytes: memory of the largest rank.
        fits: whether it fits in memory.
        note: why there is no time.
    """

    mode: Mode
    series: str
    nodes: int
    ranks: int
    global_batch: int
    seconds: float | None
    tokens_per_second: float | None
    memory_bytes: float | None
    fits: bool = True
    note: str = ""


def efficiencies(points: Sequence[ScalingPoint]) -> list[float | None]:
    """Return the tokens per second and rank of each point, relative to the fewest nodes of its series.

    Args:
        points: points of each series, with the fewest nodes first.
    """
    first: dict[tuple[str, str], float] = {}
    found: list[float | None] = []
    for point in points:
        if point.tokens_per_second is None:
            found.append(None)
            continue
        rate = point.tokens_per_second / point.ranks
        found.append(rate / first.setdefault((point.mode, point.series), rate))
    return found


@dataclass(frozen=True)
class ScaledRun:
    """Describes the run of a scaling table on one number of nodes.

    Attributes:
        config: the config with the batch of this number of nodes.
    """

    mode: Mode
    nodes: int
    config: Config
    cluster: Cluster

    @property
    def global_batch(self) -> int:
        batch = self.config.training.global_batch_size
        assert batch is not None
        return batch

    def planned(self, request: Request, series: str) -> ScalingPoint:
        """Return the planned point."""
        plan = RunPlan(request.planned_run(self.config, self.cluster))
        return ScalingPoint(
            self.mode,
            series,
            self.nodes,
            self.cluster.world_size,
            self.global_batch,
            plan.time.seconds,
            plan.tokens_per_second,
            plan.memory_bytes,
            plan.fits,
        )


def scaled_runs(request: Request, cluster: Cluster) -> list[ScaledRun]:
    """Return the runs of a scaling table, which --scaling requests: weak scaling, then strong scaling.

    Raises:
        UserError: training would reject the run on one of the numbers of nodes.
    """
    assert request.scaling is not None
    found = []
    for mode in MODES:
        for nodes in request.scaling.nodes:
            config = batch_on(request.config, mode, nodes, max(request.scaling.nodes))
            sized = replace(cluster, world_size=nodes * cluster.gpus_per_node)
            if problems := run_problems(config, sized):
                raise UserError(f"--scaling {nodes}, which is {sized.world_size} ranks: {problems[0]}")
            found.append(ScaledRun(mode, nodes, config, sized))
    return found


def batch_on(config: Config, mode: Mode, nodes: int, largest: int) -> Config:
    """Return the config with the global batch on this number of nodes. It is whole on the largest one.

    Raises:
        UserError: with weak scaling, a node's share of the batch is not a whole number of samples.
    """
    batch = config.training.global_batch_size
    assert batch is not None
    if mode == "strong" or nodes == largest:
        return config
    if batch * nodes % largest:
        below = batch // largest * largest
        raise UserError(
            f"--global-batch-size {batch} has no equal part for each of {largest} nodes: pass "
            f"--global-batch-size {below or largest}"
        )
    return replace(config, training=replace(config.training, global_batch_size=batch * nodes // largest))


def plan_scaling(request: Request) -> Iterator[ScalingPoint]:
    """Yield the points of the plan's table: each network and mode, with the fewest nodes first."""
    assert request.scaling is not None
    networks = {
        "InfiniBand": request.cluster.network_gbps,
        "Ethernet": request.scaling.ethernet_gbps,
    }
    for series, gbps in networks.items():
        for run in scaled_runs(request, replace(request.cluster, network_gbps=gbps)):
            yield run.planned(request, series)
