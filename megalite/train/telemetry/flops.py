"""How much arithmetic a GPU can do; and, from the planner, how much a model takes."""

from __future__ import annotations

import re

import torch

from megalite.plan.flops import flops_per_token

__all__ = ["flops_per_token", "peak_tflops", "peak_tflops_of"]

_PEAK_TFLOPS: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"B200"}), 2250.0),
    (frozenset({"GB200"}), 2500.0),
    (frozenset({"B100"}), 1750.0),
    (frozenset({"H200", "NVL"}), 835.0),
    (frozenset({"H200"}), 989.0),
    (frozenset({"GH200"}), 989.0),
    (frozenset({"H100", "PCIE"}), 756.0),
    (frozenset({"H100", "NVL"}), 835.0),
    (frozenset({"H100"}), 989.0),
    (frozenset({"H800"}), 989.0),
    (frozenset({"H20"}), 148.0),
    (frozenset({"A100"}), 312.0),
    (frozenset({"A800"}), 312.0),
    (frozenset({"A40"}), 149.7),
    (frozenset({"A30"}), 165.0),
    (frozenset({"A10"}), 125.0),
    (frozenset({"L40S"}), 362.0),
    (frozenset({"L40"}), 181.0),
    (frozenset({"L4"}), 121.0),
    (frozenset({"MI300X"}), 1307.0),
)
"""Words of a GPU's name, and its dense bf16 TFLOP/s by the vendor's data sheet; the first row that fits."""


def peak_tflops(device: torch.device) -> float | None:
    """Dense bf16 TFLOP/s of a GPU by its data sheet; None for a CPU, a slice of a GPU, an unknown GPU."""
    return peak_tflops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_tflops_of(name: str) -> float | None:
    """Dense bf16 TFLOP/s of the GPU that CUDA calls `name`, such as "NVIDIA A100-SXM4-80GB"."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if "MIG" in words:
        return None
    return next((peak for key, peak in _PEAK_TFLOPS if key <= words), None)
