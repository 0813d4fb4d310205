"""Records of layers, as Megatron-LM with Transformer Engine executes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.other_programs import PROGRAMS, OtherProgram, request_of
from benchmarks.transformer_engine import (
    FUSED_EXPERTS,
    OWN_PASSES,
    PERMUTED_ONCE,
    ROUNDINGS,
    SORTED,
    ExpertHost,
    Rounding,
    mean_holders,
)
from megalite.config.presets import PRESETS
from megalite.observe.unit_record import UnitRecord
from megalite.plan.layer_time import OPERATOR_SECONDS

BRIDGE = PROGRAMS["megatron-bridge"]
DENSE = "--preset llama3-8b --seq-length 8192 --micro-batch-size 2 --global-batch-size 16 --world-size 8"
EXPERTS = (
    "--preset qwen3-30b-a3b --seq-length 4096 --ep 8 --etp 1 --micro-batch-size 4 --global-batch-size 32 "
    "--world-size 8"
)


def layer_of(program: OtherProgram, flags: str) -> UnitRecord:
    _, plan = request_of(program, f"{flags} --bf16 --gpu gb200 --zero-stage 1".split())
    (layer,) = plan.run.units.layers.values()
    return layer


@pytest.mark.parametrize(
    ("recipe", "bytes_of_element"), [("mxfp8", 4), ("tensorwise", 5), ("tensorwise-hopper", 6), ("nvfp4", 5)]
)
def test_each_operand_is_rounded_once(recipe: str, bytes_of_element: float) -> None:
    """A layer's inputs in forward, and gradients of its outputs in backward; 16,384 tokens."""
    plain, narrow = layer_of(BRIDGE, DENSE), layer_of(replace(BRIDGE, rounding=ROUNDINGS[recipe]), DENSE)
    inputs, outputs = 3 * 4096 + 14336, 6144 + 2 * 4096 + 2 * 14336
    for before, after, width in (
        (plain.forward, narrow.forward, inputs),
        (plain.backward, narrow.backward, outputs),
    ):
        assert after.kernel_bytes - before.kernel_bytes == 16384 * width * bytes_of_element
        assert {gemm.element_bytes for gemm in after.gemms} == {ROUNDINGS[recipe].element_bytes}


def test_the_router_keeps_its_precision() -> None:
    narrow = layer_of(replace(BRIDGE, rounding=Rounding(1, 1, 2)), EXPERTS)
    assert sorted({gemm.element_bytes for gemm in narrow.forward.gemms}) == [1, 4]


def test_rows_are_moved_less_often() -> None:
    """131,072 rows of 2,048 and of 768 elements."""
    own, plain = (
        layer_of(replace(BRIDGE, expert_passes=each), EXPERTS) for each in (OWN_PASSES["swiglu"], None)
    )
    assert own.forward.kernel_bytes == plain.forward.kernel_bytes
    rows = 131_072 * 2
    for passes, hidden in ((SORTED, 6), (PERMUTED_ONCE, 2 + 2 * 5.34 / 8)):
        layer = layer_of(replace(BRIDGE, expert_passes=passes), EXPERTS)
        for phase, before, inner in (
            (layer.forward, plain.forward, 3 - 5),
            (layer.backward, plain.backward, 5 - 14),
        ):
            expected = rows * (2048 * (hidden - 6) + 768 * inner)
            assert phase.kernel_bytes - before.kernel_bytes == pytest.approx(expected, rel=0.01)
    fused = layer_of(replace(BRIDGE, expert_passes=FUSED_EXPERTS), EXPERTS)
    assert layer.forward.kernel_bytes - fused.forward.kernel_bytes == rows * 768 * 3
    dense = layer_of(replace(BRIDGE, expert_passes=SORTED), DENSE)
    assert dense.forward.kernel_bytes == layer_of(BRIDGE, DENSE).forward.kernel_bytes


def test_own_passes_are_the_slope_of_the_record() -> None:
    """Half of the experts of a token have half of its rows."""
    whole, half = (
        layer_of(replace(BRIDGE, expert_passes=None), f"{EXPERTS} --moe-router-topk {topk}")
        for topk in (8, 4)
    )
    own, rows = OWN_PASSES["swiglu"], 65_536 * 2
    for inner, after, before in (
        (own.forward, whole.forward, half.forward),
        (own.backward, whole.backward, half.backward),
    ):
        assert after.kernel_bytes - before.kernel_bytes == pytest.approx(
            rows * (2048 * own.hidden + 768 * inner), rel=0.03
        )


def test_a_host_slower_than_the_gpu_is_waited_for() -> None:
    flags = f"{EXPERTS} --bf16 --gpu gb200 --zero-stage 1".split()
    slow, graph = (
        request_of(replace(BRIDGE, expert_host=host), flags)[1]
        for host in (ExpertHost(40e-3, 1e-3), ExpertHost(0.0, 0.0))
    )
    (layer,) = slow.run.units.layers.values()
    host = (layer.forward.num_operators + layer.backward.num_operators) * OPERATOR_SECONDS
    assert host == pytest.approx(56e-3, rel=1e-3)  # 16 experts on a rank
    assert slow.time.work.launch > 0.0 == graph.time.work.launch
    assert slow.time.seconds == pytest.approx(48 * 56e-3, rel=0.1)


def test_holders_of_uniform_choices() -> None:
    assert mean_holders(PRESETS["qwen3-30b-a3b"], 8) == pytest.approx(5.34, abs=0.01)
