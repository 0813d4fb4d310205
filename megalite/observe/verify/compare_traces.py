"""Compare the values of all ranks of a layout with their places in the tensors of one rank.

Samples are placed by their index in the global batch, positions by the rank's slice of the sequence, and
features and parameters by the tensor-parallel slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.distributed.axis import HeldPositions
from megalite.observe.operator_log import Collective
from megalite.observe.verify.compare_runs import magnitude
from megalite.observe.verify.trace_run import Activation, RankTrace, StepTensor
from megalite.tensor_parallel.placement import Box


@dataclass(frozen=True)
class Comparison:
    """Value of one rank, and the same elements on one rank.

    Attributes:
        starts: place of the first element in the full tensor.
        dims: names of the dims.
        samples: number in the run of the first sample, and the count; None for a value of no sample.
        others: full tensor of all samples, with the samples in the first dim.
        sums: names of the axes that were summed over.
    """

    trace: RankTrace
    value: Tensor
    expected: Tensor
    starts: tuple[int, ...]
    dims: tuple[str, ...]
    collective: Collective | None
    label: str
    samples: tuple[int, int] | None = None
    others: Tensor | None = None
    sums: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """Return the largest difference; inf if only one of both has a NaN."""
        difference = (self.value - self.expected).abs()
        is_nan = self.value.isnan()
        difference[is_nan] = math.inf
        difference[is_nan & self.expected.isnan()] = 0.0
        return float(difference.max()) if difference.numel() else 0.0


class Event(NamedTuple):
    """Comparisons of one tensor on all ranks and for all microbatches, and its place in order."""

    phase: str
    order: int
    names: Sequence[str]
    comparisons: list[Comparison]


def compared_steps(run: Sequence[RankTrace], reference: RankTrace) -> Iterator[Event]:
    """Yield the tensors of parameters, and numbers, in the reference's order."""
    values: dict[tuple[str, str], dict[int, StepTensor]] = {}
    for trace in run:
        for step in trace.steps:
            values.setdefault((step.phase, step.name), {})[trace.rank] = step
    for order, full in enumerate(reference.steps):
        found = values.get((full.phase, full.name), {})
        comparisons = [
            _parameter(trace, found, run, full.value[: full.num_used] if full.value.dim() else full.value)
            for trace in run
            if trace.rank in found
        ]
        yield Event(full.phase, order, [full.name], comparisons)


def _parameter(
    trace: RankTrace, steps: dict[int, StepTensor], run: Sequence[RankTrace], full: Tensor
) -> Comparison:
    """Compare a rank's slice, or its sum over ranks with parts of it, with the full tensor."""
    step = steps[trace.rank]
    own = trace.coordinates_outside(step.summed_over)
    parts = [
        steps[each.rank].value
        for each in run
        if each.rank in steps and own == each.coordinates_outside(step.summed_over)
    ]
    value, box = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0], step.box
    if value.dim():
        rows = max(0, min(box.shape[0], step.num_used - box.starts[0]))
        value, box = value[:rows], Box(box.starts, (rows, *box.shape[1:]))
    return Comparison(
        trace,
        value.double(),
        box.of(full).double() if value.dim() else full.double(),
        box.starts,
        tuple(f"dim {dim}" for dim in range(value.dim())),
        _last_collective(trace, step.num_before, step.phase),
        step.name,
        sums=step.summed_over,
    )


def _last_collective(trace: RankTrace, num_before: int, phase: str) -> Collective | None:
    """Return the last collective on which a tensor can depend.

    Activations do not depend on the reductions of gradients that run meanwhile. A gradient's sum over its
    replicas is one of these, and the loss depends on its own sums.
    """
    for number, each in reversed(list(enumerate(trace.collectives[:num_before]))):
        is_reduction = each.axis in trace.replicas and each.kind in ("all-reduce", "reduce-scatter")
        if (number in trace.loss_collectives) != (phase == "loss"):
            continue
        if is_reduction and phase in ("forward", "backward", "own gradient") and not each.in_forward:
            continue
        if phase == "reduced gradient" and not is_reduction:
            continue
        return each
    return None


def compared_activations(
    run: Sequence[RankTrace], reference: RankTrace, limit: float
) -> tuple[list[Event], int]:
    """Return the microbatches, activations and their gradients, and how many have no place.

    Args:
        limit: a larger relative difference cannot come from the order of floating-point sums.
    """
    full, by_name = _by_tensor(reference)
    used = {
        by_name[entry.names[0]]
        for trace in run
        for entry in trace.activations
        if entry.names[0] in by_name and entry.gradient is not None and entry.gradient.any()
    }
    values: dict[str, list[Comparison]] = {}
    recomputed: dict[str, list[Comparison]] = {}
    gradients: dict[str, list[Comparison]] = {}
    unplaced: set[str] = set()
    for trace in run:
        for entry in (*trace.microbatches, *trace.activations):
            key = next((by_name[name] for name in entry.names if name in by_name), None)
            compared = key and _compare(trace, entry, full[key], reference, is_gradient=False)
            if not key or not compared:
                unplaced.add(entry.names[0])
                continue
            is_constant = entry.gradient is not None and not bool(entry.gradient.any())
            if key in used and is_constant and compared.largest > limit * magnitude(compared.expected):
                continue  # the loss does not depend on it: a head's of other tokens
            values.setdefault(key, []).append(compared)
            of_gradient = _compare(trace, entry, full[key], reference, is_gradient=True)
            if of_gradient is not None:
                gradients.setdefault(key, []).append(of_gradient)
        for entry in trace.recomputed:
            key = next((by_name[name] for name in entry.names if name in by_name), None)
            again = key and _compare(trace, entry, full[key], reference, is_gradient=False)
            if key and again:
                recomputed.setdefault(key, []).append(again)
    data, positions = {entry.names[0] for entry in reference.microbatches}, list(full)
    events = []
    for phase, tensors in (("forward", values), ("recomputed", recomputed), ("backward", gradients)):
        for key, comparisons in tensors.items():
            first = full[key][0]
            order = first.gradient_order if phase == "backward" else positions.index(key)
            is_data = phase == "forward" and key in data
            events.append(Event("microbatch" if is_data else phase, order, first.names, comparisons))
    return events, len(unplaced)


def skipped_layers(run: Sequence[RankTrace], reference: RankTrace) -> list[str]:
    """Return the layers of the reference that no rank has run, such as ``layers.1``."""
    here = {name for trace in run for entry in trace.activations for name in entry.names}
    names = dict.fromkeys(name for entry in reference.activations for name in entry.names)
    outputs = [name for name in names if name.startswith("output of layers.") and name.count(".") == 1]
    return [name.removeprefix("output of ") for name in outputs if name not in here]


def _by_tensor(reference: RankTrace) -> tuple[dict[str, list[Activation]], dict[str, str]]:
    """Return the microbatches of the reference's tensors by their first names, and the first name by each."""
    full: dict[str, list[Activation]] = {}
    by_name: dict[str, str] = {}
    entries = [*reference.microbatches, *reference.activations]
    for entry in sorted(entries, key=lambda entry: entry.microbatch):
        key = by_name.get(entry.names[0], entry.names[0])
        full.setdefault(key, []).append(entry)
        for name in entry.names:
            by_name.setdefault(name, key)
    return full, by_name


def _compare(
    trace: RankTrace, entry: Activation, parts: Sequence[Activation], reference: RankTrace, is_gradient: bool
) -> Comparison | None:
    """Compare a rank's tensor of a microbatch with its place; None if it has none."""
    tensors = [part.gradient if is_gradient else part.value for part in parts]
    value = entry.gradient if is_gradient else entry.value
    if value is None or any(tensor is None for tensor in tensors):
        return None
    whole = [tensor.double() for tensor in tensors if tensor is not None]
    value = value.double()
    if len({tensor.shape for tensor in whole}) > 1:
        return None
    sizes = trace.micro_batch_size, reference.micro_batch_size
    value, whole, batch_dim = _with_samples(value, whole, *sizes, entry.batch_dim)
    value, whole = _with_features(value, whole, entry.features)
    if batch_dim is None:
        if any(not torch.equal(each, whole[0]) for each in whole):
            return None  # a value of a microbatch, such as its sum, depends on its size
        full = whole[0]
    else:
        full = torch.cat(whole, batch_dim)
    full = _in_order_of_ranks(full, value, batch_dim, trace)
    first = trace.first_samples[entry.microbatch]
    box = _place(tuple(value.shape), tuple(full.shape), batch_dim, first, trace)
    if box is None:
        return None
    value = Box((0,) * value.dim(), box.shape).of(value)  # without padding at its end
    names = ["features"] * value.dim()
    others = None
    if batch_dim is not None:
        names[0 if batch_dim else min(1, value.dim() - 1)] = "positions"
        names[batch_dim] = "samples"
        starts = tuple(0 if dim == batch_dim else start for dim, start in enumerate(box.starts))
        sizes_of = tuple(full.shape[d] if d == batch_dim else n for d, n in enumerate(box.shape))
        others = Box(starts, sizes_of).of(full).movedim(batch_dim, 0)
    num_before = entry.gradient_num_before if is_gradient else entry.num_before
    return Comparison(
        trace,
        value,
        box.of(full),
        box.starts,
        tuple(names),
        _last_collective(trace, num_before, "backward" if is_gradient else "forward"),
        entry.gradient_name if is_gradient else entry.names[0],
        None if batch_dim is None else (trace.first_sample + first, trace.micro_batch_size),
        others,
    )


def _with_samples(
    value: Tensor, whole: list[Tensor], size: int, reference_size: int, known: int | None
) -> tuple[Tensor, list[Tensor], int | None]:
    """Return both with a dim of samples, and which it is; ``[s b, …]`` becomes ``[s, b, …]``."""
    if known is not None:
        return value, whole, known
    dims = sorted(range(value.dim()), key=lambda dim: (dim != 1, dim))
    if whole[0].dim() != value.dim():
        return value, whole, None
    for dim in dims:
        if value.shape[dim] == size and whole[0].shape[dim] == reference_size:
            return value, whole, dim
    flat = value.dim() > 1 and value.shape[0] % size == 0 and whole[0].shape[0] % reference_size == 0
    if flat and value.shape[0] // size <= whole[0].shape[0] // reference_size:
        unflat = [tensor.unflatten(0, (-1, reference_size)) for tensor in whole]
        return value.unflatten(0, (-1, size)), unflat, 1
    return value, whole, None


def _with_features(
    value: Tensor, whole: list[Tensor], features: tuple[int, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Split the last dim into its dims, of which tensor parallelism cuts the last."""
    if not features or whole[0].shape[-1] != math.prod(features):
        return value, whole
    return value.unflatten(-1, (*features[:-1], -1)), [each.unflatten(-1, features) for each in whole]


def is_cut_by_positions(size: int, whole: int, trace: RankTrace) -> bool:
    """Return whether a dim has the rank's part of the positions, if need be with padding."""
    return size != whole and 0 <= size * trace.positions.count - whole < trace.positions.count


def _in_order_of_ranks(full: Tensor, value: Tensor, batch_dim: int | None, trace: RankTrace) -> Tensor:
    """Return a full tensor with its positions in the order of the ranks that hold them."""
    own = trace.held
    if not own.is_zigzag:
        return full
    for dim, (size, whole) in enumerate(zip(value.shape, full.shape, strict=False)):
        if dim == 2 and batch_dim == 1:
            break  # features after positions and samples: of all positions, a rank has a part of the heads
        if dim != batch_dim and is_cut_by_positions(size, whole, trace) and whole % (2 * own.count) == 0:
            ranks = (HeldPositions(rank, own.count, is_zigzag=True) for rank in range(own.count))
            return torch.cat([rank.take(full, dim) for rank in ranks], dim)
    return full


def _place(
    shape: tuple[int, ...], full: tuple[int, ...], batch_dim: int | None, first: int, trace: RankTrace
) -> Box | None:
    """Return the place of a rank's tensor in the full one, without padding; None if shapes do not fit.

    If the second dim is of samples, the first one is of positions, and features follow. With all positions,
    the features can be those of heads that ranks have exchanged, in their order. With the positions of some
    other ranks, a tensor has no place.
    """
    if len(shape) != len(full):
        return None
    num_ranks, index = trace.positions.count, trace.positions.index
    exchanges_heads = shape[0] == full[0] and trace.sizes["tp"] == 1
    starts, sizes = [], []
    for dim, (size, whole) in enumerate(zip(shape, full, strict=True)):
        is_of_positions, is_of_features = batch_dim == 1 and dim == 0, batch_dim == 1 and dim > 0
        is_cut_by_ranks = is_cut_by_positions(size, whole, trace)
        if is_of_features:
            is_cut_by_ranks = exchanges_heads and size * num_ranks == whole
        if dim == batch_dim:
            start = first
        elif size == whole:
            start = 0
        elif is_cut_by_ranks:
            start = index * size
        elif not is_of_positions and size * trace.sizes["tp"] == whole:
            start = trace.coordinates["tp"] * size
        elif whole < size < whole + trace.sizes["tp"]:  # padded so that tp divides it
            start = 0
        else:
            return None
        starts.append(start)
        sizes.append(max(0, min(size, whole - start)))
    return Box(tuple(starts), tuple(sizes))
