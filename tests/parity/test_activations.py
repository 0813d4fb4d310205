"""More rows of the layout table: sequences cut over tp, and activations that backward computes again.

The reference of every row is that of the table: one rank that keeps every activation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import RecomputeConfig
from megalite.verify.compare import TOLERANCES, compare
from megalite.verify.layout import Layout
from megalite.verify.record import record_run
from tests.parity.test_layout_table import GLOBAL_BATCH_SIZE, MODELS, NUM_ITERATIONS, _config, _reference

SEQUENCE_PARALLEL = ("tp2+sp", "tp4+sp", "tp2pp2dp2+sp")
QUICK_SEQUENCE_PARALLEL = [
    ("gpt-tiny", "fp64", "tp2+sp"),
    *((model, "fp64", "tp2pp2dp2+sp") for model in MODELS),
]
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
QUICK = {
    ("full", "dp2+zero1+gather"),
    ("sliced", "tp2"),
    ("parts", "pp2v2"),
    ("parts", "tp2pp2zbdp2+sp"),
    ("loss", "tp2pp2zbdp2+sp"),
    ("loss", "dp2+zero3"),
}


def _slow_unless(is_quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if is_quick else (pytest.mark.slow,)


@pytest.mark.parametrize(
    ("model", "dtype", "name"),
    [
        pytest.param(model, dtype, name, marks=_slow_unless((model, dtype, name) in QUICK_SEQUENCE_PARALLEL))
        for model in MODELS
        for dtype in ("fp64", "fp32")
        for name in SEQUENCE_PARALLEL
    ],
)
def test_sequence_parallel(model: str, dtype: str, name: str, corpus: str) -> None:
    layout = Layout.parse(name)
    config = layout.apply(_config(model, dtype, corpus), GLOBAL_BATCH_SIZE)
    assert config.parallel.sequence_parallel
    run = record_run(config, NUM_ITERATIONS, layout.world_size)
    assert not compare(run, _reference(model, dtype, corpus)).excesses(TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("model", "kind", "name"),
    [
        pytest.param(model, kind, name, marks=_slow_unless(model == "gpt-tiny" and (kind, name) in QUICK))
        for model in MODELS
        for kind in RECOMPUTE
        for name in LAYOUTS
    ],
)
def test_recomputed(model: str, kind: str, name: str, corpus: str) -> None:
    """Within the table's bounds; that layers' are bitwise the layout's own is tested on single stages."""
    layout = Layout.parse(name)
    config = layout.apply(
        replace(_config(model, "fp64", corpus), recompute=RECOMPUTE[kind]), GLOBAL_BATCH_SIZE
    )
    run = record_run(config, NUM_ITERATIONS, layout.world_size)
    assert not compare(run, _reference(model, "fp64", corpus)).excesses(TOLERANCES["fp64"])
