"""The positions of each sample that a rank holds.

Nothing else decides it: the data, embeddings, dropout and attention read their positions here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.distributed.axes import Slice


@dataclass(frozen=True)
class HeldPositions:
    """Positions of each sample that one of `count` ranks holds, in the order of its tokens.

    They are consecutive. In zigzag order, they are two of 2 `count` slices, number `index` and the same
    number from the end. In causal attention, all ranks then compute as many scores. Megatron-LM has this
    order.

    Attributes:
        index: coordinate of the rank among the ranks that hold different positions.
        count: number of these ranks.
        is_zigzag: whether a rank holds two slices.
        assigns_documents: whether `Microbatch.assignments` says which positions a rank holds, because each
            sample has documents of its own. Then only `index` and `count` may be read here.
    """

    index: int
    count: int
    is_zigzag: bool = False
    assigns_documents: bool = False

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Return the slices of the sample that the rank holds."""
        return self.slices_of(self.index)

    def slices_of(self, index: int) -> tuple[Slice, ...]:
        """Return the slices of the sample that the rank with this coordinate holds."""
        assert not self.assigns_documents, "a microbatch's assignments determine the positions"
        if not self.is_zigzag or self.count == 1:
            return (Slice(index, self.count),)
        num_slices = 2 * self.count
        return Slice(index, num_slices), Slice(num_slices - 1 - index, num_slices)

    def ranges(self, num_tokens: int, part: slice | None = None) -> tuple[range, ...]:
        """Return the positions of the rank's tokens as ranges, in the order of the tokens.

        Args:
            num_tokens: number of tokens of a sample that the rank holds.
            part: which of these tokens are wanted; None for all.
        """
        length = num_tokens // len(self.slices)
        ranges = (range(each.index * length, (each.index + 1) * length) for each in self.slices)
        return cut_ranges(ranges, part or slice(0, num_tokens))

    def group_positions(self, size: int) -> HeldPositions:
        """Return the positions that a group of `size` neighbouring ranks holds together, in order."""
        return replace(self, index=self.index // size, count=self.count // size)

    def take(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the rank's positions of a tensor of whole samples; a view if they are consecutive.

        Args:
            dim: the dim of the positions.
        """
        ranges = self.ranges(x.shape[dim] // self.count)
        parts = [x.narrow(dim, positions.start, len(positions)) for positions in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def in_position_order(self, x: Tensor) -> Tensor:
        """Return ``[s, ...]``, the tokens of two ranks together, in the order of positions."""
        order = self._slices_by_rank
        return _reordered(x, [order.index(number) for number in range(len(order))])

    def in_rank_order(self, x: Tensor) -> Tensor:
        """Return the tokens of a sample, ``[s, ...]``, in the order of the ranks that hold them."""
        return _reordered(x, self._slices_by_rank)

    @property
    def _slices_by_rank(self) -> list[int]:
        """Return the numbers of the sample's slices in the order of the ranks that hold them."""
        return [each.index for rank in range(self.count) for each in self.slices_of(rank)]


def cut_ranges(ranges: Iterable[range], part: slice) -> tuple[range, ...]:
    """Return the positions of some of the tokens that have the positions of these ranges, in their order."""
    found, first = [], 0
    for positions in ranges:
        own = positions[max(part.start - first, 0) : max(part.stop - first, 0)]
        if own:
            found.append(own)
        first += len(positions)
    return tuple(found)


def range_positions(ranges: Iterable[range], device: torch.device) -> Tensor:
    """Return the positions of these ranges, int64 ``[s]``; the host does not wait for the device."""
    return torch.cat([torch.arange(positions.start, positions.stop, device=device) for positions in ranges])


def _reordered(x: Tensor, order: list[int]) -> Tensor:
    """Return equal slices of the first dim in this order; x itself if they are in it."""
    if order == sorted(order):
        return x
    slices = x.chunk(len(order))
    return torch.cat([slices[number] for number in order])
