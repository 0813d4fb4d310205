"""Which rank writes what: each element once a stage, what replicas hold alike spread over them by bytes."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Mapping

from torch import Tensor

from megalite.checkpoint.place import Place, Tensors
from megalite.checkpoint.tensor_writer import Piece
from megalite.optim.part import Part
from megalite.topology import Topology

_CUT_BYTES = 16 << 20
"""A larger tensor is cut up among replicas. It depends on nothing but the tensor and their number: the two
stages that hold a tied table cut it alike, so that a reader sees that it is the same."""


def share_of(tensors: Tensors, topology: Topology, cut_bytes: int = _CUT_BYTES) -> dict[str, Piece]:
    """What this rank writes of what it holds.

    Its own part of what replicas share out; of what all of them hold a share by bytes, equal up to one
    tensor of `cut_bytes`; and of plain tensors those of a stage's first rank. Every rank comes to the same
    division by itself.

    Returns:
        By tensor's name: a name comes once at the most.
    """
    mine = {name: tensor for name, tensor in tensors.items() if _is_for_tp_rank(tensor, topology)}
    copied = {
        name: part
        for name, part in mine.items()
        if isinstance(part, Part) and part.is_copied and _numel(part)
    }
    share = {
        name: all_of(tensor, topology)
        for name, tensor in mine.items()
        if name not in copied and (isinstance(tensor, Part) or topology.dp.is_first) and _numel(tensor)
    }
    for name, start, end in _deal(copied, topology.dp.size, cut_bytes)[topology.dp.rank]:
        share[name] = _stretch(copied[name], start, end, topology)
    return share


def all_of(tensor: Tensor | Part, topology: Topology) -> Piece:
    """All that this rank holds of a tensor. What is a whole slice keeps its shape; other parts are flat."""
    if isinstance(tensor, Tensor):
        return Piece(tensor)
    elements = tensor.tensor.view(tensor.shape) if tensor.is_copied else tensor.tensor
    return Piece(elements, Place.of(tensor, topology))


def _is_for_tp_rank(tensor: Tensor | Part, topology: Topology) -> bool:
    """Whether this rank of tp is the only one, or the first, that holds it."""
    return topology.tp.is_first or (isinstance(tensor, Part) and tensor.spec.shard is not None)


def _numel(tensor: Tensor | Part) -> int:
    return tensor.numel() if isinstance(tensor, Tensor) else tensor.tensor.numel()


def _stretch(part: Part, start: int, end: int, topology: Topology) -> Piece:
    """Elements ``[start, end)`` of a slice that all replicas hold."""
    whole = all_of(part, topology)
    if (start, end) == (0, part.tensor.numel()):
        return whole
    assert whole.place is not None
    return Piece(part.tensor[start:end], dataclasses.replace(whole.place, start=start, end=end))


def _deal(parts: Mapping[str, Part], num_replicas: int, cut_bytes: int) -> list[list[tuple[str, int, int]]]:
    """Each replica's stretches as (name, start, end): the largest tensors first, to those with the least."""
    sizes = {name: part.tensor.numel() * part.tensor.element_size() for name, part in parts.items()}
    hands: list[list[tuple[str, int, int]]] = [[] for _ in range(num_replicas)]
    loads = [(0, replica) for replica in range(num_replicas)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        numel, size = parts[name].tensor.numel(), sizes[name]
        num_cuts = min(num_replicas, max(1, -(-size // cut_bytes)))
        least = [heapq.heappop(loads) for _ in range(num_cuts)]
        for (load, replica), (start, end) in zip(least, _even(numel, num_cuts), strict=True):
            hands[replica].append((name, start, end))
            heapq.heappush(loads, (load + size * (end - start) // numel, replica))
    return hands


def _even(numel: int, num_cuts: int) -> Iterator[tuple[int, int]]:
    """Stretches that differ by one element at the most."""
    for number in range(num_cuts):
        yield numel * number // num_cuts, numel * (number + 1) // num_cuts
