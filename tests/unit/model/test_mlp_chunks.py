"""The MLP in chunks of the sequence: the same numbers, and never its whole wide activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config import RecomputeConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch, WithTerms
from megalite.distributed.topology import Topology
from megalite.observe.record_unit import record_unit
from megalite.observe.unit_record import UnitKey
from tests.live_bytes import LargestTensor
from tests.stages import build_stage

B, S, FFN = 2, 50, 2048
MODEL = replace(
    PRESETS["llama-tiny"], ffn_hidden_size=FFN, vocab_size=40, seq_length=S, params_dtype="fp64", num_layers=2
)
SELECTIVE = {"recompute_granularity": "selective"}


def run(topology: Topology, recompute: RecomputeConfig) -> tuple[Tensor, dict[str, Tensor], int]:
    stage = build_stage(MODEL, topology, range(2), seed=3, recompute=recompute)
    ids = torch.randint(40, (B, S), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        output = stage(Microbatch(ids, ids.flip(1), torch.arange(B)), None)
        loss = sum(term.value(1.0) for term in WithTerms.of_last(output).terms.values())
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in stage.named_parameters()}, largest.num_elements


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(mlp_chunks=2),
        RecomputeConfig(mlp_chunks=7),
        RecomputeConfig(mlp_chunks=S + 3),
        RecomputeConfig(mlp_chunks=3, recompute_modules=("core_attn", "layernorm"), **SELECTIVE),
        RecomputeConfig(mlp_chunks=3, recompute_granularity="full"),
    ],
    ids=["2", "7", "more than positions", "with norms", "in whole layers"],
)
def test_any_number_of_chunks_gives_the_same(recompute: RecomputeConfig, one_rank: Topology) -> None:
    (loss, grads, _), (same, others, _) = (run(one_rank, each) for each in (RecomputeConfig(), recompute))
    torch.testing.assert_close(same, loss, rtol=1e-13, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=1e-11, atol=1e-13)


def test_the_whole_activations_never_exist(one_rank: Topology) -> None:
    assert run(one_rank, RecomputeConfig())[2] == B * S * 2 * FFN
    weight = MODEL.hidden_size * 2 * FFN
    num_chunks = 10
    assert B * S * 2 * FFN > weight > B * S * 2 * FFN // num_chunks
    assert run(one_rank, RecomputeConfig(mlp_chunks=num_chunks))[2] == weight


def test_a_plan_knows_the_memory_of_a_chunk() -> None:
    wide = 4 * 2 * FFN * S * B
    key = UnitKey(
        replace(MODEL, params_dtype="fp32"),
        0,
        tp=1,
        positions=S,
        micro_batch_size=B,
        sequence_parallel=False,
        has_documents=False,
        splits_backward=False,
    )
    whole, parts = (record_unit(replace(key, mlp_chunks=count)) for count in (1, 10))
    assert whole.saved_bytes - parts.saved_bytes > wide
    assert parts.workspace_bytes < wide / 2 < whole.workspace_bytes
