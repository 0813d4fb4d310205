"""Training in 16 bits: one curve in any layout, and the curve of fp32."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megalite.config import Config
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.record_run import RunRecord
from tests.parity import models

CURVE, IN_LAYOUTS = 30, 10
"""Iterations that the loss falls over on one rank, and of the runs in other layouts."""


def _config(dtype: str, corpus: str) -> Config:
    config = models.config_of("gpt-tiny", dtype, corpus)
    return replace(
        config,
        training=replace(config.training, train_iters=CURVE),
        # A scale with which no iteration is skipped, and a rate at which rounding does not grow.
        optimizer=replace(config.optimizer, initial_loss_scale=2.0**12, lr=1e-3),
    )


@functools.cache
def _reference(dtype: str, corpus: str) -> RunRecord:
    return models.run_in("mbs2", _config(dtype, corpus), IN_LAYOUTS)


def check_layout(name: str, dtype: str, corpus: str) -> None:
    """Compare a run in a layout with one rank; both add gradients of as many samples."""
    run = models.run_in(name, _config(dtype, corpus), IN_LAYOUTS)
    assert not compare(run, _reference(dtype, corpus)).excesses(TOLERANCES[dtype])


@pytest.mark.parametrize(
    "name",
    [
        "dp2+zero1",
        "tp2mbs2+sp",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tp2mbs2", "pp2", "dp4+zero2", "tp2pp2dp2+sp+zero1+gather", "pp4zb", "pp2v2")
        ),
    ],
)
def test_bf16_in_any_layout(name: str, corpus: str) -> None:
    check_layout(name, "bf16", corpus)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_the_curve_is_that_of_fp32(dtype: str, corpus: str) -> None:
    run, reference = (models.run_alone(_config(each, corpus), CURVE) for each in (dtype, "fp32"))
    assert reference.losses[-1] < 0.9 * reference.losses[0]  # it has come some way
    assert run.losses == pytest.approx(reference.losses, rel=1e-2)


@pytest.mark.slow
def test_fp16_in_another_layout(corpus: str) -> None:
    check_layout("tp2dp2+zero1", "fp16", corpus)
