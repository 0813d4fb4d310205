"""The optimizer of ZeRO stage 3: torch's FSDP shards weights and gradients; the state has the same shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed.collectives import all_gather_single, reduce_scatter_single
from megalite.distributed.observer import EventStack, Wait
from megalite.distributed.topology import Axis, Topology
from megalite.optim.adamw import MOMENTS
from megalite.optim.flat_buffers import ParameterShard
from megalite.optim.gradient_buckets import MESSAGE_DTYPES, main_dtype
from megalite.optim.offload import OptimizerOffload, open_offload
from megalite.optim.optimizer import BaseOptimizer, CountedShard
from megalite.pipeline.schedules import SCHEDULES
from megalite.tensor_parallel.counter_random import fill_initial
from megalite.tensor_parallel.parameter_spec import ParameterSpec, num_used, spec_of
from megalite.tensor_parallel.tied_embedding import TiedWeight, sum_tied_embedding_grads
from megalite.tensor_parallel.weight_gradient_store import WeightGradient, run_stored
from megalite.torch_private import all_gather_waits_for, unsharded_parameters, wait_for_reductions


class FullyShardedParameter:
    """This rank's shard of one parameter: main weights, gradient and moments of consecutive elements.

    FSDP splits the first dim into equal chunks; the last chunks may be smaller or empty.

    Attributes:
        parameter: DTensor of the main weights, which FSDP substitutes for the full parameter between uses.
        shape: shape of the full parameter in the model.
        start: position of this rank's first element in the parameter.
        moments: AdamW's moments by torch's names, ``[n]``; the optimizer allocates them.
    """

    moments: Mapping[str, Tensor]

    def __init__(self, name: str, parameter: nn.Parameter, shape: tuple[int, ...], dp: Axis) -> None:
        self.name = name
        self.parameter = parameter
        self.shape = shape
        num_rows, *row = parameter.shape
        chunk = -(-num_rows // dp.shard.size)
        self.start = min(chunk * dp.shard.rank, num_rows) * math.prod(row)

    @property
    def spec(self) -> ParameterSpec:
        return spec_of(self.parameter)

    @property
    def decay(self) -> bool:
        return self.spec.decay

    @property
    def is_cut(self) -> bool:
        return self.spec.shard is not None

    @property
    def is_vocabulary(self) -> bool:
        return self.spec.is_vocabulary

    @property
    def main(self) -> Tensor:
        """Return the main weights, ``[n]``."""
        return _local(self.parameter.data)

    @property
    def gradient(self) -> Tensor:
        """Return the reduced gradients of the microbatches so far, ``[n]``."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter.data)
        return _local(self.parameter.grad)

    @property
    def rounded(self) -> None:
        """Return None: FSDP casts the main weights at each all-gather."""

    def parameter_shard(self, tensor: Tensor) -> ParameterShard:
        """Return a tensor of these elements, ``[n]``, as a shard of the parameter."""
        return ParameterShard(tensor, self.start, self.shape, self.spec, is_replicated=False)

    def full(self, tensor: Tensor) -> Tensor:
        """All-gather `parameter.data` or its gradient; every rank of dp must call it."""
        assert isinstance(tensor, DTensor)
        return tensor.full_tensor().view(self.shape)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().view(-1)


def shard_module(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    seed: int,
    topology: Topology,
    dtype: torch.dtype,
    message_dtype: torch.dtype | None,
) -> list[FullyShardedParameter]:
    """Initialize the module's weights and shard them with FSDP.

    FSDP all-gathers a block's weights for its forward, and again for its backward unless `ShardedChunk` keeps
    them. Blocks are initialized and sharded one after the other, so a rank never holds the full weights of
    more than one block.

    Args:
        module: module with parameters on the meta device, which are replaced. A submodule that is already
            sharded is skipped: the tied embedding, if the rank holds the first and the last stage.
        blocks: submodules that are all-gathered one at a time. The rest is all-gathered as one unit, and
            stays full from forward to backward, or in a pipeline to the last backward.
        seed: seed of the initial weights.
        dtype: compute dtype of the module; main weights and gradients have `main_dtype`.
        message_dtype: dtype to which gradients are rounded for the reduction, which sums in it; None to keep
            their dtype.
    """
    main = main_dtype(dtype)
    policy = MixedPrecisionPolicy(dtype, message_dtype or main, cast_forward_inputs=False)
    shared: set[nn.Parameter] = {each for each in module.parameters() if isinstance(each, DTensor)}
    named = {name: each for name, each in module.named_parameters() if each not in shared}
    names = {parameter: name for name, parameter in named.items()}
    dp = topology.dp
    mesh = topology.mesh["dp"] if dp.replicate is None else topology.mesh[dp.replicate.name, dp.shard.name]
    gather = Wait(dp.shard.name, "all-gather", "weights")
    reduce = Wait(dp.shard.name, "reduce-scatter", "gradients")
    all_gather = _PostedCollective(all_gather_single, topology.events, gather)
    reduce_scatter = _PostedCollective(reduce_scatter_single, topology.events, reduce)
    for unit in (*blocks, module):
        for owner in unit.modules():
            for key, parameter in list(owner.named_parameters(recurse=False)):
                if name := names.get(parameter):
                    weight = torch.empty(parameter.shape, dtype=main, device=topology.device)
                    fill_initial(weight, name, spec_of(parameter), seed, topology)
                    setattr(owner, key, nn.Parameter(_flat_outputs(weight, key)))
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=shared)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)  # sum gradients: the loss is already a mean
        unit.set_force_sum_reduction_for_comms(True)  # gloo does not support a pre-multiplied sum
        # FSDP declares private types, which only require these methods.
        unit.set_custom_all_gather(all_gather)  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
    sharded = []
    for name, parameter in module.named_parameters():
        if parameter in shared:
            continue
        parameter.spec = spec_of(named[name])  # type: ignore[attr-defined]
        sharded.append(FullyShardedParameter(name, parameter, tuple(named[name].shape), dp))
    return sharded


class _PostedCollective:
    """A collective of FSDP that posts its wait. FSDP calls `allocate` and the object itself.

    Args:
        run: runs the collective with the output, the input, the group and FSDP's other arguments.
        wait: the wait to post.
    """

    def __init__(self, run: Callable[..., Any], events: EventStack, wait: Wait) -> None:
        self._run, self._events, self._wait = run, events, wait

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for an input or output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        with self._events.during(self._wait):
            return self._run(output_tensor, input_tensor, *args, **kwargs)


def _flat_outputs(weight: Tensor, key: str) -> Tensor:
    """Flatten the output dims of a linear layer: ``[..., in] -> [out, in]``, a bias ``[...] -> [out]``.

    FSDP splits the first dim, so a third rank would have nothing of SwiGLU's ``[2, ffn, h]``.
    """
    if key == "bias":
        return weight.flatten()
    return weight.flatten(0, -2) if weight.dim() > 1 else weight


class ShardedChunk:
    """A pipeline stage under FSDP: controls how long its full weights stay, and when gradients are reduced.

    Gradients are reduce-scattered in every microbatch, as soon as they are computed. Without a pipeline,
    weights are gathered for every microbatch unless `keeps_blocks`. In a pipeline, some microbatch is nearly
    always between its forward and its backward, so weights outside of blocks stay full from the first
    forward of an iteration to its last backward.

    Args:
        root: stage that `shard_module` has sharded, with these blocks.
        keeps_rest: keep weights outside of blocks full for a whole iteration.
        keeps_blocks: keep the blocks' weights full for a whole iteration.
        all_reduces_once: ranks that replicate a shard all-reduce its sum over all microbatches, instead of
            the gradient of each microbatch.

    Attributes:
        all_reduces_once: see Args.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Iterable[nn.Module],
        *,
        keeps_rest: bool,
        keeps_blocks: bool,
        all_reduces_once: bool,
    ) -> None:
        self._units = [unit for unit in (*blocks, root) if isinstance(unit, FSDPModule)]
        *block_units, root_unit = self._units
        if keeps_rest:
            root_unit.set_reshard_after_backward(False, recurse=False)
            # FSDP's own order of gathering for backward is wrong if other microbatches' forwards run
            # between a microbatch's forward and its backward.
            for unit, earlier in zip(self._units, [root_unit, *block_units], strict=True):
                unit.set_modules_to_backward_prefetch([earlier])
        for unit in block_units if keeps_blocks else ():
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
        self._root = root_unit
        self._num_left = 0
        self.all_reduces_once = all_reduces_once
        if all_reduces_once:
            root.register_forward_hook(self._after_forward)

    def units(self) -> Iterator[tuple[FSDPModule, list[nn.Parameter]]]:
        """Yield the modules to gather, in the order of forward, each with its own shards."""
        *blocks, root = self._units
        of_blocks = {each for block in blocks for each in block.parameters()}
        yield root, [each for each in root.parameters() if each not in of_blocks]
        for block in blocks:
            yield block, list(block.parameters())

    def begin(self, num_microbatches: int) -> None:
        """Free the full weights, and start an iteration with this number of backward passes."""
        self.free_weights()
        self._num_left = num_microbatches

    def _after_forward(self, module: nn.Module, arguments: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._before_backward)

    def _before_backward(self, gradient: Tensor) -> None:
        """All-reduce shards only in the iteration's last backward."""
        self._num_left -= 1
        self._root.set_requires_all_reduce(self._num_left <= 0)

    def reductions(self) -> Iterator[tuple[nn.Parameter, Callable[[], None]]]:
        """Yield the full parameters, each with a function that reduces its unit's gradients."""
        for unit in self._units:
            yield from unsharded_parameters(unit)

    def wait_for_reductions(self) -> None:
        """Make the device wait for reductions that began outside of a backward pass."""
        wait_for_reductions(self._units[-1])

    def free_weights(self) -> None:
        """Free the full weights."""
        for unit in self._units:
            unit.reshard()


class FullyShardedOptimizer(BaseOptimizer):
    """The optimizer of ZeRO stage 3: this rank has a shard of each parameter.

    Attributes:
        parameters: this rank's shards, some of which may be empty.
        local: shards that are not empty, in the order of AdamW's states.
    """

    def __init__(
        self,
        modules: Sequence[tuple[nn.Module, Sequence[nn.Module]]],
        tied: TiedWeight | None,
        config: OptimizerConfig,
        parallel: ParallelConfig,
        topology: Topology,
        dtype: torch.dtype,
        seed: int,
        *,
        keeps_weights: bool = False,
    ) -> None:
        """Initialize and shard the modules with `shard_module`, and allocate the state.

        Args:
            modules: this rank's pipeline stages, each with the blocks that are all-gathered one at a time.
            tied: tied word embedding, if the pipeline has more than one rank and this rank holds the first or
                the last stage.
            parallel: dtype of gradient messages, and sequence parallelism.
            dtype: compute dtype of the model.
            seed: seed of the initial weights.
            keeps_weights: all-gather each weight once per iteration, and keep it until the last backward.
        """
        message_dtype = MESSAGE_DTYPES[parallel.grad_communication_dtype]
        self.dtype = dtype
        self._copied: str | None = None  # name of the weight that another stage has a copy of
        if tied is not None and tied.has_other_copy:
            named = (pair for module, _ in modules for pair in module.named_parameters())
            self._copied = next(name for name, parameter in named if parameter is tied.weight)
        self.parameters: list[FullyShardedParameter] = []
        self._chunks: list[ShardedChunk] = []
        # FSDP sums a shard's microbatches in the messages' dtype until it all-reduces them. This is not
        # possible if a zero bubble reduces some gradients of a layer in B and others in W.
        has_one_reduction = not SCHEDULES[parallel.schedule].splits_backward
        for module, blocks in modules:
            self.parameters += shard_module(module, blocks, seed, topology, dtype, message_dtype)
            self._chunks.append(
                ShardedChunk(
                    module,
                    blocks,
                    keeps_rest=keeps_weights or topology.pp.size > 1,
                    keeps_blocks=keeps_weights,
                    all_reduces_once=topology.dp.replicate is not None
                    and message_dtype in (None, main_dtype(dtype))
                    and has_one_reduction,
                )
            )
        self._reduce_of: dict[nn.Parameter, Callable[[], None]] = {}
        self.local = [each for each in self.parameters if each.main.numel() > 0]
        units = [pair for chunk in self._chunks for pair in chunk.units()]
        offload = self._allocate_moments(units, config, parallel, topology)
        super().__init__(self.local, config, parallel, topology, dtype, offload)
        self._num_reductions: list[int] = []  # in this iteration so far, by offloaded state
        self._num_expected = 0
        if offload is not None:
            self._overlap_copies(units, self.local[: offload.count])

    def _allocate_moments(
        self,
        units: Sequence[tuple[FSDPModule, Sequence[nn.Parameter]]],
        config: OptimizerConfig,
        parallel: ParallelConfig,
        topology: Topology,
    ) -> OptimizerOffload | None:
        """Allocate the moments; return the storage of offloaded moments, if any."""
        in_order = list(dict.fromkeys(parameter for _, own in units for parameter in own))
        position = {parameter: number for number, parameter in enumerate(in_order)}
        order = sorted(range(len(self.local)), key=lambda number: position[self.local[number].parameter])
        numels, main = [each.main.numel() for each in self.local], main_dtype(self.dtype)
        offload = open_offload(numels, MOMENTS, main, main, config, parallel, topology, order)
        offloaded = self.local[: offload.count] if offload else []
        for each in self.parameters:
            if each not in offloaded:
                each.moments = {moment: torch.zeros_like(each.main) for moment in MOMENTS}
        for number, each in enumerate(offloaded):
            assert offload is not None
            each.moments = offload.tensors(number)
        return offload

    def _overlap_copies(
        self,
        units: Sequence[tuple[FSDPModule, Sequence[nn.Parameter]]],
        offloaded: Sequence[FullyShardedParameter],
    ) -> None:
        """Copy gradients to the host when FSDP reduces them, and make each unit wait for its own updates."""
        for number, each in enumerate(offloaded):
            if self._is_complete(each) and each.name != self._copied:
                each.parameter.register_post_accumulate_grad_hook(partial(self._copy_to_host, number))
        number_of = {each.parameter: number for number, each in enumerate(offloaded)}
        for unit, own in units:
            numbers = [number_of[each] for each in own if each in number_of]
            assert isinstance(unit, nn.Module)
            unit.register_forward_pre_hook(partial(self._wait_for_update, numbers), prepend=True)

    def begin(self, num_microbatches: int) -> None:
        super().begin(num_microbatches)
        for chunk in self._chunks:
            chunk.begin(num_microbatches)
        for each in self.parameters:
            each.parameter.grad = None
        self._num_reductions = [0] * (0 if self.offload is None else self.offload.count)
        self._num_expected = 1 if self._chunks[0].all_reduces_once else num_microbatches

    def finish_weights(self) -> None:
        """Wait for the host's update, and free full weights left by an evaluation."""
        super().finish_weights()
        for chunk in self._chunks:
            chunk.free_weights()

    def _copy_to_host(self, number: int, parameter: Tensor) -> None:
        """Start to copy an offloaded state's gradient, once FSDP has reduced it in the last microbatch."""
        assert self.offload is not None
        self._num_reductions[number] += 1
        if self._num_reductions[number] >= self._num_expected:  # later reductions replace the copy
            self.offload.copy_gradient(number, self.local[number].gradient)

    def _wait_for_update(self, states: Sequence[int], unit: nn.Module, _: object) -> None:
        """Wait until a unit's shards are updated, before FSDP gathers them."""
        assert self.offload is not None and isinstance(unit, FSDPModule)
        for event in self.offload.wait(states):  # the all-gather's stream waits for nothing else
            all_gather_waits_for(unit, event)

    def run_stored(self, gradients: Iterable[WeightGradient]) -> None:
        """Compute stored weight gradients, and reduce-scatter each layer's before the next layer's."""
        if not self._reduce_of:  # the full parameters exist after the first forward
            self._reduce_of = dict(pair for chunk in self._chunks for pair in chunk.reductions())
        for reduce, of_unit in groupby(gradients, lambda each: self._reduce_of[each.weight]):
            run_stored(of_unit)
            reduce()

    def weight(self, name: str) -> Tensor:
        """Return a parameter's main weights in its local shape; every rank of dp must call it."""
        each = self._find(name)
        return each.full(each.parameter.data)

    def gradient(self, name: str) -> Tensor:
        each = self._find(name)
        if each.parameter.grad is None:  # backward has not reached it
            each.parameter.grad = torch.zeros_like(each.parameter.data)
        return each.full(each.parameter.grad) / self.scaler.scale

    def weights(self) -> dict[str, ParameterShard]:
        """Return the model's weights for a checkpoint: views of the main weights, or rounded copies.

        Copies are for runs that load rounded weights; writing to them has no effect.
        """
        return {each.name: each.parameter_shard(each.main.to(self.dtype)) for each in self.parameters}

    def _find(self, name: str) -> FullyShardedParameter:
        (found,) = (each for each in self.parameters if each.name == name)
        return found

    def _parameter_state(self) -> Iterator[tuple[str, ParameterShard]]:
        for each in self.parameters:
            if main_dtype(self.dtype) != self.dtype:
                yield f"{each.name}.main", each.parameter_shard(each.main)
            for moment, tensor in each.moments.items():
                yield f"{each.name}.{moment}", each.parameter_shard(tensor)

    def _weight_and_gradient_bytes(self) -> Iterator[tuple[str, int, int]]:
        """Yield 0 bytes for weights that are rounded copies: they only exist while they are used."""
        rounds = main_dtype(self.dtype) != self.dtype
        for each in self.parameters:
            yield each.name, 0 if rounds else each.main.nbytes, each.main.nbytes

    def _finish_reduction(self) -> None:
        for chunk in self._chunks:
            chunk.wait_for_reductions()
        self.unreached = [each.name for each in self.parameters if each.parameter.grad is None]
        self.finish_weights()
        if self._copied is not None and (gradient := self._find(self._copied).gradient).numel() > 0:
            sum_tied_embedding_grads(gradient, self.topology.pp)

    def _owned_gradients(self) -> list[Tensor]:
        return [each.gradient for each in self.local]

    def _norm_gradients(self) -> list[Tensor]:
        return [shard.gradient for shard in self.counted_shards()]

    def counted_shards(self) -> Iterator[CountedShard]:
        replicate = self.topology.dp.replicate
        if replicate is not None and not replicate.is_first:
            return
        for each in self.local:
            if each.name == self._copied and not self.topology.pp.is_first:
                continue  # the first stage counts it
            if each.is_cut or self.topology.tp.is_first:
                used = max(0, num_used(each.spec, self.topology) - each.start)
                yield CountedShard(each.name, each.main, each.gradient, each.moments, used)

    def _named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for each in self.local:
            yield each.name, each.gradient
