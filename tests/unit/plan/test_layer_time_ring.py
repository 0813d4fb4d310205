"""The planned messages of a ring are those of its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.attention.ring import ring_steps, slices_of_ranks
from megalite.config import Config, DataConfig, ParallelConfig
from megalite.config.presets import PRESETS
from megalite.distributed.axis import HeldPositions
from megalite.observe.unit_record import AttentionCall
from megalite.plan.layer_time import ring_slices
from megalite.plan.planned_run import kernels_of
from megalite.utils.hardware.gpus import GPUS


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("window", "is_causal"), [(None, True), (None, False), (10, True), (40, True)])
def test_slices_are_those_that_ranks_send(num_ranks: int, window: int | None, is_causal: bool) -> None:
    s = 48 * num_ranks
    call = AttentionCall("sdpa", 2, 2, s // num_ranks, s, 8, 8, is_causal, False, False, window)
    held = slices_of_ranks(HeldPositions(0, num_ranks, is_zigzag=True), s)
    sent = sum(
        len(step.sent) for rank in range(num_ranks) for step in ring_steps(held, rank, window, is_causal)[1:]
    )
    assert ring_slices(call, num_ranks) == pytest.approx(sent / num_ranks, rel=0.3 if window else 1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_of_a_causal_ring_compute_the_same_number_of_blocks(num_ranks: int) -> None:
    held = slices_of_ranks(HeldPositions(0, num_ranks, is_zigzag=True), 16 * num_ranks)
    counts = [[len(step.blocks) for step in ring_steps(held, rank, None, True)] for rank in range(num_ranks)]
    assert counts == [[3] + [2] * (num_ranks - 1)] * num_ranks


@pytest.mark.parametrize(
    ("preset", "has_documents", "needs_triton"),
    [("llama3-8b", False, False), ("llama3-8b", True, True), ("gemma3-1b", False, True)],
)
def test_a_ring_is_planned_with_the_kernels_of_its_blocks(
    preset: str, has_documents: bool, needs_triton: bool
) -> None:
    gpu = GPUS["h100-80"]

    def config_of(cp: int) -> Config:
        parallel = ParallelConfig(context_parallel_size=cp, cp_comm_type="p2p")
        data = DataConfig(mock_data=True, reset_attention_mask=has_documents)
        return Config(model=PRESETS[preset], parallel=parallel, data=data)

    for has_triton in (False, True):
        ring = kernels_of(config_of(2), replace(gpu, has_triton=has_triton))
        assert (ring.attention != "unfused") == (has_triton or not needs_triton)
    assert kernels_of(config_of(1), gpu).attention == "cudnn"
