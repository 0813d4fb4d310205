"""Activation offload in pipelines, with tensor parallelism, sequence parallelism and ZeRO: the same bits.

The layout table has it too, with one rank as the reference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.verify.layouts import Layout
from tests.live_ranks import record_run
from tests.parity.models import GLOBAL_BATCH_SIZE, config_of

NUM_ITERATIONS = 3
ROWS = ("tp2pp2+sp", "pp2v2+full", "pp2zbv+selective", "dp2+zero3", "dp2+zero2+gather")
SLOW = ("pp2gpipe", "pp4zb+full", "pp2+uneven", "tp2pp2dp2+sp+zero1+gather+full")


@pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_bitwise_the_run_without(name: str, corpus: str) -> None:
    layout = Layout.parse(name)
    config = layout.apply(config_of("gpt-tiny", "fp32", corpus), GLOBAL_BATCH_SIZE)
    most = 2 if layout.size("pp") == 1 else 1
    offloaded = replace(config, recompute=replace(config.recompute, cpu_offload_activations=most))
    before, after = (record_run(each, NUM_ITERATIONS, layout.world_size) for each in (config, offloaded))
    assert after.losses == before.losses
    assert all(after.weights[key].equal(before.weights[key]) for key in before.weights)
