"""Embedding and cross-entropy with the vocabulary's rows cut over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.distributed.axis import Axis
from megalite.distributed.collectives import (
    all_reduce,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from megalite.kernels import cross_entropy_gradient_, cross_entropy_statistics
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut


class VocabParallelEmbedding(nn.Module):
    """Embedding table that is cut along its rows; the ranks' results are summed.

    Args:
        num_padding: number of unused rows at the end.
    """

    def __init__(
        self, num_rows: int, hidden_size: int, context: LayerContext, *, std: float, num_padding: int = 0
    ) -> None:
        super().__init__()
        self.tp = context.tp
        sp = context.sequence_parallel
        self.reduce = reduce_scatter_to_sequence_parallel if sp else reduce_from_tensor_parallel
        spec = ParameterSpec(
            (num_rows, hidden_size), Cut("tp", 0), std=std, num_padding=num_padding, is_vocabulary=True
        )
        self.weight = new_parameter(spec, context)  # [rows/tp, h]

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up ``[s, b]`` token ids -> ``[s, b, h]``, or ``[s/tp, b, h]`` if sequence parallel."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        num_rows = self.weight.shape[0]
        rows = tokens - self.tp.rank * num_rows
        is_elsewhere = (rows < 0) | (rows >= num_rows)
        found = F.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return self.reduce(found.masked_fill(is_elsewhere[..., None], 0.0), self.tp)


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


EMBEDDING_GRADS = "embedding-grads-all-reduce"
"""Name of the wait in `sum_tied_embedding_grads`, as in Megatron-LM's timers."""


class TiedWeight(NamedTuple):
    """Word embedding that two stages use.

    Attributes:
        weight: this rank's slice.
        has_other_copy: whether the first and last stage are on different ranks, each with a copy, or on one
            rank, where they share the parameter.
        num_gradients: number of gradients of a microbatch on this rank.
    """

    weight: nn.Parameter
    has_other_copy: bool
    num_gradients: int = 1


def sum_tied_embedding_grads(gradient: Tensor, pp: Axis) -> None:
    """Sum the gradients of a tied weight's two copies on the first and last rank of pp, in place.

    The two ranks exchange their gradients, and each adds the other's. A sum of two numbers has the same bits
    in either order, so the copies stay equal. This needs no process group of the two ranks.
    """
    assert pp.size > 1 and (pp.is_first or pp.is_last)
    other_rank = pp.ranks[0] if pp.is_last else pp.ranks[-1]
    other = torch.empty_like(gradient)
    messages = [
        dist.P2POp(dist.isend, gradient, other_rank, pp.group),
        dist.P2POp(dist.irecv, other, other_rank, pp.group),
    ]
    works = dist.batch_isend_irecv(messages)
    pp.wait_begins(EMBEDDING_GRADS)
    for work in works:
        work.wait()
    pp.wait_ends(EMBEDDING_GRADS)
    gradient += other
