"""Set environment variables in a rank's process before CUDA starts."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # for torch, it takes precedence over the new name


class EnvironmentVariable(NamedTuple):
    """Describes an environment variable to set.

    Attributes:
        reason: why it is set, for the log.
        names: names under which the user may have set the variable.
    """

    name: str
    value: str
    reason: str
    names: tuple[str, ...]


def settings_for(
    tp: int, zero_stage: int, *, has_symmetric_memory: bool = False
) -> list[EnvironmentVariable]:
    """Return the variables that a run needs.

    With one connection the GPU starts kernels in launch order. Tensor parallelism needs this: in backward a
    collective is launched just before the GEMM that hides it, and could otherwise wait until the GEMM leaves
    SMs free. ZeRO stage 3 needs the opposite: its all-gathers of weights overtake the GEMMs launched before
    them. So do torch's operators on symmetric memory, which multiply and copy on two streams in turns: with
    one connection, each GEMM would wait for the copy launched before it.

    Args:
        tp: tensor-parallel size.
        zero_stage: ZeRO stage of the data-parallel ranks.
        has_symmetric_memory: whether tensor-parallel collectives may use symmetric memory.
    """
    settings = [
        EnvironmentVariable(
            ALLOCATOR,
            "expandable_segments:True",
            "freed memory can be reused for tensors of any size",
            (ALLOCATOR, _OLD_ALLOCATOR),
        )
    ]
    if tp > 1 and zero_stage < 3 and not has_symmetric_memory:
        reason = "tensor-parallel collectives start before the GEMMs that hide them"
        settings.append(EnvironmentVariable(CONNECTIONS, "1", reason, (CONNECTIONS,)))
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
