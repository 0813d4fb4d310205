"""Activation offload in pipelines, with tensor parallelism, sequence parallelism and ZeRO: the same bits.

The layout table has it too, with one rank as the reference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.models import NUM_ITERATIONS, config_of, run_in

ROWS = ("tp2pp2+sp", "pp2zbv+selective", "dp2+zero3")
SLOW = (
    *("pp2gpipe", "pp2v2+full", "pp4zb+full", "pp2+uneven", "dp2+zero2+gather"),
    "tp2pp2dp2+sp+zero1+gather+full",
)


@pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_bitwise_the_run_without(name: str, corpus: str) -> None:
    config = config_of("gpt-tiny", "fp32", corpus)
    most = 1 if "pp" in name else 2
    offloaded = replace(config, recompute=replace(config.recompute, cpu_offload_activations=most))
    before, after = (run_in(name, each, NUM_ITERATIONS) for each in (config, offloaded))
    assert after.losses == before.losses
    assert all(after.weights[key].equal(before.weights[key]) for key in before.weights)
