"""How much memory this process has taken, in MiB."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_MIB = 2.0**20
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Memory:
    """Memory of one rank, in MiB.

    Attributes:
        allocated: CUDA: the most that tensors have held at one time since the process started.
            CPU: the process's resident set now.
        reserved: CUDA: the most that torch's allocator has held of the device.
            CPU: the largest the resident set has been.
    """

    allocated: float
    reserved: float


def measure_memory(device: torch.device) -> Memory:
    """Reads counters alone: it waits for no kernel."""
    if device.type == "cuda":
        return Memory(
            torch.cuda.max_memory_allocated(device) / _MIB, torch.cuda.max_memory_reserved(device) / _MIB
        )
    return _resident_set()


def _resident_set() -> Memory:
    # The kernel's own figures first: getrusage's peak is inherited from the parent over fork and exec.
    if _STATUS.exists():
        lines = (line.split() for line in _STATUS.read_text().splitlines())
        kib = {words[0].rstrip(":"): float(words[1]) for words in lines if words and words[-1] == "kB"}
        if "VmRSS" in kib and "VmHWM" in kib:
            return Memory(kib["VmRSS"] / 1024, kib["VmHWM"] / 1024)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_mib = peak / _MIB if sys.platform == "darwin" else peak / 1024
    return Memory(peak_mib, peak_mib)
