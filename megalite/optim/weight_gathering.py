"""All-gather the weights that other ranks update, or that ZeRO stage 3 shards.

At ZeRO stages 0 to 2, `WeightGatherer` completes the updated weights before or during the next forward. At
stage 3, `ShardedWeights` gathers an FSDP unit's weights before its forward and its backward, and frees them
afterwards (Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, "PyTorch FSDP"). Weights in 8 bits are
gathered so at stages 1 and 2 too, once per iteration. Between two uses they have no memory. Only their
storage is resized: the parameters, their hooks and the views that autograd has saved stay the same objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import ParallelConfig
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import Pending, all_reduce, flat_all_gather
from megalite.optim.flat_buffers import Bucket, overlap
from megalite.tensor_parallel.fp8 import Fp8, GatheredGemm, WeightPart, gathered_gemm_of

FsdpUnit = tuple[nn.Module, Sequence[nn.Parameter]]
"""A module, and the parameters that forward uses from its call to the next unit's call."""


class WeightGatherer:
    """All-gather of each bucket's weights from the ranks that own its shards (ZeRO stages 0 to 2).

    With units, the all-gather overlaps the next forward: buckets are started in the order in which forward
    first uses them, and each unit's call waits for its own buckets. Without units, `start` waits for all.

    Args:
        gathers: gather each bucket from the ranks that own its shards; False if each rank owns whole buckets
            and only waits for updates.
        one_ahead: start each bucket only when forward waits for the previous one.
        wait_for_update: waits until a bucket is updated, for concurrent updates on the host; buckets are
            then started as with `one_ahead`. None if `start` is called after the update.
        in_8_bits: gathers the weights of other buckets; None if there are none.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gathers: bool,
        units: Sequence[FsdpUnit] = (),
        one_ahead: bool = False,
        wait_for_update: Callable[[Bucket], object] | None = None,
        in_8_bits: ShardedWeights | None = None,
    ) -> None:
        self.gathers = gathers
        self.in_8_bits = in_8_bits
        self.overlap = bool(units)
        self.one_ahead = one_ahead
        self.wait_for_update = wait_for_update
        self._in_flight: dict[Bucket, Pending] = {}
        bucket_of = {entry.parameter: bucket for bucket in buckets for entry in bucket.entries}
        needs = [_buckets_of(parameters, bucket_of) for _, parameters in units]
        used = dict.fromkeys(bucket for needed in needs for bucket in needed)
        assert not units or len(used) == len(buckets), "a bucket that no unit waits for"
        self.buckets = list(used) if units else list(buckets)
        self._position = {bucket: position for position, bucket in enumerate(self.buckets)}
        self._num_started = len(self.buckets)  # before the first update, weights are complete
        for (module, _), needed in zip(units, needs, strict=True):
            module.register_forward_pre_hook(partial(self._wait, needed))

    def start(self) -> None:
        """Start to all-gather the buckets from up-to-date shards."""
        self._num_started = 0
        if not self.overlap:
            self._start_until(len(self.buckets))
            self._wait(self.buckets)
        elif self.wait_for_update is None:
            self._start_until(1 if self.one_ahead else len(self.buckets))

    def finish(self) -> None:
        """Wait for every bucket, before weights are read outside of a unit's forward."""
        self._wait(self.buckets)
        self.free()

    def free(self) -> None:
        """Free the weights in 8 bits; the others stay full."""
        if self.in_8_bits is not None:
            self.in_8_bits.free()

    def _start_until(self, end: int) -> None:
        for bucket in self.buckets[self._num_started : end]:
            if self.wait_for_update is not None:
                self.wait_for_update(bucket)
            if self.gathers:
                self._in_flight[bucket] = flat_all_gather(
                    bucket.weight, bucket.weight[bucket.shard], bucket.replicas.shard, of="weights"
                )
        self._num_started = max(self._num_started, end)

    def _wait(self, buckets: Sequence[Bucket], *_: Any) -> None:
        for bucket in buckets:
            self._start_until(self._position[bucket] + 2)  # this bucket and the one after it
            if pending := self._in_flight.pop(bucket, None):
                pending.wait()


def _buckets_of(parameters: Iterable[nn.Parameter], bucket_of: Mapping[nn.Parameter, Bucket]) -> list[Bucket]:
    """Return the buckets of a unit's parameters, each once; other gatherers have the rest."""
    return list(dict.fromkeys(bucket_of[each] for each in parameters if each in bucket_of))


class WeightGathering(NamedTuple):
    """Choice of how long ZeRO stage 3 keeps gathered weights.

    Attributes:
        keeps_weights: gather each weight once per iteration and keep it until the last backward. Otherwise
            gather a layer's weights before its forward and before its backward, for each microbatch.
        reason: reason of the choice, for the log.
    """

    keeps_weights: bool
    reason: str

    @staticmethod
    def configured(parallel: ParallelConfig) -> WeightGathering:
        """Return the choice of `fsdp_reshard_after_forward`; its default does not keep weights."""
        choice = parallel.fsdp_reshard_after_forward
        return WeightGathering(choice == "never", f"--fsdp-reshard-after-forward {choice}")


class ChunkModules(NamedTuple):
    """Modules of a model chunk.

    Attributes:
        module: the chunk.
        units: its modules in the order in which forward calls them, layers included.
    """

    module: nn.Module
    layers: Sequence[nn.Module]
    units: Sequence[FsdpUnit]


def bucket_units(
    chunks: Sequence[ChunkModules],
    named_parameters: Sequence[tuple[str, nn.Parameter]],
    new_bucket: Callable[[Sequence[tuple[str, nn.Parameter]]], Bucket],
    replicas_of: Callable[[nn.Parameter], Axis],
    tied: nn.Parameter | None = None,
    *,
    splits_backward: bool = False,
) -> list[list[Bucket]]:
    """Put the parameters of each layer, of each chunk's embedding and of its head into buckets.

    Weights that are gathered in 8 bits have their own.

    Args:
        new_bucket: makes a bucket of parameters, in the order in which backward reaches them.
        replicas_of: returns the ranks that have the same parameter and sum its gradients; parameters with
            different replicas have different buckets.
        tied: a weight that two pipeline stages share. It has its own bucket, because both stages must have
            the same shards of it.
        splits_backward: the schedule computes the gradients of matrices later than the others. They have
            their own bucket, so that neither waits for the other in a full buffer.

    Returns:
        Groups of buckets: the buckets of a chunk in the order in which backward fills them, and the buckets
        that two chunks of this rank share. The last chunk is first.
    """
    name_of = {parameter: name for name, parameter in named_parameters}
    bucket_of: dict[nn.Parameter, Bucket] = {}
    users: dict[Bucket, list[int]] = {}  # chunks, in the order in which forward first uses the buckets
    for number, chunk in enumerate(chunks):
        for _, parameters in chunk.units:
            parts: dict[tuple[str, bool, bool, bool], list[tuple[str, nn.Parameter]]] = {}
            for parameter in reversed(parameters):
                if parameter not in bucket_of:
                    name = replicas_of(parameter).name
                    is_later = splits_backward and parameter.dim() > 1
                    part = name, parameter is tied, is_later, gathered_gemm_of(parameter) is not None
                    parts.setdefault(part, []).append((name_of[parameter], parameter))
            for pairs in parts.values():
                bucket_of.update(dict.fromkeys((each for _, each in pairs), new_bucket(pairs)))
            for bucket in dict.fromkeys(bucket_of[parameter] for parameter in parameters):
                if number not in (known := users.setdefault(bucket, [])):
                    known.append(number)
    groups: dict[tuple[int, ...], list[Bucket]] = {}
    for bucket in reversed(users):
        groups.setdefault(tuple(users[bucket]), []).append(bucket)
    return [groups[each] for each in sorted(groups, reverse=True)]


@dataclass(frozen=True, eq=False)
class ShardedUnit:
    """Module and the buckets of the weights that are gathered for it.

    Attributes:
        is_layer: the weights are freed after forward, and gathered again for backward. Otherwise, as for the
            embedding and the head, they stay full until backward has used them.
    """

    module: nn.Module
    buckets: Sequence[Bucket]
    is_layer: bool


class ShardedWeights:
    """Weights of this rank's units, gathered when they are needed and freed afterwards.

    While a unit computes, the weights of the unit that follows in forward, or in backward, are gathered. At
    most two layers of a chunk are full at a time, unless they are kept.

    Args:
        keeps_rest: keep weights outside of layers full from the first forward of an iteration to its end.
        keeps_layers: keep the layers' weights full, too.
        wait_for_reductions: waits for the reductions of the previous microbatch, whose full gradients would
            otherwise stay in memory during this one's forward. Called after each layer's forward.
        wait_for_update: waits until a bucket's main weights are updated, if the host updates them
            concurrently; else None.
    """

    def __init__(
        self,
        chunks: Sequence[ChunkModules],
        buckets: Sequence[Bucket],
        *,
        keeps_rest: bool,
        keeps_layers: bool,
        wait_for_reductions: Callable[[], object],
        wait_for_update: Callable[[Bucket], object] | None = None,
    ) -> None:
        self.keeps_layers = keeps_layers
        self.wait_for_reductions = wait_for_reductions
        self.wait_for_update = wait_for_update
        self._full: dict[Bucket, Pending] = {}
        """Buckets with memory, and their all-gathers."""
        self._scales: dict[Bucket, list[Tensor]] = {}
        """Scales of each weight of the buckets in 8 bits, since the last update."""
        self._in_backward: dict[ShardedUnit, ShardedUnit | None] = {}
        """Layers that compute their backward, each with the layer whose backward follows."""
        self._for_backward = set[ShardedUnit]()
        """Layers whose weights are full for a backward that has not ended."""
        self._freed_with_gradients = set[Bucket]()
        bucket_of = {entry.parameter: bucket for bucket in buckets for entry in bucket.entries}
        for chunk in chunks:
            units = []
            for module, parameters in chunk.units:
                used = _buckets_of(parameters, bucket_of)
                units.append(ShardedUnit(module, used, module in chunk.layers))
                if not (units[-1].is_layer or keeps_rest):
                    self._freed_with_gradients.update(used)
            self._register_hooks(chunk.module, units)

    def _register_hooks(self, chunk: nn.Module, units: Sequence[ShardedUnit]) -> None:
        last_layer: ShardedUnit | None = None
        for unit, later in zip(units, [*units[1:], None], strict=True):
            before = partial(self._before_forward, unit, later)
            unit.module.register_forward_pre_hook(before, prepend=True)
            if unit.is_layer:
                unit.module.register_forward_hook(partial(self._after_forward, unit, last_layer))
                last_layer = unit
        chunk.register_forward_hook(partial(self._after_chunk, last_layer))

    def start(self) -> None:
        """Do nothing after an update: each unit's weights are gathered when it uses them."""

    def finish(self) -> None:
        """Free all weights, before the main weights are read or changed."""
        self.free()

    def free(self) -> None:
        """Free all weights: the main weights have changed, or are about to."""
        self._in_backward.clear()
        self._for_backward.clear()
        self._scales.clear()
        for bucket in list(self._full):
            self._free(bucket)

    def gradients_are_complete(self, bucket: Bucket) -> None:
        """Free a bucket outside of the layers once backward has used it in this microbatch."""
        if bucket in self._freed_with_gradients:
            self._free(bucket)

    def _after_chunk(
        self, last: ShardedUnit | None, module: nn.Module, inputs: object, output: Tensor
    ) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._start_for_backward(last))

    def _before_forward(
        self, unit: ShardedUnit, later: ShardedUnit | None, module: nn.Module, inputs: Sequence[object]
    ) -> None:
        self._start(unit)
        if unit not in self._for_backward:  # otherwise backward recomputes a layer
            self._start(later)
        for bucket in unit.buckets:
            self._finish(bucket)
        for x in inputs if unit.is_layer else ():
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda gradient: self._after_backward(unit))

    def _after_forward(
        self,
        layer: ShardedUnit,
        earlier: ShardedUnit | None,
        module: nn.Module,
        inputs: object,
        output: Tensor,
    ) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._before_backward(layer, earlier))
        if layer in self._for_backward:
            return
        self.wait_for_reductions()
        if not self.keeps_layers:
            self._free_all(layer)

    def _before_backward(self, layer: ShardedUnit, earlier: ShardedUnit | None) -> None:
        self._start_for_backward(layer)
        self._in_backward[layer] = earlier
        if len(self._in_backward) == 1:  # otherwise `_after_backward` of the layer before it in backward
            self._start_for_backward(earlier)
        for bucket in layer.buckets:
            self._finish(bucket)

    def _after_backward(self, layer: ShardedUnit) -> None:
        """Free a layer's weights, then gather the weights of the layer after the next one in backward."""
        self._for_backward.discard(layer)
        if layer not in self._in_backward:
            return
        del self._in_backward[layer]
        if not self.keeps_layers:
            self._free_all(layer)
        for earlier in self._in_backward.values():
            self._start_for_backward(earlier)

    def _start_for_backward(self, layer: ShardedUnit | None) -> None:
        if layer is not None:
            self._for_backward.add(layer)
            self._start(layer)

    @torch.no_grad()
    def _start(self, unit: ShardedUnit | None) -> None:
        """Start to gather the unit's weights, unless they are full."""
        for bucket in () if unit is None else unit.buckets:
            if bucket in self._full:
                continue
            if self.wait_for_update is not None:
                self.wait_for_update(bucket)
            assert bucket.main is not None
            gemm = None if bucket.numbers is None else gathered_gemm_of(bucket.entries[0].parameter)
            numbers = bucket.numbers if gemm is not None and gemm.rounds else None
            gathered = bucket.weight if numbers is None else numbers
            gathered.untyped_storage().resize_(gathered.nbytes)
            own = gathered[bucket.shard]
            if numbers is None:
                own.copy_(bucket.main)  # rounded to the dtype of the weights
            else:
                self._round(bucket, numbers, bucket.main)
                gathered, own = gathered.view(torch.uint8), own.view(torch.uint8)  # for gloo
            self._full[bucket] = flat_all_gather(gathered, own, bucket.replicas.shard, of="weights")

    def _round(self, bucket: Bucket, numbers: Tensor, main: Tensor) -> None:
        """Round this rank's shard of a bucket to 8 bits, as GEMMs would round the whole weights."""
        wide = main.to(bucket.weight.dtype)  # as it would be gathered
        gemms = list[GatheredGemm]()
        owned: dict[int, tuple[slice, WeightPart]] = {}  # by the number of the entry
        for i, entry in enumerate(bucket.entries):
            gemm = gathered_gemm_of(entry.parameter)
            assert gemm is not None  # a bucket's weights are gathered alike
            gemms.append(gemm)
            share = overlap(slice(entry.start, entry.end), bucket.shard)
            if share.start < share.stop:
                own = slice(share.start - bucket.shard.start, share.stop - bucket.shard.start)
                part = WeightPart(wide[own], share.start - entry.start, entry.parameter.shape)
                owned[i] = own, part
        if bucket not in self._scales:
            self._scales[bucket] = _shared_scales(
                bucket, gemms, [(i, part) for i, (_, part) in owned.items()]
            )
        scales = self._scales[bucket]
        for i, (own, part) in owned.items():
            numbers[bucket.shard][own].copy_(gemms[i].round_part(part, scales[i]))
        for gemm, entry, scale in zip(gemms, bucket.entries, scales, strict=True):
            gemm.weights.set_gathered(entry.parameter, Fp8(numbers[entry.start : entry.end], scale))

    def _finish(self, bucket: Bucket) -> None:
        pending = self._full[bucket]
        if pending.work is not None:
            pending.wait()
            self._full[bucket] = Pending(pending.tensor, None)

    def _free_all(self, unit: ShardedUnit) -> None:
        for bucket in unit.buckets:
            self._free(bucket)

    def _free(self, bucket: Bucket) -> None:
        if bucket in self._full:
            self._finish(bucket)  # the memory must not be reused before the all-gather has written it
            self._full.pop(bucket).tensor.untyped_storage().resize_(0)


def _shared_scales(
    bucket: Bucket, gemms: Sequence[GatheredGemm], owned: Sequence[tuple[int, WeightPart]]
) -> list[Tensor]:
    """Return the scales of each weight of a bucket, which the owners of its parts agree on.

    Args:
        gemms: the GEMMs that read each weight; they have the same recipe.
        owned: this rank's parts, with the numbers of their weights.
    """
    pairs = zip(gemms, bucket.entries, strict=True)
    shapes = [gemm.scale_shape(entry.parameter.shape) for gemm, entry in pairs]
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.zeros(sum(sizes), device=bucket.weight.device)
    scales = [scale.view(shape) for scale, shape in zip(flat.split(sizes), shapes, strict=True)]
    for i, part in owned:
        scales[i].copy_(gemms[i].scale_of_part(part))
    for axis in (bucket.replicas.shard, *gemms[0].scale_axes):
        all_reduce(flat, axis, dist.ReduceOp.MAX, of="scales of weights")
    return scales
