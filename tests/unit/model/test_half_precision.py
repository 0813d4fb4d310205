"""What is in fp32 although weights and hidden states have 16 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megalite.attention.positions import Rotary
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_that_of_the_logits_in_fp32(dtype: torch.dtype, one_rank: Topology) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(7, 3, 1000, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(900, (7, 3), generator=generator)
    loss = vocab_parallel_cross_entropy(logits.clone(), targets, 900, one_rank.tp)
    expected = F.cross_entropy(
        logits.detach().float()[..., :900].flatten(0, 1), targets.flatten(), reduction="none"
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.flatten(), expected, rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype


def test_rotation_is_rounded_once(one_rank: Topology) -> None:
    config = replace(PRESETS["llama-tiny"], seq_length=512)
    x = torch.randn(512, 1, 2, config.head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    spec = config.head_specs[0].rotary
    assert spec is not None
    turned = [
        Rotary(spec, config, LayerContext(one_rank, dtype))(x.to(dtype), None)
        for dtype in (torch.bfloat16, torch.float64)
    ]
    assert turned[0].dtype == torch.bfloat16
    assert (turned[0] == turned[1].bfloat16()).double().mean() > 0.999
