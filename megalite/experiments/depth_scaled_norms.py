r"""Train a GPT whose norms shrink with depth: LayerNorm Scaling (Sun et al. 2025, arXiv 2502.05795).

The residual stream of a pre-norm model grows with depth, so that deep layers change it little. Here the
output of both norms of layer l, counted from 1, is multiplied by l ** -power.

torchrun --nproc-per-node 4 -m megalite.experiments.depth_scaled_norms --tp 2 --pp 2 --preset gpt-tiny \
    --mock-data --vocab-size 512 --train-iters 20 --lr 1e-3 --global-batch-size 8 --micro-batch-size 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

import megalite
from megalite.utils.errors import UserError


@dataclass(frozen=True)
class DepthScaling:
    """Settings of the experiment."""

    power: float = 0.5
    """Power of the layer's number that its norms are divided by. 0 trains the usual GPT."""


class DepthScaledGPT(megalite.GPT):
    """GPT with pre-norm layers whose norms shrink with depth.

    Subclass it to train with other settings.
    """

    settings = DepthScaling()

    def build_layer(self, number: int) -> nn.Module:
        """Return layer `number`, counted from 0.

        Raises:
            UserError: the model's norms are not before its blocks.
        """
        if self.config.norm_position != "pre":
            raise UserError(f"--norm-position {self.config.norm_position} has no norms to scale: pass pre")
        layer = super().build_layer(number)
        factor = (number + 1) ** -self.settings.power
        for name in ("attention_norm", "mlp_norm"):
            if hasattr(layer, name):  # a layer of --hybrid-override-pattern has one of them
                getattr(layer, name).register_forward_hook(partial(_scale, factor))
        return layer


def _scale(
    factor: float, norm: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Multiply the normalized hidden states ``[s, b, h]``, and not the residual stream beside them."""
    normed, x = output
    return normed * factor, x


if __name__ == "__main__":
    megalite.pretrain(DepthScaledGPT)
