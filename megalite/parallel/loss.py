"""Cross-entropy over a vocabulary that is cut over the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.kernels import cross_entropy_gradient_, cross_entropy_statistics
from megalite.parallel.collectives import all_reduce
from megalite.parallel.recompute import recompute
from megalite.topology import Axis


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int, tp: Axis) -> Tensor:
    """-log softmax(logits)[target] of each token, without ever gathering the logits.

    Three numbers a token cross the network (Shoeybi et al. 2019, section 3): the maximum, and in one message
    the sum of exponentials and the target's logit.

    The logits are used up: backward puts their gradient in their place, and nothing else of their size ever
    exists. For autograd they are changed in place: a leaf, and logits that another operation has saved for
    its backward, are refused, as is a second backward.

    Args:
        logits: ``[..., padded/t]``, this rank's columns of the padded vocabulary.
        targets: ``[...]`` token ids in [0, vocab_size).
        vocab_size: columns from here on are padding and take no part.

    Returns:
        Loss of each token, ``[...]``, the same on every rank; in fp32, in fp64 for fp64.
    """
    loss: Tensor = _CrossEntropy.apply(logits.contiguous(), targets, vocab_size, tp)[0]
    return loss


def losses_in_chunks(
    losses: Callable[[Tensor, Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    num_chunks: int,
    num_slices: int = 1,
) -> Tensor:
    """The losses of all tokens, of which no two chunks' logits exist at one time, in backward either.

    Args:
        losses: of hidden states ``[n, b, h]`` and targets ``[num_slices n, b]``, ``[num_slices n, b]``.
        hidden: ``[s / num_slices, b, h]``.
        targets: ``[s, b]`` token ids.
        num_chunks: of the first dim of `hidden`; none is empty, whatever is asked for.
        num_slices: ranks that hold slices of the sequence, which `losses` gathers.

    Returns:
        Loss of each token, ``[s, b]``.
    """

    def of_chunk(here: Tensor, there: Tensor) -> Tensor:
        chunk = recompute(lambda x: losses(x, there.flatten(0, 1)), here)
        return chunk.unflatten(0, (num_slices, -1))

    num_chunks = min(num_chunks, hidden.shape[0])
    by_slice = targets.unflatten(0, (num_slices, -1))  # [r, s/r, b]
    chunks = zip(hidden.tensor_split(num_chunks), by_slice.tensor_split(num_chunks, dim=1), strict=True)
    return torch.cat([of_chunk(here, there) for here, there in chunks], dim=1).flatten(0, 1)


class _CrossEntropy(torch.autograd.Function):
    """Gives the logits out again, unchanged, as autograd demands of a tensor that is marked dirty."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, tp: Axis
    ) -> tuple[Tensor, Tensor]:
        num_columns = logits.shape[-1]
        start = tp.rank * num_columns
        num_real = min(max(vocab_size - start, 0), num_columns)
        rows, targets = logits.view(-1, num_columns), targets.flatten()
        mine, mine_sum, target_logit = cross_entropy_statistics(rows, targets, start, num_real).unbind(0)

        largest = all_reduce(mine.clone(), tp, dist.ReduceOp.MAX)
        is_mine = (targets >= start) & (targets < start + num_real)
        sums = torch.stack((mine_sum * (mine - largest).exp_(), (target_logit - largest).where(is_mine, 0.0)))
        total, target_logit = all_reduce(sums, tp).unbind(0)

        ctx.mark_dirty(logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, torch.stack((largest, total)))
        ctx.start, ctx.num_real = start, num_real
        return (total.log() - target_logit).view(logits.shape[:-1]), logits

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, of_logits: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        """D loss / d logits = softmax - onehot(target)."""
        if grad is None:
            return of_logits, None, None, None
        logits, targets, statistics = ctx.saved_tensors
        rows, grad = logits.view(-1, logits.shape[-1]), grad.contiguous().view(-1)
        cross_entropy_gradient_(rows, targets, statistics, grad, ctx.start, ctx.num_real)
        return logits if of_logits is None else logits + of_logits, None, None, None
