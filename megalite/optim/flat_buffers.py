"""Buckets: parameters as views of one flat tensor, which is reduced, updated and all-gathered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.config import OptimizerConfig
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import Pending
from megalite.tensor_parallel.fp8 import gathered_gemm_of
from megalite.tensor_parallel.parameter_spec import ParameterSpec, spec_of
from megalite.tensor_parallel.placement import ParameterAxes

ALIGNMENT = 64
"""Every parameter and every rank's shard starts at a multiple of this number of elements.

This is at least 128 bytes, with which GEMMs and NCCL are fastest. No shard ends within a vector register:
the same instructions update an element, to the same bits, wherever the shards are cut.
"""


@dataclass(frozen=True)
class BucketEntry:
    """Parameter and its elements [start, end) in the flat tensors of its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    end: int

    @property
    def spec(self) -> ParameterSpec:
        return spec_of(self.parameter)


class ParameterKind(NamedTuple):
    """Properties that all elements of one optimizer state share.

    Attributes:
        decay: whether weight decay applies.
        parameter_axes: which ranks hold the parameters, and over which axes their gradients are partial.
        is_vocabulary: whether they are weights of the vocabulary with a learning rate of their own.
        is_matrix: whether an update of one depends on the whole matrix.
        width_ratio: divisor of AdamW's learning rate and epsilon in muP.
    """

    decay: bool
    parameter_axes: ParameterAxes
    is_vocabulary: bool
    is_matrix: bool
    width_ratio: float


def parameter_kind(parameter: nn.Parameter, config: OptimizerConfig | None = None) -> ParameterKind:
    """Return a parameter's kind: weights that the optimizer updates alike have one kind."""
    spec, config = spec_of(parameter), config or OptimizerConfig()
    is_matrix = config.updates_whole_matrices and spec.is_matrix
    return ParameterKind(
        spec.decay,
        spec.parameter_axes,
        config.decoupled_lr is not None and spec.is_vocabulary,
        is_matrix,
        1.0 if is_matrix else spec.width_ratio,  # the matrix's shape scales its updates
    )


class Section(NamedTuple):
    """Elements [start, end) of a bucket, padding included, whose parameters have one kind."""

    kind: ParameterKind
    start: int
    end: int


def overlap(elements: slice, others: slice) -> slice:
    """Return the elements that are also in another range, which may be none."""
    start = min(max(elements.start, others.start), elements.stop)
    return slice(start, max(min(elements.stop, others.stop), start))


class Bucket:
    """Parameters whose weights are views of one flat tensor.

    The bucket is padded with zeros so that each data-parallel rank has a part of equal size. The padding does
    not depend on the ZeRO stage or on how many ranks it shards over, so neither changes a sum.

    Attributes:
        replicas: the ranks that have the same bucket and sum its gradients.
        entries: parameters by kind, and in the order in which backward reaches them, the model's last
            parameter first.
        weight: flat weights, ``[size]``. With `main` they have no memory, except while `ShardedWeights`
            gathers them.
        shard: range of the flat tensors that this rank owns if ZeRO shards them: the parts of as many
            ranks as replicate it.
        counted: part of `shard` that this rank counts in norms, and no other data-parallel rank.
        sections: ranges of parameters of one kind; together they cover the bucket.
        main: with `main_dtype`, this rank's shard of the main weights, ``[shard size]``; else None.
        numbers: the weights in E4M3, ``[size]``, without memory like `weight`, if `ShardedWeights` gathers
            them instead; else None.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        replicas: Axis,
        *,
        kind_of: Callable[[nn.Parameter], ParameterKind] = parameter_kind,
        main_dtype: torch.dtype | None = None,
    ) -> None:
        """Move parameters with equal dtype into a new flat tensor.

        Args:
            main_dtype: shard the weights, and keep this rank's shard of the main weights in this dtype. The
                parameters have no memory yet. None for weights that each rank holds in full.
        """
        kinds = [kind_of(parameter) for _, parameter in named_parameters]
        self.replicas = replicas
        self.entries: list[BucketEntry] = []
        starts: dict[ParameterKind, int] = {}
        end = 0
        for kind in dict.fromkeys(kinds):
            starts[kind] = end
            for (name, parameter), its_kind in zip(named_parameters, kinds, strict=True):
                if its_kind == kind:
                    self.entries.append(BucketEntry(name, parameter, end, end + parameter.numel()))
                    end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        first = self.entries[0].parameter
        part_size = -(-self.entries[-1].end // (replicas.size * ALIGNMENT)) * ALIGNMENT
        self.size = replicas.size * part_size
        self.shard = self.shard_of(replicas.shard.rank)
        shard_size, start = self.size // replicas.shard.size, self.shard.start
        start += replicas.replicate.rank * part_size if replicas.replicate else 0
        self.counted = slice(start, start + part_size)
        ends = [*[*starts.values()][1:], self.size]
        self.sections = [
            Section(kind, start, end) for (kind, start), end in zip(starts.items(), ends, strict=True)
        ]
        new = torch.zeros if main_dtype is None else torch.empty
        self.weight = new(self.size, dtype=first.dtype, device=first.device)
        self.main: Tensor | None = None
        self.numbers: Tensor | None = None
        with torch.no_grad():
            for entry in self.entries:
                weight = self.view(self.weight, entry)
                if main_dtype is None:
                    weight.copy_(entry.parameter)
                entry.parameter.data = weight
        if main_dtype is not None:
            self.main = torch.zeros(shard_size, dtype=main_dtype, device=first.device)
            self.weight.untyped_storage().resize_(0)
        if main_dtype is not None and gathered_gemm_of(first) is not None:
            self.numbers = torch.empty(self.size, dtype=torch.float8_e4m3fn, device=first.device)
            self.numbers.untyped_storage().resize_(0)

    def shard_of(self, rank: int) -> slice:
        """Return the range that the rank with this coordinate owns if ZeRO shards the bucket."""
        size = self.size // self.replicas.shard.size
        return slice(rank * size, (rank + 1) * size)

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
    new_bucket: Callable[[Sequence[tuple[str, nn.Parameter]]], Bucket],
    bucket_size: int | None,
    kind_of: Callable[[nn.Parameter], ParameterKind] = parameter_kind,
) -> list[Bucket]:
    """Assign parameters to buckets, in the order in which backward fills the buckets.

    Weights that are gathered in 8 bits have their own.

    Args:
        named_parameters: parameters in the order in which forward uses them.
        new_bucket: makes a bucket of parameters of one kind.
        bucket_size: number of elements at which a bucket is full; `usual_bucket_size` by default.
    """

    def key(parameter: nn.Parameter) -> tuple[ParameterKind, bool]:
        return kind_of(parameter), gathered_gemm_of(parameter) is not None

    backwards = list(named_parameters)[::-1]
    size = bucket_size or usual_bucket_size(sum(parameter.numel() for _, parameter in backwards))
    arrival = {name: number for number, (name, _) in enumerate(backwards)}
    keys = dict.fromkeys(key(parameter) for _, parameter in backwards)
    buckets = [
        new_bucket(members)
        for each in keys
        for members in _split([pair for pair in backwards if key(pair[1]) == each], size)
    ]
    return sorted(buckets, key=lambda bucket: arrival[bucket.entries[-1].name])


def usual_bucket_size(num_elements: int) -> int:
    """Return the default bucket size on a rank with `num_elements` in total.

    Every bucket but the last is reduced during backward, so there should be several. With messages of less
    than a million elements, their number costs too much; more than 40 million (Megatron-LM's size) gain
    nothing.
    """
    return min(max(num_elements // 6, 1_000_000), 40_000_000)


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


class ReduceHandle:
    """In-flight reduction of a bucket; `wait` also stores its result.

    Args:
        store_result: called once the collective is complete.
        start_next: starts the collective that must follow it.

    Attributes:
        on_complete: called once the result is stored, on the stream that has it; may be None.
    """

    def __init__(
        self,
        pending: Pending,
        store_result: Callable[[], object],
        start_next: Callable[[], ReduceHandle] | None = None,
    ) -> None:
        self._pending = pending
        self._store_result = store_result
        self._start_next = start_next
        self._first: object = None
        self._is_complete = False
        self._completed: torch.cuda.Event | None = None
        self.on_complete: Callable[[], object] | None = None

    def advance(self, stream: torch.cuda.Stream | None) -> None:
        """Run the work after the first collective while backward runs, if there is any.

        Args:
            stream: on a GPU, the stream that waits, so that backward does not; None on a CPU, where the host
                waits.
        """
        if self._is_complete or (self._start_next is None and self.on_complete is None):
            return
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._complete()
                self._completed = stream.record_event()  # the tensors are kept until `wait`
        elif self.on_complete is not None:
            self._complete()
        else:
            self._start_following()

    def wait(self) -> None:
        if not self._is_complete:
            self._complete()
        elif self._completed is not None:
            torch.cuda.current_stream().wait_event(self._completed)

    def _complete(self) -> None:
        self._start_following()
        self._pending.wait()
        self._store_result()
        self._is_complete = True
        if self.on_complete is not None:
            self.on_complete()

    def _start_following(self) -> None:
        if self._start_next is None:
            return
        self._pending.wait()
        self._store_result()
        following = self._start_next()
        self._first = self._store_result  # keeps the tensors alive: a stream may still use them
        self._pending, self._store_result = following._pending, following._store_result
        self._start_next = None
