"""Moments rounded at random: an oracle in numpy and ml_dtypes, the compiled kernel, and the mean."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.kernels import round_moments_, site_key, wide_exp_avg
from megalite.kernels.moments import reference
from megalite.kernels.philox import random_words, signed64

KEY = site_key(1234, "layers.0.mlp.up.weight.moments")
NUMBER = 17
E4M3 = torch.float8_e4m3fn
NUMBERS_OF = {torch.bfloat16: ml_dtypes.bfloat16, E4M3: ml_dtypes.float8_e4m3fn}


def moments(num: int) -> tuple[Tensor, Tensor]:
    """First and second moments of Adam's, of many magnitudes; some are zero."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.exp(4 * torch.randn(num, generator=generator) - 12)
    signs = torch.randn(num, generator=generator)
    exp_avg, exp_avg_sq = signs * sizes, sizes * sizes * torch.rand(num, generator=generator)
    exp_avg[::7] = 0.0
    exp_avg_sq[::14] = 0.0
    return exp_avg, exp_avg_sq


def outputs(num: int, dtype: torch.dtype | None, sq_dtype: torch.dtype | None) -> list[Tensor | None]:
    return [None if each is None else torch.zeros(num, dtype=each) for each in (dtype, sq_dtype)]


def neighbour(values: np.ndarray, words: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The number of the format below or above, by its distance and 16 random bits, from the table of all."""
    codes = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # NaN
        table = codes.view(NUMBERS_OF[dtype]).astype(np.float64)
    table = np.unique(table[np.isfinite(table) & (table >= 0)])
    size = np.minimum(np.abs(values), table[-1])
    below = np.searchsorted(table, size, side="right") - 1
    above = np.minimum(below + 1, len(table) - 1)
    gap = np.maximum(table[above] - table[below], 1e-300)
    is_above = (size - table[below]) / gap + words / 2.0**16 >= 1.0
    return np.copysign(table[np.where(is_above, above, below)], values)


@pytest.mark.parametrize("num", [0, 1, 3, 127, 4097])
@pytest.mark.parametrize(
    ("dtype", "sq_dtype"),
    [(torch.bfloat16, torch.bfloat16), (E4M3, torch.bfloat16), (E4M3, None), (None, torch.bfloat16)],
)
@pytest.mark.parametrize("op", [torch.ops.megalite.round_moments_, reference], ids=["operator", "reference"])
def test_the_oracle_rounds_to_the_same_bits(op, dtype, sq_dtype, num: int) -> None:
    base, first, length, stride = 2**34 - 2, 5, 11, 40
    (exp_avg, exp_avg_sq), (rounded, rounded_sq) = moments(num), outputs(num, dtype, sq_dtype)
    number = torch.tensor(float(NUMBER))
    op(exp_avg, exp_avg_sq, rounded, rounded_sq, number, signed64(KEY), base, first, length, stride)
    indices = [base + e // length * stride + e % length for e in range(first, first + num)]
    words = random_words(torch.tensor(indices, dtype=torch.int64), 1, torch.tensor(NUMBER), KEY).numpy()
    low, high = words[:, 0] % 2**16, words[:, 0] >> 16
    mean, square = exp_avg.double().numpy(), exp_avg_sq.double().numpy()
    if rounded_sq is not None:
        square = neighbour(square, low, sq_dtype)
        np.testing.assert_array_equal(rounded_sq.double().numpy(), square)
    if rounded is not None:
        scale = 1.0
        if dtype == E4M3:  # a moment of zero counts as the smallest normal number's half
            exponent = np.floor(np.log2(np.maximum(square, 2.0**-127)))
            scale = 2.0 ** (np.floor(exponent / 2) - 3)
        np.testing.assert_array_equal(rounded.double().numpy(), neighbour(mean / scale, high, dtype))


@pytest.mark.usefixtures("compiled")
def test_threads_and_pieces_change_nothing() -> None:
    exp_avg, exp_avg_sq = moments(40_000)
    site = {"base": 7, "run_length": 640, "run_stride": 1280}
    number, whole, parts = torch.tensor(2.0), outputs(40_000, E4M3, torch.bfloat16), []
    round_moments_(exp_avg, exp_avg_sq, *whole, number, KEY, first=0, **site)
    for start, stop in ((0, 64), (64, 9_001), (9_001, 40_000)):
        part = outputs(stop - start, E4M3, torch.bfloat16)
        own = slice(start, stop)
        round_moments_(exp_avg[own], exp_avg_sq[own], *part, number, KEY, first=start, **site)
        parts.append(part)
    for one, several in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(one.float(), torch.cat(several).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_the_mean_of_rounded_moments_is_the_moment(dtype: torch.dtype) -> None:
    """Also of small ones, which lie between zero and the smallest code. Rounding to nearest is 2% off."""
    num, exp_avg_sq = 40_000, 3.1e-7
    for exp_avg in (1.2345e-4, -3.3e-4, 1e-8):
        wide = torch.full((num,), exp_avg), torch.full((num,), exp_avg_sq)
        rounded, rounded_sq = outputs(num, dtype, torch.bfloat16)
        site = {"base": 0, "first": 0, "run_length": num, "run_stride": num}
        round_moments_(*wide, rounded, rounded_sq, torch.tensor(1.0), KEY, **site)
        found = rounded.double() if dtype == torch.bfloat16 else wide_exp_avg(rounded, rounded_sq).double()
        for values, expected in ((found, exp_avg), (rounded_sq.double(), exp_avg_sq)):
            error = values.mean().item() - expected
            assert abs(error) < 5 * values.std().item() / num**0.5 + 1e-5 * abs(expected)
            assert values.unique().numel() > 1


@pytest.mark.parametrize("sq_dtype", [None, torch.bfloat16])
def test_moments_without_an_update_keep_their_bits(sq_dtype: torch.dtype | None) -> None:
    exp_avg, exp_avg_sq = moments(4097)
    rounded, rounded_sq = outputs(4097, E4M3, sq_dtype)
    site = {"base": 3, "first": 0, "run_length": 4097, "run_stride": 0}
    round_moments_(exp_avg, exp_avg_sq, rounded, rounded_sq, torch.tensor(1.0), KEY, **site)
    stored = exp_avg_sq if rounded_sq is None else rounded_sq.float()
    wide = wide_exp_avg(rounded, stored)
    assert torch.equal(wide, wide.bfloat16().float())  # as in a checkpoint
    again, again_sq = outputs(4097, E4M3, sq_dtype)
    round_moments_(wide, stored, again, again_sq, torch.tensor(2.0), KEY, **site)
    assert torch.equal(again.view(torch.uint8), rounded.view(torch.uint8))
    assert rounded_sq is None or torch.equal(again_sq, rounded_sq)


def test_the_operator_is_registered_as_torch_expects() -> None:
    arguments = (*moments(13), *outputs(13, torch.bfloat16, torch.bfloat16), torch.tensor(1.0))
    torch.library.opcheck(torch.ops.megalite.round_moments_, (*arguments, signed64(KEY), 0, 0, 13, 13))
