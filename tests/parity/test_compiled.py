"""Rows of the layout table with compiled layers; the reference is the table's, one rank and no compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import RecomputeConfig
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.record_run import record_run
from tests.parity.models import (
    BESIDE,
    COHERE,
    GLOBAL_BATCH_SIZE,
    LATENT,
    MIXTRAL,
    NUM_ITERATIONS,
    WIDE_EXPERTS,
    WINDOWED,
    config_of,
    reference,
)
from tests.parity.test_activations import RECOMPUTE

NOTHING = RecomputeConfig()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "name", "recompute"),
    [
        ("gpt-tiny", "fp64", "mbs2", NOTHING),
        ("gpt-tiny", "fp32", "mbs2", NOTHING),
        ("gpt-tiny", "fp64", "dp2+zero2", NOTHING),
        ("gpt-tiny", "fp64", "tp2", RECOMPUTE["mlp"]),
        ("gpt-tiny", "fp64", "pp4zb", RECOMPUTE["core"]),
        ("gpt-tiny", "fp64", "dp2+zero3", RECOMPUTE["full"]),
        ("llama-tiny", "fp64", "pp2dp2+zero1", NOTHING),
        ("llama-tiny", "fp64", "tp4+sp", NOTHING),
        ("llama-tiny", "fp64", "cp2+a2a", NOTHING),
        ("gpt-tiny", "fp64", "tp2cp2+sp", RECOMPUTE["core"]),
        ("llama-tiny", "fp32", "dp2+zero1+gather", RECOMPUTE["parts"]),
        ("bloom-tiny", "fp64", "tp2pp2zbdp2+sp", RECOMPUTE["parts"]),
        (LATENT, "fp64", "pp2", RECOMPUTE["core"]),
        (LATENT, "fp64", "tp2+sp", RECOMPUTE["parts"]),
        (WINDOWED, "fp64", "pp2dp2+zero3", RECOMPUTE["core"]),
        (WIDE_EXPERTS, "fp64", "mbs2", NOTHING),
        (WIDE_EXPERTS, "fp64", "tp2dp2ep4etp1+sp+zero1", RECOMPUTE["mlp"]),
        (MIXTRAL, "fp64", "dp2ep2+zero3", NOTHING),
        (MIXTRAL, "fp64", "dp2ep2+allgather", NOTHING),
        (MIXTRAL, "fp64", "pp2dpvdp2ep2", NOTHING),
        (BESIDE, "fp64", "pp2", RECOMPUTE["mlp"]),
        (COHERE, "fp64", "tp2+sp", RECOMPUTE["parts"]),
    ],
)
def test_same_run(model: str, dtype: str, name: str, recompute: RecomputeConfig, corpus: str) -> None:
    layout = Layout.parse(name)
    config = config_of(model, dtype, corpus)
    config = replace(config, training=replace(config.training, compile=True), recompute=recompute)
    config = layout.apply(config, GLOBAL_BATCH_SIZE)
    run = record_run(config, NUM_ITERATIONS, layout.world_size)
    assert not compare(run, reference(model, dtype, corpus)).excesses(TOLERANCES[dtype])
