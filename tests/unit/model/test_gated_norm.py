"""The gated norms are those of transformers' models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from megalite.model.gated_norm import gated_rms_norm


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(5, 2, 24, generator=generator).to(dtype) for _ in range(2))
    return x, gate, torch.randn(24, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [24, 8])
def test_gate_first(group_size: int, dtype: torch.dtype) -> None:
    x, gate, weight = drawn(dtype)
    theirs = NemotronHRMSNormGated(24, group_size, eps=1e-3)
    theirs.weight.data = weight
    grouped = (each.unflatten(-1, (-1, group_size)) for each in (x, gate, weight))
    ours = gated_rms_norm(*grouped, 1e-3, gate_first=True).flatten(-2)
    torch.testing.assert_close(ours, theirs(x, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_last(dtype: torch.dtype) -> None:
    x, gate, weight = drawn(dtype)
    theirs = Qwen3NextRMSNormGated(24, eps=1e-3)
    theirs.weight.data = weight
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-3, gate_first=False), theirs(x, gate))
