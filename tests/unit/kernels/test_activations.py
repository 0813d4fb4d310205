"""Bias with GELU and with SwiGLU: both passes against fp64, at odd shapes and odd numbers."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.kernels import activations, bias_gelu, bias_swiglu
from tests.unit.kernels.ulps import assert_within


class Kernel(NamedTuple):
    function: Callable[[Tensor, Tensor | None], Tensor]
    exact: Callable[[Tensor, Tensor | None], Tensor]
    exact_backward: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    halves: int


KERNELS = {
    "gelu": Kernel(bias_gelu, activations.gelu_reference, activations.gelu_backward_reference, 1),
    "swiglu": Kernel(bias_swiglu, activations.swiglu_reference, activations.swiglu_backward_reference, 2),
}
SIZES = [0, 1, 3, 127, 4097]


@pytest.fixture(params=KERNELS.values(), ids=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


def check(kernel: Kernel, x: Tensor, bias: Tensor | None, grad: Tensor) -> None:
    """Both passes against fp64; an element's terms are its input and, in SwiGLU, the other half's."""
    x = x.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    y = kernel.function(x, bias)
    assert (y.dtype, y.shape) == (x.dtype, grad.shape)
    wide, wide_bias = x.detach().double(), None if bias is None else bias.detach().double()
    size = 1.0 + (wide if wide_bias is None else wide + wide_bias.flatten()).abs()
    for half in size.chunk(kernel.halves, -1)[1:]:
        size = half * size.chunk(kernel.halves, -1)[0]
    assert_within(y.detach(), kernel.exact(wide, wide_bias), size)
    y.backward(grad)
    expected, expected_bias = kernel.exact_backward(grad.double(), wide, wide_bias)
    terms = 2 * (grad.double().abs() * size).repeat(1, kernel.halves)
    assert x.grad is not None
    assert_within(x.grad, expected, terms)
    if bias is not None:
        assert bias.grad is not None
        assert_within(bias.grad.flatten(), expected_bias, terms.sum(0))


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 35])
@pytest.mark.parametrize("n", SIZES)
def test_is_exact(kernel: Kernel, n: int, rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, grad = (numbers(rows, k * n, dtype=dtype, seed=k) for k in (kernel.halves, 1))
    check(kernel, x, numbers(kernel.halves, n, dtype=dtype, seed=9) if has_bias else None, grad)


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.floats(-60000, 60000, width=16), min_size=2, max_size=40),
    rows=st.integers(1, 70),
    name=st.sampled_from(list(KERNELS)),
)
def test_any_numbers(values: list[float], rows: int, name: str) -> None:
    kernel = KERNELS[name]
    n = len(values) // 2
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.tensor(values[: 2 * n], dtype=dtype).view(1, -1).repeat(rows, 1)
        grad = torch.linspace(-1, 1, rows * 2 * n // kernel.halves).view(rows, -1).to(dtype)
        check(kernel, x, None, grad)


def test_the_ends_of_the_number_line(kernel: Kernel) -> None:
    for large in (50.0, 1e4, 3e38):
        up = [1.0] * (kernel.halves - 1)
        x = torch.tensor([[large, *up], [-large, *up]], requires_grad=True)
        y = kernel.function(x, None)
        y.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(y[:, 0].detach(), torch.tensor([large, 0.0]), rtol=0, atol=1e-18)
        torch.testing.assert_close(x.grad[:, 0], torch.tensor([1.0, 0.0]), rtol=0, atol=1e-18)
    assert kernel.function(torch.full((1, kernel.halves), torch.nan), None).isnan().all()


def test_inputs_that_lie_apart(kernel: Kernel) -> None:
    x, bias = numbers(5, 3, 2 * 6, dtype=torch.float32), numbers(2 * 6, dtype=torch.float32)
    there = x.transpose(0, 1)
    assert torch.equal(kernel.function(there, bias), kernel.function(there.contiguous(), bias))
    leaf = x.clone().requires_grad_()
    kernel.function(leaf, bias).sum().backward()  # its gradient is a number expanded
    assert leaf.grad is not None and leaf.grad.is_contiguous()


@pytest.mark.usefixtures("compiled")
def test_threads_change_nothing(kernel: Kernel) -> None:
    x, bias = numbers(901, 258, dtype=torch.bfloat16), numbers(258, dtype=torch.bfloat16)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (3, 1):
            torch.set_num_threads(count)
            leaf, added = x.clone().requires_grad_(), bias.clone().requires_grad_()
            y = kernel.function(leaf, added)
            y.backward(torch.ones_like(y))
            results.append((y, leaf.grad, added.grad))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_autograd_opcheck_and_compile(kernel: Kernel) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(kernel.function, (x, bias))
    op = getattr(torch.ops.megalite, kernel.function.__name__).default
    for added in (bias, None):
        torch.library.opcheck(op, (x, added))
    whole = torch.compile(kernel.function, backend="aot_eager", fullgraph=True)
    assert torch.equal(whole(x, bias), kernel.function(x, bias))


def test_keeps_its_input_alone(kernel: Kernel) -> None:
    saved: list[Tensor] = []
    x = torch.randn(7, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        kernel.function(x, None)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


@pytest.mark.usefixtures("compiled")
def test_a_bias_of_another_size_is_refused(kernel: Kernel) -> None:
    with pytest.raises(RuntimeError, match="bias"):
        kernel.function(torch.randn(2, 4), torch.randn(6))
