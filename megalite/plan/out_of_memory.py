"""Check the host's memory before training, and explain out-of-memory errors: causes and remedies."""

from __future__ import annotations

import os
import re
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from megalite.config import Config
from megalite.distributed.topology import Topology
from megalite.hardware.gpus import GPUS
from megalite.hardware.host_memory import free_bytes
from megalite.model.stage import StageProvider
from megalite.plan.advice import Device, advise, advise_largest, planned_run_on
from megalite.plan.offloaded_state import offloaded_state
from megalite.plan.rank_memory import host_activations
from megalite.utils.errors import UserError
from megalite.utils.log import log

_GB = 1e9
_MESSAGE = re.compile(
    "out of memory"
    "|DefaultCPUAllocator: (can't allocate|not enough) memory"
    "|Storage size calculation overflowed|integer multiplication overflow"
    r"|aten::(new_)?(empty|zeros|contiguous|clone)\b.* API call failed",
    re.IGNORECASE,
)
"""Matches torch's messages. A GPU's error has the type `OutOfMemoryError`; others are a plain `RuntimeError`,
which names only the call if a compiled kernel requested the memory."""
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_CPU_RESIDUAL_BYTES = 0.4 * _GB
"""Memory of a process on a CPU besides its tensors: Python, torch and gloo."""


class MemoryExhausted(UserError):
    """Raised on a rank that ran out of memory."""

    on_one_rank = True


@contextmanager
def explain_out_of_memory(
    config: Config, topology: Topology, provider: StageProvider | None = None
) -> Iterator[None]:
    """Explain an allocation failure in this block.

    Args:
        provider: builds the stages of the program's own model.

    Raises:
        MemoryExhausted: memory ran out; the message lists the estimated uses of this rank's memory and the
            flags to change.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        explained = MemoryExhausted("\n".join(_lines(error, config, topology, provider)))
        raise explained from None  # drops the traceback, which holds tensors


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _MESSAGE.search(str(error)) is not None


def _lines(
    error: BaseException, config: Config, topology: Topology, provider: StageProvider | None
) -> Iterator[str]:
    limits = device_of(topology.device)
    found = _REQUESTED.search(str(error))
    requested = ""
    if found is not None:
        num_bytes = float(found[1]) * _UNITS[found[2].lower()]
        requested = f" when it requested {num_bytes / _GB:.2f} GB more"
    coordinates = ", ".join(
        f"{axis.name} {axis.rank} of {axis.size}" for axis in topology.model.named.values()
    )
    if topology.device.type == "cuda":
        held = torch.cuda.memory_allocated(topology.device)
        free_blocks = torch.cuda.memory_reserved(topology.device) - held
        usage = (
            f"of {limits.memory_bytes / _GB:.2f} GB, tensors hold {held / _GB:.2f} GB, and the allocator "
            f"{free_blocks / _GB:.2f} GB more in blocks that were too small"
        )
    else:
        usage = f"the process can use {limits.memory_bytes / _GB:.2f} GB"
    # People search a log for "RuntimeError" and "CUDA out of memory".
    name = f"RuntimeError: {topology.device.type.upper()} out of memory"
    yield f"rank {topology.rank} ({coordinates}) ran out of memory{requested} ({name}): {usage}"
    traceback.clear_frames(error.__traceback__)  # frees the step's tensors: planning needs memory too
    config = with_shard_degree(config, topology)
    try:
        yield from advise(config, topology.world_size, topology.pp.rank, limits, provider).lines()
    except UserError as cannot_plan:
        yield f"there is no advice: {cannot_plan}"


def with_shard_degree(config: Config, topology: Topology) -> Config:
    """Return the config with the number of replicas of a node in place of `--shard-within-node`."""
    if not config.parallel.shards_within_node:
        return config
    parallel = replace(config.parallel, data_parallel_shard_degree=topology.replicas.shard.size)
    return replace(config, parallel=parallel)


def device_of(device: torch.device) -> Device:
    """Return the memory that a rank can use on a device of this machine."""
    if device.type == "cuda":
        residual = GPUS["a100-80"].residual_gb * _GB
        return Device(float(torch.cuda.get_device_properties(device).total_memory), residual)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # shared by its ranks
    memory = machine if limit == resource.RLIM_INFINITY else min(machine, limit)
    return Device(float(memory), _CPU_RESIDUAL_BYTES, is_host=True)


def warn_of_planned_memory(config: Config, topology: Topology, local_world_size: int) -> None:
    """Warn before a run whose layout was passed if the plan needs more memory than a rank has.

    Rank 0 plans, without a collective. Ranks on a CPU share the memory of the machine.
    """
    if topology.rank != 0 or config.parallel.layout != "manual":
        return
    device = device_of(topology.device)
    if device.is_host:
        device = replace(device, memory_bytes=device.memory_bytes / local_world_size)
    try:
        advice = advise_largest(with_shard_degree(config, topology), topology.world_size, device)
    except UserError:
        return  # it cannot be planned
    if advice is not None:
        log.warning(
            "planned %.1f GB of %.1f per rank: the run may run out of memory",
            advice.memory.total / _GB,
            device.memory_bytes / _GB,
        )
        for line in advice.lines():
            log.warning("%s", line)


def check_host_memory(
    config: Config, topology: Topology, local_world_size: int, provider: StageProvider | None = None
) -> None:
    """Check that the host has memory for the activations that its ranks offload, besides optimizer state.

    Optimizer state alone is checked where it is allocated.

    Args:
        local_world_size: ranks of this machine; all are assumed to need as much as this rank.
        provider: builds the stages of the program's own model; nothing is checked if it cannot be planned.

    Raises:
        UserError: the host has too little memory; raised on every rank.
    """
    number, free = config.recompute.cpu_offload_activations, free_bytes()
    if number == 0 or free is None:
        return
    device = device_of(topology.device)
    run = planned_run_on(with_shard_degree(config, topology), topology.world_size, device, provider)
    try:
        state, activations = offloaded_state(run, run.ranks[topology.pp.rank]), host_activations(run)
    except UserError:
        return
    needed = local_world_size * (activations[topology.pp.rank] + (state.host if state else 0.0))
    also = " and offloaded optimizer state need" if state else " needs"
    with topology.agreed():
        if needed > free:
            raise UserError(
                f"--cpu-offload-activations {number}{also} {needed / _GB:.1f} GB of host memory for the "
                f"{local_world_size} ranks of a machine, of which {free / _GB:.1f} GB are free: pass a "
                "smaller --cpu-offload-activations"
            )
