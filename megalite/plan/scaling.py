"""A run on several numbers of nodes, with a batch that grows with them or stays: its plans and its table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megalite.config import Config
from megalite.config.fields import with_fields
from megalite.plan.communication import Cluster
from megalite.plan.estimate import RunPlan, large
from megalite.plan.plan_request import Request
from megalite.plan.planned_run import run_problems
from megalite.plan.units import whole_model
from megalite.utils.errors import UserError, counted

Mode = Literal["weak", "strong"]
MODES: tuple[Mode, ...] = ("weak", "strong")
"""Weak: each node has the same share of the batch. Strong: the batch is the same on any number of nodes."""
_GB = 1e9
_CELL = 16
"""Width of a cell: seconds per iteration, efficiency, and a mark."""
_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP = 52, 64, 300, 200, 30
_COLOURS = ((66, 119, 214), (232, 156, 48))


@dataclass(frozen=True)
class ScalingPoint:
    """Run of a scaling table, planned or measured.

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
    """Run of a scaling table on one number of nodes.

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
    return with_fields(config, global_batch_size=batch * nodes // largest)


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


def table_lines(points: Sequence[ScalingPoint]) -> Iterator[str]:
    """Yield a row for each number of nodes, with two series of weak and of strong scaling."""
    series = list(dict.fromkeys(point.series for point in points))
    shares = efficiencies(points)
    cells = {
        (point.mode, point.series, point.nodes): _cell(point, share)
        for point, share in zip(points, shares, strict=True)
    }
    ranks = {point.nodes: point.ranks for point in points}
    yield f"{'':13}" + "".join(f"  {f'{mode} scaling':{_CELL * len(series) - 2}}" for mode in MODES).rstrip()
    yield (
        f"{'nodes':>6}{'ranks':>7}"
        + "".join(f"{name:>{_CELL - 1}} " for _ in MODES for name in series).rstrip()
    )
    for nodes in sorted(ranks):
        row = "".join(f"{cells.get((mode, name, nodes), ''):>{_CELL}}" for mode in MODES for name in series)
        yield f"{nodes:>6}{ranks[nodes]:>7}{row}".rstrip()
    yield ""
    yield "s/iteration, and tokens/s per rank relative to the fewest nodes"
    batches = [point.global_batch for point in points]
    yield f"global batch: {min(batches)} to {max(batches)} with weak, {max(batches)} with strong scaling"
    if any(not point.fits for point in points):
        yield "! does not fit in memory"
    for point in points:
        if point.note:
            yield f"{counted(point.nodes, 'node')}, batch {point.global_batch}: {point.note}"


def _cell(point: ScalingPoint, share: float | None) -> str:
    mark = " " if point.fits else "!"
    if point.seconds is None or share is None:
        return f"-{mark}"
    return f"{point.seconds:.3f}{share:7.1%}{mark}"


def as_objects(points: Sequence[ScalingPoint]) -> list[dict[str, Any]]:
    """Return the points as objects for JSON."""
    return [
        {
            "scaling": point.mode,
            "series": point.series.lower(),
            "nodes": point.nodes,
            "world_size": point.ranks,
            "global_batch_size": point.global_batch,
            "iteration_time_s": point.seconds,
            "tokens_per_second": point.tokens_per_second,
            "efficiency": share,
            "memory_gb": None if point.memory_bytes is None else point.memory_bytes / _GB,
            "fits": point.fits,
            **({"note": point.note} if point.note else {}),
        }
        for point, share in zip(points, efficiencies(points), strict=True)
    ]


def scaling_title(request: Request) -> str:
    """Return the title of the picture: the model, the layout and the batch."""
    config = request.config
    parameters = large(whole_model(config.model, config.parallel.tp).num_parameters)
    return (
        f"{parameters} parameters, tp {config.parallel.tp} x pp {config.parallel.pp}, batch "
        f"{config.training.global_batch_size}: tokens/s per rank, relative to the fewest nodes"
    )


def scaling_svg(points: Sequence[ScalingPoint], title: str) -> str:
    """Return a picture with a chart of weak and one of strong scaling: efficiency over nodes."""
    from megalite.pipeline.draw_schedule import INK, WAITING, Drawing

    series = list(dict.fromkeys(point.series for point in points))
    nodes = sorted({point.nodes for point in points})
    colours = dict(zip(series, _COLOURS, strict=False))
    shares = efficiencies(points)
    highest = max(1.0, *(share for share in shares if share is not None))
    drawing = Drawing(2 * (_LEFT + _WIDTH + _GAP), _TOP + _HEIGHT + 60)
    drawing.text(16, 24, title, 14)
    span = max(math.log2(nodes[-1] / nodes[0]), 1e-9)

    def x_of(left: float, count: int) -> float:
        return left + _WIDTH * math.log2(count / nodes[0]) / span

    def y_of(share: float) -> float:
        return _TOP + _HEIGHT * (1 - share / highest)

    for number, mode in enumerate(MODES):
        left = _LEFT + number * (_WIDTH + _GAP + _LEFT)
        drawing.text(left, _TOP - 14, f"{mode} scaling", 12)
        for percent in range(0, 101, 25):
            drawing.line([(left, y_of(percent / 100)), (left + _WIDTH, y_of(percent / 100))], WAITING)
            drawing.text(left - 8, y_of(percent / 100) + 4, f"{percent}%", 10, anchor="end")
        for count in nodes:
            drawing.text(x_of(left, count), _TOP + _HEIGHT + 18, str(count), 10, anchor="middle")
        drawing.text(left + _WIDTH / 2, _TOP + _HEIGHT + 36, "nodes", 11, anchor="middle")
        for name in series:
            line = [
                (x_of(left, point.nodes), y_of(share))
                for point, share in zip(points, shares, strict=True)
                if (point.mode, point.series) == (mode, name) and share is not None
            ]
            drawing.line(line, colours[name], width=2)
            for x, y in line:
                drawing.box(x - 3, y - 3, 6, 6, colours[name])
    x = float(_LEFT)
    for name in series:
        drawing.box(x, _TOP + _HEIGHT + 44, 12, 12, colours[name])
        drawing.text(x + 17, _TOP + _HEIGHT + 54, name, 11, INK)
        x += 40 + 6.5 * len(name)
    return drawing.content()
