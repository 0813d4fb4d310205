"""Compute a weight's gradient by a GEMM that writes a sum of gradients, or adds to it, in place."""

import functools

import torch
from torch import Tensor

from megalite.kernels.library import NAMESPACE

_OP = f"{NAMESPACE}::add_weight_gradient_"

torch.library.define(_OP, "(Tensor(a!) total, Tensor grad, Tensor x, bool overwrite) -> ()")


def add_weight_gradient_(total: Tensor, grad: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
    """Add ``grad^T x`` to `total`, without a temporary tensor if the device has such a GEMM.

    Then the product of 16-bit factors is not rounded to 16 bits before it is added to an fp32 sum.

    Args:
        total: ``[..., i]``, all dims but the last together o; of the factors' dtype or a wider one. In a
            graph of torch.compile it must be an input as it is: a view of one is made again at the offset of
            the first layer's.
        grad: ``[n, o]``.
        x: ``[n, i]``, of the gradient's dtype.
        overwrite: write to `total` without reading it.
    """
    torch.ops.megalite.add_weight_gradient_(total, grad, x, overwrite)


@functools.cache
def has_widening_gemm(dtype: torch.dtype, total_dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device multiplies in `dtype` into a sum in `total_dtype`; it is tried once.

    It must write 257, which needs more bits than bf16 has, over NaN, and then add it. A meta tensor, where
    nothing can be tried, counts as one on a GPU.
    """
    if device.type == "meta":
        return True
    factor = torch.ones(257, 16, dtype=dtype, device=device)
    total = torch.full((16, 16), torch.nan, dtype=total_dtype, device=device)
    try:
        for overwrite in (True, False):
            _gemm_widened(total, factor, factor, overwrite)
        return bool((total == 2 * 257.0).all())
    except (NotImplementedError, RuntimeError):
        return False


def reference(total: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    """Implement it in plain PyTorch."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), x, beta=0 if overwrite else 1)
    elif overwrite:
        total.copy_(grad.t() @ x)
    else:
        total.add_(grad.t() @ x)


def _implementation(total: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    """Return PyTorch's own GEMM if it widens (as cuBLAS does), else the reference."""
    total = total.flatten(0, -2)
    is_wider = total.dtype != grad.dtype
    if is_wider and has_widening_gemm(grad.dtype, total.dtype, grad.device):
        _gemm_widened(total, grad, x, overwrite)
    else:
        reference(total, grad, x, overwrite)


def _gemm_widened(total: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    beta = 0 if overwrite else 1
    torch.ops.aten.addmm.dtype_out(total, grad.t(), x, total.dtype, beta=beta, out=total)


torch.library.impl(_OP, "default", _implementation)


@torch.library.register_fake(_OP)
def _fake(total: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    return None
