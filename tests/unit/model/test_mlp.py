"""Gated activations with limits are those of GPT-OSS in transformers, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from megalite.config import ModelConfig
from megalite.model.mlp import activation_of

LIMITS: dict[str, Any] = {"activation_func_clamp_value": 0.8, "glu_linear_offset": 1.0}


def halves_of(num_features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, 2 * num_features, dtype=torch.float64, generator=generator) * 2.0


@pytest.mark.parametrize("num_features", [1, 37])
def test_limits_are_those_of_gpt_oss(num_features: int) -> None:
    theirs = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=4, intermediate_size=4))
    theirs.limit = LIMITS["activation_func_clamp_value"]
    x = halves_of(num_features).requires_grad_()
    neighbors = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # their gate and values alternate
    expected = theirs._apply_gate(neighbors)
    activation = activation_of(ModelConfig(activation="quick_geglu", **LIMITS))
    y = activation.function(x)
    assert not activation.adds_bias
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(y)
    ours, reference = (torch.autograd.grad(each, x, grad)[0] for each in (y, expected))
    torch.testing.assert_close(ours, reference, rtol=1e-13, atol=1e-13)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": lambda gate: F.gelu(gate, approximate="tanh"),
    "geglu_exact": F.gelu,
    "reglu": F.relu,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_gates_take_the_options(name: str) -> None:
    x = halves_of(7)
    gate, up = x.chunk(2, dim=-1)
    y = activation_of(ModelConfig(activation=name, **LIMITS)).function(x)
    expected = FUNCTIONS[name](gate.clamp(max=0.8)) * (up.clamp(-0.8, 0.8) + 1.0)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)


def test_without_options_the_kernel_stays() -> None:
    assert activation_of(ModelConfig(activation="swiglu")).adds_bias
    assert activation_of(ModelConfig(activation="gelu", **LIMITS)).is_gelu
