"""Bind a rank to the CPU cores that are next to its GPU, on machines with several NUMA nodes.

The cores of another node reach the GPU, and the memory beside it, over the link between processors: copies
and kernel launches are slower. Linux allocates memory on the node of the core that first writes to it, so
host memory follows the binding of the cores.

torchrun --numa-binding does the same when it starts ranks, but it needs the numactl program, and other
launchers do not have it. The functions in torch.numa that bind the calling process are private.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch


def bind_to_gpu(device: torch.device, system: Path = Path("/sys")) -> str:
    """Bind all threads of this process, and those that start later, to the NUMA node of a CUDA device.

    Nothing changes on a machine with one node, if the launcher has already bound the process to some of the
    cores, or if the GPU's node is not known.

    Args:
        system: where Linux describes devices.

    Returns:
        What was done, and why, for the log.
    """
    nodes = _cores_by_node(system)
    if len(nodes) < 2 or not hasattr(os, "sched_setaffinity"):
        return "all of the machine, which has one NUMA node"
    allowed = os.sched_getaffinity(0)
    if not allowed.issuperset(set().union(*nodes.values())):
        return f"{len(allowed)} cores, to which the launcher has bound the rank"
    address = _pci_address(device)
    node = _node_of(address, system)
    if node not in nodes:
        return f"all of the machine: the NUMA node of the GPU at {address} is not known"
    cores = nodes[node]
    _bind_threads(cores, allowed)
    torch.set_num_threads(min(torch.get_num_threads(), len(cores)))
    return f"the {len(cores)} cores of NUMA node {node}, which has the GPU at {address}"


def _pci_address(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    # torch's type stubs lack these attributes.
    domain, bus, slot = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _cores_by_node(system: Path) -> dict[int, set[int]]:
    nodes = {
        int(file.parent.name.removeprefix("node")): _numbers(file.read_text())
        for file in (system / "devices" / "system" / "node").glob("node[0-9]*/cpulist")
    }
    return {node: cores for node, cores in nodes.items() if cores}


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def _node_of(address: str, system: Path) -> int:
    """Return the NUMA node of a PCI device; -1 if it is not known, as in many virtual machines."""
    try:
        return int((system / "bus" / "pci" / "devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _bind_threads(cores: set[int], unbound: set[int]) -> None:
    """Bind the threads of this process that may run on all the `unbound` cores."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # it has ended
            if os.sched_getaffinity(thread) == unbound:
                os.sched_setaffinity(thread, cores)
