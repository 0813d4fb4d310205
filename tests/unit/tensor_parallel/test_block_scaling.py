"""Blocks with a scale: the codes of other implementations, and GEMMs of what the codes stand for."""

from __future__ import annotations

import itertools
from functools import reduce

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megalite.config import TrainingConfig
from megalite.config.training import FP8_BLOCKS
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.block_scaling import BlockGemm, round_in_blocks
from megalite.tensor_parallel.delayed_scaling import DelayedGemm
from megalite.tensor_parallel.fp8 import (
    E4M3,
    E5M2,
    Fp8,
    Fp8Settings,
    Fp8Weights,
    TensorwiseGemm,
    WeightPart,
    check_device,
)
from megalite.tensor_parallel.linear import LinearContext, column_linear
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.utils.errors import UserError

NUMPY_DTYPES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


def _expected(x: Tensor, dtype: torch.dtype, rows: int, columns: int) -> np.ndarray:
    """Round each block by its definition: the scale is 2^ceil(log2(largest / the format's largest))."""
    numbers, codes = x.double().numpy(), NUMPY_DTYPES[dtype]
    largest_code = float(ml_dtypes.finfo(codes).max)
    found = np.empty_like(numbers)
    for top in range(0, numbers.shape[0], rows):
        for left in range(0, numbers.shape[1], columns):
            block = numbers[top : top + rows, left : left + columns]
            scale = 2.0 ** np.ceil(np.log2(max(np.abs(block).max(), 1e-300) / largest_code))
            rounded = (block / scale).astype(np.float32).astype(codes).astype(np.float64)
            found[top : top + rows, left : left + columns] = rounded * scale
    return found


def _spread(*shape: int, seed: int) -> Tensor:
    """Return numbers of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return normal[0] * (3.0 * normal[1]).exp()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("code_dtype", NUMPY_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (1, 128), (128, 128), (32, 1)])
def test_codes_are_those_of_the_definition(
    code_dtype: torch.dtype, dtype: torch.dtype, rows: int, columns: int
) -> None:
    """Check blocks that are cut short at the end, of zeros, and whose largest number is the format's."""
    x = _spread(200, 330, seed=0).to(dtype)
    x[130:, :128] = 0.0
    x[:128, 256] = torch.finfo(code_dtype).max * 2.0**-5
    x[:, 300:] = x[:, 300:].clamp(-1.0, 1.0)
    found = round_in_blocks(x, code_dtype, rows, columns)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.double().numpy(), _expected(x, code_dtype, rows, columns))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    x = torch.ones(4, 64)
    x[2, 40] = value
    found = round_in_blocks(x, E4M3, 1, 32)
    assert found[2, 32:].isnan().all()
    assert torch.equal(found[[0, 1, 3]], x[[0, 1, 3]]) and torch.equal(found[2, :32], x[2, :32])


@pytest.mark.parametrize("fused", [False, True], ids=["autograd", "main_grad"])
@pytest.mark.parametrize("rounds_weight_gradients", [False, True])
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_gemms_are_those_of_what_the_codes_stand_for(
    recipe: str, rounds_weight_gradients: bool, fused: bool, one_rank: Topology
) -> None:
    """Check that each GEMM has blocks along the dim that it sums over; those of tokens are of one sample."""
    settings = Fp8Settings("hybrid", recipe, rounds_weight_gradients=rounds_weight_gradients)
    layer_context = LayerContext(one_rank, torch.float64, fuses_weight_gradients=fused, fp8=settings)
    size, weight_rows = FP8_BLOCKS[recipe]
    s, b, wide, out = size + 20, 2, size + 8, 2 * size
    x = _spread(s, b, wide, seed=1).requires_grad_()
    weight, bias = nn.Parameter(_spread(2, size, wide, seed=2)), nn.Parameter(_spread(2, size, seed=3))
    grad = _spread(s, b, out, seed=4)
    y = column_linear(x, weight, bias, LinearContext.of(layer_context))
    y.backward(grad)

    matrix = weight.detach().flatten(0, 1)
    of_rows = torch.from_numpy(_expected(matrix, E4M3, weight_rows, size))
    of_columns = torch.from_numpy(_expected(matrix.t(), E4M3, weight_rows, size)).t()
    expected = torch.zeros(out, wide, dtype=torch.float64)
    for i in range(b):
        own_x, own_grad = x.detach()[:, i], grad[:, i]
        rounded = torch.from_numpy(_expected(own_x, E4M3, 1, size)) @ of_rows.t() + bias.detach().flatten()
        torch.testing.assert_close(y.detach()[:, i], rounded)
        assert x.grad is not None
        rounded = torch.from_numpy(_expected(own_grad, E5M2, 1, size)) @ of_columns
        torch.testing.assert_close(x.grad[:, i], rounded)
        if rounds_weight_gradients:
            own_x = torch.from_numpy(_expected(own_x, E4M3, size, 1))
            own_grad = torch.from_numpy(_expected(own_grad, E5M2, size, 1))
        expected += own_grad.t() @ own_x
    assert weight.grad is not None and bias.grad is not None
    torch.testing.assert_close(weight.grad.flatten(0, 1), expected)
    torch.testing.assert_close(bias.grad.flatten(), grad.flatten(0, 1).sum(0))  # not of rounded numbers


def test_a_weight_is_rounded_once_an_iteration(one_rank: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, shapes = Fp8Weights(), []
    context = LayerContext(one_rank, torch.float64, fp8=Fp8Settings("e4m3", "blockwise", weights=weights))
    weight = nn.Parameter(_spread(128, 128, seed=0))

    def counted(x: Tensor, *args: object) -> Tensor:
        shapes.append(tuple(x.shape))
        return round_in_blocks(x, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("megalite.tensor_parallel.block_scaling.round_in_blocks", counted)
    with weights.iteration(keeps_copies=True):
        for seed in range(3):
            x = _spread(16, 1, 128, seed=seed).requires_grad_()
            column_linear(x, weight, None, LinearContext.of(context)).sum().backward()
    assert shapes.count((128, 128)) == 1  # for forward and backward, whose blocks are the same


def test_a_device_needs_kernels_or_emulation() -> None:
    training = TrainingConfig(fp8_format="hybrid", fp8_recipe="mxfp8")
    with pytest.raises(UserError, match=r"--fp8-recipe mxfp8: megalite has no GPU kernels .* pass --emulate"):
        check_device(torch.device("cpu"), training)
    check_device(torch.device("cpu"), TrainingConfig(fp8_format="hybrid", fp8_recipe="mxfp8", emulate=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("cuts", [(), (1,), (5000, 5001), (128 * 330, 40000, 200 * 330)], ids=str)
@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_parts_of_a_weight_are_rounded_like_the_whole(
    dtype: torch.dtype, cuts: tuple[int, ...], value: float, size: float
) -> None:
    """Cut a weight inside of rows and blocks, with a number of any kind in the block of a corner."""
    weight = (size * torch.randn(2, 150, 330, generator=torch.Generator().manual_seed(1))).to(dtype)
    weight[0, :50], weight[1, 106:] = 0, 0  # zeros in a part of the first blocks, and in all of the last ones
    weight[0, 127, 329] = value
    gemm = BlockGemm(Fp8Settings("hybrid", "blockwise"))
    ends = [0, *sorted(cuts), weight.numel()]
    parts = [
        WeightPart(weight.flatten()[start:end], start, weight.shape)
        for start, end in itertools.pairwise(ends)
    ]
    scale = reduce(torch.fmax, [gemm.scale_of_part(part) for part in parts])  # drops NaN, as gloo may
    numbers = torch.cat([gemm.round_part(part, scale) for part in parts])
    matrix = weight.flatten(0, 1)
    gemm.weights.set_gathered(matrix, Fp8(numbers, scale))
    found = gemm.rounded_weight(matrix, sums_over_rows=False)
    expected = round_in_blocks(matrix, E4M3, 128, 128)
    assert expected.isnan().sum() == (0 if value == 1.0 else 128 * (330 - 256))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_number_that_is_not_finite_stays_visible_in_a_gathered_weight(
    recipe: str, value: float, one_rank: Topology
) -> None:
    """The last owner's, which a maximum over ranks that drops NaN would lose."""
    settings = Fp8Settings("hybrid", recipe, emulates=True)
    gemm = TensorwiseGemm(settings, one_rank.tp) if recipe == "tensorwise" else DelayedGemm(settings)
    if isinstance(gemm, DelayedGemm):
        gemm.history, gemm.measured = torch.ones(2, 3), torch.zeros(3).unbind()
    weight = _spread(16, 32, seed=1).float()
    weight[15, 31] = value
    parts = [WeightPart(weight.flatten()[start : start + 256], start, weight.shape) for start in (0, 256)]
    scale = reduce(torch.fmax, [gemm.scale_of_part(part) for part in parts])
    numbers = torch.cat([gemm.round_part(part, scale) for part in parts])
    gemm.weights.set_gathered(weight, Fp8(numbers, scale))
    x = torch.ones(3, 1, 32)
    assert gemm.forward(x, weight, None).isnan().all()
