r"""Train a selective scan (Gu and Dao 2023): sums over all channels drive the channels of each rank.

torchrun --nproc-per-node 4 examples/own_scan.py --tp 2 --pp 2 --preset gpt-tiny --mock-data \
    --vocab-size 512 --seq-length 32 --train-iters 20 --lr 1e-3
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megalite
from megalite import Cut, ParameterSpec, new_parameter

STATES, RANK = 8, 4  # numbers that a channel remembers; inner size of the step's projection


class ScanLayer(nn.Module):
    """Compute x + down(silu(gate) * scan(silu(u))); each tensor-parallel rank has some of the d channels."""

    def __init__(self, config: megalite.ModelConfig, context: megalite.LayerContext) -> None:
        super().__init__()
        h, d, self.tp, cut = config.hidden_size, config.ffn_size, context.tp, Cut("tp", 0)
        self.norm = nn.LayerNorm(h)
        self.up = megalite.ColumnParallelLinear(h, (2, d), context, bias=False)
        self.down = megalite.RowParallelLinear(d, h, context, bias=False)
        self.select = new_parameter(ParameterSpec((RANK + 2 * STATES, d), Cut("tp", 1), std=0.1), context)
        self.step = new_parameter(ParameterSpec((d, RANK), cut, std=0.5), context)
        self.step_bias = new_parameter(ParameterSpec((d,), cut, mean=-2.0, decay=False), context)
        self.log_decay = new_parameter(ParameterSpec((d, STATES), cut, std=0.5, decay=False), context)

    @megalite.wrap_point  # for --compile
    def forward(self, x: Tensor, microbatch: megalite.Microbatch) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``; n = STATES."""
        gate, u = (F.silu(y) for y in self.up(self.norm(x)).chunk(2, dim=-1))  # [s, b, d/tp]
        # A sum over all channels, so partial on each rank; then full, and used by the rank's own channels.
        full = megalite.reduce_from_tensor_parallel(F.linear(u, self.select), self.tp)
        full = megalite.copy_to_tensor_parallel(full, self.tp)
        step, write, read = full.split((RANK, STATES, STATES), dim=-1)
        step = F.softplus(F.linear(step, self.step, self.step_bias))  # [s, b, d/tp]
        kept = torch.exp(-step[..., None] * torch.exp(self.log_decay))  # [s, b, d/tp, n]
        added = (step * u)[..., None] * write[:, :, None]
        state, outputs = torch.zeros_like(added[0]), []
        for i in range(len(u)):  # over the sequence: a kernel does it in one launch
            state = kept[i] * state + added[i]
            outputs.append((state * read[i, :, None]).sum(-1))
        return x + self.down(gate * torch.stack(outputs))


class ScanModel(megalite.SequentialStage):
    """Predict the next token, with GPT's embedding, head and loss."""

    def build_layer(self, number: int) -> nn.Module:
        """Return one layer."""
        return ScanLayer(self.config, self.context)


if __name__ == "__main__":
    megalite.pretrain(ScanModel)
