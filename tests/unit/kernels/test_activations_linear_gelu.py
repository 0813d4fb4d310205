"""GEMMs with GELU, or with its derivative, against fp64 at odd shapes.

The GPU's code passes these tests too, on tests/cuda_on_cpu/cublas_lt.cpp: see test_cuda_on_cpu.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megalite.kernels import activations, gelu_linear_backward, has_linear_gelu, library, linear_gelu
from megalite.kernels.activations import (
    _difference,
    gelu_linear_backward_reference,
    linear_gelu_reference,
)
from tests.unit.kernels.ulps import assert_within

DTYPES = [torch.bfloat16, torch.float16]
SIZES = [(1, 8, 1), (1, 8, 8), (5, 24, 7), (33, 64, 48), (130, 16, 129), (65, 24, 136)]
"""Tokens, out and in features. cuBLASLt needs a multiple of 8 of the second, and may of the third."""


@contextmanager
def may_be_refused(features: int) -> Iterator[None]:
    """Skip a test whose rows are not aligned to 16 bytes, if the GPU's library has no such GEMM."""
    try:
        yield
    except RuntimeError as error:
        if features % 8 == 0 or "cuBLASLt" not in str(error):
            raise
        pytest.skip(str(error))


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "o", "i"), SIZES)
def test_forward_is_exact(n: int, o: int, i: int, dtype: torch.dtype, has_bias: bool) -> None:
    """Of slices: the operator does not need contiguous tensors."""
    x = numbers(n, 2, 2 * i, dtype=dtype, seed=1)[..., :i]
    weight = numbers(i, o, dtype=dtype, seed=2).t()
    bias = numbers(o, dtype=dtype, seed=3) if has_bias else None
    with may_be_refused(i):
        value, before = linear_gelu(x, weight, bias)
    wide = x.double(), weight.double(), None if bias is None else bias.double()
    exact_value, exact = linear_gelu_reference(*wide)
    size = linear_gelu_reference(*(None if each is None else each.abs() for each in wide))[1]
    assert value.shape == before.shape == (n, 2, o)
    assert_within(before, exact, size)
    assert_within(value, exact_value, 2 * size)  # PyTorch's own rounds `before` first


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "o", "h"), SIZES)
def test_backward_is_exact(n: int, o: int, h: int, dtype: torch.dtype, has_bias: bool) -> None:
    grad = numbers(n, 3, h, dtype=dtype, seed=1)
    weight = numbers(h, o, dtype=dtype, seed=2)
    before = numbers(n, 3, o, dtype=dtype, seed=3)
    with may_be_refused(h):
        before_grad, bias_grad = gelu_linear_backward(grad, weight, before, has_bias)
    exact, exact_sums = gelu_linear_backward_reference(
        grad.double(), weight.double(), before.double(), has_bias
    )
    size = 2 * (grad.double().abs() @ weight.double().abs())
    assert before_grad.shape == before.shape
    assert_within(before_grad, exact, size)
    if bias_grad is None:
        assert not has_bias
    else:
        assert_within(bias_grad, exact_sums, size.flatten(0, -2).sum(0))


def test_of_no_tokens() -> None:
    weight, x = torch.ones(8, 3, dtype=torch.bfloat16), torch.ones(0, 3, dtype=torch.bfloat16)
    assert [each.shape for each in linear_gelu(x, weight, None)] == [(0, 8), (0, 8)]
    before = torch.ones(0, 8, dtype=torch.bfloat16)
    before_grad, bias_grad = gelu_linear_backward(x, weight.t(), before, True)
    assert before_grad.shape == (0, 8)
    assert bias_grad is not None and torch.equal(bias_grad, torch.zeros(8, dtype=torch.bfloat16))


def test_a_weight_that_is_aligned_to_16_bytes_only() -> None:
    weight = numbers(8 * 16 + 8, dtype=torch.bfloat16, seed=1)[8:].view(8, 16)
    x = numbers(4, 16, dtype=torch.bfloat16, seed=2)
    assert_within(linear_gelu(x, weight, None)[1], x.double() @ weight.double().t(), 16.0)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("unaligned", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_trial_accepts_right_operators(dtype: torch.dtype, unaligned: int, has_bias: bool) -> None:
    with may_be_refused(unaligned):
        assert _difference(64 + unaligned, has_bias, dtype, torch.device("cpu")) == ""


@pytest.mark.parametrize("name", ["linear_gelu", "gelu_linear_backward"])
def test_the_trial_rejects_a_wrong_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result in turn is off in one element."""
    right = getattr(torch.ops.megalite, name)
    for position in range(2):

        def wrong(*arguments: object, position: int = position) -> tuple[Tensor, ...]:
            results = right(*arguments)
            results[position].view(-1)[5] += 1.0
            return results

        monkeypatch.setattr(torch.ops.megalite, name, wrong)
        assert "differs from PyTorch's" in _difference(64, True, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(
    "problem", ["GELU in bf16 differs from PyTorch's", RuntimeError("no cuBLASLt\nmore")]
)
def test_a_failed_trial_is_a_warning(problem: str | Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, warning = Mock(side_effect=[problem]), Mock()
    monkeypatch.setattr(activations, "_difference", trial)
    monkeypatch.setattr(library.log, "warning", warning)
    assert not activations._agrees.__wrapped__(0, True, torch.bfloat16, torch.device("cpu"))
    assert warning.call_args.args[0].endswith(str(problem).splitlines()[0])


@pytest.mark.parametrize(
    ("shape", "dtype", "is_tried"),
    [
        ((24, 7), torch.bfloat16, True),
        ((24, 7), torch.float16, True),
        ((24, 7), torch.float32, False),
        ((20, 8), torch.bfloat16, False),
    ],
)
def test_a_gpu_tries_it_where_it_may_serve(
    shape: tuple[int, int], dtype: torch.dtype, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Mock(return_value=True)
    monkeypatch.setattr(activations, "_agrees", trial)
    monkeypatch.setattr(activations, "is_compiled", lambda *_: True)
    weight = Mock(is_cuda=True, shape=shape, dtype=dtype, device="cuda:0")
    assert has_linear_gelu(weight, False) == is_tried
    if is_tried:
        trial.assert_called_once_with(7, False, dtype, "cuda:0")
    else:
        trial.assert_not_called()


def test_a_cpu_has_none() -> None:
    assert not has_linear_gelu(torch.zeros(8, 8, dtype=torch.bfloat16), True)
