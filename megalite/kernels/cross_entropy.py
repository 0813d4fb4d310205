"""Compute cross-entropy over a part of the vocabulary in the memory of the logits.

The forward reads the logits once and computes three numbers per token. The backward reads them again and
replaces them with their gradient. The communication in between is in
`megalite.tensor_parallel.vocab_parallel`.
"""

import torch
from torch import Tensor

from megalite.kernels.library import define, no_result

# Number of logits that the reference computes at a time, which bounds its temporaries. On a CPU they stay in
# the caches; on a GPU they are large enough for the time to depend on memory and not on launches.
_PIECE, _PIECE_OF_GPU = 1 << 20, 1 << 24


def cross_entropy_statistics(logits: Tensor, targets: Tensor, start: int, num_real: int) -> Tensor:
    """Return the statistics of a part of the vocabulary for each token's cross-entropy, without autograd.

    Args:
        logits: contiguous, ``[rows, columns]``, for the tokens of the vocabulary from `start` on.
        targets: int64 ``[rows]``, token ids.
        start: token id of the first column.
        num_real: columns from here on are padding and are ignored.

    Returns:
        ``[3, rows]`` in fp32, in fp64 for fp64: the largest logit (-inf if no column is real), the sum of
        exp(logit - largest), and the target's logit (0 if the target is not in these columns).
    """
    result: Tensor = torch.ops.megalite.cross_entropy_statistics(logits, targets, start, num_real)
    return result


def cross_entropy_gradient_(
    logits: Tensor, targets: Tensor, statistics: Tensor, grad: Tensor, start: int, num_real: int
) -> Tensor:
    """Replace the logits with grad * (softmax - onehot(target)), and padding with 0.

    Args:
        logits, targets, start, num_real: as in `cross_entropy_statistics`.
        statistics: ``[2, rows]`` over the whole vocabulary: the largest logit and the sum of exponentials.
        grad: gradients of the tokens' losses, ``[rows]``, in the dtype of `statistics`.

    Returns:
        `logits`.
    """
    torch.ops.megalite.cross_entropy_gradient_(logits, targets, statistics, grad, start, num_real)
    torch.autograd.graph.increment_version(logits)  # so that autograd detects uses of the old values
    return logits


@torch.no_grad()
def statistics_reference(logits: Tensor, targets: Tensor, start: int, num_real: int) -> Tensor:
    """Implement the forward in plain PyTorch."""
    pieces = (_statistics(logits[piece], targets[piece], start, num_real) for piece in _pieces(logits))
    return torch.cat(list(pieces), dim=1)


@torch.no_grad()
def gradient_reference(
    logits: Tensor, targets: Tensor, statistics: Tensor, grad: Tensor, start: int, num_real: int
) -> None:
    """Implement the backward in plain PyTorch."""
    for piece in _pieces(logits):
        _replace_by_gradient(
            logits[piece], targets[piece], statistics[:, piece], grad[piece], start, num_real
        )


def _pieces(logits: Tensor) -> list[slice]:
    rows, columns = logits.shape
    size = _PIECE if logits.device.type == "cpu" else _PIECE_OF_GPU
    step = max(1, size // max(1, columns))
    return [slice(begin, min(begin + step, rows)) for begin in range(0, max(1, rows), step)]


def _statistics(logits: Tensor, targets: Tensor, start: int, num_real: int) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if num_real == 0:
        zeros = logits.new_zeros(len(logits), dtype=dtype)
        return torch.stack((zeros - torch.inf, zeros, zeros))
    real = logits[:, :num_real]
    largest = real.amax(-1).to(dtype)
    base = largest.where(largest != -torch.inf, 0.0)
    total = real.to(dtype).sub(base[:, None]).exp_().sum(-1)
    column = targets - start
    is_mine = (column >= 0) & (column < num_real)
    target_logit = real.gather(-1, column.where(is_mine, 0)[:, None]).squeeze(-1).to(dtype)
    return torch.stack((largest, total, target_logit.where(is_mine, 0.0)))


def _replace_by_gradient(
    logits: Tensor, targets: Tensor, statistics: Tensor, grad: Tensor, start: int, num_real: int
) -> None:
    largest, total = statistics
    columns = torch.arange(logits.shape[1], device=logits.device)
    # In this form a compiler computes each element from its column. To add at the target's column, it would
    # need a copy.
    is_target = columns == (targets - start)[:, None]
    result = logits.to(statistics.dtype).sub(largest[:, None]).exp_().mul_((grad / total)[:, None])
    result -= grad[:, None].where(is_target, 0.0)
    logits.copy_(result.where(columns < num_real, 0.0))


def _fake_statistics(logits: Tensor, targets: Tensor, *_: int) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty((3, targets.numel()), dtype=dtype)


define(
    "cross_entropy_statistics",
    "(Tensor logits, Tensor targets, int start, int num_real) -> Tensor",
    statistics_reference,
    _fake_statistics,
    compiled=_statistics,
)
define(
    "cross_entropy_gradient_",
    "(Tensor(a!) logits, Tensor targets, Tensor statistics, Tensor grad, int start, int num_real) -> ()",
    gradient_reference,
    no_result,
    compiled=_replace_by_gradient,
)
