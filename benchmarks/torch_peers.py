"""torch's own ways to train one model on several ranks, each as a step to be timed.

They share what surrounds them: the same plain model, fused AdamW, and clipping by the whole model's norm.
Each builder gives a function from this rank's part of the global batch to (mean loss, gradient norm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from plain_gpt import PlainGPT, mean_loss
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from megalite.config import Config, OptimizerConfig
from megalite.distributed.topology import Topology

PeerStep = Callable[[Tensor, Tensor], tuple[float, float]]
"""Tokens and labels, ``[n, s]`` each, this rank's samples of a global batch -> loss and norm."""
Microbatches = Sequence[tuple[Tensor, Tensor]]


def tensor_parallel(
    topology: Topology, config: Config, weights: Mapping[str, Tensor], sequence_parallel: bool
) -> PeerStep:
    """DTensor tensor parallelism by `parallelize_module`, with the loss over a vocabulary that is cut."""
    network = _network(config, weights)
    mesh = topology.mesh["tp"]
    whole = Shard(1) if sequence_parallel else Replicate()  # of what lies between two blocks
    plan: dict[str, Any] = {
        "word": RowwiseParallel(input_layouts=Replicate(), output_layouts=whole),
        "layers.*.qkv": ColwiseParallel(input_layouts=whole),
        "layers.*.projection": RowwiseParallel(output_layouts=whole),
        "layers.*.up": ColwiseParallel(input_layouts=whole),
        "layers.*.down": RowwiseParallel(output_layouts=whole),
        "output": ColwiseParallel(input_layouts=whole, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        plan |= {name: SequenceParallel() for name in ("layers.*.norm1", "layers.*.norm2", "norm")}
        rows = distribute_tensor(network.position.weight.detach(), mesh, [Shard(0)])
        network.position.weight = nn.Parameter(rows)
    parallelize_module(network, mesh, plan)
    if not config.model.untie_embeddings_and_output_weights:
        network.output.weight = network.word.weight
    return _accumulating(network, config, around=loss_parallel)


def pipeline(topology: Topology, config: Config, weights: Mapping[str, Tensor], num_chunks: int) -> PeerStep:
    """torch.distributed.pipelining: 1F1B, or its interleaved form where a rank has several chunks."""
    pp, micro_batch_size = topology.pp, config.training.micro_batch_size
    num_microbatches = config.num_microbatches(1)
    all_layers = _layers_of_stages(config, pp.size * num_chunks)
    stages: list[Any] = [
        PipelineStage(
            _network(config, weights, all_layers[number]),
            number,
            len(all_layers),
            topology.device,
            group=pp.group,
        )
        for number in range(pp.rank, len(all_layers), pp.size)
    ]

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(logits, labels) / num_microbatches

    # The loss is divided, so that the schedule need not divide every gradient.
    if num_chunks == 1:
        schedule: Any = Schedule1F1B(stages[0], num_microbatches, loss_fn=loss_of, scale_grads=False)
    else:
        schedule = ScheduleInterleaved1F1B(stages, num_microbatches, loss_fn=loss_of, scale_grads=False)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = _adamw(parameters, config.optimizer)

    def step(tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        assert len(tokens) == num_microbatches * micro_batch_size
        optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = (tokens,) if pp.is_first else ()
        targets = {"target": labels, "losses": losses} if pp.is_last else {}
        schedule.step(*inputs, **targets, return_outputs=False)
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())
        dist.all_reduce(total, group=pp.group)
        norm = _clip(parameters, config.optimizer.clip_grad, pp.group)
        optimizer.step()
        return total.item(), norm

    return step


def ddp(topology: Topology, config: Config, weights: Mapping[str, Tensor], zero1: bool) -> PeerStep:
    """DistributedDataParallel; for ZeRO-1 with torch's ZeroRedundancyOptimizer."""
    network = DistributedDataParallel(
        _network(config, weights), process_group=topology.dp.group, gradient_as_bucket_view=True
    )

    def only_last(is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else network.no_sync()

    make = partial(_zero1, group=topology.dp.group) if zero1 else _adamw
    return _accumulating(network, config, before=only_last, make_optimizer=make, dp=topology.dp.group)


def fsdp(topology: Topology, config: Config, weights: Mapping[str, Tensor], zero3: bool) -> PeerStep:
    """FSDP2, layer by layer; as ZeRO-2 the gathered weights stay until the global batch's last backward."""
    is_bf16 = config.model.params_dtype == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_bf16 else MixedPrecisionPolicy()
    network = _network(config, weights, autocast=False)
    wrap = partial(fully_shard, mesh=topology.mesh["dp"], mp_policy=policy, reshard_after_forward=bool(zero3))
    for layer in network.layers.values():
        wrap(layer)
    root: Any = wrap(network)

    def prepare(is_last: bool) -> AbstractContextManager[Any]:
        root.set_is_last_backward(is_last)
        if not zero3:
            root.set_reshard_after_backward(is_last)
        return nullcontext()

    return _accumulating(network, config, before=prepare, dp=topology.dp.group)


def _network(
    config: Config, weights: Mapping[str, Tensor], layers: Iterable[int] | None = None, autocast: bool = True
) -> PlainGPT:
    """Return the plain model with megalite's weights, in bf16 by autocast."""
    network = PlainGPT(config.model, layers)
    network.load(weights)
    if autocast and config.model.params_dtype == "bf16":
        network.forward = torch.autocast("cpu", torch.bfloat16)(network.forward)  # type: ignore[method-assign]
    return network


def _layers_of_stages(config: Config, num_stages: int) -> list[range]:
    """Return the layers by stage, as --pipeline-layers has them or evenly."""
    counts = config.parallel.pipeline_layers or [config.model.num_layers // num_stages] * num_stages
    starts = [sum(counts[:i]) for i in range(num_stages + 1)]
    assert starts[-1] == config.model.num_layers, (counts, config.model.num_layers)
    return [range(start, end) for start, end in pairwise(starts)]


def _accumulating(
    network: nn.Module,
    config: Config,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before: Callable[[bool], AbstractContextManager[Any]] = lambda is_last: nullcontext(),
    make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    dp: dist.ProcessGroup | None = None,
) -> PeerStep:
    """Return a step that adds up the gradients of microbatches.

    Args:
        around: the context of each forward and backward.
        before: called before each microbatch with whether it is the last; gives a context too.
        dp: the replicas over which the loss is a mean.
    """
    parameters = list(network.parameters())
    optimizer = (make_optimizer or _adamw)(parameters, config.optimizer)

    def step(tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        size = config.training.micro_batch_size
        microbatches = list(zip(tokens.split(size), labels.split(size), strict=True))
        total = torch.zeros(())
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            with before(number == len(microbatches)), around():
                loss = mean_loss(network(inputs), targets) / len(microbatches)
                loss.backward()
            total += _whole(loss.detach())
        if dp is not None:
            dist.all_reduce(total, group=dp)
            total /= dist.get_world_size(dp)
        norm = _clip(parameters, config.optimizer.clip_grad)
        optimizer.step()
        return total.item(), norm

    return step


def _groups(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    """By weight decay, and DTensors apart: torch's fused update takes no mixture."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dim() > 1, isinstance(parameter, DTensor)), []).append(parameter)
    return [
        {"params": members, "weight_decay": config.weight_decay if decays else 0.0}
        for (decays, _), members in groups.items()
    ]


def _settings(config: OptimizerConfig) -> dict[str, Any]:
    betas = (config.adam_beta1, config.adam_beta2)
    return {"lr": config.lr, "betas": betas, "eps": config.adam_eps, "fused": True}


def _adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(parameters, config), **_settings(config))


def _zero1(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, group: dist.ProcessGroup
) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(
        _groups(parameters, config),
        optimizer_class=torch.optim.AdamW,
        process_group=group,
        parameters_as_bucket_view=True,
        **_settings(config),
    )


def _clip(parameters: Sequence[nn.Parameter], max_norm: float, pp: dist.ProcessGroup | None = None) -> float:
    """Clip by the norm over all parameters, and over the stages of a pipeline; returns it."""
    members: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        members[isinstance(parameter, DTensor)].append(parameter)
    norms = [
        _whole(nn.utils.get_total_norm([each.grad for each in group if each.grad is not None]))
        for group in members.values()
        if group
    ]
    square = torch.stack(norms).square().sum()
    if pp is not None:
        dist.all_reduce(square, group=pp)
    norm = math.sqrt(square.item())
    if norm > max_norm:
        for group in filter(None, members.values()):
            nn.utils.clip_grads_with_norm_(group, max_norm, torch.tensor(norm))
    return norm


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
