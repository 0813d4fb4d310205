"""Apply rotary position embedding (Su et al. 2021) in one kernel, pairing the two halves of each head."""

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.library import define, like_first


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair (i, i + d/2) of a head's elements by its token's angle.

    It is computed in the dtype of the tables and rounded once. The backward rotates the gradient back and
    does not save `x`.

    Args:
        x: ``[s, b, n, d]``, fp64, fp32, bf16 or fp16; heads need not be contiguous, and are read in place.
        cosine: ``[s, b or 1, 1, d]`` in fp32 (fp64 for fp64); its two halves are equal.
        sine: like `cosine`.

    Returns:
        ``[s, b, n, d]``, contiguous.
    """
    # On a GPU, a graph fuses the rotation with the split of queries, keys and values. On a CPU our kernel is
    # faster.
    if torch.compiler.is_compiling() and not x.is_cpu:
        return reference(x, cosine, sine, False)
    result: Tensor = torch.ops.megalite.rotate(x, cosine, sine, False)
    return result


def reference(x: Tensor, cosine: Tensor, sine: Tensor, inverse: bool) -> Tensor:
    """Implement the operator in plain PyTorch."""
    first, second = x.chunk(2, dim=-1)
    crossed = torch.cat((second, -first) if inverse else (-second, first), dim=-1)
    return (x * cosine + crossed * sine).to(x.dtype).contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cosine, sine, ctx.inverse = inputs
    ctx.save_for_backward(cosine, sine)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.megalite.rotate(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


define(
    "rotate",
    "(Tensor x, Tensor cosine, Tensor sine, bool inverse) -> Tensor",
    reference,
    like_first,
    save=_save,
    backward=_backward,
    compiled=reference,
)
