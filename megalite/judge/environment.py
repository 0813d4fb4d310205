"""Environment variables that torchrun sets, for packages that read them although the process group exists."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist


def set_torchrun_variables() -> dict[str, str | None]:
    """Set the variables of this rank as torchrun does on one machine, and return their earlier values."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    wanted = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    wanted |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    return before


def restore_variables(before: Mapping[str, str | None]) -> None:
    """Set variables to earlier values; remove those that were not set."""
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
