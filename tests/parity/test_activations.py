"""More rows of the layout table: sequences cut over tp, and activations that backward computes again.

The reference of every row is that of the table: one rank that keeps every activation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import RecomputeConfig
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout
from tests.parity.models import MODELS, NUM_ITERATIONS, config_of, reference, run_in

SEQUENCE_PARALLEL = ("tp2+sp", "tp4+sp", "tp2pp2dp2+sp")
RECOMPUTE = {
    "full": RecomputeConfig(recompute_granularity="full"),
    "two": RecomputeConfig(recompute_granularity="full", recompute_num_layers=2),
    "block": RecomputeConfig(recompute_granularity="full", recompute_method="block"),
    "sliced": RecomputeConfig(recompute_granularity="full", distribute_saved_activations=True),
    "core": RecomputeConfig(recompute_granularity="selective"),
    "parts": RecomputeConfig(
        recompute_granularity="selective", recompute_modules=("core_attn", "mlp_act", "layernorm")
    ),
    "mlp": RecomputeConfig(recompute_granularity="selective", recompute_modules=("mlp",)),
    "loss": RecomputeConfig(cross_entropy_chunks=3),
    "mlp in chunks": RecomputeConfig(
        mlp_chunks=3, recompute_granularity="selective", recompute_modules=("layernorm",)
    ),
}
LAYOUTS = (
    "mbs2",
    "tp2",
    "pp2v2",
    "pp4zb",
    "tp2+sp",
    "dp2+zero1+gather",
    "dp2+zero3",
    "tp2pp2zbdp2+sp",
    "tp2pp2dp2+sp+zero1",
)
CORE = {
    ("two", "pp2v2"),
    ("block", "tp2+sp"),
    ("sliced", "tp2"),
    ("parts", "tp2pp2zbdp2+sp"),
    ("mlp", "dp2+zero1+gather"),
    ("loss", "dp2+zero3"),
    ("mlp in chunks", "tp2pp2zbdp2+sp"),
}
"""Each kind but full and core, which the table's core has as +full and +selective."""


def _slow_unless(is_core: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if is_core else (pytest.mark.slow,)


@pytest.mark.slow  # the table's core has each model with sequence parallelism
@pytest.mark.parametrize(
    ("model", "dtype", "name"),
    [
        (model, dtype, name)
        for model in MODELS
        for dtype in ("fp64", "fp32")
        for name in SEQUENCE_PARALLEL
        if (model, dtype, name) != ("gpt-tiny", "fp64", "tp2+sp")
    ],
)
def test_sequence_parallel(model: str, dtype: str, name: str, corpus: str) -> None:
    assert "sp" in Layout.parse(name).switches
    run = run_in(name, config_of(model, dtype, corpus), NUM_ITERATIONS)
    assert not compare(run, reference(model, dtype, corpus)).excesses(TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("model", "kind", "name"),
    [
        pytest.param(model, kind, name, marks=_slow_unless(model == "gpt-tiny" and (kind, name) in CORE))
        for model in MODELS
        for kind in RECOMPUTE
        for name in LAYOUTS
    ],
)
def test_recomputed(model: str, kind: str, name: str, corpus: str) -> None:
    """Within the table's bounds; that layers' are bitwise the layout's own is tested on single stages."""
    config = replace(config_of(model, "fp64", corpus), recompute=RECOMPUTE[kind])
    run = run_in(name, config, NUM_ITERATIONS)
    assert not compare(run, reference(model, "fp64", corpus)).excesses(TOLERANCES["fp64"])
