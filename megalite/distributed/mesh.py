"""Build the mesh of all ranks, with a process group for each line of ranks along an axis."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megalite.torch_private import flatten_mesh

AXES = ("pp", "dp", "tp")
"""Mesh axes, outermost first. For a new axis, add an entry here and a size in `_axis_sizes` (topology.py)."""

REPLICATE, SHARD = "dp_replicate", "dp_shard"
"""Parts of dp if ZeRO shards within groups, outermost first: the ranks of a group are neighbours."""


def build_mesh(
    sizes: tuple[int, int, int], shard_degree: int, device_type: str
) -> tuple[DeviceMesh, dict[str, DeviceMesh]]:
    """Return the mesh, and this rank's line of ranks along each axis; every rank must call it.

    Args:
        sizes: sizes in the order of `AXES`.
        shard_degree: number of dp ranks that ZeRO shards over. If it is less than dp, the mesh has the axes
            pp, `REPLICATE`, `SHARD` and tp; the product of `REPLICATE` and `SHARD`, dp, also has a line.
    """
    pp, dp, tp = sizes
    if shard_degree == dp:
        options = group_options(device_type, dp, "dp")
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES, backend_override=options)
        return mesh, {name: mesh[name] for name in AXES}
    names = ("pp", REPLICATE, SHARD, "tp")
    mesh = init_device_mesh(
        device_type,
        (pp, dp // shard_degree, shard_degree, tp),
        mesh_dim_names=names,
        backend_override=group_options(device_type, dp, REPLICATE, SHARD),
    )
    options = group_options(device_type, dp, "dp")
    whole = flatten_mesh(mesh[REPLICATE, SHARD], "dp", None if options is None else options["dp"])
    return mesh, {"dp": whole, **{name: mesh[name] for name in names}}


def group_options(device_type: str, dp: int, *names: str) -> dict[int | str, Any] | None:
    """Return NCCL options for the groups between `dp` replicas, by axis; None for torch's defaults.

    Their collectives run on a high-priority stream. They overlap with GEMMs, whose waiting thread blocks
    would otherwise all start first.
    """
    if device_type != "cuda" or dp == 1:
        return None
    return {name: dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) for name in names}


def another_group(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    """Return a second process group for this rank's line of ranks along an axis; every rank must call it."""
    assert mesh.mesh_dim_names is not None
    lines = mesh.mesh.movedim(mesh.mesh_dim_names.index(name), -1).flatten(0, -2).tolist()
    description = f"mesh_{name}_backward"
    if mesh.device_type == "cuda":  # one call splits NCCL's communicator for all lines
        group = dist.split_group(split_ranks=lines, group_desc=description)
    else:
        group, _ = dist.new_subgroups_by_enumeration(lines, group_desc=description)
    assert group is not None
    return group
