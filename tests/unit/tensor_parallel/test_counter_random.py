"""Dropout of tokens depends on their samples and positions, however ranks hold them."""

from __future__ import annotations

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.data.microbatch import AssignedSamples
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.parameter_spec import LayerContext

SAMPLES = torch.tensor([3, 2**40])
RUNS = ((range(2, 5), range(9, 12)), (range(1, 7),))
OWN = torch.tensor([[2, 3, 4, 9, 10, 11], [1, 2, 3, 4, 5, 6]]).t()  # [s, b]


def dropout_of(topology: Topology) -> Dropout:
    context = LayerContext(topology, torch.float64, seed=7, sequence_parallel=topology.tp.size > 1)
    return Dropout(0.4, context, "layers.1.mlp.output")


@pytest.mark.parametrize("tp", [1, 3])
def test_tokens_of_assigned_documents_have_the_masks_of_their_positions(tp: int) -> None:
    """Also with a sum in the same kernel, and if tensor-parallel ranks hold slices of the tokens."""
    x, residual = torch.randn(2, 12, 2, 6, dtype=torch.float64).unbind()
    bias, columns = torch.randn(6, dtype=torch.float64), torch.arange(2)
    with Topology.fake(ParallelConfig().mesh, 1, rank=0) as topology:
        dropped = dropout_of(topology)(x, SAMPLES)[OWN, columns]
        added = dropout_of(topology).add_to(residual, x, bias, SAMPLES)[OWN, columns]
    for rank in range(tp):
        rows = OWN.chunk(tp)[rank]
        mesh = ParallelConfig(tensor_model_parallel_size=tp).mesh
        with Topology.fake(mesh, tp, rank=rank) as topology:
            module, samples = dropout_of(topology), AssignedSamples(SAMPLES, RUNS)
            found = module(x[rows, columns], samples)
            total = module.add_to(residual[rows, columns], x[rows, columns], bias, samples)
        own = slice(rank * len(rows), (rank + 1) * len(rows))
        assert torch.equal(found, dropped[own])
        torch.testing.assert_close(total, added[own], rtol=1e-14, atol=1e-14)
