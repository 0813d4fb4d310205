"""Show the points of a scaling table: as text, as JSON, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.errors import counted
from megalite.files import write_output
from megalite.plan.plan_request import Request
from megalite.plan.quantities import large
from megalite.plan.scaling.scaling_plan import MODES, ScalingPoint, efficiencies
from megalite.plan.units import whole_model

_GB = 1e9
_CELL = 16
"""Width of a cell: seconds per iteration, efficiency, and a mark."""


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


_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP = 52, 64, 300, 200, 30
_COLOURS = ((66, 119, 214), (232, 156, 48))


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
    from megalite.pipeline.schedule_svg import INK, WAITING, Drawing

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


def save_scaling_svg(path: Path, points: Sequence[ScalingPoint], title: str) -> None:
    """Write the picture to a file.

    Raises:
        UserError: it cannot be written.
    """
    write_output(path, scaling_svg(points, title), "--svg")
