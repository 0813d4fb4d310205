"""The gated norm is that of transformers' Nemotron-H."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated

from megalite.model.gated_norm import gated_rms_norm


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(5, 2, 24, generator=generator).to(dtype) for _ in range(2))
    return x, gate, torch.randn(24, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [24, 8])
def test_is_transformers_norm(group_size: int, dtype: torch.dtype) -> None:
    x, gate, weight = drawn(dtype)
    theirs = NemotronHRMSNormGated(24, group_size, eps=1e-3)
    theirs.weight.data = weight
    grouped = (each.unflatten(-1, (-1, group_size)) for each in (x, gate, weight))
    ours = gated_rms_norm(*grouped, 1e-3).flatten(-2)
    torch.testing.assert_close(ours, theirs(x, gate))
