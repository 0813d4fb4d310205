"""Activation offload on a GPU: the same bits, and the planned bytes leave its memory."""

import pytest
import torch

from megalite.config import ParallelConfig, RecomputeConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.model.activation_offload import ActivationOffload
from tests.stages import build_stage
from tests.unit.model.test_activation_offload import GPT, NUM_LAYERS, batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_same_bits_with_fewer_bytes() -> None:
    held, found = [], []
    with Topology.start(ParallelConfig().mesh, Launch(0, 1, 0, 1)) as topology:
        offload = ActivationOffload(topology.device)
        kinds = [(None, RecomputeConfig()), (offload, RecomputeConfig(cpu_offload_activations=2))]
        for to, recompute in kinds:
            stage = build_stage(GPT, topology, range(NUM_LAYERS), seed=3, recompute=recompute, offload=to)
            microbatches = [
                Microbatch(each.tokens.cuda(), each.labels.cuda(), each.sample_numbers.cuda())
                for each in map(batch, range(2))
            ]
            stage(microbatches[0], None).backward()  # tables and gradients that are made once
            before = torch.cuda.memory_allocated()
            losses = [stage(each, None) for each in microbatches]
            held.append(torch.cuda.memory_allocated() - before)
            for loss in reversed(losses):
                loss.backward()
            found.append({name: p.grad for name, p in stage.named_parameters()})
        torch.cuda.synchronize()
    assert all(found[0][name].equal(found[1][name]) for name in found[0])
    assert held[0] - held[1] == pytest.approx(offload.buffers.num_bytes, rel=0.02)
