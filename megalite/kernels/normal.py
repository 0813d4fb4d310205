"""Generate normal numbers by counter: initial weights that do not depend on the layout.

The bits are the same on every machine and device, so a rank fills its shard without a full tensor or a
broadcast.
"""

import torch
from torch import Tensor

from megalite.kernels.library import NAMESPACE
from megalite.kernels.philox import random_words, signed64, standard_normal

_OP = f"{NAMESPACE}::fill_normal_"
_PIECE = 1 << 20  # elements that the reference computes at a time, to bound its int64 and fp64 temporaries

torch.library.define(
    _OP, "(Tensor(a!) out, float std, float mean, int key, int base, int run_length, int run_stride) -> ()"
)


def fill_normal_(
    out: Tensor,
    key: int,
    *,
    std: float,
    mean: float = 0.0,
    base: int = 0,
    run_length: int | None = None,
    run_stride: int | None = None,
) -> Tensor:
    """Fill a local shard with the normal numbers that its elements have in the full tensor.

    Element e of `out` is element `base + (e // run_length) * run_stride + e % run_length` of the full
    tensor: a slice along a dim consists of evenly spaced runs of consecutive elements. Numbers are computed
    in fp64 and rounded to fp32, then to the dtype of `out`, so a bf16 weight is the rounded fp32 weight.

    Args:
        out: contiguous, fp64, fp32, bf16 or fp16.
        key: 64 bits, from `site_key(seed, parameter's full name)`.
        std: standard deviation.
        mean: mean.
        base: index of the first element in the full tensor.
        run_length: number of consecutive elements in a run; by default all of `out`.
        run_stride: distance between the first elements of consecutive runs; by default `run_length`.

    Returns:
        `out`.

    Raises:
        ValueError: `out` is not contiguous, or an index would be negative.
    """
    length = max(1, out.numel()) if run_length is None else run_length
    stride = length if run_stride is None else run_stride
    if not out.is_contiguous():
        raise ValueError(f"fill_normal_ needs a contiguous tensor: got strides {out.stride()}")
    if base < 0 or length < 1 or stride < 0:
        raise ValueError(
            f"fill_normal_ needs base >= 0, run_length >= 1, run_stride >= 0: got {base}, {length}, {stride}"
        )
    torch.ops.megalite.fill_normal_(out, std, mean, signed64(key), base, length, stride)
    return out


@torch.no_grad()
def reference(
    out: Tensor, std: float, mean: float, key: int, base: int, run_length: int, run_stride: int
) -> None:
    """Implement the operator in plain PyTorch, with the same bits as the compiled one."""
    flat = out.view(-1)
    sample = torch.zeros((), dtype=torch.int64, device=out.device)
    for begin in range(0, flat.numel(), _PIECE):
        piece = flat[begin : begin + _PIECE]
        element = torch.arange(begin, begin + piece.numel(), device=out.device)
        run = element.div(run_length, rounding_mode="floor")
        index = base + run * run_stride + (element - run * run_length)
        value = standard_normal(random_words(index, 1, sample, key).squeeze(-1)) * std + mean
        piece.copy_(value if out.dtype == torch.float64 else value.float())


torch.library.impl(_OP, "default", reference)  # on every device without a compiled kernel


@torch.library.register_fake(_OP)
def _fake(
    out: Tensor, std: float, mean: float, key: int, base: int, run_length: int, run_stride: int
) -> None:
    """Do nothing: a meta tensor has no values to change."""
