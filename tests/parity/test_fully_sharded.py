"""Rows of the layout table in which data-parallel ranks share out weights, gradients and state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import RecomputeConfig
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from tests.parity import models
from tests.parity import test_layout_table as table
from tests.parity import test_precision as precision

LAYOUTS = ("dp2+zero3", "dp4+zero3", "tp2dp2+zero3", "tp2dp2+sp+zero3", "dp2mbs1+zero3")
RECOMPUTE = {
    "two layers": RecomputeConfig(recompute_granularity="full", recompute_num_layers=2),
    "parts": RecomputeConfig("selective", recompute_modules=("core_attn", "mlp_act", "layernorm")),
}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(dtype, name, marks=() if (dtype, name) == ("fp64", "tp2dp2+zero3") else pytest.mark.slow)
        for dtype in ("fp64", "fp32")
        for name in LAYOUTS
        if (dtype, name) != ("fp64", "dp4+zero3")  # the table's core has it
    ],
)
def test_same_run(dtype: str, name: str, corpus: str) -> None:
    table.test_same_run("gpt-tiny", dtype, name, corpus)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-tiny", "dp4+zero3"),
        *(
            pytest.param(model, name, marks=pytest.mark.slow)
            for model in ("bloom-tiny", "llama-tiny")
            for name in LAYOUTS
            if (model, name) != ("llama-tiny", "dp4+zero3")
        ),
    ],
)
def test_same_run_of_other_models(model: str, name: str, corpus: str) -> None:
    table.test_same_run(model, "fp64", name, corpus)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("two layers", "tp2dp2+sp+zero3"),
        *(
            pytest.param(kind, name, marks=pytest.mark.slow)
            for kind, name in (("two layers", "dp2+zero3"), ("parts", "tp2dp2+sp+zero3"))
        ),
    ],
)
def test_recomputed(kind: str, name: str, corpus: str) -> None:
    """A layer that is computed again is so with its weights gathered once more."""
    config = replace(models.config_of("gpt-tiny", "fp64", corpus), recompute=RECOMPUTE[kind])
    run = models.run_in(name, config, models.NUM_ITERATIONS)
    reference = models.reference("gpt-tiny", "fp64", corpus)
    assert not compare(run, reference).excesses(TOLERANCES["fp64"])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("dp2+zero3", "bf16"),
        pytest.param("tp2dp2+sp+zero3", "bf16", marks=pytest.mark.slow),
        pytest.param("dp2+zero3", "fp16", marks=pytest.mark.slow),
    ],
)
def test_in_16_bits(name: str, dtype: str, corpus: str) -> None:
    precision.check_layout(name, dtype, corpus)
