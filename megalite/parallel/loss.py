"""Cross-entropy over a vocabulary that is cut over the tensor-parallel axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.collectives import all_reduce
from megalite.topology import Axis


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int, tp: Axis) -> Tensor:
    """-log softmax(logits)[target] of each token, without ever gathering the logits.

    Three numbers a token cross the network (Shoeybi et al. 2019, section 3): the maximum, and in one message
    the sum of exponentials and the target's logit.

    Args:
        logits: ``[..., padded/t]``, this rank's columns of the padded vocabulary.
        targets: ``[...]`` token ids in [0, vocab_size).
        vocab_size: columns from here on are padding and take no part.

    Returns:
        Loss of each token, ``[...]``, the same on every rank.
    """
    loss: Tensor = _CrossEntropy.apply(logits, targets, vocab_size, tp)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, tp: Axis) -> Tensor:
        num_columns = logits.shape[-1]
        start = tp.rank * num_columns
        num_real = min(max(vocab_size - start, 0), num_columns)
        # In fp32 at the least, without a copy of the logits in it: they are promoted as they are read.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        largest = _largest(logits[..., :num_real], tp).to(dtype)

        exponentials = logits - largest[..., None]
        columns = targets - start
        foreign = (columns < 0) | (columns >= num_real)
        columns = columns.masked_fill(foreign, 0)
        target_logits = exponentials.gather(-1, columns[..., None]).squeeze(-1).masked_fill(foreign, 0.0)
        exponentials.exp_()
        exponentials[..., num_real:] = 0.0
        sums = torch.stack((exponentials.sum(-1), target_logits))
        total, target_logits = all_reduce(sums, tp).unbind(0)

        ctx.save_for_backward(exponentials, total, columns, foreign)
        return total.log() - target_logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """D loss / d logits = softmax - onehot(target); the buffer of exponentials becomes the gradient."""
        exponentials, total, columns, foreign = ctx.saved_tensors
        gradient = exponentials.mul_((grad / total)[..., None])
        at_target = grad.masked_fill(foreign, 0.0).neg_()[..., None]
        gradient.scatter_add_(-1, columns[..., None], at_target)
        return gradient, None, None, None


def _largest(logits: Tensor, tp: Axis) -> Tensor:
    """Row maximum over every rank's columns; a rank that holds padding alone has none to offer."""
    largest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
    return all_reduce(largest, tp, dist.ReduceOp.MAX)
