"""What a rank sets in its environment before CUDA starts there."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch reads it before the other


class Setting(NamedTuple):
    """A variable of the environment.

    Attributes:
        reason: why it is set so.
        names: under which the user may have set it.
    """

    name: str
    value: str
    reason: str
    names: tuple[str, ...]


def settings_for(tp: int, zero_stage: int) -> list[Setting]:
    """What a run wants to be set.

    With one connection the GPU takes up kernels in the order in which the program starts them. Tensor
    parallelism lives on it: in backward a collective is started just before the product that hides it, and
    would else wait until the product leaves it room. The gathering of weights in ZeRO stage 3 is to run past
    the products before it, and would wait for them.

    Args:
        tp: tensor-parallel size.
        zero_stage: what data-parallel ranks share out.
    """
    found = [
        Setting(
            ALLOCATOR,
            "expandable_segments:True",
            "memory that is freed serves tensors of any size",
            (ALLOCATOR, _OLD_ALLOCATOR),
        )
    ]
    if tp > 1 and zero_stage < 3:
        reason = "tensor-parallel collectives start before the products that hide them"
        found.append(Setting(CONNECTIONS, "1", reason, (CONNECTIONS,)))
    return found


def prepare_environment(settings: list[Setting]) -> None:
    """Sets what the user has not set, where torch has CUDA; it has not touched a GPU yet."""
    if torch.version.cuda is None:
        return
    for setting in settings:
        if not any(name in os.environ for name in setting.names):
            os.environ[setting.name] = setting.value


def describe(settings: list[Setting]) -> str:
    """What is set now, in a line for the log: by whom, or why."""
    told = []
    for setting in settings:
        name = next((name for name in reversed(setting.names) if name in os.environ), None)
        if name is None:
            continue
        is_ours = (name, os.environ[name]) == (setting.name, setting.value)
        told.append(f"{name}={os.environ[name]} ({setting.reason if is_ours else 'as it was set'})")
    return ", ".join(told)
