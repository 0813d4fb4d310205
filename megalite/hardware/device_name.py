"""The name of the device that a rank runs on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """Return the name of a GPU from its driver, or the name of the CPU from Linux."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
