"""Log norms to the dashboards: of each layer's gradient, of the weights and of the optimizer's moments."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megalite.distributed.collectives import all_reduce, largest_of_all
from megalite.distributed.topology import Topology
from megalite.optim.adamw import MOMENTUM
from megalite.optim.global_norm import sum_of_squares
from megalite.optim.optimizer import Optimizer
from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult

_EMBEDDING, _HEAD = "embedding", "head"


class LayerNorms(Callback):
    """Writes the gradient's norm of each layer every --log-layer-grad-norms-interval iterations."""

    def __init__(self, writers: Writers) -> None:
        self.writers = writers

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        trainer = loop.trainer
        has_gradient = not result.plan.is_excluded and result.anomaly is None
        interval = trainer.config.logging.log_layer_grad_norms_interval
        if is_due(loop.iteration, interval) and has_gradient and math.isfinite(result.grad_norm):
            num_layers = trainer.config.model.num_layers
            norms = layer_grad_norms(trainer.optimizer, num_layers, result.grad_norm, trainer.topology)
            self.writers.layer_norms(loop.iteration, norms)


def layer_grad_norms(
    optimizer: Optimizer, num_layers: int, grad_norm: float, topology: Topology
) -> Mapping[str, float]:
    """Return the 2-norms of the gradients of "embedding", "layers.0" and so on, and "head"; a collective.

    Call it between an update and the next gradients.

    Args:
        grad_norm: norm of the whole model's gradient before clipping. The squares of the layers' norms
            add up to its square.
    """
    names = [_EMBEDDING, *(f"layers.{layer}" for layer in range(num_layers)), _HEAD]
    squares = torch.zeros(len(names), dtype=torch.float64, device=topology.device)
    for shard in optimizer.counted_shards():
        # An update may have unscaled and clipped the gradients, which keeps their ratios.
        squares[names.index(_layer_of(shard.name))] += sum_of_squares([shard.gradient], topology.device)
    shares = all_reduce(squares, topology.world, of="layer norms")
    total = shares.sum().clamp_min(torch.finfo(torch.float64).tiny)
    norms = grad_norm * (shares / total).sqrt()
    return dict(zip(names, topology.to_host(norms).tolist(), strict=True))


def _layer_of(name: str) -> str:
    """Return the part of the model that a parameter belongs to; everything after the layers is the head."""
    first, *rest = name.split(".")
    if first == "layers":
        return f"layers.{rest[0]}"
    return _EMBEDDING if first == "embedding" else _HEAD


_KINDS = {"weight": ("main",), "momentum": ("exp_avg", MOMENTUM), "variance": ("exp_avg_sq",)}
"""Megatron-DeepSpeed's names of the measured tensors, and torch's names. Muon has no variance."""


class OptimizerNorms(Callback):
    """Writes norms of the optimizer's tensors with --log-optimizer-states-to-tensorboard."""

    def __init__(self, writers: Writers) -> None:
        self.writers = writers

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        logging = loop.trainer.config.logging
        if not (logging.log_optimizer_states_to_tensorboard and logging.has_dashboards):
            return
        if is_due(loop.iteration, logging.dashboard_interval):
            norms = optimizer_norms(loop.trainer.optimizer)
            self.writers.scalars(loop.iteration, {f"optimizer/{tag}": norm for tag, norm in norms.items()})


@torch.no_grad()
def optimizer_norms(optimizer: Optimizer) -> Mapping[str, float]:
    """Return 2-norms, 1-norms and largest magnitudes over the whole model; every rank must call it.

    The norms of the variance's (Adam's second moment's) square root are returned too, as Megatron-DeepSpeed
    logs them: ``variance_sqrt_l2`` and so on. The vocabulary's padding is not counted.
    """
    if optimizer.offload is not None:
        optimizer.offload.finish()
    topology = optimizer.topology
    sums = torch.zeros(len(_KINDS), 3, dtype=torch.float64, device=topology.device)
    largest = torch.zeros(len(_KINDS), dtype=torch.float64, device=topology.device)
    for shard in optimizer.counted_shards():
        tensors = {"main": shard.main, **shard.moments}
        for number, kinds in enumerate(_KINDS.values()):
            tensor = next((tensors[kind][: shard.num_used] for kind in kinds if kind in tensors), None)
            if tensor is None or not tensor.numel():
                continue
            sums[number, 0] += sum_of_squares([tensor], topology.device)
            sums[number, 1] += tensor.abs().sum(dtype=torch.float64).to(topology.device)
            sums[number, 2] += tensor.abs().sqrt().sum(dtype=torch.float64).to(topology.device)
            largest[number] = largest[number].maximum(tensor.abs().max().to(topology.device))
    found = torch.cat([all_reduce(sums, topology.world), largest_of_all(largest, topology)[:, None]], dim=1)
    norms: dict[str, float] = {}
    for name, (squares, total, roots, most) in zip(_KINDS, topology.to_host(found).tolist(), strict=True):
        norms |= {f"{name}_l2": squares**0.5, f"{name}_l1": total, f"{name}_abs_max": most}
        if name == "variance":  # it has no negative elements
            root = f"{name}_sqrt"
            norms |= {f"{root}_l2": total**0.5, f"{root}_l1": roots, f"{root}_abs_max": most**0.5}
    return norms
