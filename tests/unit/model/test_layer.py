"""A layer whose second norm computes the sum before it, as on a GPU: the numbers of two operators."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megalite.config import ModelConfig, RecomputeConfig
from megalite.data.microbatch import Microbatch
from megalite.distributed.topology import Topology
from megalite.kernels.norm import _rms_norm_of_sum, bias_dropout_add_norm
from megalite.model.layer import TransformerLayer
from megalite.model.norm import LayerNorm, RMSNorm
from megalite.model.stage import Stage
from tests.stages import build_stage

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=64,
    params_dtype="fp64",
    hidden_dropout=0.1,
    attention_dropout=0.0,
)
LLAMA = replace(MODEL, normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0)
SELECTIVE = partial(RecomputeConfig, recompute_granularity="selective")
CASES = {
    "gpt": (MODEL, RecomputeConfig()),
    "llama": (LLAMA, RecomputeConfig()),
    "sandwich": (replace(MODEL, norm_position="sandwich", zero_centered_norms=True), RecomputeConfig()),
    "full": (MODEL, RecomputeConfig(recompute_granularity="full")),
    "layernorm": (MODEL, SELECTIVE(recompute_modules=("layernorm",))),
    "mlp": (MODEL, SELECTIVE(recompute_modules=("mlp",))),
}


def _loss_and_gradients(stage: Stage) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    loss = stage(Microbatch(ids[:, :-1], ids[:, 1:], torch.tensor([3, 2**40])), None)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_sum_and_norm_in_one_operator(case: str, one_rank: Topology) -> None:
    model, recompute = CASES[case]
    expected = _loss_and_gradients(build_stage(model, one_rank, range(2), seed=1, recompute=recompute))
    stage = build_stage(model, one_rank, range(2), seed=1, recompute=recompute)
    calls = []
    for layer in stage.layers.values():
        assert isinstance(layer, TransformerLayer)
        norm = layer.mlp_norm
        assert isinstance(norm, (LayerNorm, RMSNorm))
        fused = bias_dropout_add_norm if isinstance(norm, LayerNorm) else _rms_norm_of_sum

        def counted(*operands: object, fused=fused) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
            calls.append(fused)
            return fused(*operands)

        norm.normalize_sum = counted
    found = _loss_and_gradients(stage)
    # A norm that is recomputed keeps the sum, which an operator of its own computes.
    assert len(calls) == {"layernorm": 0, "mlp": 0, "full": 4}.get(case, 2)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
