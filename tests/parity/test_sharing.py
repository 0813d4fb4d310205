"""Rows of the layout table in which data-parallel ranks share out state and gradients."""

from __future__ import annotations

import pytest

from tests.parity import models
from tests.parity import test_layout_table as table

LAYOUTS = ("dp2+zero1", "dp4+zero1+gather", "dp2+zero2", "dp4+zero2+gather", "pp2dp2+zero2")
MORE_LAYOUTS = ("tp2dp2+zero1", "tp2dp2+zero2", "pp2dp2+zero1+gather", "dp2mbs1+zero2", "tp2pp2dp2+zero2")
GROUPS = ("pp2dp4shard2+zero2", "tp2dp4shard2+sp+zero3", "tp2dp4shard2+zero1+gather")
CORE = [("fp64", "dp4+zero2+gather"), ("fp64", "pp2dp2+zero2"), ("fp64", GROUPS[0]), ("fp64", GROUPS[1])]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(dtype, name, marks=() if (dtype, name) in CORE else pytest.mark.slow)
        for dtype in ("fp64", "fp32")
        for name in (
            *LAYOUTS,
            *MORE_LAYOUTS,
            *GROUPS,
            *(("tp2pp2dp2+sp+zero1+gather",) if dtype == "fp32" else ()),
        )
    ],
)
def test_same_run(dtype: str, name: str, corpus: str) -> None:
    table.test_same_run("gpt-tiny", dtype, name, corpus)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", ["bloom-tiny", "llama-tiny"])
def test_same_run_of_other_models(model: str, name: str, corpus: str) -> None:
    table.test_same_run(model, "fp64", name, corpus)


@pytest.mark.parametrize(
    "name",
    [
        "dp2",
        pytest.param("dp4", marks=pytest.mark.slow),
        pytest.param("tp2pp2dp2+sp", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_zero_1_is_bitwise_the_run_without(dtype: str, name: str, corpus: str) -> None:
    config = models.config_of("gpt-tiny", dtype, corpus)
    whole, *others = (
        models.run_in(name + more, config, models.NUM_ITERATIONS) for more in ("", "+zero1", "+zero1+gather")
    )
    for shared in others:
        assert (shared.losses, shared.grad_norms) == (whole.losses, whole.grad_norms)
        for part in ("gradients", "weights"):
            expected, found = getattr(whole, part), getattr(shared, part)
            assert all(found[key].equal(expected[key]) for key in expected)
