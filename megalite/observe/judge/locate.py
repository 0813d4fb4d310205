"""Find the first tensor of a layout that one rank's run does not contain, without knowing how it is cut.

A rank's tensor is taken as rows of its last dim. Each row must occur in the reference's tensor of the same
module, in any order, whole or cut in one of the ways in which features are cut; or the sum of the tensor over
some ranks must, because it may be a part of a sum. So the search needs to know nothing of how samples,
positions and experts are spread over ranks. It does not see rows in a wrong order; the next attention or the
loss does.

Gradients may have a constant factor, because programs divide by the number of tokens before or after they
sum. The factor must be the same for all modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megalite.observe.judge.compare import named_factor
from megalite.observe.judge.rank_record import Observation
from megalite.observe.verify.compare_runs import magnitude

_AGREES = 1e-8
"""Largest difference of equal rows, relative to the largest magnitude of the tensor."""
_SMALLEST = 1e-6
"""Part of the largest magnitude of all tensors below which a tensor's own is not looked at."""

ByRank = Mapping[int, Tensor]
"""A module's tensor on each rank, as rows ``[n, features]``."""


def first_difference(
    traces: Sequence[Sequence[Observation]],
    reference: Sequence[Observation],
    sizes: Mapping[str, int],
    *,
    is_gradient: bool,
) -> str:
    """Describe the first tensor that differs, or return an empty string.

    Args:
        traces: observations of each rank of the layout.
        reference: those of one rank.
        sizes: numbers of the layout that a factor can come from.
        is_gradient: compare gradients of outputs instead of outputs.
    """
    known = _rows_by_name(reference, is_gradient)
    largest = max((magnitude(rows) for rows in known.values()), default=0.0)
    calls = _by_call(traces, is_gradient)
    order = {name: number for number, name in enumerate(known)}
    candidates = _factors(sizes) if is_gradient else [1.0]
    agreeing = "none before it"
    for name, call in sorted((each for each in calls if each[0] in known), key=lambda each: order[each[0]]):
        by_rank = {rank: _rows(each.value) for rank, each in calls[name, call].items()}
        if not any(bool(each.any()) for each in by_rank.values()):
            continue
        match = _Match(known[name], max(magnitude(known[name]), _SMALLEST * largest))
        factor = next((each for each in candidates if match.holds(by_rank, each)), None)
        if factor is None:
            place = "backward: the gradient of the output" if is_gradient else "forward: the output"
            how, ranks = match.described(by_rank, candidates[0], sizes)
            collective = calls[name, call][ranks[0]].collective
            shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            return (
                f"first difference in {place} of {name or 'the model'} {how} on {shown}, after "
                f"{collective}; the last one that agrees is {agreeing}"
            )
        candidates = [factor]
        agreeing = name or "the model's"
    return ""


def _rows_by_name(observations: Sequence[Observation], is_gradient: bool) -> dict[str, Tensor]:
    """Return the rows of each module's tensors over all its calls, in the order of the first ones."""
    parts: dict[str, list[Tensor]] = {}
    for each in observations:
        if each.is_gradient == is_gradient:
            parts.setdefault(each.name, []).append(_rows(each.value))
    return {
        name: torch.cat(rows) for name, rows in parts.items() if len({each.shape[1] for each in rows}) == 1
    }


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).double()


def _by_call(
    traces: Sequence[Sequence[Observation]], is_gradient: bool
) -> dict[tuple[str, int], dict[int, Observation]]:
    calls: dict[tuple[str, int], dict[int, Observation]] = {}
    for rank, trace in enumerate(traces):
        for each in trace:
            if each.is_gradient == is_gradient and each.value.numel():
                calls.setdefault((each.name, each.call), {})[rank] = each
    return calls


def _factors(sizes: Mapping[str, int]) -> list[float]:
    products = {1.0}
    for size in sizes.values():
        products |= {each * size for each in products}
    return sorted(products | {1.0 / each for each in products}, key=lambda factor: abs(factor - 1.0))


class _Match:
    """Search for rows in the reference's rows of a module.

    Args:
        rows: the reference's rows, ``[n, features]``.
        scale: magnitude that differences are relative to.
    """

    def __init__(self, rows: Tensor, scale: float) -> None:
        self._rows = rows
        self._limit = _AGREES * scale

    def holds(self, by_rank: ByRank, factor: float) -> bool:
        """Return whether the tensors of all ranks, or their sums, are in the reference times the factor."""
        if all(self.contains(each, factor) for each in by_rank.values()):
            return True
        return any(all(self.contains(each, factor) for each in sums) for sums in _sums(by_rank))

    def contains(self, local: Tensor, factor: float) -> bool:
        """Return whether each row is in the reference times the factor, whole or cut."""
        return any(
            _distance(local, cut * factor) <= self._limit * abs(factor)
            for cut in _cuts(self._rows, local.shape[1])
        )

    def described(self, by_rank: ByRank, factor: float, sizes: Mapping[str, int]) -> tuple[str, list[int]]:
        """Return how tensors differ, and on which ranks."""
        ranks = [rank for rank, each in sorted(by_rank.items()) if not self.contains(each, factor)]
        ranks = ranks or sorted(by_rank)
        for other in _factors(sizes):
            if other != 1.0 and all(self.contains(by_rank[rank], factor * other) for rank in ranks):
                return f"is {named_factor(other, sizes)} the reference's", ranks
        return "differs", ranks


def _sums(by_rank: ByRank) -> Iterator[list[Tensor]]:
    """Yield the sums over groups of neighbouring ranks, and of ranks with a constant distance."""
    ranks = sorted(by_rank)
    if len({by_rank[rank].shape for rank in ranks}) > 1:
        return
    for size in (each for each in range(2, len(ranks) + 1) if len(ranks) % each == 0):
        num_groups = len(ranks) // size
        neighbours = [ranks[start * size : (start + 1) * size] for start in range(num_groups)]
        distant = [ranks[start::num_groups] for start in range(num_groups)]
        for groups in (neighbours, distant):
            yield [torch.stack([by_rank[rank] for rank in group]).sum(0) for group in groups]


def _distance(local: Tensor, full: Tensor) -> float:
    """Return the largest distance of a row from the nearest row of another tensor."""
    if local.numel() == 0:
        return 0.0
    if full.numel() == 0 or not local.isfinite().all():
        return torch.inf
    # p=inf subtracts rows; with p=2 a product of rows could lose half of the digits.
    return float(torch.cdist(local, full, p=torch.inf).amin(1).max())


def _cuts(full: Tensor, features: int) -> Iterator[Tensor]:
    """Yield the ways in which features are cut: a slice, or slices of each half or third, joined."""
    total = full.shape[1]
    if total == features:
        yield full
    elif total % features == 0:
        for parts in (each for each in (1, 2, 3) if features % each == 0):
            split = full.unflatten(1, (parts, total // features, -1))
            yield from (split[:, :, index].flatten(1) for index in range(total // features))
