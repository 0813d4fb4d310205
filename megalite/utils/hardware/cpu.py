"""CPU settings of a rank's process: threads, their scheduling and the allocator."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1


def limit_threads(num_threads: int | None, local_world_size: int) -> None:
    """Set torch's number of threads; the default is one per rank if several ranks share a machine.

    More threads than cores slow each other down. OMP_NUM_THREADS, if set, replaces the default.
    """
    if num_threads is None and local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        num_threads = 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def schedule_as_batch() -> None:
    """Let Linux schedule this thread and the threads that it starts as batch work (sched(7), SCHED_BATCH).

    A batch thread that wakes up does not interrupt the running thread. This helps ranks that share cores.
    While a thread holds the lock of a connection, gloo's own thread polls the socket without pause. If gloo's
    thread takes the core from the thread that holds the lock, both wait for the end of its time slice.
    Figures are in benchmarks/RESULTS.md. There is no effect on free cores, on other systems, or if the
    process was started with a policy other than the default.
    """
    if hasattr(os, "sched_setscheduler") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # a sandbox can forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensor; no effect with another C library.

    By default glibc maps each large tensor and unmaps it when it is freed, so every training step takes page
    faults for all its memory. Keeping the memory makes steps up to a third faster, and the process up to a
    third larger, because blocks of many sizes leave gaps. Figures are in benchmarks/RESULTS.md.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)


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
