"""Training in 16 bits: one curve in any layout, and the curve of fp32."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megalite.verify.compare_runs import TOLERANCES, compare
from megalite.verify.layouts import Layout
from megalite.verify.record_run import RunRecord
from tests.live_ranks import record_run
from tests.parity import models

CURVE, IN_LAYOUTS = 30, 20
"""Iterations that the loss falls over on one rank, and of the runs in other layouts."""


@functools.cache
def _run(name: str, dtype: str, corpus: str, num_iterations: int = IN_LAYOUTS) -> RunRecord:
    layout = Layout.parse(name)
    config = models.config_of("gpt-tiny", dtype, corpus)
    config = replace(
        config,
        training=replace(config.training, train_iters=num_iterations),
        # A scale with which no iteration is skipped, and a rate at which rounding does not grow.
        optimizer=replace(config.optimizer, initial_loss_scale=2.0**12, lr=1e-3),
    )
    config = layout.apply(config, models.GLOBAL_BATCH_SIZE)
    return record_run(config, num_iterations, layout.world_size)


@pytest.mark.parametrize(
    "name",
    [
        "dp2+zero1",
        "tp2+sp",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tp2", "pp2", "dp4+zero2", "tp2pp2dp2+sp+zero1+gather", "pp4zb", "pp2v2")
        ),
    ],
)
def test_bf16_in_any_layout(name: str, corpus: str) -> None:
    comparison = compare(_run(name, "bf16", corpus), _run("mbs2", "bf16", corpus))
    assert not comparison.excesses(TOLERANCES["bf16"])


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_the_curve_is_that_of_fp32(dtype: str, corpus: str) -> None:
    run, reference = (_run("mbs2", each, corpus, CURVE) for each in (dtype, "fp32"))
    assert reference.losses[-1] < 0.9 * reference.losses[0]  # it has come some way
    assert run.losses == pytest.approx(reference.losses, rel=1e-2)


@pytest.mark.slow
def test_fp16_in_another_layout(corpus: str) -> None:
    comparison = compare(_run("tp2dp2+zero1", "fp16", corpus), _run("mbs2", "fp16", corpus))
    assert not comparison.excesses(TOLERANCES["fp16"])
