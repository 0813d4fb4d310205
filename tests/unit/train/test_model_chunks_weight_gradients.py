"""Test what accumulates the gradients of weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megalite.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.train import model_chunks
from megalite.train.model_chunks import weight_gradient_fusion

FUSED = "accumulated by the weight-gradient GEMMs (fused)"


@pytest.fixture
def topology() -> Iterator[Topology]:
    with Topology.fake(ParallelConfig(data_parallel_size=2).mesh, 2, 0, device="cpu") as topology:
        yield topology


def fusion(
    topology: Topology, dtype: str = "fp32", compile: bool = False, **parallel: object
) -> tuple[bool, str]:
    return weight_gradient_fusion(
        Config(
            model=ModelConfig(params_dtype=dtype),
            parallel=ParallelConfig(**parallel),
            training=TrainingConfig(compile=compile),
        ),
        topology,
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_weights_as_wide_as_the_sums(topology: Topology, dtype: str) -> None:
    assert fusion(topology, dtype) == (True, FUSED)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_gemm_that_adds_to_a_wider_sum(
    topology: Topology, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_on, why = fusion(topology, dtype)
    assert not is_on
    assert "cpu has no GEMM of" in why
    monkeypatch.setattr(model_chunks, "has_widening_gemm", lambda *_: True)
    assert fusion(topology, dtype) == (True, FUSED)


def test_autograd_accumulates(topology: Topology) -> None:
    is_on, why = fusion(topology, gradient_accumulation_fusion=False)
    assert (is_on, "--no-gradient-accumulation-fusion" in why) == (False, True)


def test_compiled_layers_need_buffers_that_stay_in_place(topology: Topology) -> None:
    assert fusion(topology, compile=True, zero_stage=1) == (True, FUSED)
    is_on, why = fusion(topology, compile=True, zero_stage=2)
    assert is_on
    assert "by autograd in the layers (--compile with --zero-stage 2" in why
