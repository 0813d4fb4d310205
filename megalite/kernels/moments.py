"""Round the moments of Adam to 16 or 8 bits at random, so that the mean of the rounded moment is the moment.

Rounding to nearest would lose the second moment's small steps: with beta2 = 0.999 it changes by a thousandth
per update, and a step of bf16 is a 128th to a 256th of it. Here a number between two neighbours of the format
becomes the upper one with a probability equal to its distance from the lower one. The random word is a
function of key, update and the element's index in the full parameter, as in `megalite.kernels.philox`: it is
the same in every layout.

    moment        format      scale
    exp_avg_sq    bf16        none: bf16 has the exponents of fp32
    exp_avg       bf16        none
    exp_avg       fp8 (e4m3)  2^(k - 3), where 2^k is the root of the element's own exp_avg_sq up to a factor
                              of 2, k = floor(exponent / 2)

The scale of e4m3 needs no memory and no block of elements that a layout could cut. The update depends on
exp_avg / sqrt(exp_avg_sq): this is what is rounded, to 4 digits, or a multiple of 2^-12 if it is small. By
Cauchy's inequality it is at most (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)), which is 7.3 for
Adam's default betas. Magnitudes above 28 do not fit if beta1^2 is near or above beta2, and become the largest
number. A scale is a power of two: a moment that is not updated keeps all its bits.
"""

import torch
from torch import Tensor

from megalite.kernels.library import define, no_result
from megalite.kernels.philox import random_words, signed64

_PIECE = 1 << 18  # elements that the reference computes at a time, to bound its int64 temporaries
_BLOCK = 1024  # elements of a block of the Triton kernel
_LARGEST = 448.0
_SHIFT = 120 << 23  # fp32's bits minus this are e4m3's bits, 20 places further up
_SMALLEST_NORMAL = 2.0**-6


def round_moments_(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rounded: Tensor | None,
    rounded_sq: Tensor | None,
    number: Tensor,
    key: int,
    *,
    base: int,
    first: int,
    run_length: int,
    run_stride: int,
) -> None:
    """Round moments of consecutive elements of a local box.

    Element e has the index ``base + (f // run_length) * run_stride + f % run_length`` in the full parameter,
    where f = first + e.

    Args:
        exp_avg, exp_avg_sq: moments, fp32, ``[n]``, contiguous.
        rounded: receives exp_avg in bf16 or float8_e4m3fn, ``[n]``; None to skip it.
        rounded_sq: receives exp_avg_sq in bf16, ``[n]``; None if the state keeps `exp_avg_sq` as it is.
        number: number of the update, an fp32 scalar on the device.
        key: 64 bits, from `site_key(seed, parameter's name)`.
    """
    torch.ops.megalite.round_moments_(
        exp_avg,
        exp_avg_sq,
        rounded,
        rounded_sq,
        number,
        signed64(key),
        base,
        first,
        run_length,
        run_stride,
    )


def reference(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rounded: Tensor | None,
    rounded_sq: Tensor | None,
    number: Tensor,
    key: int,
    base: int,
    first: int,
    run_length: int,
    run_stride: int,
) -> None:
    """Implement the operator in plain PyTorch, with the same bits as the compiled one."""
    sample = number.long()
    for start in range(0, exp_avg.numel(), _PIECE):
        own = slice(start, min(start + _PIECE, exp_avg.numel()))
        element = torch.arange(first + own.start, first + own.stop, device=exp_avg.device)
        run = element.div(run_length, rounding_mode="floor")
        index = base + run * run_stride + (element - run * run_length)
        words = random_words(index, 1, sample, key).squeeze(-1)
        squares = exp_avg_sq[own]
        if rounded_sq is not None:
            rounded_sq[own] = _to_bf16(squares, words & 0xFFFF)
            squares = rounded_sq[own].float()
        if rounded is not None and rounded.dtype == torch.bfloat16:
            rounded[own] = _to_bf16(exp_avg[own], words >> 16)
        elif rounded is not None:
            values = (exp_avg[own] * _power(-scale_exponents(squares))).clamp(-_LARGEST, _LARGEST)
            rounded.view(torch.uint8)[own] = _to_e4m3(values, words >> 16)


def launch(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rounded: Tensor | None,
    rounded_sq: Tensor | None,
    number: Tensor,
    *site: int,
) -> None:
    """Run the Triton kernel."""
    from megalite.kernels import triton_random as kernels  # imports Triton, which a CPU does not need

    if not exp_avg.numel():
        return
    is_e4m3 = rounded is not None and rounded.dtype == torch.float8_e4m3fn
    with torch.cuda.device_of(exp_avg):
        kernels.round_moments_kernel[(-(-exp_avg.numel() // _BLOCK),)](
            exp_avg,
            exp_avg_sq,
            None if rounded is None else rounded.view(torch.uint8 if is_e4m3 else torch.int16),
            None if rounded_sq is None else rounded_sq.view(torch.int16),
            number,
            exp_avg.numel(),
            *site,
            IS_E4M3=is_e4m3,
            N=_BLOCK,
            enable_fp_fusion=False,
        )


def _to_bf16(values: Tensor, words: Tensor) -> Tensor:
    """Round fp32 to bf16 with 16 random bits: adding them to the bits below carries with the probability."""
    return ((values.view(torch.int32) + words) >> 16).to(torch.int16).view(torch.bfloat16)


def _to_e4m3(values: Tensor, words: Tensor) -> Tensor:
    """Round fp32 up to 448 to e4m3 with 16 random bits; return the codes, uint8."""
    size = values.abs()
    normal = size.view(torch.int32) - _SHIFT
    # Below, e4m3's numbers are multiples of 2^-9, and here of 2^-29.
    magnitude = torch.where(size < _SMALLEST_NORMAL, (size * 2.0**29).int(), normal)
    code = (magnitude + (words << 4)) >> 20
    return (code + 128 * values.signbit()).to(torch.uint8)


def scale_exponents(exp_avg_sq: Tensor) -> Tensor:
    """Return the exponents of the scales of e4m3 for elements with these second moments, int32.

    Args:
        exp_avg_sq: stored second moments, in any dtype.
    """
    exponents = (exp_avg_sq.float().view(torch.int32) >> 23) - 127
    return (exponents >> 1) - 3


def _power(exponents: Tensor) -> Tensor:
    return ((exponents + 127) << 23).view(torch.float32)


def wide_exp_avg(codes: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Return the first moments that e4m3 codes stand for, fp32; bf16 holds them exactly.

    Args:
        codes: float8_e4m3fn, ``[n]``.
        exp_avg_sq: stored second moments, ``[n]``.
    """
    # A table, because torch converts e4m3 one by one on a CPU.
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype).float()
    return table.index_select(0, codes.view(torch.uint8).int()) * _power(scale_exponents(exp_avg_sq))


define(
    "round_moments_",
    "(Tensor exp_avg, Tensor exp_avg_sq, Tensor(a!)? rounded, Tensor(b!)? rounded_sq, Tensor number, "
    "int key, int base, int first, int run_length, int run_stride) -> ()",
    reference,
    no_result,
    triton=launch,
)
