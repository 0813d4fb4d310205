"""Set environment variables in a rank's process before CUDA starts; let several ranks share a GPU over NCCL.

Sharing lets parallel code be developed and tested with few GPUs. NCCL 2.30 and later allows it with
NCCL_MULTI_RANK_GPU_ENABLE=1. Ranks take turns on the GPU, unless NVIDIA's Multi-Process Service (MPS) runs
their kernels at the same time.
"""

from __future__ import annotations

import ctypes
import os
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
