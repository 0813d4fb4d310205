"""Find what a rank holds of a DTensor, for the adapters of programs that keep their parameters in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from megalite.observe.judge.program import Piece, positions_in


def piece_of(tensor: Tensor) -> Piece:
    """Return this rank's piece of a tensor, which is the full tensor if it is no DTensor.

    All ranks of its mesh call this, because partial sums are reduced first. Otherwise the piece shares the
    tensor's memory.
    """
    if not isinstance(tensor, DTensor):
        return Piece.whole(tensor.detach())
    with torch.no_grad():
        if any(placement.is_partial() for placement in tensor.placements):
            settled = [Replicate() if each.is_partial() else each for each in tensor.placements]
            tensor = tensor.redistribute(placements=settled)
        local = tensor.to_local().detach()
    positions = _positions(tensor)
    if positions.numel() != local.numel():
        raise RuntimeError(
            f"a rank holds {local.numel()} elements where {tensor.placements} name {positions.numel()}"
        )
    return Piece(local, tuple(tensor.shape), positions.view(local.shape))


def _positions(tensor: DTensor) -> Tensor:
    """Return the indices of a rank's elements in the flat full tensor, computed without DTensor's own code.

    A shard that is strided is cut after the shards of later mesh dims: FSDP cuts what tensor parallelism has
    left of a dim, although its mesh dim comes first. Without such shards, it cuts each of equal parts of the
    dim, such as the gate and the up projection in one matrix, and joins the slices.
    """
    mesh, found = tensor.device_mesh, positions_in(tensor.shape)
    coordinates = mesh.get_coordinate()
    if coordinates is None:  # a rank outside of the mesh holds nothing
        return found.flatten()[:0]
    shards: list[tuple[int, Any]] = [
        (dim, each) for dim, each in enumerate(tensor.placements) if not each.is_replicate()
    ]
    plain = [(dim, each) for dim, each in shards if type(each) is Shard]
    strided = [(dim, each) for dim, each in reversed(shards) if type(each) is not Shard]
    for mesh_dim, shard in (*plain, *strided):
        is_after = any(dim > mesh_dim and each.dim == shard.dim for dim, each in plain)
        num_parts = 1 if is_after else getattr(shard, "split_factor", 1)
        parts = found.chunk(num_parts, shard.dim)
        place = (shard.dim, coordinates[mesh_dim], mesh.size(mesh_dim))
        found = torch.cat([_chunk(part, *place) for part in parts], shard.dim)
    return found


def _chunk(tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    """Return one chunk of a dim; the last ones are shorter or empty if the size is not divisible."""
    chunks = tensor.chunk(count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)
