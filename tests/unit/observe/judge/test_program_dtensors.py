"""Which elements of a DTensor a rank holds."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from megalite.config import ParallelConfig
from megalite.distributed.local_ranks import run_ranks
from megalite.observe.judge.program import piece_of, positions_in


def _distributed_positions(topology, rows):
    """Return, for DTensors whose elements are their own positions, what pieces say of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pieces = []
    cuts = [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(1))]
    if rows % 4 == 0:  # two matrices in one, each cut
        cuts.append((Replicate(), _StridedShard(0, split_factor=2)))
    for placements in cuts:
        pieces.append(piece_of(distribute_tensor(positions_in((rows, 3)), mesh, placements)))
    layer = torch.nn.Linear(3, rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(positions_in((rows, 3)))
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])  # which cuts what tensor parallelism has left
    return [*pieces, piece_of(layer.weight)]


@pytest.mark.parametrize("rows", [8, 5])  # 5 rows leave ranks without any
def test_positions_are_those_of_the_elements(rows):
    for pieces in run_ranks(_distributed_positions, ParallelConfig().mesh, 4, rows):
        for piece in pieces:
            assert piece.shape == (rows, 3)
            assert torch.equal(piece.tensor.long(), piece.positions)


def _summed(topology):
    mesh = init_device_mesh("cpu", (2,))
    rank = torch.full((3,), 1.0 + topology.rank)
    return piece_of(torch.distributed.tensor.DTensor.from_local(rank, mesh, [Partial()])).tensor


def test_partial_sums_are_reduced_first():
    for tensor in run_ranks(_summed, ParallelConfig().mesh, 2):
        assert torch.equal(tensor, torch.full((3,), 3.0))
