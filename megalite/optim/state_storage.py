"""Storage of optimizer states outside of the device: selection of states, ranges, and host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.hardware.host_memory import allocate_bytes
from megalite.optim.offload_sizes import RANGE_SIZE


class StateSize(NamedTuple):
    """Tensors of one of AdamW's states.

    Attributes:
        numel: number of elements of each tensor.
        dtype: dtype of each tensor.
        kinds: names of the tensors, such as main and exp_avg.
    """

    numel: int
    dtype: torch.dtype
    kinds: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.kinds) * self.numel * self.dtype.itemsize


class StateRange(NamedTuple):
    """Elements ``[start, stop)`` of the state at this position."""

    state: int
    start: int
    stop: int


def num_offloaded(sizes: Sequence[StateSize], fraction: float) -> int:
    """Return how many states, from the first on, hold at least this share of all elements."""
    needed = fraction * sum(size.numel for size in sizes)
    total = count = 0
    while total < needed:
        total += sizes[count].numel
        count += 1
    return count


def ranges_of(
    sizes: Sequence[StateSize], range_size: int, order: Sequence[int] | None = None
) -> list[StateRange]:
    """Return the ranges of all states, in `order` or in the order of the states.

    Each starts at a multiple of `range_size`, so a vector instruction of the update never spans two ranges.
    """
    return [
        StateRange(number, start, min(start + range_size, sizes[number].numel))
        for number in (range(len(sizes)) if order is None else order)
        for start in range(0, sizes[number].numel, range_size)
    ]


class StateStorage(ABC):
    """Tensors of states, initially zero, whose ranges pass to an update one by one.

    An update calls `start`, possibly long before it begins, then `take` and `put` for each range in order,
    then `finish`. Between updates `tensors` may be read and written; call `seal` after writing.

    Args:
        order: order of the states in an update; None for the order of `sizes`.

    Attributes:
        sizes: sizes of the states.
        ranges: ranges in the order of an update.
    """

    def __init__(
        self,
        sizes: Sequence[StateSize],
        range_size: int = RANGE_SIZE,
        order: Sequence[int] | None = None,
    ) -> None:
        self.sizes = sizes
        self.ranges = ranges_of(sizes, range_size, order)

    @abstractmethod
    def tensors(self, state: int) -> dict[str, Tensor]:
        """Return a state's complete tensors by kind, ``[numel]``, in host memory or mapped into it."""

    @abstractmethod
    def take(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a range by kind, for the update to change in place."""

    @abstractmethod
    def start(self) -> None:
        """Prepare for an update, unless this has already been done."""

    @abstractmethod
    def put(self, number: int) -> None:
        """Store a range that was taken and updated."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all ranges are stored."""

    @abstractmethod
    def seal(self, kinds: Collection[str] | None = None) -> None:
        """Accept new values of `tensors`, only of `kinds` if passed."""

    @abstractmethod
    def check(self) -> None:
        """Check that `tensors` are unchanged since the last update or `seal`."""


class HostStorage(StateStorage):
    """Tensors in host memory.

    The memory is not pinned: only the host reads and writes it.

    Args:
        device: meta for tensors without memory in a dry run.
    """

    def __init__(
        self,
        sizes: Sequence[StateSize],
        device: str = "cpu",
        range_size: int = RANGE_SIZE,
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__(sizes, range_size, order)
        self._tensors = [_zeros(size, device) for size in sizes]

    def tensors(self, state: int) -> dict[str, Tensor]:
        return self._tensors[state]

    def take(self, number: int) -> dict[str, Tensor]:
        state, start, stop = self.ranges[number]
        return {kind: tensor[start:stop] for kind, tensor in self._tensors[state].items()}

    def start(self) -> None:
        """Do nothing: the tensors are in memory."""

    def put(self, number: int) -> None:
        """Do nothing: the update has changed the tensors themselves."""

    def finish(self) -> None:
        """Do nothing: nothing is in flight."""

    def seal(self, kinds: Collection[str] | None = None) -> None:
        """Do nothing: memory has no checksums."""

    def check(self) -> None:
        """Do nothing: memory has no checksums."""


def _zeros(size: StateSize, device: str) -> dict[str, Tensor]:
    if device == "meta":
        return {kind: torch.zeros(size.numel, dtype=size.dtype, device=device) for kind in size.kinds}
    flat = allocate_bytes(size.num_bytes).view(size.dtype)
    return dict(zip(size.kinds, flat.split(size.numel), strict=True))
