"""The weight gradient's GEMM that sums the gradient of a bias too.

The GPU's code passes these tests too, on tests/cuda_on_cpu/cublas_lt.cpp: see test_cuda_on_cpu.py.
"""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megalite.kernels import library
from megalite.kernels import weight_gradient as module
from megalite.kernels.weight_gradient import (
    _agrees,
    _difference,
    add_weight_and_bias_gradient_,
    add_weight_gradient_,
    has_bias_gradient_gemm,
)
from tests.unit.kernels.test_activations_linear_gelu import may_be_refused
from tests.unit.kernels.test_weight_gradient import tensors

CPU = torch.device("cpu")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "o", "i"), [(0, 8, 8), (1, 8, 16), (33, 24, 8), (130, 16, 40), (7, 3, 5)])
def test_the_gemm_with_a_bias_is_exact(n: int, o: int, i: int, dtype: torch.dtype, overwrite: bool) -> None:
    """Of slices: the operator does not need contiguous factors. The total is a part of a flat buffer."""
    start, grad, x = tensors(n, o, i, dtype, torch.float32)
    buffer = torch.full((8 + o * i + 8,), torch.nan)
    total = buffer[8 : 8 + o * i].view(o, i)
    if not overwrite:
        total.copy_(start)
    wide_grad, wide_x = torch.stack([grad, grad], 1)[:, 0], torch.stack([x, x], 1)[:, 1]
    with may_be_refused(o):
        sums = torch.ops.megalite.add_weight_and_bias_gradient_(total, wide_grad, wide_x, overwrite)
    exact = grad.double().t() @ x.double() + (0.0 if overwrite else start.double())
    # without a GPU the product is rounded to the factors' dtype before it is added
    tolerance = torch.finfo(dtype).eps * (grad.double().abs().t() @ x.double().abs()) + 1e-6 * exact.abs()
    assert ((total.double() - exact).abs() <= tolerance).all()
    torch.testing.assert_close(sums, grad.float().sum(0), rtol=1e-5, atol=1e-4)
    assert sums.dtype == torch.float32
    assert buffer[:8].isnan().all() and buffer[-8:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_trial_accepts_the_right_operator(dtype: torch.dtype) -> None:
    assert _difference(dtype, CPU) == ""


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_the_trial_rejects_a_wrong_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.ops.megalite.add_weight_and_bias_gradient_

    def wrong(total: Tensor, *arguments: Any) -> Tensor:
        sums: Tensor = right(total, *arguments)
        (total if name == "weight" else sums).view(-1)[5] += 1.0
        return sums

    monkeypatch.setattr(torch.ops.megalite, "add_weight_and_bias_gradient_", wrong)
    assert (
        _difference(torch.bfloat16, CPU)
        == f"the gradient of the {name} in torch.bfloat16 differs from PyTorch's"
    )


@pytest.mark.parametrize("problem", ["", "not PyTorch's", RuntimeError("no cuBLASLt\nmore")])
def test_a_gpu_uses_it_where_the_trial_passes(
    problem: str | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = Mock()
    monkeypatch.setattr(module, "_difference", Mock(side_effect=[problem]))
    monkeypatch.setattr(module, "is_compiled", lambda *_: True)
    monkeypatch.setattr(library.log, "warning", warning)
    _agrees.cache_clear()
    grad = Mock(is_cuda=True, dtype=torch.bfloat16, shape=(4, 16), device="cuda:0")
    total, x = Mock(dtype=torch.float32), Mock(shape=(4, 8))
    assert has_bias_gradient_gemm(total, grad, x) is (problem == "")
    assert warning.called is (problem != "")
    _agrees.cache_clear()
    assert not has_bias_gradient_gemm(Mock(dtype=torch.bfloat16), grad, x)
    assert not has_bias_gradient_gemm(total, grad, Mock(shape=(4, 7)))


@pytest.mark.parametrize("is_there", [False, True])
def test_the_gradient_of_a_bias_is_of_the_dtype_of_its_weight(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_bias_gradient_gemm", lambda *_: is_there)
    total, grad, x = tensors(64, 8, 16, torch.bfloat16, torch.float32)
    expected = total.clone()
    add_weight_gradient_(expected, grad, x)
    sums = add_weight_and_bias_gradient_(total, grad, x)
    torch.testing.assert_close(total, expected, rtol=1e-2, atol=1e-1)
    torch.testing.assert_close(sums, grad.sum(0))
    assert sums.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    op = torch.ops.megalite.add_weight_and_bias_gradient_.default
    torch.library.opcheck(op, (*tensors(7, 8, 16, dtype, torch.float32), False))
