"""Mamba-2's layer: initial values, precision, and what generation keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated

from megalite.attention.cache import CachedCore
from megalite.config import ModelConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from megalite.model.mamba import gated_rms_norm
from tests.stages import build_stage

TINY = replace(PRESETS["nemotron-h-tiny"], vocab_size=101, params_dtype="fp64")


def mixer_of(config: ModelConfig, topology):
    stage = build_stage(config, topology, range(config.num_layers), seed=3)
    return stage.layers["0"].mamba


def test_initial_decays_and_time_steps_cover_their_ranges(one_rank) -> None:
    mixer = mixer_of(replace(TINY, mamba_num_heads=64, mamba_head_dim=2), one_rank)
    rates, steps = mixer.A_log.detach().exp(), F.softplus(mixer.dt_bias.detach())
    assert (rates.min() - 1.0).abs() < 0.2
    assert (rates.max() - 16.0).abs() < 0.2
    assert 1e-3 <= steps.min() < 1.2e-3
    assert 0.8e-1 < steps.max() <= 1e-1
    ranks = torch.stack((rates, steps)).argsort(1).argsort(1).double()
    assert torch.corrcoef(ranks)[0, 1].abs() < 0.1  # fast and slow decays have all time steps
    assert torch.equal(mixer.D, torch.ones_like(mixer.D))
    assert torch.equal(mixer.norm, torch.ones_like(mixer.norm))


@pytest.mark.parametrize(("pattern", "num_blocks"), [("M*-M", 4), (None, 8)])
def test_the_last_gemm_of_a_block_starts_smaller(pattern: str | None, num_blocks: int, one_rank) -> None:
    wide = replace(TINY, hybrid_override_pattern=pattern, hidden_size=256, init_method_std=0.5)
    stage = build_stage(wide, one_rank, range(4), seed=3)
    for name, weight in stage.layers.named_parameters():
        if name.endswith(("projection.weight", "down.weight")) and "in_projection" not in name:
            assert weight.std().item() == pytest.approx(0.5 / num_blocks**0.5, rel=0.02), name


def test_half_precision_is_that_of_its_rounding(one_rank) -> None:
    """Sums, decays and states are in fp32: a long sample is not less precise than a short one."""
    tokens = torch.randint(101, (1, 512), generator=torch.Generator().manual_seed(0))
    microbatch = Microbatch(tokens, tokens, torch.zeros(1, dtype=torch.int64))
    outputs = []
    for dtype in ("fp64", "bf16"):
        config = replace(TINY, hybrid_override_pattern="MMMM", params_dtype=dtype, seq_length=512)
        stage = build_stage(config, one_rank, range(4), seed=3).eval()
        hidden = stage.hidden_states(microbatch, None)
        hidden.square().sum().backward()
        assert all(torch.isfinite(each.grad).all() for each in stage.layers.parameters())
        outputs.append(hidden.detach().double())
    errors = (outputs[1] - outputs[0]).norm(dim=-1) / outputs[0].norm(dim=-1)  # [s, b]
    assert errors.max() < 0.05
    assert errors[-100:].mean() < 1.5 * errors[:100].mean()


@torch.no_grad()
def test_generation_keeps_a_state_of_fixed_size_in_fp32(one_rank) -> None:
    config = replace(TINY, params_dtype="bf16")
    stage = build_stage(config, one_rank, range(4), seed=3, attention=CachedCore).eval()
    stage.core.begin(20)
    for num_tokens in (2, 9, 1):  # fewer than the convolution sees, more, one
        tokens = torch.ones(3, num_tokens, dtype=torch.int64)
        positions = stage.core.positions(3, num_tokens)
        stage.hidden_states(Microbatch(tokens, tokens, torch.zeros(3, dtype=torch.int64), positions), None)
        assert set(stage.core.states) == {0, 2}
        for each in stage.core.states.values():
            assert each.inputs.shape == (3, 3, 128 + 2 * 4 * 16)
            assert each.state.shape == (3, 4, 2, 16, 16)
            assert each.state.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [24, 8])
def test_the_gated_norm_is_that_of_transformers(group_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 2, 24), (5, 2, 24), (24,)
    x, gate, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    theirs = NemotronHRMSNormGated(24, group_size, eps=1e-3)
    theirs.weight.data = weight
    grouped = (each.unflatten(-1, (-1, group_size)) for each in (x, gate, weight))
    ours = gated_rms_norm(*grouped, 1e-3).flatten(-2)
    torch.testing.assert_close(ours, theirs(x, gate))
