"""Optimizer of ZeRO stage 3: torch's FSDP shards weights and gradients, and the state follows the shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed.observer import EventStack, Wait
from megalite.distributed.topology import Axis, Topology
from megalite.optim.adamw import MOMENTS
from megalite.optim.flat_buffers import ParameterShard
from megalite.optim.gradient_buckets import MESSAGE_DTYPES, main_dtype
from megalite.optim.offload import open_offload
from megalite.optim.optimizer import BaseOptimizer, CountedShard
from megalite.tensor_parallel.counter_random import fill_initial
from megalite.tensor_parallel.parameter_spec import ParameterSpec, num_used, spec_of


class FullyShardedParameter:
    """This rank's shard of one parameter: main weights, gradient and moments of consecutive elements.

    FSDP splits the first dim into equal chunks; the last ones may be smaller, or empty.

    Attributes:
        parameter: a DTensor of the main weights, which FSDP puts in place of the full parameter between uses.
        shape: of the full parameter, as the model made it.
        start: position of this rank's first element among the parameter's.
        moments: by torch's names, ``[n]``; the optimizer allocates them.
    """

    moments: Mapping[str, Tensor]

    def __init__(self, name: str, parameter: nn.Parameter, shape: tuple[int, ...], dp: Axis) -> None:
        self.name = name
        self.parameter = parameter
        self.shape = shape
        num_rows, *row = parameter.shape
        chunk = -(-num_rows // dp.size)
        self.start = min(chunk * dp.rank, num_rows) * math.prod(row)

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
        """The main weights, ``[n]``."""
        return _local(self.parameter.data)

    @property
    def gradient(self) -> Tensor:
        """The reduced gradients of the microbatches so far, ``[n]``."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter.data)
        return _local(self.parameter.grad)

    @property
    def rounded(self) -> None:
        """None: FSDP casts the main weights at each all-gather."""

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
    """Give the module its initial weights and shard them with FSDP.

    From then on FSDP all-gathers a block's weights for its forward, and again for its backward. Blocks are
    initialized and sharded one after the other, so that a rank never holds more than one block's full
    weights.

    Args:
        module: its parameters are on the meta device, and are replaced.
        blocks: parts of it that are all-gathered one at a time; the rest is all-gathered as one unit, and
            stays full from forward to backward.
        seed: key of the initial weights.
        dtype: in which the module computes; main weights and gradients have `main_dtype`.
        message_dtype: gradients are rounded to it for the reduction, which sums in it; None keeps theirs.
    """
    main = main_dtype(dtype)
    policy = MixedPrecisionPolicy(dtype, message_dtype or main, cast_forward_inputs=False)
    named = dict(module.named_parameters())
    names = {parameter: name for name, parameter in named.items()}
    for unit in (*blocks, module):
        for owner in unit.modules():
            for key, parameter in list(owner.named_parameters(recurse=False)):
                if name := names.get(parameter):
                    weight = torch.empty(parameter.shape, dtype=main, device=topology.device)
                    fill_initial(weight, name, spec_of(parameter), seed, topology)
                    setattr(owner, key, nn.Parameter(_flat_outputs(weight, key)))
        fully_shard(unit, mesh=topology.mesh["dp"], mp_policy=policy)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)  # gradients are summed: the loss is a mean already
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        unit.set_custom_all_gather(_PostedAllGather(topology.events))
        unit.set_custom_reduce_scatter(_PostedReduceScatter(topology.events))
    sharded = []
    for name, parameter in module.named_parameters():
        parameter.spec = spec_of(named[name])  # type: ignore[attr-defined]
        sharded.append(FullyShardedParameter(name, parameter, tuple(named[name].shape), topology.dp))
    return sharded


class _PostedAllGather(DefaultAllGather):
    """FSDP's all-gather; posts the wait for it."""

    def __init__(self, events: EventStack) -> None:
        super().__init__()
        self._events = events

    def __call__(self, *args: Any, **kwargs: Any) -> torch.distributed.Work | None:
        with self._events.during(Wait("dp", "all-gather", "weights")):
            return super().__call__(*args, **kwargs)


class _PostedReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter; posts the wait for it."""

    def __init__(self, events: EventStack) -> None:
        super().__init__()
        self._events = events

    def __call__(self, *args: Any, **kwargs: Any) -> torch.distributed.Work:
        with self._events.during(Wait("dp", "reduce-scatter", "gradients")):
            return super().__call__(*args, **kwargs)


def _flat_outputs(weight: Tensor, key: str) -> Tensor:
    """Flatten the output dims of a linear layer: ``[..., in] -> [out, in]``, a bias ``[...] -> [out]``.

    FSDP splits the first dim, and SwiGLU's ``[2, ffn, h]`` would leave nothing for a third rank.
    """
    if key == "bias":
        return weight.flatten()
    return weight.flatten(0, -2) if weight.dim() > 1 else weight


class FullyShardedOptimizer(BaseOptimizer):
    """ZeRO stage 3: this rank has a shard of each parameter.

    Attributes:
        parameters: this rank's shards, some of which may be empty.
        local: those that are not empty, in the order of AdamW's states.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        config: OptimizerConfig,
        parallel: ParallelConfig,
        topology: Topology,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        """Give the module its initial weights, as `shard_module` does, and allocate the state.

        Args:
            module: the whole model; `blocks` are its parts that are all-gathered one at a time.
            parallel: dtype of gradient messages, and sequence parallelism.
            dtype: in which the model computes.
            seed: key of the initial weights.
        """
        message_dtype = MESSAGE_DTYPES[parallel.grad_communication_dtype]
        self.dtype = dtype
        self.parameters = shard_module(module, blocks, seed, topology, dtype, message_dtype)
        assert isinstance(module, FSDPModule)
        self.root = module
        self.local = [each for each in self.parameters if each.main.numel() > 0]
        numels = [each.main.numel() for each in self.local]
        main = main_dtype(dtype)
        offload = open_offload(numels, MOMENTS, main, main, config, parallel, topology)
        offloaded = self.local[: offload.count] if offload else []
        for each in self.parameters:
            if each not in offloaded:
                each.moments = {moment: torch.zeros_like(each.main) for moment in MOMENTS}
        for number, each in enumerate(offloaded):
            assert offload is not None
            each.moments = offload.tensors(number)
        super().__init__(self.local, config, parallel, topology, dtype, offload)

    def begin(self, num_microbatches: int) -> None:
        self.finish_weights()
        for each in self.parameters:
            each.parameter.grad = None

    def finish_weights(self) -> None:
        """Free the full weights that an evaluation has left, before weights are read or changed."""
        self.root.reshard()

    def weight(self, name: str) -> Tensor:
        """Return a parameter's main weights in its local shape; every rank of dp must call it."""
        each = self._find(name)
        return each.full(each.parameter.data)

    def gradient(self, name: str) -> Tensor:
        each = self._find(name)
        assert each.parameter.grad is not None
        return each.full(each.parameter.grad) / self.scaler.scale

    def weights(self) -> dict[str, ParameterShard]:
        """Return the model's weights for a checkpoint: views of the main weights, or rounded copies.

        Copies exist for runs that load rounded weights; writing to them changes nothing.
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
        """Yield no bytes for weights that are rounded copies: they exist only while they are used."""
        rounds = main_dtype(self.dtype) != self.dtype
        for each in self.parameters:
            yield each.name, 0 if rounds else each.main.nbytes, each.main.nbytes

    def _finish_reduction(self) -> None:
        """Do nothing: FSDP has summed the gradients in backward."""

    def _owned_gradients(self) -> list[Tensor]:
        return [each.gradient for each in self.local]

    def _norm_gradients(self) -> list[Tensor]:
        return [shard.gradient for shard in self._counted_shards()]

    def _counted_shards(self) -> Iterator[CountedShard]:
        for each in self.local:
            if each.is_cut or self.topology.tp.is_first:
                used = max(0, num_used(each.spec, self.topology) - each.start)
                yield CountedShard(each.name, each.main, each.gradient, used)

    def _named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for each in self.local:
            yield each.name, each.gradient
