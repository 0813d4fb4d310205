"""GELU in the epilogues of cuBLASLt's GEMMs on a real GPU: against the operators that they replace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megalite.config import Config, ModelConfig, ParallelConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.kernels import has_linear_gelu, library
from megalite.tensor_parallel.gemm import MainGrad
from megalite.train.gemm_epilogues import choose_gemm_epilogues, seconds_in_turns
from megalite.train.model_chunks import ChunkResources, build_chunks
from tests.stages import build_stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(library.CUDA_LOAD_ERROR), reason=library.CUDA_LOAD_ERROR or "-"),
]


@pytest.fixture
def one_gpu() -> Iterator[Topology]:
    with Topology.start(ParallelConfig().mesh, Launch(0, 1, 0, 1)) as topology:
        yield topology


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_training_step_is_the_same(dtype: str, has_bias: bool, one_gpu: Topology) -> None:
    """But for roundings, with weight gradients that GEMMs add to fp32 sums."""
    model = ModelConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        seq_length=64,
        vocab_size=128,
        params_dtype=dtype,  # type: ignore[arg-type]
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=has_bias,
    )
    ids = torch.arange(130, device=one_gpu.device).view(2, 65) % 128
    batch = Microbatch(ids[:, :-1], ids[:, 1:], torch.arange(2, device=one_gpu.device))
    losses, gradients = [], []
    for in_gemms in (True, False):
        stage = build_stage(model, one_gpu, range(2), seed=1, fuses_weight_gradients=True)
        sums = {}
        for name, parameter in stage.layers.named_parameters():
            if parameter.dim() > 1:
                sums[name] = torch.zeros_like(parameter, dtype=torch.float32)
                claim = lambda total=sums[name]: (total, False)  # noqa: E731
                parameter.main_grad = MainGrad(claim, lambda: None, None)
        for layer in stage.layers.values():
            assert has_linear_gelu(layer.mlp.up.weight, has_bias)
            layer.mlp.up.fuses_gelu = in_gemms
        loss = stage(batch, None)
        loss.backward()
        losses.append(loss.item())
        others = {name: p.grad.float() for name, p in stage.named_parameters() if p.grad is not None}
        gradients.append(others | sums)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name, found in gradients[0].items():
        assert (found - gradients[1][name]).norm() <= 0.05 * gradients[1][name].norm(), name


def test_both_forms_are_timed_and_one_is_chosen(one_gpu: Topology) -> None:
    """At the shapes of GPT-1.3B with one sample, where each of the timed GEMMs takes over 50 us."""
    config = Config(model=replace(PRESETS["gpt-1.3b"], num_layers=1, params_dtype="bf16"))
    chunks = build_chunks(config, one_gpu, ChunkResources(fuses_weight_gradients=True))
    timed = []

    def timer(functions):  # type: ignore[no-untyped-def]
        timed.append(seconds_in_turns(functions))
        return timed[-1]

    line = choose_gemm_epilogues(chunks, config, one_gpu, timer)
    assert sorted(map(len, timed)) == [2, 4]
    assert all(20e-6 < seconds < 20e-3 for each in timed for seconds in each)
    assert "GELU of 2048 x 2048 -> 8192: in " in line
    assert "bias gradient of 2048 x 2048 -> 6144: in " in line
    assert chunks[0].layers["0"].mlp.up.fuses_gelu is ("GELU of 2048 x 2048 -> 8192: in GEMMs" in line)
