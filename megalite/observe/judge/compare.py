"""Compare what a layout has computed with the reference, and find the first tensor that differs.

The tolerance is measured. A wrong tensor or number is often a multiple of the right one: the factor is named
by the sizes of axes.

`first_difference` does not know how a tensor is cut. It takes a rank's tensor as rows of its last dim. Each
row must occur in the reference's tensor of the same module, in any order, whole or cut in one of the ways in
which features are cut; or the sum of the tensor over some ranks must, because it may be a part of a sum. So
the search needs to know nothing of how samples, positions and experts are spread over ranks. It does not see
rows in a wrong order; the next attention or the loss does. Gradients may have a constant factor, because
programs divide by the number of tokens before or after they sum. It must be the same for all modules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.observe.judge.rank_record import FullRecord, FullTensor, Observation, Report
from megalite.observe.verify.compare_runs import ROUNDING, SMALLEST, magnitude, nan_last
from megalite.utils.errors import few

START, GRADIENT, WEIGHT = "start", "gradient", "weight"
"""Kinds of tensors: before the first iteration, in it, and after the last one."""
SAFETY = 30.0
"""Factor between the measured effect of one rounding of each weight and the tolerance."""
EXACT = 1e3
"""Factor between the least tolerance and the deviation from a multiple that still counts as one."""
MOST_EXACT = 1e-3
"""Largest such deviation, in any precision."""

Key = tuple[str, str]
"""A kind of tensors and a parameter, or the name of a number and its iteration."""


class Deviation(NamedTuple):
    """Deviation of one quantity from the reference.

    Attributes:
        size: the difference, relative to the largest magnitude of the tensor.
        text: what differs and how, in words; for a tensor with ``{}`` in the place of its name, and without a
            number if only its size is known.
        phase: 0 for the start, 1 for what the first iteration computes from it, 2 for what follows from that.
    """

    size: float
    text: str
    phase: int


Deviations = dict[Key, Deviation]


class ReferenceCheck:
    """Check of layouts against the reference.

    Args:
        reference: what one rank has computed.
        floor: least tolerance, as a relative difference.

    Attributes:
        tolerance: measured tolerance of each quantity; see `measure`.
    """

    def __init__(self, reference: FullRecord, floor: float) -> None:
        self.reference = reference
        self.floor = floor
        self.tolerance: dict[Key, float] = {}
        gradients = {name: magnitude(full.value) for name, full in reference.gradients.items()}
        self._largest = max(gradients.values(), default=0.0)
        # A gradient that is zero but for rounding has no digits, and what Adam makes of it is random.
        self._noise = {name for name, each in gradients.items() if 0.0 < each <= ROUNDING * self._largest}

    def measure(self, perturbed: FullRecord) -> None:
        """Widen the tolerance by a run of one rank whose start was changed by rounding."""
        for key, found in self.deviations(perturbed, {}).items():
            self.tolerance[key] = max(self.tolerance.get(key, 0.0), SAFETY * found.size)

    def findings(self, deviations: Deviations) -> Deviations:
        """Return the differences above the tolerance, and of these, those of the first phase that has any."""
        found = {
            key: each
            for key, each in deviations.items()
            if not each.size <= max(self.floor, self.tolerance.get(key, 0.0))
        }
        first = min((each.phase for each in found.values()), default=0)
        return {key: each for key, each in found.items() if each.phase == first}

    def deviations(
        self,
        record: FullRecord,
        sizes: Mapping[str, int],
        since: int = 0,
        *,
        is_same_program: bool = True,
    ) -> Deviations:
        """Compare all quantities of a record.

        Args:
            sizes: numbers of the layout that a factor can come from, by name.
            since: iterations of the reference before the first one of a record that has resumed; its start
                and its first gradients are not compared.
            is_same_program: the record must have all numbers that the reference reports.
        """
        found: Deviations = {}
        reference = self.reference
        if since == 0:
            for name, full in reference.start.items():
                found[START, name] = self._tensor(START, record.start.get(name), full.value, sizes, 0)
            for name, full in reference.gradients.items():
                smallest = self._largest * (1.0 if name in self._noise else SMALLEST)
                own = record.gradients.get(name)
                found[GRADIENT, name] = self._tensor(GRADIENT, own, full.value, sizes, 1, smallest)
        reports = zip(record.reports, reference.reports[since:], strict=True)
        for iteration, (report, expected) in enumerate(reports, since + 1):
            for name in expected if is_same_program and not since else expected.keys() & report.keys():
                phase = 1 if iteration == 1 else 2
                found[name, str(iteration)] = _number(name, iteration, report, expected, sizes, phase)
        for name, full in reference.weights.items():
            if name not in self._noise:
                found[WEIGHT, name] = self._tensor(WEIGHT, record.weights.get(name), full.value, sizes, 2)
        return found

    def _tensor(
        self,
        kind: str,
        tensor: FullTensor | None,
        reference: Tensor,
        sizes: Mapping[str, int],
        phase: int,
        smallest: float = 0.0,
    ) -> Deviation:
        if tensor is None or tensor.value.shape != reference.shape:
            shape = "missing" if tensor is None else f"of shape {list(tensor.value.shape)}"
            return Deviation(math.inf, f"the {kind} of {{}} is {shape}", phase)
        scale = max(magnitude(reference), smallest, 1e-30)
        off = float((tensor.value - reference).abs().max()) if reference.numel() else 0.0
        size = max(off / scale, tensor.disagreement / scale, key=nan_last)
        return Deviation(size, self._described(kind, tensor, reference, sizes), phase)

    def _described(self, kind: str, tensor: FullTensor, reference: Tensor, sizes: Mapping[str, int]) -> str:
        exact = min(EXACT * self.floor, MOST_EXACT)
        if tensor.total is not None and tensor.num_holders is not None:
            text = (
                f"ranks {tensor.ranks[0]} and {tensor.ranks[1]} hold different copies of the {kind} of {{}}"
            )
            for value, word in ((tensor.total, "sum"), (tensor.total / tensor.num_holders, "mean")):
                factor = factor_of(value, reference, exact)
                if factor is not None and abs(factor - 1.0) <= exact:
                    return f"{text}: their {word} is the reference's, so a reduction over them is missing"
            return text
        factor = factor_of(tensor.value, reference, exact)
        if factor is not None and abs(factor - 1.0) > exact:
            return f"the {kind} of {{}} is {named_factor(factor, sizes)} the reference's"
        return f"the {kind} of {{}} differs"


def _number(
    name: str,
    iteration: int,
    report: Report,
    expected: Report,
    sizes: Mapping[str, int],
    phase: int,
) -> Deviation:
    if name not in report:
        return Deviation(math.inf, f"no rank reports the {name} of iteration {iteration}", phase)
    right = expected[name][0]
    farthest = max(report[name], key=lambda each: nan_last(abs(each - right)))
    size = abs(farthest - right) / max(abs(right), 1e-30)
    text = f"the {name} of iteration {iteration} is {farthest:.9g} instead of {right:.9g} (by {size:.1e})"
    factor = named_factor(farthest / right, sizes) if right else ""
    return Deviation(size, f"{text}: {factor} the reference's" if "(" in factor else text, phase)


def largest(deviations: Deviations, kinds: Iterable[str]) -> float:
    """Return the largest difference of some kinds."""
    sizes = (each.size for (kind, _), each in deviations.items() if kind in kinds)
    return max(sizes, key=nan_last, default=0.0)


def lines(findings: Deviations) -> list[str]:
    """Return a line for each distinct finding: tensors that are wrong in the same way share one."""
    alike: dict[str, dict[str, float]] = {}
    for (_, name), each in findings.items():
        alike.setdefault(each.text, {})[name] = each.size
    found = [_line(text, sizes) for text, sizes in alike.items()]
    return sorted(found, key=lambda line: not line.startswith("ranks"))  # who disagrees comes first


def _line(text: str, sizes: Mapping[str, float]) -> str:
    """Return a finding in one line, about all tensors that share it."""
    if "{}" not in text:
        return text
    size = "" if "reference" in text else f", by {max(sizes.values(), key=nan_last):.1e}"
    return text.format(few(list(sizes), 2)) + size + " at most" * (bool(size) and len(sizes) > 1)


_NAMED = 1e-6
"""Largest relative difference between a factor and the number that it is called by."""


def factor_of(value: Tensor, reference: Tensor, exact: float) -> float | None:
    """Return the number that gives the value when it is multiplied with the reference; None if there is none.

    Args:
        exact: relative deviation from a multiple that still counts as one.
    """
    squared = float(reference.square().sum())
    if squared == 0.0:
        return None
    factor = float((value * reference).sum()) / squared
    rest = float((value - factor * reference).square().sum())
    return factor if rest <= exact**2 * squared else None


def named_factor(factor: float, sizes: Mapping[str, int]) -> str:
    """Return a factor in words, such as ``2 (tp or dp) times``.

    Args:
        sizes: numbers of the layout that a factor can come from, by name.
    """
    if factor == 0.0:
        return "zero"
    shown = f"{factor:.6g}"
    for candidates in _candidates({name: size for name, size in sizes.items() if size > 1}):
        if names := [name for name, value in candidates.items() if abs(factor / value - 1) < _NAMED]:
            return f"{shown} ({' or '.join(names)}) times"
    return f"{shown} times"


def _candidates(sizes: Mapping[str, int]) -> Iterator[dict[str, float]]:
    """Yield what factors can be called, the simplest first."""
    products = {
        " * ".join(names): float(math.prod(sizes[name] for name in names))
        for count in (1, 2, 3)
        for names in itertools.combinations(sizes, count)
    }
    yield {"-1": -1.0}
    yield products
    yield {f"1/{name}" if "*" not in name else f"1/({name})": 1.0 / value for name, value in products.items()}
    yield {
        f"{a}/{b}": sizes[a] / sizes[b] for a, b in itertools.permutations(sizes, 2) if sizes[a] != sizes[b]
    }
    yield {f"sqrt({name})": math.sqrt(value) for name, value in products.items()}
    yield {f"1/sqrt({name})": 1.0 / math.sqrt(value) for name, value in products.items()}


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
