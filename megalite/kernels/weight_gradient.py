"""Compute the gradient of a weight with a GEMM that writes or adds to the sum of gradients in place.

On a GPU, cuBLASLt can also sum the gradient of the bias in the same GEMM. Our CUDA library calls it.
"""

import functools

import torch
from torch import Tensor

from megalite.kernels.library import define, is_compiled, no_result, passes_trial

_WITH_BIAS = "add_weight_and_bias_gradient_"


def add_weight_gradient_(
    total: Tensor, grad: Tensor, x: Tensor, *, overwrite: bool = False, is_written: Tensor | None = None
) -> None:
    """Add ``grad^T x`` to `total`, without a temporary tensor if the device has such a GEMM.

    Such a GEMM does not round the product of 16-bit factors to 16 bits before it adds it to an fp32 sum.

    Args:
        total: ``[..., i]``, where all dims except the last have o elements together; in the dtype of the
            factors or a wider one. In a graph of torch.compile it must itself be an input: the graph would
            recreate a view of an input with the offset of the first layer.
        grad: ``[n, o]``.
        x: ``[n, i]``, in the dtype of `grad`.
        overwrite: write to `total` without reading it.
        is_written: a bool in host memory that decides this when the operator runs, for graphs: it overwrites
            `total` if this is False, and sets it.
    """
    torch.ops.megalite.add_weight_gradient_(total, grad, x, overwrite, is_written)


def add_weight_and_bias_gradient_(
    total: Tensor, grad: Tensor, x: Tensor, *, overwrite: bool = False
) -> Tensor:
    """Call `add_weight_gradient_`, and return the sum of `grad` over its rows, ``[o]`` in its dtype.

    One GEMM computes both if `has_bias_gradient_gemm` is true.
    """
    if has_bias_gradient_gemm(total, grad, x):
        sums: Tensor = torch.ops.megalite.add_weight_and_bias_gradient_(total, grad, x, overwrite)
        return sums.to(grad.dtype)
    add_weight_gradient_(total, grad, x, overwrite=overwrite)
    return grad.sum(0)


def has_bias_gradient_gemm(total: Tensor, grad: Tensor, x: Tensor) -> bool:
    """Return whether a GPU has the GEMM for these tensors; the arguments are as in `add_weight_gradient_`.

    The GEMM runs once, on small tensors, and must agree with the reference; otherwise a warning is logged.
    """
    is_aligned = grad.shape[-1] % 8 == 0 and x.shape[-1] % 8 == 0
    is_16_bit = grad.dtype in (torch.bfloat16, torch.float16)
    if not (grad.is_cuda and is_16_bit and is_aligned and total.dtype == torch.float32):
        return False
    return is_compiled(_WITH_BIAS, "cuda") and _agrees(grad.dtype, grad.device)


@functools.cache
def _agrees(dtype: torch.dtype, device: torch.device) -> bool:
    return passes_trial(
        lambda: _difference(dtype, device),
        "The gradient of a bias is summed in a separate kernel, not in a GEMM of cuBLASLt",
    )


def _difference(dtype: torch.dtype, device: torch.device) -> str:
    """Return which result differs from the exact result, or an empty string. Results are small integers."""
    grad = torch.arange(24 * 64, device=device).view(24, 64) % 7 - 3
    x = torch.arange(24 * 32, device=device).view(24, 32) % 5 - 2
    for overwrite in (True, False):
        total = torch.full((64, 32), torch.nan if overwrite else 1.0, device=device)
        expected = (0.0 if overwrite else 1.0) + grad.float().t() @ x.float()
        sums = torch.ops.megalite.add_weight_and_bias_gradient_(total, grad.to(dtype), x.to(dtype), overwrite)
        if not torch.equal(total, expected):
            return f"the gradient of the weight in {dtype} differs from PyTorch's"
        if not torch.equal(sums, grad.float().sum(0)):
            return f"the gradient of the bias in {dtype} differs from PyTorch's"
    return ""


@functools.cache
def has_widening_gemm(dtype: torch.dtype, total_dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device has a GEMM from `dtype` into a sum in `total_dtype`, by running it once.

    It must overwrite NaN with 257, which needs more bits than bf16 has, and then add 257. The meta device
    cannot run it, and is treated like a GPU.
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
    """Implement `add_weight_gradient_` in plain PyTorch."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), x, beta=0 if overwrite else 1)
    elif overwrite:
        total.copy_(grad.t() @ x)
    else:
        total.add_(grad.t() @ x)


def _implementation(
    total: Tensor, grad: Tensor, x: Tensor, overwrite: bool, is_written: Tensor | None = None
) -> None:
    """Run PyTorch's GEMM if it writes to the wider type (as with cuBLAS), otherwise the reference."""
    if is_written is not None:
        overwrite = not is_written.item()
        is_written.fill_(True)
    total = total.flatten(0, -2)
    is_wider = total.dtype != grad.dtype
    if is_wider and has_widening_gemm(grad.dtype, total.dtype, grad.device):
        _gemm_widened(total, grad, x, overwrite)
    else:
        reference(total, grad, x, overwrite)


def _gemm_widened(total: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    beta = 0 if overwrite else 1
    torch.ops.aten.addmm.dtype_out(total, grad.t(), x, total.dtype, beta=beta, out=total)


def _implementation_with_bias(total: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> Tensor:
    _implementation(total, grad, x, overwrite)
    return grad.sum(0, dtype=total.dtype)


def _fake_with_bias(total: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> Tensor:
    return total.new_empty(grad.shape[-1])


_ARGUMENTS = "Tensor(a!) total, Tensor grad, Tensor x, bool overwrite"
define(
    "add_weight_gradient_",
    f"({_ARGUMENTS}, Tensor(b!)? is_written=None) -> ()",
    _implementation,
    no_result,
)
define(_WITH_BIAS, f"({_ARGUMENTS}) -> Tensor", _implementation_with_bias, _fake_with_bias)
