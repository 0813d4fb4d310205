"""The types of right models fit on any rank, and those of some errors of the catalogue do not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from spmd_types import I, SpmdTypeError, V
from torch import Tensor, nn

from megalite import ColumnParallelLinear, RowParallelLinear, SequentialStage
from megalite.distributed.collectives import copy_to_tensor_parallel
from tests.power.measure import BY_NAME
from tests.power.spmd_judge import judged, loss_types, type_error

LAYOUTS = ("tp2", "tp4", "dp2", "tp2dp2", "tp2+sp", "tp2+sp+full", "tp4+sp+overlap", "tp4dp128+sp")

FOUND = [
    "gradients of LayerNorm's weight are not summed",
    "the gradient of shared keys and values is not summed",
    "gradients of BERT's heads are not summed",
    "word embeddings are not summed",
    "gradients of LayerNorm's bias are not summed",
    "gradients of RMSNorm are not summed",
    "gradients of LayerNorm after the embedding are not summed",
    "gradients of post-norm are not summed",
    "gradients of row layers' biases are not summed",
    "gradients of the position table are not summed",
    "gradients of the token types are not summed",
    "the cross-entropy gets the logits of all ranks as its slice",
    "gradients of the norms of queries and keys are not summed",
    "gradients of a norm over all heads are not summed",
    "a norm over all heads uses the rank's heads alone",
    "the gradient of a norm over all heads is that of the rank's heads",
    "gradients of an output's norm are not summed",
    "the gradient of the weight that joins two states is not summed",
]
"""Errors of the catalogue that change a type."""


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *itertools.product(["gpt", "llama", "bloom", "bert", "qwen", "neox", "nemotron-h", "later"], LAYOUTS),
        *((model, "tp2+sp") for model in ("gemma4", "gemma4 e2b")),
        # With four ranks, the keys of two are the same, and the norm over all heads has no rule for that.
        *(("olmo", layout) for layout in LAYOUTS if "tp4" not in layout),
    ],
)
def test_the_loss_is_full_over_tp_and_varies_over_replicas(model: str, layout: str) -> None:
    types = loss_types(layout, model)
    assert types == {name: {"tp": I, "dp": V}[name] for name in types}
    assert types


@pytest.mark.parametrize("name", FOUND[:3])
def test_an_error_in_a_placement_changes_a_type(name: str) -> None:
    assert "Invariant type on axis" in type_error(BY_NAME[name])


@pytest.mark.slow
def test_types_find_these_errors_and_no_others() -> None:
    assert {error.name for error in judged() if type_error(error)} == set(FOUND)


class Gated(nn.Module):
    """Scales cut hidden channels by a replicated parameter."""

    def __init__(self, stage: SequentialStage) -> None:
        super().__init__()
        h, ffn, context = stage.config.hidden_size, stage.config.ffn_size, stage.context
        self.tp = context.tp
        self.up, self.down = ColumnParallelLinear(h, ffn, context), RowParallelLinear(ffn, h, context)
        self.gate = nn.Parameter(torch.ones(1, dtype=context.dtype))

    def forward(self, x: Tensor, microbatch: Any) -> Tensor:
        return x + self.down(self.up(x) * copy_to_tensor_parallel(self.gate, self.tp))


class Uncopied(Gated):
    """Forgets that the gate's gradient is partial on each rank."""

    def forward(self, x: Tensor, microbatch: Any) -> Tensor:
        return x + self.down(self.up(x) * self.gate)


@pytest.mark.parametrize("layer", [Gated, Uncopied])
def test_a_replicated_parameter_on_cut_channels_needs_a_sum_in_backward(layer: type[Gated]) -> None:
    class GatedStage(SequentialStage):
        def build_layer(self, number: int) -> nn.Module:
            return layer(self)

    if layer is Gated:
        assert loss_types("tp2", build_stage=GatedStage) == {"tp": I}
    else:
        with pytest.raises(SpmdTypeError, match=r"Invariant type on axis .* cannot mix"):
            loss_types("tp2", build_stage=GatedStage)
