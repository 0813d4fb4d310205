"""Update weights by AdamW (Loshchilov and Hutter 2019) and round them to 16 bits, in one pass over memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.kernels.library import define, no_result
from megalite.utils.torch_private import foreach_copy_, foreach_mul_, fused_adamw_


def adamw_(
    main: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    rounded: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    number: Tensor,
    divisor: Tensor | None,
    is_good: Tensor,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    epsilon: float,
) -> None:
    """Divide the gradients and update weights and moments, unless `is_good` is False.

    The compiled kernel reads each gradient, weight and moment once and writes weights, moments and rounded
    weights once: 30 bytes per element. Without it, PyTorch's fused kernel runs. That kernel also writes the
    divided gradients, and a second kernel rounds the weights.

    Args:
        main: main weights, fp32 or fp64, contiguous.
        exp_avg: first moments, like `main`.
        exp_avg_sq: second moments, like `main`.
        rounded: model weights in bf16 or fp16, overwritten with the rounded main weights; empty if the model
            uses `main`.
        gradients: like `main`; their values may be overwritten.
        number: number of this update, counted from 1, an fp32 scalar on the device.
        divisor: divides the gradients, an fp64 scalar on the device; None for 1.
        is_good: bool scalar on the device; if it is False, nothing changes.
    """
    torch.ops.megalite.adamw_(
        main,
        exp_avg,
        exp_avg_sq,
        rounded,
        gradients,
        number,
        divisor,
        is_good,
        learning_rate,
        *betas,
        weight_decay,
        epsilon,
    )


def reference(
    main: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    rounded: list[Tensor],
    gradients: list[Tensor],
    number: Tensor,
    divisor: Tensor | None,
    is_good: Tensor,
    learning_rate: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    epsilon: float,
) -> None:
    """Implement the operator in plain PyTorch.

    It does not use the class `torch.optim.AdamW`, whose constructor imports torch's compiler (a second or
    more at the start of each rank) and which counts the steps of each tensor.
    """
    if divisor is not None and main[0].dtype == torch.float64:
        foreach_mul_(gradients, torch.where(is_good, divisor.reciprocal(), 1.0))
        divisor = None  # the fused op would round it to fp32
    fused_adamw_(
        main,
        gradients,
        exp_avg,
        exp_avg_sq,
        [],
        [number] * len(main),
        lr=learning_rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=None if divisor is None else divisor.float(),
        found_inf=is_good.logical_not().float(),
    )
    if rounded:
        foreach_copy_(rounded, main)


define(
    "adamw_",
    "(Tensor(a!)[] main, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, Tensor(d!)[] rounded, "
    "Tensor(e!)[] gradients, Tensor number, Tensor? divisor, Tensor is_good, float learning_rate, "
    "float beta1, float beta2, float weight_decay, float epsilon) -> ()",
    reference,
    no_result,
)
