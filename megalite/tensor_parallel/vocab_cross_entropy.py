"""Cross-entropy over a vocabulary that is sharded along the tensor-parallel axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.distributed.axis import Axis
from megalite.distributed.collectives import all_reduce
from megalite.kernels import cross_entropy_gradient_, cross_entropy_statistics


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int, tp: Axis) -> Tensor:
    """Return -log softmax(logits)[target] of each token, without gathering the logits.

    The ranks all-reduce three numbers per token (Shoeybi et al. 2019, section 3): the maximum, and then, in
    one message, the sum of exponentials and the target's logit.

    Backward overwrites the logits with their gradient, so no second tensor of their size exists. Autograd
    treats the logits as changed in place: it refuses a leaf, logits that another operation has saved for its
    backward, and a second backward.

    Args:
        logits: ``[..., padded/tp]``, this rank's columns of the padded vocabulary.
        targets: ``[...]``, token ids in [0, vocab_size).
        vocab_size: columns from this one on are padding and are ignored.

    Returns:
        Loss of each token, ``[...]``, the same on every rank, in fp32 (fp64 for fp64 logits).
    """
    loss: Tensor = _CrossEntropy.apply(logits.contiguous(), targets, vocab_size, tp, False)[0]
    return loss


def losses_and_log_sums(logits: Tensor, targets: Tensor, vocab_size: int, tp: Axis) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and the logarithm of its sum of exponentials, both differentiable.

    See `vocab_parallel_cross_entropy` for arguments, shapes and dtype. A token whose loss has a gradient
    of 0 gets no gradient from its sum either: both are of tokens that are not masked.
    """
    loss, log_sums, _ = _CrossEntropy.apply(logits.contiguous(), targets, vocab_size, tp, True)
    return loss, log_sums


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, tp: Axis, returns_sums: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        num_columns = logits.shape[-1]
        start = tp.rank * num_columns
        num_real = min(max(vocab_size - start, 0), num_columns)
        rows, targets = logits.view(-1, num_columns), targets.flatten()
        maximum, exp_sum, target_logit = cross_entropy_statistics(rows, targets, start, num_real).unbind(0)

        largest = all_reduce(maximum.clone(), tp, dist.ReduceOp.MAX)
        is_mine = (targets >= start) & (targets < start + num_real)
        exp_sum = exp_sum * (maximum - largest).exp_()  # relative to the maximum over all ranks
        sums = torch.stack((exp_sum, (target_logit - largest).where(is_mine, 0.0)))
        total, target_logit = all_reduce(sums, tp).unbind(0)

        ctx.mark_dirty(logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, torch.stack((largest, total)))
        ctx.start, ctx.num_real = start, num_real
        # Autograd requires a tensor that is marked dirty among the outputs.
        shape, log_total = logits.shape[:-1], total.log()
        log_sums = (log_total + largest).view(shape) if returns_sums else None
        return (log_total - target_logit).view(shape), log_sums, logits

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, sums_grad: Tensor | None, logits_grad: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        """Compute d loss / d logits = softmax(logits) - onehot(target), plus softmax for the log sums."""
        if grad is None:
            assert sums_grad is None, "the log sums have a gradient, and the loss has none"
            return logits_grad, None, None, None, None
        logits, targets, statistics = ctx.saved_tensors
        rows, grad = logits.view(-1, logits.shape[-1]), grad.contiguous().view(-1)
        if sums_grad is not None:
            # The kernel computes grad * (exp(logit - largest) / total - onehot). With another total, the
            # first factor is grad + sums_grad.
            largest, total = statistics
            changed = total * grad / (grad + sums_grad.reshape(-1))
            statistics = torch.stack((largest, changed.where(grad != 0.0, total)))
        cross_entropy_gradient_(rows, targets, statistics, grad, ctx.start, ctx.num_real)
        return logits if logits_grad is None else logits + logits_grad, None, None, None, None
