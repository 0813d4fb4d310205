"""Published mistakes of other frameworks, as models and batches of ours: megalite trains the same run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from megalite import (
    ColumnParallelLinear,
    Cut,
    ParameterSpec,
    Providers,
    RowParallelLinear,
    SequentialStage,
    new_parameter,
)
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout
from tests.live_ranks import record_run
from tests.power.catalogue import CONTROL
from tests.power.measure import GLOBAL_BATCH_SIZE, config_of, measure


class Scaled(nn.Module):
    """Scales each of its hidden channels by a parameter that is cut like the channels."""

    def __init__(self, stage: SequentialStage) -> None:
        super().__init__()
        h, ffn, context = stage.config.hidden_size, stage.config.ffn_size, stage.context
        self.up, self.down = ColumnParallelLinear(h, ffn, context), RowParallelLinear(ffn, h, context)
        self.scale = new_parameter(ParameterSpec((ffn,), Cut("tp", 0), mean=1.0), context)

    def forward(self, x: Tensor, microbatch: Any) -> Tensor:
        return x + self.down(self.up(x) * self.scale)


class ScaledStage(SequentialStage):
    """A pipeline stage of such layers."""

    def build_layer(self, number: int) -> nn.Module:
        return Scaled(self)


@pytest.mark.parametrize("name", ["tp2", "tp2+sp"])
def test_every_slice_of_a_cut_vector_counts_in_the_norm(name: str) -> None:
    """An attention sink per head was counted on the first tensor-parallel rank only."""
    runs = []
    for layout in (Layout(), Layout.parse(name)):
        config = layout.apply(config_of("gpt"), GLOBAL_BATCH_SIZE)
        runs.append(record_run(config, 1, layout.world_size, Providers(ScaledStage)))
    reference, run = runs
    assert compare(run, reference).excesses(TOLERANCES["fp64"]) == []


def test_replicas_with_unequal_numbers_of_tokens_train_the_same_run() -> None:
    """A loss was divided by the number of tokens of its own rank."""
    packed = replace(CONTROL, model="packed", layout="dp2")
    assert [finding.differences for finding in measure([packed], only_own_layout=True)] == [[]]
