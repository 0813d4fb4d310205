"""Settings of a rank's process: CPU threads, the allocator, and CUDA's environment variables.

Environment variables are set before CUDA starts. Sharing a GPU among ranks over NCCL lets parallel code be
developed and tested with few GPUs. NCCL 2.30 and later allows it with NCCL_MULTI_RANK_GPU_ENABLE=1. Ranks
take turns on the GPU, unless NVIDIA's Multi-Process Service (MPS) runs their kernels at the same time.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from megalite.distributed.axes import MeshOptions
from megalite.utils.errors import UserError

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # for torch, it takes precedence over the new name


class EnvironmentVariable(NamedTuple):
    """Environment variable to set.

    Attributes:
        reason: why it is set, for the log.
        names: names under which the user may have set the variable.
    """

    name: str
    value: str
    reason: str
    names: tuple[str, ...]


_SHARED_GPUS = (
    ("NCCL_MULTI_RANK_GPU_ENABLE", "1", "ranks share GPUs"),
    ("NCCL_MAX_CTAS", "2", "the GPU runs the collectives of all ranks that share it at the same time"),
    ("NCCL_NVLS_ENABLE", "0", "a switch sums over GPUs, not over ranks of one"),
    ("NCCL_BUFFSIZE", "1048576", "buffers for each pair of ranks are in the memory of one GPU"),
)
"""Settings with which ranks have shared an H100: name, value and reason."""


def settings_for(options: MeshOptions, tp: int) -> list[EnvironmentVariable]:
    """Return the variables that a run needs.

    With one connection the GPU starts kernels in launch order. Tensor parallelism needs this: in backward a
    collective is launched just before the GEMM that hides it, and could otherwise wait until the GEMM leaves
    SMs free. ZeRO stage 3 needs the opposite: its all-gathers of weights overtake the GEMMs launched before
    them. So do torch's operators on symmetric memory, which multiply and copy on two streams in turns: with
    one connection, each GEMM would wait for the copy launched before it.

    Args:
        options: the run's ranks: `Config.mesh`.
        tp: tensor-parallel size.
    """
    settings = [
        EnvironmentVariable(
            ALLOCATOR,
            "expandable_segments:True",
            "freed memory can be reused for tensors of any size",
            (ALLOCATOR, _OLD_ALLOCATOR),
        )
    ]
    if tp > 1 and options.zero_stage < 3 and not options.requests_symmetric_memory:
        reason = "tensor-parallel collectives start before the GEMMs that hide them"
        settings.append(EnvironmentVariable(CONNECTIONS, "1", reason, (CONNECTIONS,)))
    if options.ranks_share_gpus:
        settings += [EnvironmentVariable(name, value, why, (name,)) for name, value, why in _SHARED_GPUS]
    return settings


def prepare_environment(settings: list[EnvironmentVariable]) -> None:
    """Set the variables that the user has not set, if torch is built with CUDA.

    Call it before torch first uses a GPU.
    """
    if torch.version.cuda is None:
        return
    for setting in settings:
        if not any(name in os.environ for name in setting.names):
            os.environ[setting.name] = setting.value


def describe(settings: list[EnvironmentVariable]) -> str:
    """Return the current values for the log, each with its reason or a note that the user set it."""
    descriptions = []
    for setting in settings:
        name = next((name for name in reversed(setting.names) if name in os.environ), None)
        if name is None:
            continue
        is_ours = (name, os.environ[name]) == (setting.name, setting.value)
        descriptions.append(f"{name}={os.environ[name]} ({setting.reason if is_ours else 'set by the user'})")
    return ", ".join(descriptions)


MIN_NCCL = (2, 30)
MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
"""Variable with the folder through which programs find the daemon of MPS."""
DEFAULT_MPS_FOLDER = Path("/tmp/nvidia-mps")


def loaded_nccl() -> tuple[int, int, int]:
    """Return the version of the NCCL that this process uses; zeros if it has none.

    `torch.cuda.nccl.version` returns the version that torch was built with, even if another one is preloaded.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")  # the one that is loaded, if there is one
    except OSError:  # torch may contain it
        major, minor, patch = torch.cuda.nccl.version()[:3] if torch.version.cuda else (0, 0, 0)
        return major, minor, patch
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def nccl_problem() -> str:
    """Return why ranks cannot share a GPU with this process's NCCL, and what to type; empty if they can."""
    version = loaded_nccl()
    if version[:2] >= MIN_NCCL:
        return ""
    needed, found = (".".join(map(str, each)) for each in (MIN_NCCL, version))
    uses = f"this process uses NCCL {found}" if any(version) else "this process has no NCCL"
    cuda = (torch.version.cuda or "").partition(".")[0]
    return (
        f"ranks can share a GPU with NCCL {needed} or later, and {uses}: type pip "
        f"install --no-deps 'nvidia-nccl-cu{cuda}>={needed}', or set LD_PRELOAD to the libnccl.so.2 of a "
        "later NCCL; torch 2.14 comes with one"
    )


def check_nccl_shares_gpus() -> None:
    """Raise UserError if this process's NCCL does not let ranks share a GPU."""
    if problem := nccl_problem():
        raise UserError(f"--ranks-share-gpus: {problem}")


def running_mps() -> Path | None:
    """Return the folder of the daemon of MPS that serves this process; None if there is no daemon."""
    folder = Path(os.environ.get(MPS_FOLDER, DEFAULT_MPS_FOLDER))
    return folder if (folder / "control").exists() else None


def describe_sharing(device: torch.device) -> str:
    """Return a line for the log: whether ranks that share a GPU run at the same time, or take turns."""
    if device.type != "cuda":
        return "--ranks-share-gpus has no effect: ranks run on CPU cores"
    folder = running_mps()
    how = (
        f"with MPS ({folder})"
        if folder is not None
        else "in turns, about 36 ms for each collective: MPS (nvidia-cuda-mps-control -d) is faster"
    )
    return f"ranks share GPUs {how}; speeds do not predict a cluster's"


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
