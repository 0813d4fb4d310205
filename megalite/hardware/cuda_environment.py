"""Set environment variables in a rank's process before CUDA starts."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from megalite.distributed.axes import MeshOptions

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
