"""Recurrent mixers compute the same by the operator of the kernels as by chunks in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.attention.cache import CachedCore
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from megalite.model.recurrent_mixer import RecurrentMixer
from tests.stages import build_stage

GATED_DELTA_NET = replace(
    PRESETS["llama-tiny"],
    **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (2,), "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
)
CONFIGS = {"gated_delta_net": GATED_DELTA_NET, "mamba": PRESETS["nemotron-h-tiny"]}
CONFIGS = {name: replace(config, vocab_size=101, params_dtype="fp64") for name, config in CONFIGS.items()}


def results_of(mixer: torch.nn.Module, x: Tensor, starts: Tensor | None) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters."""
    y = mixer(x, torch.arange(2), PositionInfo({}, document_starts=starts)).x
    return [y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])]


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_operator_and_the_chunks_agree(name: str, has_documents: bool, one_rank) -> None:
    stage = build_stage(CONFIGS[name], one_rank, range(CONFIGS[name].num_layers), seed=3)
    mixer = getattr(stage.layers["0"], name)
    generator = torch.Generator().manual_seed(0)
    shape = 70, 2, CONFIGS[name].hidden_size
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    starts = torch.stack((torch.arange(70) // 11 * 11, torch.arange(70) // 64 * 64))
    results = []
    for mixer.kernel_problem in ("no GPU", ""):
        results.append(results_of(mixer, x, starts if has_documents else None))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_the_log_names_what_computes_recurrences(one_rank) -> None:
    config = CONFIGS["mamba"]
    stage = build_stage(config, one_rank, range(config.num_layers), seed=3)
    assert stage.description.endswith("; recurrences: plain PyTorch (no GPU)")
    for module in stage.modules():
        if isinstance(module, RecurrentMixer):
            module.kernel_problem = ""
    assert stage.description.endswith("; recurrences: Triton")
    attention_alone = build_stage(replace(PRESETS["llama-tiny"], vocab_size=101), one_rank, range(2), seed=3)
    assert "recurrences" not in attention_alone.description


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_goes_on_from_the_same_state(name: str, one_rank) -> None:
    config = CONFIGS[name]
    outputs = [generated(config, name, one_rank, problem) for problem in ("no GPU", "")]
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)


def generated(config: ModelConfig, name: str, one_rank, problem: str) -> list[Tensor]:
    stage = build_stage(config, one_rank, range(config.num_layers), seed=3, attention=CachedCore).eval()
    for module in stage.modules():
        if isinstance(module, RecurrentMixer):
            module.kernel_problem = problem
    stage.core.begin(20)
    outputs = []
    for num_tokens in (9, 1):
        tokens = torch.arange(2 * num_tokens).view(2, num_tokens)
        positions = stage.core.positions(2, num_tokens)
        microbatch = Microbatch(tokens, tokens, torch.zeros(2, dtype=torch.int64), positions)
        outputs.append(stage.hidden_states(microbatch, None))
    return [*outputs, *(each.state for each in stage.core.states.values())]
