"""Inspect the hardware of this node: its GPUs or CPU, memory and network adapters."""

from __future__ import annotations

import json
import math
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megalite.utils.errors import UserError
from megalite.utils.hardware.host_memory import total_bytes

CPU = "cpu"
_QUERY = Path(__file__).with_name("gpu_query.py")
_SECONDS_TO_QUERY = 60.0
_ADAPTERS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class NodeHardware:
    """Hardware of a rank on its node. All values are the same at each start on the same machine.

    Attributes:
        device: name of the GPU, or `CPU`.
        memory_bytes: memory of the device that one rank can use.
        num_sms: multiprocessors of the GPU; 1 for a CPU.
        has_peer_access: whether neighbouring GPUs access each other's memory.
        network_gbps: GB/s of a rank's share of the network adapters, one way; None if it is unknown.
    """

    device: str
    memory_bytes: float
    num_sms: int
    has_peer_access: bool
    network_gbps: float | None
    host_bytes: float
    num_ranks: int

    @property
    def device_type(self) -> str:
        return "cpu" if self.device == CPU else "cuda"


def inspect_node(
    backend: str, local_rank: int, local_world_size: int, *, shares_gpus: bool = False
) -> NodeHardware:
    """Inspect this node for a rank, without starting CUDA in this process.

    Args:
        backend: `ParallelConfig.distributed_backend`; gloo trains on CPU cores.
        shares_gpus: ranks that are more than the GPUs share their memory.
    """
    host, adapters = float(total_bytes()), sum(_port_gbps(_ADAPTERS))
    network = adapters / local_world_size if adapters else None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    share = host / local_world_size
    memory = share if limit == resource.RLIM_INFINITY else min(share, float(limit))
    node = NodeHardware(CPU, memory, 1, True, network, host, local_world_size)
    gpus = [] if backend == "gloo" or torch.version.cuda is None else _gpus()
    if not gpus:
        return node
    gpu = gpus[local_rank % len(gpus)]
    ranks_of_gpu = math.ceil(local_world_size / len(gpus)) if shares_gpus else 1
    return replace(
        node,
        device=gpu["name"],
        memory_bytes=gpu["memory_bytes"] / ranks_of_gpu,
        num_sms=gpu["num_sms"],
        has_peer_access=gpu["has_peer_access"],
    )


def weakest(nodes: Sequence[NodeHardware]) -> NodeHardware:
    """Return the hardware that every rank has at least.

    Raises:
        UserError: some ranks are on GPUs, and others on CPUs.
    """
    if len({node.device_type for node in nodes}) > 1:
        raise UserError("some ranks find a GPU and others none: start all ranks on nodes with GPUs")
    smallest = min(nodes, key=lambda node: node.memory_bytes)
    networks = [node.network_gbps for node in nodes if node.network_gbps is not None]
    return replace(
        smallest,
        num_sms=min(node.num_sms for node in nodes),
        has_peer_access=all(node.has_peer_access for node in nodes),
        network_gbps=min(networks, default=None),
        host_bytes=min(node.host_bytes for node in nodes),
        num_ranks=min(node.num_ranks for node in nodes),
    )


def _gpus() -> list[dict[str, Any]]:
    """Return the GPUs that `gpu_query` lists; none if there is no driver."""
    try:
        query = subprocess.run(
            [sys.executable, "-I", str(_QUERY)], capture_output=True, timeout=_SECONDS_TO_QUERY, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return list(json.loads(query.stdout))


def _port_gbps(folder: Path) -> Iterator[float]:
    """Yield GB/s of each active InfiniBand or RoCE port, one way."""
    for port in sorted(folder.glob("*/ports/*")):
        with suppress(OSError):  # a port may vanish
            rate = re.match(r"([\d.]+) Gb/sec", (port / "rate").read_text())
            if rate is not None and "ACTIVE" in (port / "state").read_text():
                yield float(rate[1]) / 8
