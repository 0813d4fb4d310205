r"""Train with a loss of your own: the focal loss, which counts tokens less that are predicted well.

torchrun --nproc-per-node 4 examples/own_loss.py --tp 2 --pp 2 --preset gpt-tiny --mock-data \
    --vocab-size 512 --train-iters 20 --lr 1e-3 --global-batch-size 8 --micro-batch-size 2
"""

from __future__ import annotations

import torch
from torch import Tensor

import megalite

GAMMA = 2.0


class FocalGPT(megalite.GPT):
    """Predict the next token with the loss (1 - p)^gamma * -log p (Lin et al. 2017)."""

    def losses(self, normed: Tensor, microbatch: megalite.Microbatch) -> Tensor:
        """Return the sum of the losses of a microbatch's tokens."""
        cross_entropy = self.losses_of(normed, microbatch.labels.t())  # [s, b], on every tensor-parallel rank
        probability = torch.exp(-cross_entropy)
        return self.masked_sum((1.0 - probability) ** GAMMA * cross_entropy, microbatch)


if __name__ == "__main__":
    megalite.pretrain(FocalGPT)
