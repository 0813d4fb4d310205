"""Define the operators, one per file: schema, fake implementation, autograd, plain PyTorch reference."""

from megalite.kernels.activations import (
    bias_gelu,
    bias_swiglu,
    gelu_linear_backward,
    has_linear_gelu,
    linear_gelu,
)
from megalite.kernels.adamw import adamw_
from megalite.kernels.cross_entropy import cross_entropy_gradient_, cross_entropy_statistics
from megalite.kernels.dropout import ResidualSum, bias_dropout_add, dropout
from megalite.kernels.flash_attention import flash_attention
from megalite.kernels.library import implementation, is_compiled
from megalite.kernels.moments import round_moments_, wide_exp_avg
from megalite.kernels.norm import layer_norm, layer_norm_on, rms_norm, rms_norm_on
from megalite.kernels.philox import fill_normal_, site_key
from megalite.kernels.recurrence import recurrence, recurrence_problem
from megalite.kernels.rotary import rotate
from megalite.kernels.softmax import CausalSoftmax, Drop, VisibleKeys
from megalite.kernels.token_rows import copy_to_rows, sum_rows
from megalite.kernels.weight_gradient import add_weight_and_bias_gradient_, add_weight_gradient_

__all__ = [
    "CausalSoftmax",
    "Drop",
    "ResidualSum",
    "VisibleKeys",
    "adamw_",
    "add_weight_and_bias_gradient_",
    "add_weight_gradient_",
    "bias_dropout_add",
    "bias_gelu",
    "bias_swiglu",
    "copy_to_rows",
    "cross_entropy_gradient_",
    "cross_entropy_statistics",
    "describe",
    "dropout",
    "fill_normal_",
    "flash_attention",
    "gelu_linear_backward",
    "has_linear_gelu",
    "layer_norm",
    "layer_norm_on",
    "linear_gelu",
    "recurrence",
    "recurrence_problem",
    "rms_norm",
    "rms_norm_on",
    "rotate",
    "round_moments_",
    "site_key",
    "sum_rows",
    "wide_exp_avg",
]

_OPS = (
    "bias_dropout_add",
    "bias_gelu",
    "bias_swiglu",
    "causal_softmax_",
    "cross_entropy_gradient_",
    "cross_entropy_statistics",
    "dropout",
    "fill_normal_",
    "rms_norm",
    "rotate",
)
_CPU_OPS = ("round_moments_",)  # on a GPU always Triton's
_CUDA_OPS = ("layer_norm",)  # on a CPU PyTorch's own is used
_LIBRARY_OPS = (
    "adamw_",
    "add_weight_and_bias_gradient_",
    "bias_dropout_add_norm",
    "linear_gelu",
)  # without a compiled kernel PyTorch's own, or two operators


def describe(device_type: str = "cpu") -> str:
    """Return one line for the log that names the implementation of each operator."""
    names: dict[str, list[str]] = {}
    ops = list(_OPS)
    if device_type == "cuda":
        ops += [*_CUDA_OPS, *(op for op in _LIBRARY_OPS if is_compiled(op, "cuda"))]
    elif device_type == "cpu":
        ops += _CPU_OPS
    for op in ops:
        names.setdefault(implementation(op, device_type), []).append(op)
    return "; ".join(f"{', '.join(ops)}: {serving}" for serving, ops in names.items())
