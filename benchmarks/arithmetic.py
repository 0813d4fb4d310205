"""Measure the rate of a device's matrix products, the reference for a training step."""

from __future__ import annotations

import math

import torch
from turns import Work

from megalite.config import Config
from megalite.distributed.topology import Topology
from megalite.model.stage import DTYPES

SIZES = {"cpu": (2048, 1), "cuda": (8192, 20)}
"""Rows and columns of the matrices, and the number of products per turn."""


def product(config: Config, topology: Topology) -> Work:
    """Square matrix products in the model's precision, into allocated memory."""
    size, repeats = SIZES[topology.device.type]
    x, y, z = (
        torch.randn(size, size, device=topology.device).to(DTYPES[config.model.params_dtype])
        for _ in range(3)
    )

    def step() -> float:
        for _ in range(repeats):
            torch.mm(x, y, out=z)
        return math.nan

    return Work(step, 0)


def product_flops(device_type: str) -> float:
    """Return the operations in a turn of `product`; a multiply-add counts as two."""
    size, repeats = SIZES[device_type]
    return 2.0 * size**3 * repeats
