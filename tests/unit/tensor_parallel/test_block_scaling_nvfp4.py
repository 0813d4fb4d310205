"""4-bit numbers: the codes of another implementation, the mean of random rounding, and the transform."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megalite.distributed.topology import Topology
from megalite.tensor_parallel import block_scaling
from megalite.tensor_parallel.block_scaling import Nvfp4Gemm, hadamard_transform, name_gemms, round_in_blocks
from megalite.tensor_parallel.fp8 import E2M1, BackwardSamples, Fp8Settings
from megalite.tensor_parallel.linear import ColumnParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext


def _expected(x: Tensor, rows: int, columns: int) -> np.ndarray:
    """Round with the types of ml_dtypes, and a power of two as the scale of the whole tensor."""
    numbers = x.float().numpy()
    found = np.empty_like(numbers)
    scale_of_all = 2.0 ** np.ceil(np.log2(np.abs(numbers).max() / (6.0 * 448.0)))
    for top in range(0, numbers.shape[0], rows):
        for left in range(0, numbers.shape[1], columns):
            block = numbers[top : top + rows, left : left + columns]
            scale = (np.abs(block).max() / np.float32(6.0) / scale_of_all).astype(ml_dtypes.float8_e4m3fn)
            scale = scale.astype(np.float32) * np.float32(scale_of_all)
            rounded = (block / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
            found[top : top + rows, left : left + columns] = rounded * scale
    return found


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (16, 16)])
@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e6])
def test_codes_are_those_of_ml_dtypes(magnitude: float, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Check blocks of different magnitudes, among them one that is cut short and ties between codes."""
    x = _normal(40, 200, seed=0) * _normal(40, 1, seed=1).exp() * magnitude
    ties = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25]).repeat(16, 2)
    x[:16, :16] = ties * 2.0 ** round(math.log2(magnitude))
    x = x.to(dtype)
    found = round_in_blocks(x, E2M1, rows, columns)
    assert found.dtype == dtype  # which holds a code times a scale exactly
    np.testing.assert_array_equal(found.float().numpy(), _expected(x, rows, columns))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    x = torch.ones(2, 32)
    x[1, 20] = value
    found = round_in_blocks(x, E2M1, 1, 16)
    assert found[1, 16:].isnan().all() and found[0].isfinite().all() and found[1, :16].isfinite().all()
    assert not round_in_blocks(torch.zeros(2, 32), E2M1, 1, 16).any()


def _gemm(topology: Topology, out: int, name: str = "layers.0.mlp.up") -> tuple[Nvfp4Gemm, nn.Module]:
    settings = Fp8Settings("e2m1", "nvfp4", samples=BackwardSamples())
    context = LayerContext(topology, torch.float64, seed=5, fp8=settings)
    layer = ColumnParallelLinear(32, out, context, bias=False)
    nn.init.normal_(layer.weight)
    model = nn.Module()
    model.add_module(name.rpartition(".")[2], layer)
    name_gemms(model, topology)
    gemm = layer.context.gemm
    assert isinstance(gemm, Nvfp4Gemm)
    return gemm, layer


def test_random_rounding_has_the_number_as_its_mean(one_rank: Topology) -> None:
    gemm, _ = _gemm(one_rank, 32)
    row = _normal(32, seed=3)
    row[[0, 16]] = 6.0  # the scales are 1
    row = row.clamp(-6.0, 6.0)
    count = 4000
    gemm.samples.numbers = torch.arange(count)
    rounded = gemm.rounded_gradient(row.expand(1, count, 32))[0]  # [samples, 32]
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    assert torch.isin(rounded.abs(), magnitudes).all()
    codes = torch.cat((-magnitudes.flip(0), magnitudes[1:]))
    upper = torch.searchsorted(codes, row).clamp(1, len(codes) - 1)
    low, high = codes[upper - 1], codes[upper]
    assert ((rounded == low) | (rounded == high)).all()  # the neighbours
    error = rounded.mean(0) - row
    deviation = ((row - low) * (high - row) / count).sqrt()
    assert (error.abs() <= 4.5 * deviation + 2.0**-16).all()
    assert (rounded.std(0)[deviation > 0] > 0).all()
    pairs = torch.corrcoef((rounded - row).t()[deviation > 0])
    assert (pairs - torch.eye(len(pairs))).abs().max() < 0.08  # elements are rounded independently


def test_random_numbers_depend_on_what_is_global(one_rank: Topology) -> None:
    """Check samples in other microbatches, and that layers and the two uses of a gradient differ."""
    gemm, _ = _gemm(one_rank, 48)
    grad = _normal(32, 3, 48, seed=1)
    gemm.samples.numbers = torch.tensor([7, 8, 11])
    whole = gemm.rounded_gradient(grad), gemm.weight_gradient_operands(grad, grad)[0].view(32, 3, 48)
    gemm.samples.numbers = torch.tensor([11])
    alone = gemm.rounded_gradient(grad[:, 2:]), gemm.weight_gradient_operands(grad[:, 2:], grad[:, 2:])[0]
    assert torch.equal(alone[0], whole[0][:, 2:]) and torch.equal(alone[1].view(32, 1, 48), whole[1][:, 2:])
    other, _ = _gemm(one_rank, 48, "layers.0.mlp.down")
    other.samples.numbers = torch.tensor([11])
    assert not torch.equal(other.rounded_gradient(grad[:, 2:]), alone[0])
    gemm.samples.numbers = torch.tensor([12])
    assert not torch.equal(gemm.rounded_gradient(grad[:, 2:]), alone[0])


def test_the_transform_is_orthogonal_and_cancels(one_rank: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = hadamard_transform(seed=5)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64), rtol=0.0, atol=0.0)
    assert not torch.equal(matrix, hadamard_transform(seed=6))
    gemm, _ = _gemm(one_rank, 32)
    gemm.samples.numbers = torch.arange(2)
    grad, x = _normal(40, 2, 32, seed=1), _normal(40, 2, 48, seed=2)  # 40 is no multiple of 16
    monkeypatch.setattr(block_scaling, "round_in_blocks", lambda x, *_: x)
    left, right = gemm.weight_gradient_operands(grad, x)
    torch.testing.assert_close(left.t() @ right, grad.flatten(0, 1).t() @ x.flatten(0, 1))


def test_gemms_are_those_of_what_the_codes_stand_for(one_rank: Topology) -> None:
    """Check each GEMM of a layer; rounding at random is replaced by what it rounds to."""
    gemm, layer = _gemm(one_rank, 48)
    gemm.samples.numbers = torch.tensor([3, 9])
    x, grad = _normal(32, 2, 32, seed=1).requires_grad_(), _normal(32, 2, 48, seed=2)
    y = layer(x)
    y.backward(grad)
    weight = layer.weight.detach()
    rounded_weight = round_in_blocks(weight, E2M1, 16, 16)
    torch.testing.assert_close(y.detach(), round_in_blocks(x.detach(), E2M1, 1, 16) @ rounded_weight.t())
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(x.grad, gemm.rounded_gradient(grad) @ rounded_weight)
    transform = hadamard_transform(seed=5)
    transposed = x.detach().permute(1, 2, 0).unflatten(-1, (2, 16)) @ transform.t()  # [b, in, s/16, 16]
    right = round_in_blocks(transposed.flatten(2), E2M1, 1, 16)
    left = gemm.weight_gradient_operands(grad, x.detach())[0].view(32, 2, 48)
    torch.testing.assert_close(layer.weight.grad, torch.einsum("sbo,bis->oi", left, right))
    wide = grad.flatten(0, 1).t() @ x.detach().flatten(0, 1)
    error = (layer.weight.grad - wide).norm() / wide.norm()
    assert 0.05 < error < 0.3  # they are rounded
