"""Join what the ranks of a layout have recorded into full tensors, and find ranks that disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.observe.judge.program import Piece, ProgramFault
from megalite.observe.judge.rank_record import Observation, RankRecord


class FullTensor(NamedTuple):
    """Tensor that ranks hold together.

    Attributes:
        value: the elements, each of the first rank that holds it.
        disagreement: largest difference between ranks that hold the same element; NaN if one of them is NaN.
        total: sum of the elements over all ranks that hold them; None if they agree.
        num_holders: number of ranks that hold each element.
        ranks: the first rank, and one that disagrees with it.
    """

    value: Tensor
    disagreement: float = 0.0
    total: Tensor | None = None
    num_holders: Tensor | None = None
    ranks: tuple[int, ...] = ()


Fulls = dict[str, FullTensor]
Report = dict[str, list[float]]
"""Numbers that a program reports for an iteration, by name: one of each rank that reports it."""


@dataclass(frozen=True)
class FullRecord:
    """Results of a layout, as full tensors; see `RankRecord`."""

    own_start: Fulls
    start: Fulls
    reports: list[Report]
    gradients: Fulls
    weights: Fulls
    eps: float = 0.0  # relative distance of neighbouring numbers of the coarsest dtype that weights have
    save_error: str = ""
    traces: list[list[Observation]] = field(default_factory=list)


def join(ranks: Sequence[RankRecord]) -> FullRecord:
    """Join the records of all ranks of a layout.

    Raises:
        ProgramFault: an element of a tensor is on no rank, or ranks have different full shapes of it.
    """
    reports: list[Report] = [{} for _ in ranks[0].reports]
    for rank in ranks:
        for report, own in zip(reports, rank.reports, strict=True):
            for name, value in own.items():
                report.setdefault(name, []).append(value)
    dtypes = {piece.tensor.dtype for rank in ranks for piece in rank.own_start.values()}
    return FullRecord(
        joined([rank.own_start for rank in ranks]),
        joined([rank.start for rank in ranks]),
        reports,
        joined([rank.gradients for rank in ranks]),
        joined([rank.weights for rank in ranks]),
        max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0),
        next((rank.save_error for rank in ranks if rank.save_error), ""),
        [rank.trace for rank in ranks],
    )


def joined(ranks: Sequence[Mapping[str, Piece]]) -> Fulls:
    """Join the pieces of all ranks."""
    names = dict.fromkeys(name for pieces in ranks for name in pieces)
    return {
        name: _joined(name, {rank: pieces[name] for rank, pieces in enumerate(ranks) if name in pieces})
        for name in names
    }


def _joined(name: str, pieces: Mapping[int, Piece]) -> FullTensor:
    shapes = {piece.shape for piece in pieces.values()}
    if len(shapes) > 1:
        raise ProgramFault(f"ranks say that the full shape of {name} is {' and '.join(map(str, shapes))}")
    (shape,) = shapes
    size = torch.Size(shape).numel()
    value, total, count = torch.zeros(size), torch.zeros(size), torch.zeros(size)
    value, total = value.double(), total.double()
    first = torch.full((size,), -1)
    disagreement = 0.0
    ranks: tuple[int, ...] = ()
    for rank, piece in pieces.items():
        positions = torch.arange(size) if piece.positions is None else piece.positions.flatten()
        elements = piece.tensor.flatten().double()[positions >= 0]
        positions = positions[positions >= 0]
        held = count[positions] > 0
        value[positions[~held]] = elements[~held]
        first[positions[~held]] = rank
        off = (value[positions] - elements).abs()
        largest = float(off.max()) if off.numel() else 0.0
        if not (math.isnan(disagreement) or largest <= disagreement):
            at = int(off.nan_to_num(torch.inf).argmax())
            disagreement, ranks = largest, (int(first[positions[at]]), rank)
        total[positions] += elements
        count[positions] += 1
    if num_missing := int((count == 0).sum()):
        raise ProgramFault(
            f"no rank holds {num_missing} of the {size} elements of {name}: the pieces do not cover it"
        )
    full = FullTensor(value.view(shape))
    if disagreement == 0.0:
        return full
    return full._replace(
        disagreement=disagreement, total=total.view(shape), num_holders=count.view(shape), ranks=ranks
    )
