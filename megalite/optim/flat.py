"""Parameters as views of flat tensors, cut into buckets: what is reduced, updated and gathered in one go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.parallel.shard import ParameterSpec, spec_of
from megalite.topology import Axis

ALIGNMENT = 64
"""Elements that the start of every parameter and of every rank's shard is a multiple of.

128 bytes at the least, which matrix products and NCCL are fastest on. And no shard ends within a vector
register: an element is updated by the same instructions, to the same bits, wherever the shards are cut.
"""


@dataclass(frozen=True)
class Slot:
    """A parameter's place, elements [start, end), in its bucket's flat tensors."""

    name: str
    parameter: nn.Parameter
    start: int
    end: int

    @property
    def spec(self) -> ParameterSpec:
        return spec_of(self.parameter)


class Bucket:
    """Parameters whose weights lie in one flat tensor.

    Every parameter becomes a view of it. The same stretch of every flat tensor of the bucket, one for each
    data-parallel rank, is a shard: buckets are padded with zeros to a whole number of them whether the
    shards are made use of or not, so that it makes no difference to any sum.

    Attributes:
        slots: the last parameter of the model first, as backward reaches them.
        weight: flat weights, ``[size]``.
        shard: the elements that this data-parallel rank has in its care.
        decay: whether weight decay applies.
        is_cut: whether the parameters are cut over tp; else each tp rank holds all of them.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], dp: Axis) -> None:
        """Moves the parameters, which are alike in dtype, decay and cut, into a new flat tensor."""
        self.slots = list(_slots(named_parameters))
        self.decay, self.is_cut = _kind(self.slots[0].parameter)
        shard_size = -(-self.slots[-1].end // (dp.size * ALIGNMENT)) * ALIGNMENT
        self.size = dp.size * shard_size
        self.shard = slice(dp.rank * shard_size, (dp.rank + 1) * shard_size)
        first = self.slots[0].parameter
        self.weight = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        for slot in self.slots:
            self._adopt(slot)

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """The part of a flat tensor of this bucket that belongs to a parameter, in the parameter's shape."""
        return flat[slot.start : slot.end].view(slot.parameter.shape)

    def num_elements(self, part: slice) -> int:
        """Elements of parameters, without padding, in a part of the flat tensors."""
        overlaps = (min(slot.end, part.stop) - max(slot.start, part.start) for slot in self.slots)
        return sum(max(0, overlap) for overlap in overlaps)

    @torch.no_grad()
    def _adopt(self, slot: Slot) -> None:
        weight = self.view(self.weight, slot)
        weight.copy_(slot.parameter)
        slot.parameter.data = weight


def make_buckets(
    named_parameters: Iterable[tuple[str, nn.Parameter]], dp: Axis, bucket_size: int | None
) -> list[Bucket]:
    """Puts parameters into buckets, in the order in which backward fills these.

    Args:
        named_parameters: in the order of their use in forward.
        bucket_size: elements from which on a bucket takes no more; by default `usual_bucket_size`.
    """
    backwards = list(named_parameters)[::-1]
    size = bucket_size or usual_bucket_size(sum(parameter.numel() for _, parameter in backwards))
    arrival = {name: number for number, (name, _) in enumerate(backwards)}
    kinds = dict.fromkeys(_kind(parameter) for _, parameter in backwards)
    buckets = [
        Bucket(members, dp)
        for kind in kinds
        for members in _cut([pair for pair in backwards if _kind(pair[1]) == kind], size)
    ]
    return sorted(buckets, key=lambda bucket: arrival[bucket.slots[-1].name])


def usual_bucket_size(num_elements: int) -> int:
    """Elements of a bucket where a rank has so many in all.

    What is sent under backward is all but the last bucket: a handful of them. Messages of fewer elements than
    a million cost more by their number, and of more than 40 million (Megatron-LM's size) gain nothing.
    """
    return min(max(num_elements // 6, 1_000_000), 40_000_000)


def _kind(parameter: nn.Parameter) -> tuple[bool, bool]:
    """Decay, and whether it is cut over tp: parameters of one bucket agree in both."""
    spec = spec_of(parameter)
    return spec.decay, spec.shard is not None


def _slots(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Slot]:
    start = 0
    for name, parameter in named_parameters:
        yield Slot(name, parameter, start, start + parameter.numel())
        start += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT


def _cut(
    named_parameters: Sequence[tuple[str, nn.Parameter]], bucket_size: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    members: list[tuple[str, nn.Parameter]] = []
    for pair in named_parameters:
        members.append(pair)
        if sum(parameter.numel() for _, parameter in members) >= bucket_size:
            yield members
            members = []
    if members:
        yield members
