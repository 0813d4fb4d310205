"""Let several ranks share a GPU over NCCL: parallel code can be developed and tested with few GPUs.

NCCL 2.30 and later allows it with NCCL_MULTI_RANK_GPU_ENABLE=1. Ranks take turns on the GPU, unless NVIDIA's
Multi-Process Service (MPS) runs their kernels at the same time.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from megalite.utils.errors import UserError

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
