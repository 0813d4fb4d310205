"""Log the gradient norm of each layer to the dashboards."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
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
