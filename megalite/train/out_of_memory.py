"""What a run says where memory runs out: what took it, and which flags would take less."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megalite.config import Config
from megalite.errors import UserError
from megalite.plan.advice import Device, advise
from megalite.plan.gpu import GPUS
from megalite.topology import Topology

_GB = 1e9
_WORDS = re.compile(
    "out of memory"
    "|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|aten::(new_)?(empty|zeros|contiguous|clone)\b.* API call failed",
    re.IGNORECASE,
)
"""How torch says it: by an `OutOfMemoryError` for a GPU, else by a plain `RuntimeError`, which names nothing
but the call where it was a compiled kernel that asked."""
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_CPU_RESIDUAL_BYTES = 0.4 * _GB
"""Of a process on a CPU that no tensor holds: Python, torch and gloo."""


@contextmanager
def memory_explained(config: Config, topology: Topology) -> Iterator[None]:
    """Makes of an allocation that fails in this block an error that helps.

    Raises:
        UserError: memory ran out; it says for what, and what to change, by the plan of this rank.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        told = UserError("\n".join(_lines(error, config, topology)))
        told.on_one_rank = True
        raise told from None  # and with the traceback go the tensors that it holds


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


def _lines(error: BaseException, config: Config, topology: Topology) -> Iterator[str]:
    device = device_of(topology.device)
    asked = _ASKED.search(str(error))
    what = "" if asked is None else f" when {_size(asked) / _GB:.2f} GB more were asked for"
    axes = (topology.pp, topology.dp, topology.tp)
    place = ", ".join(f"{axis.name} {axis.rank} of {axis.size}" for axis in axes)
    yield f"rank {topology.rank} ({place}) ran out of memory{what}: {_held(topology.device, device)}"
    yield from advise(config, topology.world_size, topology.pp.rank, device).lines()


def _size(asked: re.Match[str]) -> float:
    return float(asked[1]) * _UNITS[asked[2].lower()]


def _held(device: torch.device, limits: Device) -> str:
    """What there is, and what this process has of it."""
    if device.type == "cuda":
        held, kept = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return (
            f"of {limits.memory_bytes / _GB:.2f} GB, tensors hold {held / _GB:.2f} GB, and the allocator "
            f"{(kept - held) / _GB:.2f} GB more in pieces that did not fit"
        )
    return f"the process can have {limits.memory_bytes / _GB:.2f} GB"


def device_of(device: torch.device) -> Device:
    """The memory that a rank can have on a device of this machine."""
    if device.type == "cuda":
        residual = GPUS["a100-80"].residual_gb * _GB
        return Device(float(torch.cuda.get_device_properties(device).total_memory), residual)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # which its ranks share
    memory = machine if limit == resource.RLIM_INFINITY else min(machine, limit)
    return Device(float(memory), _CPU_RESIDUAL_BYTES)
