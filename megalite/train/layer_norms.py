"""The gradient's norm layer by layer, whatever ranks hold which part of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megalite.parallel.collectives import all_reduce
from megalite.topology import Topology
from megalite.train.optimizer import RunOptimizer

_EMBEDDING, _HEAD = "embedding", "head"


def layer_grad_norms(
    optimizer: RunOptimizer, num_layers: int, grad_norm: float, topology: Topology
) -> Mapping[str, float]:
    """2-norms of the gradients of "embedding", "layers.0" and so on, and "head"; every rank calls it.

    To be called between an update and the next gradients.

    Args:
        grad_norm: of the whole model's gradient, before clipping: the layers' squares add up to its.
    """
    names = [_EMBEDDING, *(f"layers.{layer}" for layer in range(num_layers)), _HEAD]
    squares = torch.zeros(len(names), dtype=torch.float64, device=topology.device)
    for name, square in optimizer.gradient_squares().items():
        squares[names.index(_layer_of(name))] += square
    shares = all_reduce(squares, topology.world)
    total = shares.sum().clamp_min(torch.finfo(torch.float64).tiny)
    norms = grad_norm * (shares / total).sqrt()
    return dict(zip(names, norms.tolist(), strict=True))


def _layer_of(name: str) -> str:
    """Which part of the model a parameter belongs to: what comes after the layers is the head."""
    first, *rest = name.split(".")
    if first == "layers":
        return f"layers.{rest[0]}"
    return _EMBEDDING if first == "embedding" else _HEAD
