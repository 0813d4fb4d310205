"""Build the mesh of all ranks, with a process group for each line of ranks along an axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megalite.distributed.axes import REPLICATE, SHARD, MeshOptions, MeshSpec
from megalite.distributed.axis import Axis, AxisSet
from megalite.utils.torch_private import without_cpp_warnings


# Splits of a group with both backends have NCCL's options, of which gloo warns; it ignores them.
@without_cpp_warnings()
def build_axes(
    options: MeshOptions, sizes: Mapping[str, int], shard_degree: int, rank: int, device_type: str
) -> tuple[DeviceMesh, dict[str, AxisSet]]:
    """Return the mesh of the model's axes, and the axes of each mesh; every rank must call it.

    Args:
        sizes: size of each axis of all meshes.
        shard_degree: number of replicas of the model that ZeRO shards over.
    """
    mesh = _build_mesh(options.model, sizes, device_type)
    known = {name: _axis(mesh[name], name) for name in options.model.names}
    for entry in options.model.axes:
        if entry.sends_messages and sizes[entry.name] > 1:
            lines = lines_along(options.model, sizes, (entry.name,))
            group = new_groups(device_type, lines, f"{entry.name}_backward")
            known[entry.name] = replace(known[entry.name], backward_group=group)
    found: dict[str, AxisSet] = {}
    for mesh_spec in options.table:
        axes = _axis_set(mesh_spec, sizes, known, rank, device_type)
        if mesh_spec is options.model:
            axes = _divided(axes, sizes, shard_degree, rank, device_type)
        found[mesh_spec.name] = axes
        known |= axes.axes
    return mesh, found


def _build_mesh(mesh_spec: MeshSpec, sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    names = mesh_spec.names
    replicas = [name for name in mesh_spec.with_role("replicas") if sizes[name] > 1]
    options = group_options(device_type, len(replicas) + 1, *replicas)
    return init_device_mesh(
        device_type,
        tuple(sizes[name] for name in names),
        mesh_dim_names=names,
        backend_override=options,
    )


def group_options(device_type: str, dp: int, *names: str) -> dict[int | str, Any] | None:
    """Return NCCL options for the groups between `dp` replicas, by axis; None for torch's defaults.

    Their collectives run on a high-priority stream. They overlap with GEMMs, whose waiting thread blocks
    would otherwise all start first.
    """
    if device_type != "cuda" or dp == 1:
        return None
    return {name: dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) for name in names}


def lines_along(mesh_spec: MeshSpec, sizes: Mapping[str, int], names: Sequence[str]) -> list[list[int]]:
    """Return all lines of ranks along these axes together, each in the order of its coordinates."""
    shape = [sizes[name] for name in mesh_spec.names]
    dims = [mesh_spec.names.index(name) for name in mesh_spec.ordered(names)]
    ranks = torch.arange(math.prod(shape)).view(shape).movedim(dims, list(range(-len(dims), 0)))
    return ranks.reshape(-1, math.prod(shape[dim] for dim in dims)).tolist()


def new_groups(
    device_type: str, lines: Sequence[Sequence[int]], name: str, *, is_urgent: bool = False
) -> dist.ProcessGroup:
    """Create a process group for each line of ranks, and return this rank's; every rank must call it.

    Args:
        lines: lines that together have each rank once.
        is_urgent: run the collectives on a high-priority stream of a GPU; see `group_options`.
    """
    description = f"mesh_{name}"
    if device_type == "cuda":  # one call splits NCCL's communicator for all lines
        options = group_options(device_type, 2, name) if is_urgent else None
        more = {} if options is None else {"pg_options": options[name]}
        group = dist.split_group(split_ranks=[list(line) for line in lines], group_desc=description, **more)
    else:
        group, _ = dist.new_subgroups_by_enumeration(lines, group_desc=description)
    assert group is not None
    return group


def _axis(line: DeviceMesh, name: str) -> Axis:
    ranks = tuple(line.mesh.tolist())
    return Axis(name, len(ranks), line.get_local_rank(), ranks, line.get_group(), spans=(name,))


def _axis_set(
    mesh_spec: MeshSpec, sizes: Mapping[str, int], known: Mapping[str, Axis], rank: int, device_type: str
) -> AxisSet:
    """Create the axes of a mesh that are not known yet, and its combinations of axes."""
    replicas = set(mesh_spec.with_role("replicas"))

    def axis_over(*names: str) -> Axis:
        lines = lines_along(mesh_spec, sizes, names)
        group = new_groups(device_type, lines, "_".join(names), is_urgent=replicas.issuperset(names))
        return _axis_of(lines, rank, "_".join(names), names, group)

    axes = {}
    for name in mesh_spec.names:
        axes[name] = known[name] if name in known else axis_over(name)
        line = next(line for line in lines_along(mesh_spec, sizes, (name,)) if rank in line)
        assert axes[name].ranks == tuple(line), f"{name} has other ranks in {mesh_spec.name}"
    large = [tuple(name for name in names if sizes[name] > 1) for names in mesh_spec.combinations()]
    combined = {names: axis_over(*names) for names in dict.fromkeys(large) if len(names) > 1}
    return AxisSet(mesh_spec, axes, combined)


def _divided(
    found: AxisSet, sizes: Mapping[str, int], shard_degree: int, rank: int, device_type: str
) -> AxisSet:
    """Divide the axis of replicas into groups of `shard_degree` neighbours that ZeRO shards over."""
    whole = found.with_role("replicas")
    if shard_degree == whole.size:
        return found
    parts = []
    lines = lines_along(found.mesh_spec, sizes, whole.spans)
    groups = [line[i : i + shard_degree] for line in lines for i in range(0, whole.size, shard_degree)]
    across = [line[i::shard_degree] for line in lines for i in range(shard_degree)]
    for suffix, part in ((REPLICATE, across), (SHARD, groups)):
        group = new_groups(device_type, part, whole.name + suffix, is_urgent=True)
        parts.append(_axis_of(part, rank, whole.name + suffix, whole.spans, group))
    divided = replace(whole, replicate=parts[0], sharded=parts[1])
    return replace(
        found,
        axes={name: divided if axis is whole else axis for name, axis in found.axes.items()},
        combined={names: divided if axis is whole else axis for names, axis in found.combined.items()},
    )


def _axis_of(
    lines: Sequence[Sequence[int]], rank: int, name: str, spans: tuple[str, ...], group: dist.ProcessGroup
) -> Axis:
    line = next(line for line in lines if rank in line)
    return Axis(name, len(line), line.index(rank), tuple(line), group, spans=spans)
