"""Compute dropout by counter, alone or in residual + dropout(x + bias), which ends a block of a transformer.

The mask depends only on the sample and the element. The layout, the microbatch size, recomputation and
resuming do not change a mask. Masks are not stored: the backward computes them again.

Compiled layers pass the key of the sum in a tensor, so that one graph serves all layers. An integer would be
a constant of the compiled graph, but the dropout of each layer has a different key. In a tensor on the host,
the key is an input of the graph, and reading it does not synchronize with the GPU.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.kernels.library import define, like_first
from megalite.kernels.philox import random_words, signed64

_PIECE = 1 << 20  # elements that the reference computes at a time, to bound its int64 temporaries
_MAX_ROWS, _COLUMNS = 32, 128  # size of a block of the Triton kernel


def dropout(
    x: Tensor, p: float, key: int, sample_numbers: Tensor, *, base: int = 0, stride: int | None = None
) -> Tensor:
    """Set each element to zero with probability `p` and scale the others by 1 / (1 - p).

    `x` is [outer, b, *rest] with the sample in dim 1. Within its sample, element (o, ..., r) has the index
    `base + o * stride + r`, where r is its linear index in `rest`; the same key, sample number and index give
    the same result everywhere. An element is kept if its random 32-bit word is at least round(p * 2^32).

    Hidden states [s, b, h] need only the defaults, a shard of the sequence base = first position * h.
    Attention probabilities [b, heads, s, s] are passed as `x.unsqueeze(0)`, with base = first head * s * s.

    Args:
        x: [outer, b, *rest], fp64, fp32, bf16 or fp16.
        p: probability of a zero, 0 <= p < 1; at 0 `x` itself is returned.
        key: 64 bits, from `site_key(seed, site's name)`.
        sample_numbers: int64, [b], the number of each sample in the run.
        base: index of the first element within the sample's full tensor.
        stride: distance between `outer` neighbours in the sample's full tensor; the size of `rest` by
            default.

    Raises:
        ValueError: `p` out of range, sample numbers that do not fit dim 1 of `x`, or a negative index.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout needs 0 <= p < 1: got {p}")
    if x.dim() < 2 or sample_numbers.shape != x.shape[1:2] or sample_numbers.dtype != torch.int64:
        raise ValueError(
            f"dropout needs x [outer, b, ...] and int64 sample_numbers [b]: got {tuple(x.shape)} and "
            f"{sample_numbers.dtype} {tuple(sample_numbers.shape)}"
        )
    distance = math.prod(x.shape[2:]) if stride is None else stride
    if base < 0 or distance < 0:
        raise ValueError(f"dropout needs base >= 0 and stride >= 0: got {base} and {distance}")
    if keep_threshold(p) == 0:  # also a p that 32 bits cannot tell from 0
        return x
    result: Tensor = torch.ops.megalite.dropout(x, sample_numbers, p, signed64(key), base, distance)
    return result


def reference(x: Tensor, sample_numbers: Tensor, p: float, key: int, base: int, stride: int) -> Tensor:
    """Implement the operator in plain PyTorch, with the same bits as the compiled one."""
    outer, num_samples = x.shape[:2]
    rest = math.prod(x.shape[2:])
    flat = x.reshape(outer, num_samples, rest)
    threshold = keep_threshold(p)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = 1.0 / (1.0 - p)  # torch rounds it to the dtype of the product
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    first = base + stride * torch.arange(outer, device=x.device).unsqueeze(-1)  # [outer, 1]
    width = max(1, _PIECE // max(1, outer * num_samples))
    for begin in range(0, rest, width):
        piece = flat[..., begin : begin + width]
        keep = random_words(first + begin, piece.shape[-1], sample_numbers, key) >= threshold
        kept = (piece.to(wide) * scale).to(x.dtype)
        out[..., begin : begin + width] = torch.where(keep, kept, torch.zeros_like(kept))
    return out.view(x.shape)


def keep_threshold(p: float) -> int:
    """Return the smallest random 32-bit word with which an element is kept."""
    return min(round(p * 2**32), 2**32 - 1)


def launch(x: Tensor, sample_numbers: Tensor, p: float, key: int, base: int, stride: int) -> Tensor:
    """Run the Triton kernel."""
    return launch_kernel(x, None, None, sample_numbers, p, key, base, stride)[0]


def launch_kernel(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    sample_numbers: Tensor,
    p: float,
    key: int,
    base: int,
    stride: int,
    *,
    has_sums: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run the Triton kernel of residual + dropout(x + bias). Without bias it can also sum dropout(x).

    Args:
        has_sums: also sum over the first two dims.

    Returns:
        The result, of the shape and dtype of `x`, and the sums in at least fp32, with one dim, or None.
    """
    from megalite.kernels import triton_random as kernels  # imports Triton, which a CPU does not need

    x, sample_numbers = x.contiguous(), sample_numbers.contiguous()
    bias, residual = (None if each is None else each.contiguous() for each in (bias, residual))
    out, b, width = torch.empty_like(x), x.shape[1], math.prod(x.shape[2:])
    num_rows, wide = x.shape[0] * b, torch.promote_types(x.dtype, torch.float32)
    m = min(_MAX_ROWS, 1 << max(0, num_rows - 1).bit_length())
    sums = x.new_empty(-(-num_rows // m), width, dtype=wide) if has_sums else None
    if x.numel():
        with torch.cuda.device_of(x):
            kernels.dropout_kernel[(-(-num_rows // m) * -(-width // _COLUMNS),)](
                *(x, bias, residual, out, sums, sample_numbers if p else None),
                *(b, num_rows, width, key, base, stride, keep_threshold(p), 1.0 / (1.0 - p)),
                WIDE=kernels.wide_type(x.dtype),
                ALIGNED=base % 4 == 0 and stride % 4 == 0,
                M=m,
                N=_COLUMNS,
                enable_fp_fusion=False,  # round a product and a sum separately, as on a CPU
            )
    return out, None if sums is None else sums.sum(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, sample_numbers, *ctx.site = inputs
    ctx.save_for_backward(sample_numbers)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (sample_numbers,) = ctx.saved_tensors
    return torch.ops.megalite.dropout(grad, sample_numbers, *ctx.site), None, None, None, None, None


define(
    "dropout",
    "(Tensor x, Tensor sample_numbers, float p, int key, int base, int stride) -> Tensor",
    reference,
    like_first,
    save=_save,
    backward=_backward,
    triton=launch,
)


class ResidualSum(NamedTuple):
    """Operands of `bias_dropout_add`, for a norm whose kernel also computes the sum."""

    x: Tensor
    bias: Tensor | None
    residual: Tensor
    p: float
    key: int
    sample_numbers: Tensor
    base: int = 0

    def compute(self) -> Tensor:
        """Return the sum."""
        return bias_dropout_add(*self[:-1], base=self.base)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    key: int,
    sample_numbers: Tensor,
    *,
    base: int = 0,
) -> Tensor:
    """Return residual + dropout(x + bias), with the mask of `dropout` for the same key, samples and base.

    It is computed in fp32 (fp64 for fp64) and rounded once. Neither the mask nor `x` is stored: the backward
    computes the mask again, and sums the bias' gradient in the same kernel.

    Args:
        x: ``[n, b, h]``, fp64, fp32, bf16 or fp16.
        bias: ``[h]``, or None.
        residual: as `x`.
        p: probability of a zero, 0 <= p < 1.
        key: 64 bits, from `site_key(seed, site's name)`.
        sample_numbers: int64 ``[b]``, the number of each sample in the run.
        base: index of the first element within the sample's full tensor.

    Raises:
        ValueError: `p` or `base` out of range, or sample numbers that do not fit dim 1 of `x`.
    """
    check_sum(x, p, sample_numbers, base)
    if p == 0.0 and bias is None:
        return residual + x
    result: Tensor = torch.ops.megalite.bias_dropout_add(
        x, bias, residual, sample_numbers, p, signed64(key), base
    )
    return result


def check_sum(x: Tensor, p: float, sample_numbers: Tensor, base: int) -> None:
    """Raise ValueError for invalid arguments of `bias_dropout_add`."""
    if not 0.0 <= p < 1.0 or base < 0:
        raise ValueError(f"bias_dropout_add needs 0 <= p < 1 and base >= 0: got {p} and {base}")
    if x.dim() != 3 or sample_numbers.shape != x.shape[1:2] or sample_numbers.dtype != torch.int64:
        raise ValueError(
            f"bias_dropout_add needs x [n, b, h] and int64 sample_numbers [b]: got {tuple(x.shape)} and "
            f"{sample_numbers.dtype} {tuple(sample_numbers.shape)}"
        )


def key_tensor(key: int) -> Tensor:
    """Return the 64 bits of a key as a scalar on the host."""
    return torch.tensor(signed64(key), dtype=torch.int64, device="cpu")


def key_from_tensor(tensor: Tensor) -> int:
    """Return the key that `key_tensor` was called with."""
    return int(tensor) % (1 << 64)


def traced_bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    key: Tensor,
    sample_numbers: Tensor,
    *,
    base: int = 0,
) -> Tensor:
    """Compute the same as `bias_dropout_add` in a graph, with the same bits.

    Without dropout it uses PyTorch operators, which the compiler fuses with their neighbours, computes in
    fp32 and rounds once. An explicit cast here would add a pass in backward.

    Args:
        key: from `key_tensor`.
    """
    if p == 0.0:
        return residual + (x if bias is None else x + bias)
    result: Tensor = torch.ops.megalite.bias_dropout_add_by_tensor(
        x, bias, residual, sample_numbers, key, p, base
    )
    return result


def sum_reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    sample_numbers: Tensor,
    p: float,
    key: int,
    base: int,
) -> Tensor:
    """Implement the operator in plain PyTorch, with the same bits as the compiled one."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype) if bias is None else x.to(dtype) + bias
    # Evaluation has p = 0 and needs no random words.
    dropped = reference(wide, sample_numbers, p, key, base, x.shape[-1]) if p else wide
    return (residual + dropped).to(x.dtype)


def backward_reference(
    grad: Tensor, sample_numbers: Tensor, p: float, key: int, base: int
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `x` (same bits as compiled) and of the bias in plain PyTorch."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    dropped = reference(wide, sample_numbers, p, key, base, grad.shape[-1])
    return dropped.to(grad.dtype), dropped.flatten(0, 1).sum(0).to(grad.dtype)


def launch_sum(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    sample_numbers: Tensor,
    p: float,
    key: int,
    base: int,
) -> Tensor:
    """Run the Triton kernel of the forward."""
    return launch_kernel(x, bias, residual, sample_numbers, p, key, base, x.shape[-1])[0]


def launch_backward(
    grad: Tensor, sample_numbers: Tensor, p: float, key: int, base: int
) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel of the backward."""
    x_grad, sums = launch_kernel(
        grad, None, None, sample_numbers, p, key, base, grad.shape[-1], has_sums=True
    )
    assert sums is not None
    return x_grad, sums.to(grad.dtype)


def _traced(*arguments: Any) -> Tensor:
    *tensors, key, p, base = arguments
    result: Tensor = torch.ops.megalite.bias_dropout_add(*tensors, p, int(key), base)
    return result


def _traced_backward(
    grad: Tensor, sample_numbers: Tensor, key: Tensor, p: float, base: int
) -> tuple[Tensor, Tensor]:
    x_grad, bias_grad = torch.ops.megalite.bias_dropout_add_backward(grad, sample_numbers, p, int(key), base)
    return x_grad, bias_grad


def _fake_backward(grad: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[-1:])


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, sample_numbers, *ctx.site = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(sample_numbers)


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (sample_numbers,) = ctx.saved_tensors
    if ctx.site[0] == 0.0:
        x_grad, bias_grad = grad, grad.flatten(0, 1).sum(0)
    else:
        x_grad, bias_grad = torch.ops.megalite.bias_dropout_add_backward(grad, sample_numbers, *ctx.site)
    return x_grad, bias_grad if ctx.has_bias else None, grad, None, None, None, None


def _save_traced(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, sample_numbers, key, *ctx.site = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(sample_numbers, key)


def _differentiate_traced(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x_grad, bias_grad = torch.ops.megalite.bias_dropout_add_by_tensor_backward(
        grad.contiguous(), *ctx.saved_tensors, *ctx.site
    )
    return x_grad, bias_grad if ctx.has_bias else None, grad, None, None, None, None


_TENSORS = "Tensor x, Tensor? bias, Tensor residual, Tensor sample_numbers"

define(
    "bias_dropout_add",
    f"({_TENSORS}, float p, int key, int base) -> Tensor",
    sum_reference,
    like_first,
    save=_save_sum,
    backward=_sum_backward,
    triton=launch_sum,
)
define(
    "bias_dropout_add_backward",
    "(Tensor grad, Tensor sample_numbers, float p, int key, int base) -> (Tensor, Tensor)",
    backward_reference,
    _fake_backward,
    triton=launch_backward,
)
define(
    "bias_dropout_add_by_tensor",
    f"({_TENSORS}, Tensor key, float p, int base) -> Tensor",
    _traced,
    like_first,
    save=_save_traced,
    backward=_differentiate_traced,
)
define(
    "bias_dropout_add_by_tensor_backward",
    "(Tensor grad, Tensor sample_numbers, Tensor key, float p, int base) -> (Tensor, Tensor)",
    _traced_backward,
    _fake_backward,
)
