"""Norms that shrink with depth, against a GPT whose norms have smaller weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megalite import GPT, LayerContext, Microbatch, Topology, UserError
from megalite.config.presets import PRESETS
from megalite.experiments.depth_scaled_norms import DepthScaledGPT, DepthScaling

CONFIG = replace(PRESETS["gpt-tiny"], vocab_size=200, params_dtype="fp64", seq_length=32)


class Cubic(DepthScaledGPT):
    settings = DepthScaling(power=3.0)


class Unscaled(DepthScaledGPT):
    settings = DepthScaling(power=0.0)


def _loss(stage: nn.Module) -> Tensor:
    tokens = torch.randint(200, (2, 33), generator=torch.Generator().manual_seed(1))
    loss = stage(Microbatch.of(tokens, torch.arange(2)), None)
    assert isinstance(loss, Tensor)
    return loss


def test_norms_are_divided_by_a_power_of_the_layers_number(one_rank: Topology) -> None:
    context, layers = LayerContext(one_rank, torch.float64), range(CONFIG.num_layers)
    gpt = GPT(CONFIG, context, layers)
    usual = _loss(gpt).item()
    assert _loss(Unscaled(CONFIG, context, layers)).item() == usual
    for model, power in ((DepthScaledGPT, 0.5), (Cubic, 3.0)):
        scaled = model(CONFIG, context, layers)
        for number in layers:
            layer = gpt.layers[str(number)]
            for norm in (layer.attention_norm, layer.mlp_norm):
                nn.init.constant_(norm.weight, 1.0 / (number + 1) ** power)
        expected = _loss(gpt)
        assert abs(expected.item() - usual) > 1e-6
        torch.testing.assert_close(_loss(scaled), expected, rtol=1e-13, atol=0.0)


def test_norms_after_the_blocks_are_refused(one_rank: Topology) -> None:
    config = replace(CONFIG, norm_position="post")
    with pytest.raises(UserError, match="--norm-position post has no norms to scale: pass pre"):
        DepthScaledGPT(config, LayerContext(one_rank, torch.float64), range(1))
