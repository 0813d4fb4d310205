"""Buckets: parameters as views of one flat tensor, which is reduced, updated and all-gathered at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.distributed.topology import Axis
from megalite.tensor_parallel.parameter_spec import ParameterSpec, spec_of


@dataclass(frozen=True)
class ParameterShard:
    """Elements ``[start, start + n)`` of this rank's flattened slice of a parameter, or of its state.

    Attributes:
        tensor: these elements, ``[n]``; n may be 0.
        start: position of the first element in the slice.
        shape: shape of the slice.
        spec: spec of the parameter.
        is_replicated: whether every data-parallel rank has these elements; otherwise the other ranks that
            ZeRO shards over have the rest.
    """

    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    spec: ParameterSpec
    is_replicated: bool


ALIGNMENT = 64
"""Every parameter and every rank's shard starts at a multiple of this number of elements.

This is at least 128 bytes, with which GEMMs and NCCL are fastest. No shard ends within a vector register:
the same instructions update an element, to the same bits, wherever the shards are cut.
"""


@dataclass(frozen=True)
class BucketEntry:
    """A parameter and its elements [start, end) in the flat tensors of its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    end: int

    @property
    def spec(self) -> ParameterSpec:
        return spec_of(self.parameter)


class Bucket:
    """Parameters whose weights are views of one flat tensor.

    The bucket is padded with zeros so that each data-parallel rank has a part of equal size. The padding does
    not depend on the ZeRO stage or on how many ranks it shards over, so neither changes a sum.

    Attributes:
        entries: parameters in the order in which backward reaches them, the model's last parameter first.
        weight: flat weights, ``[size]``.
        shard: range of the flat tensors that this rank owns if ZeRO shards them: the parts of as many
            ranks as replicate it.
        counted: part of `shard` that this rank counts in norms, and no other data-parallel rank.
        decay: whether weight decay applies.
        is_cut: whether the parameters are sharded over tp or replicated on every tp rank.
        is_vocabulary: whether all of them are weights of the vocabulary (see `ParameterSpec`).
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], dp: Axis) -> None:
        """Move parameters with equal dtype, decay and tp sharding into a new flat tensor."""
        self.entries: list[BucketEntry] = []
        start = 0
        for name, parameter in named_parameters:
            self.entries.append(BucketEntry(name, parameter, start, start + parameter.numel()))
            start += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        first = self.entries[0].parameter
        self.decay, self.is_cut = _kind(first)
        self.is_vocabulary = all(entry.spec.is_vocabulary for entry in self.entries)
        part_size = -(-self.entries[-1].end // (dp.size * ALIGNMENT)) * ALIGNMENT
        self.size = dp.size * part_size
        shard_size = self.size // dp.shard.size
        start = dp.shard.rank * shard_size
        self.shard = slice(start, start + shard_size)
        start += dp.replicate.rank * part_size if dp.replicate else 0
        self.counted = slice(start, start + part_size)
        self.weight = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for entry in self.entries:
                weight = self.view(self.weight, entry)
                weight.copy_(entry.parameter)
                entry.parameter.data = weight

    def view(self, flat: Tensor, entry: BucketEntry) -> Tensor:
        """Return a parameter's part of a flat tensor of this bucket, in the parameter's shape."""
        return flat[entry.start : entry.end].view(entry.parameter.shape)

    def padding(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a flat tensor of this bucket that do not belong to a parameter."""
        starts = [entry.end for entry in self.entries]
        ends = [entry.start for entry in self.entries[1:]] + [self.size]
        return [flat[start:end] for start, end in zip(starts, ends, strict=True) if start < end]


def make_buckets(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    dp: Axis,
    bucket_size: int | None,
    separates_vocabulary: bool = False,
) -> list[Bucket]:
    """Assign parameters to buckets, in the order in which backward fills the buckets.

    Args:
        named_parameters: parameters in the order in which forward uses them.
        bucket_size: number of elements at which a bucket is full; `usual_bucket_size` by default.
        separates_vocabulary: put weights of the vocabulary into separate buckets.
    """

    def kind(parameter: nn.Parameter) -> tuple[bool, ...]:
        return *_kind(parameter), separates_vocabulary and spec_of(parameter).is_vocabulary

    backwards = list(named_parameters)[::-1]
    size = bucket_size or usual_bucket_size(sum(parameter.numel() for _, parameter in backwards))
    arrival = {name: number for number, (name, _) in enumerate(backwards)}
    kinds = dict.fromkeys(kind(parameter) for _, parameter in backwards)
    buckets = [
        Bucket(members, dp)
        for each in kinds
        for members in _split([pair for pair in backwards if kind(pair[1]) == each], size)
    ]
    return sorted(buckets, key=lambda bucket: arrival[bucket.entries[-1].name])


def usual_bucket_size(num_elements: int) -> int:
    """Return the default bucket size on a rank with `num_elements` in total.

    Every bucket but the last is reduced during backward, so there should be several. With messages of less
    than a million elements, their number costs too much; more than 40 million (Megatron-LM's size) gain
    nothing.
    """
    return min(max(num_elements // 6, 1_000_000), 40_000_000)


def _kind(parameter: nn.Parameter) -> tuple[bool, bool]:
    """Return (decay, is_cut), which must be equal for all parameters of a bucket."""
    spec = spec_of(parameter)
    return spec.decay, spec.shard is not None


def _split(
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
