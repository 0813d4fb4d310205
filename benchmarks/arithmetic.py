"""What a device's products of matrices reach: what a training step is compared with."""

from __future__ import annotations

import math

import torch
from turns import Work

from megalite.config import Config
from megalite.distributed.topology import Topology
from megalite.model.stage import DTYPES

SIZES = {"cpu": (2048, 1), "cuda": (8192, 20)}
"""Rows and columns of the matrices, and how many products make a turn."""


def product(config: Config, topology: Topology) -> Work:
    """Square products in the precision of the model, into memory that is there."""
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
    """Operations of a turn of `product`, a multiply-add being two."""
    size, repeats = SIZES[device_type]
    return 2.0 * size**3 * repeats
