r"""Train a model of your own: gated causal convolutions in place of attention.

torchrun --nproc-per-node 4 examples/own_model.py --tp 2 --pp 2 --preset gpt-tiny --mock-data \
    --vocab-size 512 --train-iters 20 --lr 1e-3
python examples/own_model.py --preset gpt-tiny --mock-data --vocab-size 512 --train-iters 20 \
    --params-dtype fp64 --verify-layouts tp2,pp2,dp2
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

import megalite
from megalite import ColumnParallelLinear, Cut, ParameterSpec, RowParallelLinear, new_parameter

WIDTH = 4  # tokens that a convolution sees


class ConvolutionLayer(nn.Module):
    """Compute x + down(silu(gate) * convolution(up)); each tensor-parallel rank has some of the channels."""

    def __init__(self, config: megalite.ModelConfig, context: megalite.LayerContext) -> None:
        super().__init__()
        h, ffn, std = config.hidden_size, config.ffn_size, config.init_method_std
        self.norm = nn.LayerNorm(h)  # torch's own modules are whole on every rank
        self.up = ColumnParallelLinear(h, (2, ffn), context, bias=False, std=std)
        self.taps = new_parameter(ParameterSpec((ffn, WIDTH), Cut("tp", 0), std=0.5), context)
        self.down = RowParallelLinear(ffn, h, context, bias=False, std=std)

    @megalite.wrap_point  # for --compile
    def forward(self, x: Tensor, microbatch: megalite.Microbatch) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``."""
        gate, y = self.up(self.norm(x)).chunk(2, dim=-1)  # [s, b, ffn/tp]
        y = F.pad(y.permute(1, 2, 0), (WIDTH - 1, 0))  # a token sees those before it
        y = F.conv1d(y, self.taps[:, None], groups=len(self.taps))  # [b, ffn/tp, s]
        return x + self.down(F.silu(gate) * y.permute(2, 0, 1))


class ConvolutionModel(megalite.SequentialStage):
    """Predict the next token, with GPT's embedding, head and loss."""

    mixes_tokens = True  # a convolution sees the rank's own tokens only: no --cp

    def build_layer(self, number: int) -> nn.Module:
        """Return one layer."""
        return ConvolutionLayer(self.config, self.context)


if __name__ == "__main__":
    megalite.pretrain(ConvolutionModel)
