r"""Train with label smoothing and z-loss: sums over a vocabulary that is cut over the tensor-parallel ranks.

torchrun --nproc-per-node 4 examples/own_vocabulary_loss.py --tp 2 --pp 2 --preset gpt-tiny --mock-data \
    --vocab-size 512 --train-iters 20 --lr 1e-3
"""

from __future__ import annotations

import torch
from torch import Tensor

import megalite
from megalite import reduce_from_tensor_parallel

SMOOTHING = 0.1  # share of the target that all tokens have alike (Szegedy et al. 2016)
Z_LOSS = 1e-4  # weight of (log Z)^2, Z the sum of exp(logits) (Chowdhery et al. 2022)


class VocabularyLossGPT(megalite.GPT):
    """Predict the next token, with (1 - e) * -log p(target) + e * mean(-log p) + Z_LOSS * (log Z)^2."""

    def losses(self, normed: Tensor, microbatch: megalite.Microbatch) -> Tensor:
        """Return the sum of the losses of a microbatch's tokens."""
        logits, targets = self.logits_of(normed), microbatch.labels.t()  # [s, b, v/tp], [s, b]
        tp, size = self.context.tp, self.vocab_size
        wide = torch.promote_types(logits.dtype, torch.float32)
        first, num_columns = tp.rank * logits.shape[-1], logits.shape[-1]
        # Each rank has some columns of the logits. What it sums over them is partial.
        columns = targets - first
        is_mine = (columns >= 0) & (columns < num_columns)
        # Indexing saves no logits, unlike gather: the cross-entropy overwrites them with their gradient.
        rows = torch.arange(targets.numel(), device=targets.device)
        own = logits.flatten(0, 1)[rows, columns.clamp(0, num_columns - 1).flatten()].view_as(targets)
        target = reduce_from_tensor_parallel(own.to(wide).where(is_mine, 0.0), tp)  # [s, b]
        num_tokens = min(max(size - first, 0), num_columns)  # columns after them are padding
        total = reduce_from_tensor_parallel(logits[..., :num_tokens].sum(-1, dtype=wide), tp)

        loss = megalite.vocab_parallel_cross_entropy(logits, targets, size, tp)  # log Z - target
        log_z = loss + target
        smoothed = (1.0 - SMOOTHING) * loss + SMOOTHING * (log_z - total / size)
        return self.masked_sum(smoothed + Z_LOSS * log_z**2, microbatch)


if __name__ == "__main__":
    megalite.pretrain(VocabularyLossGPT)
