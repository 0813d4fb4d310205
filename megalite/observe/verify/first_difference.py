"""Find the first tensor in which an iteration of a layout differs from the same iteration on one rank.

Differences are ordered by when the tensor is computed, not by rank or microbatch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.distributed.axes import coordinates_text
from megalite.observe.verify.compare_runs import SMALLEST, Tolerance, is_only_rounding, magnitude
from megalite.observe.verify.compare_traces import (
    Comparison,
    Event,
    compared_activations,
    compared_steps,
    skipped_layers,
)
from megalite.observe.verify.trace_run import RankTrace

PHASES = {
    "weight before": "weight {name} before iteration {iteration}",
    "microbatch": "{name} (iteration {iteration}{samples})",
    "divisor": "{name} that divides the loss (iteration {iteration})",
    "forward": "{name} (forward, iteration {iteration}{samples})",
    "own loss": "{name}, the sum over the microbatches of all ranks (iteration {iteration})",
    "loss": "{name}, the mean over the global batch (iteration {iteration})",
    "recomputed": "{name} (recomputed for backward, iteration {iteration}{samples})",
    "backward": "gradient of the {name} (backward, iteration {iteration}{samples})",
    "own gradient": "gradient of {name}, before its sum over the ranks (iteration {iteration})",
    "reduced gradient": "gradient of {name}, after its sum over {replicas} (iteration {iteration})",
    "gradient": "gradient of {name}, after all sums (iteration {iteration})",
    "norm": "{name} (iteration {iteration})",
    "weight": "weight {name} after the update (iteration {iteration})",
}
"""What is compared, in the order in which an iteration computes it."""
OF_MODULES = ("forward", "recomputed", "backward")
"""The phases in which modules compute."""
_LAYER = re.compile(r"output of layers\.[0-9]+")


@dataclass(frozen=True)
class FirstDifference:
    """First tensor that differs.

    Attributes:
        what: the tensor, when it is computed, and of which samples.
        name: its name in the model.
        ranks: ranks with a value that differs.
        details: further lines: which elements of which rank, what is remarkable, the last collective.
    """

    what: str
    phase: str
    name: str
    ranks: list[int]
    details: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"first difference: {self.what}", *(f"  {line}" for line in self.details)])


def first_difference(
    run: Sequence[RankTrace], reference: RankTrace, iteration: int, tolerance: Tolerance
) -> tuple[FirstDifference | None, int]:
    """Compare all ranks of a layout with one rank.

    Returns:
        The first difference, and the number of tensors that have no place in the reference's.
    """
    activations, num_unplaced = compared_activations(run, reference, tolerance.gradient)
    events = [*compared_steps(run, reference), *activations]
    scales = {phase: _scale(each for each in events if each.phase == phase) for phase in PHASES}
    rounded = frozenset(
        each.names[0]
        for each in events
        if each.phase == "gradient" and is_only_rounding(_scale([each]), scales["gradient"])
    )
    for phase in PHASES:
        if phase == "weight" and math.isinf(tolerance.weight):
            continue
        if phase == "forward" and (skipped := skipped_layers(run, reference)):
            what = f"output of {' and '.join(skipped)} (forward, iteration {iteration})"
            detail = "no rank runs it, and one rank alone does"
            return FirstDifference(what, phase, skipped[0], [], [detail]), num_unplaced
        found = sorted((each for each in events if each.phase == phase), key=lambda each: each.order)
        judge = Judge(phase, scales[phase], tolerance, rounded if phase.startswith("weight") else frozenset())
        if phase in ("recomputed", "backward"):  # a representation that differed in forward differs again
            forward = Judge("forward", scales["forward"], tolerance)
            known = {each.names[0] for each in events if each.phase == "forward" and forward.differs(each)}
            found = [each for each in found if each.names[0] not in known]
        differing = judge.differing(found)
        if differing is not None:
            return judge.described(differing, found, iteration), num_unplaced
    return None, num_unplaced


def _scale(events: Iterable[Event]) -> float:
    return max((magnitude(each.expected) for event in events for each in event.comparisons), default=0.0)


class Judge(NamedTuple):
    """Function that finds the first difference of a phase, and how to describe it.

    Attributes:
        scale: largest magnitude of the phase.
        rounded: names of weights whose differences are relative to the scale.
    """

    phase: str
    scale: float
    tolerance: Tolerance
    rounded: frozenset[str] = frozenset()

    @property
    def limit(self) -> float:
        scalars = ("divisor", "own loss", "loss")
        return self.tolerance.loss if self.phase in scalars else self.tolerance.gradient

    def is_within(self, comparison: Comparison, limit: float) -> bool:
        """Return whether the relative difference is at most the limit."""
        return comparison.largest <= limit * self._size(comparison)

    def _size(self, comparison: Comparison) -> float:
        """Return the magnitude that a difference is relative to."""
        smallest = self.scale if comparison.label in self.rounded else SMALLEST * self.scale
        return max(magnitude(comparison.expected), smallest, 1e-300)

    def differs(self, event: Event) -> bool:
        return not all(self.is_within(each, self.limit) for each in event.comparisons)

    def agrees(self, event: Event) -> bool:
        return all(self.is_within(each, self.tolerance.agrees) for each in event.comparisons)

    def differing(self, events: Sequence[Event]) -> Event | None:
        """Return the first event that differs, and on which later ones depend.

        Layers only pass hidden states on. If the output of a later layer agrees, a difference before it is
        one of representation: for example, parts of a sum that is computed later. Within a layer, parts of a
        sum are no difference if the next tensor agrees.
        """
        differing = [each for each in events if self.differs(each)]
        if self.phase not in ("forward", "backward") or not differing:
            return differing[0] if differing else None
        last = max(
            (each.order for each in events if self._is_boundary(each) and self.agrees(each)), default=-1
        )
        after = [each for each in differing if each.order > last]
        of_samples = [each for each in events if each.comparisons[0].samples is not None]
        following = {each.order: next_ for each, next_ in itertools.pairwise(of_samples)}
        if self.phase == "backward":
            following |= _inputs_of_outputs(of_samples)
        whole = (each for each in after if not self._is_completed(each, following.get(each.order)))
        return next(whole, None)

    def _is_boundary(self, event: Event) -> bool:
        """Return whether everything that follows depends on the tensor alone.

        That holds for the outputs of the embedding, the layers and the head, and in forward for the losses of
        the tokens. It does not hold for modules that compute several terms of the loss side by side.
        """
        last = ("losses_of",) if self.phase == "forward" else ()
        stages = {f"output of {name}" for name in ("embedding", event.comparisons[0].trace.head, *last)}
        return any(name in stages or _LAYER.fullmatch(name) for name in event.names)

    def _is_completed(self, event: Event, following: Event | None) -> bool:
        """Return whether the ranks have parts of a sum, and the next tensor shows that it is summed."""
        adds_up = any(_adds_up(event.comparisons, each, self) for each in event.comparisons)
        return adds_up and following is not None and self.agrees(following)

    def described(self, event: Event, events: Sequence[Event], iteration: int) -> FirstDifference:
        """Return the report of an event that differs.

        Args:
            events: all events of the phase.
        """
        differing = [each for each in event.comparisons if not self.is_within(each, self.limit)]
        first = min(differing, key=lambda each: (each.samples or (0, 0), each.trace.rank))
        numbers = [each.samples[0] + i for each in differing if each.samples for i in range(each.samples[1])]
        samples = f", {_range_text('sample', min(numbers), max(numbers))}" if numbers else ""
        what = PHASES[self.phase].format(
            name=first.label,
            iteration=iteration,
            samples=samples,
            replicas=" and ".join(first.trace.replicas[:1]),
        )
        ranks = sorted({each.trace.rank for each in differing})
        details = [self._elements(first), *self._remarks(event, first)]
        count = sum(self.differs(each) for each in events)
        if self.phase not in OF_MODULES and len(events) > 1:
            details.append(f"{count} of {len(events)} tensors differ there")
        if len(ranks) > 1:
            details.append(f"also on {_range_text('rank', *ranks[1 :: max(1, len(ranks) - 2)])}")
        details.append(self._collective(first))
        return FirstDifference(what, self.phase, first.label, ranks, details)

    def _collective(self, found: Comparison) -> str:
        if found.collective is None and self.phase == "reduced gradient":
            return f"no reduction over {found.trace.replicas[0]} before on rank {found.trace.rank}"
        return f"last collective before on rank {found.trace.rank}: {found.collective or 'none'}"

    def _elements(self, found: Comparison) -> str:
        largest = magnitude(found.expected)
        limit = self.limit * self._size(found)
        different = ~((found.value - found.expected).abs() <= limit)
        large = {axis: rank for axis, rank in found.trace.coordinates.items() if found.trace.sizes[axis] > 1}
        text = f"rank {found.trace.rank}{f' ({coordinates_text(large)})' if large else ''}: "
        if different.dim() == 0:
            return f"{text}{float(found.value):.6g} instead of {float(found.expected):.6g}"
        text += f"{int(different.sum())} of {different.numel()} elements differ"
        for dim, (start, name) in enumerate(zip(found.starts, found.dims, strict=True)):
            where = different.movedim(dim, 0).flatten(1).any(1) if different.dim() > 1 else different
            indices = where.nonzero()[:, 0]
            if name != "samples" and len(indices) < len(where):
                text += f", {name} {start + int(indices[0])}-{start + int(indices[-1])}"
        return f"{text}, by up to {found.largest:.1e} where values are up to {largest:.1e}"

    def _remarks(self, event: Event, found: Comparison) -> Iterator[str]:
        """Yield what the values have in common with right ones."""
        value, expected = found.value, found.expected
        within = self.limit * magnitude(expected)
        ratio = 1.0 if self.phase == "microbatch" else _ratio(value, expected, within)
        sizes = {axis: size for axis, size in found.trace.sizes.items() if size > 1}
        missing = [axis for axis in sizes if _adds_up(event.comparisons, found, self, axis)]
        if ratio not in (0.0, 1.0) and self.phase != "divisor":
            means = [f", as after a mean over {axis}" for axis in sizes if _is_near(ratio * sizes[axis], 1.0)]
            sums = [f", as after two sums over {axis}" for axis in sizes if _is_near(ratio, sizes[axis])]
            yield f"the values are the right ones times {ratio:.6g}{''.join((means + sums)[:1])}"
        elif self.phase == "norm" and (axis := self._axis_of_squares(event, found, sizes)):
            yield (
                f"the squares of the {axis} ranks' values add up to the square of the right one: a sum over "
                f"{axis} is missing"
            )
        elif axes := [axis for axis in missing if axis not in found.sums]:
            yield (
                f"the values of the {axes[0]} ranks add up to the right ones: a sum over {axes[0]} is missing"
            )
        elif (
            self.phase == "reduced gradient" and (rank := _own_gradient_of(event, found, within)) is not None
        ):
            axis = found.trace.replicas[0]
            yield f"the values are rank {rank}'s before the sum: a sum over {axis} is missing"
        elif self.phase == "weight" and _is_not_updated(found, within):
            others = (each for each in event.comparisons if each.starts == found.starts)
            right = next((each.trace.rank for each in others if self.is_within(each, self.limit)), None)
            more = "" if right is None else f", but rank {right} has the right ones: they are not gathered"
            yield f"the values are those before the update{more}"
        elif (sample := _other_sample(found, within)) is not None:
            yield f"the values are those of sample {sample}"
        elif (rank := _other_rank(event.comparisons, found, within)) is not None:
            yield f"the values are those of rank {rank}"
        elif ratio == 0.0:
            yield "the values are 0"
        else:
            yield from _rounding(value, expected, found.largest)

    def _axis_of_squares(self, event: Event, found: Comparison, axes: Iterable[str]) -> str | None:
        """Return the axis over whose ranks the squares of a norm were not summed; None if there is none."""
        squares = [
            replace(each, value=each.value**2, expected=each.expected**2) for each in event.comparisons
        ]
        own = squares[event.comparisons.index(found)]
        return next((axis for axis in axes if _adds_up(squares, own, self, axis)), None)


def _inputs_of_outputs(events: Iterable[Event]) -> dict[int, Event]:
    """Return the event of each module's input by the order of its output.

    In backward it depends on the output's gradient. The next gradient may belong to a module beside it.
    """
    by_name = {name: each for each in events for name in each.names}
    outputs = [(each, name[10:]) for each in events for name in each.names if name.startswith("output of ")]
    pairs = [(each, by_name.get(f"input of {module}")) for each, module in outputs]
    return {each.order: found for each, found in pairs if found is not None and found.order > each.order}


def _ratio(value: Tensor, expected: Tensor, within: float) -> float:
    """Return the factor between two tensors; 1.0 if it is not the same for all elements."""
    norm = float((expected * expected).sum())
    ratio = float((value * expected).sum()) / norm if norm > 0.0 else 1.0
    if value.dim() == 0 and not _is_near(max(ratio, 1.0 / max(ratio, 1e-9)), round(max(ratio, 1.0 / ratio))):
        return 1.0  # one number always has a factor
    rest = float((value - ratio * expected).abs().max())
    return ratio if rest <= within * max(1.0, abs(ratio)) else 1.0


def _is_near(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=1e-6)


def _own_gradient_of(event: Event, found: Comparison, within: float) -> int | None:
    """Return the rank whose gradient before the sum these values are; None if there is none."""
    for trace in (each.trace for each in event.comparisons):
        own = _step_of(trace, "own gradient", event.names[0])
        if own.shape == found.value.shape and float((own - found.value).abs().max()) <= within:
            return trace.rank
    return None


def _is_not_updated(found: Comparison, within: float) -> bool:
    before = _step_of(found.trace, "weight before", found.label)[: len(found.value)]
    return float((before - found.value).abs().max()) <= within


def _step_of(trace: RankTrace, phase: str, name: str) -> Tensor:
    """Return a rank's tensor of a phase, and an empty one if the rank does not have the parameter."""
    found = (step.value for step in trace.steps if (step.phase, step.name) == (phase, name))
    return next(found, torch.empty(0)).double()


def _range_text(what: str, first: int, last: int | None = None) -> str:
    return f"{what} {first}" if last is None or last == first else f"{what}s {first}-{last}"


def _adds_up(comparisons: Sequence[Comparison], found: Comparison, judge: Judge, axis: str = "tp") -> bool:
    """Return whether the values of the ranks along an axis add up to the right one of one of them."""
    trace = found.trace
    group = {
        each.trace.coordinates[axis]: each.value
        for each in comparisons
        if each.samples == found.samples
        and each.starts == found.starts
        and each.value.shape == found.value.shape
        and {**each.trace.coordinates, axis: 0} == {**trace.coordinates, axis: 0}
    }
    if len(group) < 2:
        return False
    total = torch.stack([*group.values()]).sum(0)
    difference = float((total - found.expected).abs().max())
    return difference <= judge.limit * magnitude(found.expected)


def _other_sample(found: Comparison, within: float) -> int | None:
    """Return the sample whose values the first sample of the value has; None if there is none."""
    if found.others is None or found.samples is None:
        return None
    own = found.value.movedim(found.dims.index("samples"), 0)[0]
    for number, other in enumerate(found.others):
        if float((own - other).abs().max()) <= within:
            first = found.samples[0] - found.starts[found.dims.index("samples")]
            return first + number if first + number != found.samples[0] else None
    return None


def _other_rank(comparisons: Sequence[Comparison], found: Comparison, within: float) -> int | None:
    """Return the rank whose right values the value has; None if there is none."""
    for each in comparisons:
        is_other = each.starts != found.starts and each.expected.shape == found.value.shape
        if is_other and float((found.value - each.expected).abs().max()) <= within:
            return each.trace.rank
    return None


def _rounding(value: Tensor, expected: Tensor, largest: float) -> Iterator[str]:
    """Yield the dtype that values were rounded to, if the difference is as small."""
    relative = largest / max(magnitude(expected), 1e-300)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        if torch.equal(value.to(dtype).double(), value) and relative <= 2 * torch.finfo(dtype).eps:
            yield f"the values are rounded to {name}"
            return
    if 1e-9 < relative < 2 * torch.finfo(torch.float32).eps:
        yield "the difference is as small as rounding to fp32"
