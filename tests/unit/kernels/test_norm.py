"""RMSNorm and LayerNorm: both passes against fp64, at odd shapes and odd numbers."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.kernels import layer_norm, layer_norm_on, norm, rms_norm, rms_norm_on
from megalite.kernels.norm import layer_norm_with_residual, rms_norm_with_residual
from tests.unit.kernels.ulps import assert_within

EPSILON = 1e-5


class Kernel(NamedTuple):
    function: Callable[..., Tensor]
    with_residual: Callable[..., tuple[Tensor, Tensor]]
    exact: Callable[..., Tensor]
    exact_backward: Callable[..., tuple[Tensor, Tensor]]
    centres: bool

    def parameters(self, columns: int, dtype: torch.dtype) -> list[Tensor]:
        return [numbers(columns, dtype=dtype, seed=seed) for seed in range(2 if self.centres else 1)]


KERNELS = {
    "rms_norm": Kernel(
        rms_norm, rms_norm_with_residual, norm.rms_reference, norm.rms_backward_reference, centres=False
    ),
    "layer_norm": Kernel(
        layer_norm,
        layer_norm_with_residual,
        norm.layer_reference,
        norm.layer_backward_reference,
        centres=True,
    ),
}


@pytest.fixture(params=KERNELS.values(), ids=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def check(
    kernel: Kernel, x: Tensor, parameters: list[Tensor], grad: Tensor, residual_grad: Tensor | None = None
) -> None:
    """Both passes against fp64; a term's size is what it has before the row's mean is taken off."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, *parameters)]
    y, *residual = (
        (kernel.function(*leaves, EPSILON),)
        if residual_grad is None
        else kernel.with_residual(*leaves, EPSILON)
    )
    assert all(torch.equal(other, x) for other in residual)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    wide_x, wide_weight = x.double(), parameters[0].double()
    variance = (
        (wide_x - (wide_x.mean(-1, keepdim=True) if kernel.centres else 0.0)).square().mean(-1, keepdim=True)
    )
    inverse = (variance + EPSILON).rsqrt()
    size = (wide_x.abs() + kernel.centres * wide_x.abs().mean(-1, keepdim=True)) * inverse
    exact = kernel.exact(wide_x, *(tensor.double() for tensor in parameters), EPSILON)
    assert_within(y.detach(), exact, 1.0 + size * wide_weight.abs() + exact.abs())
    beside = torch.zeros_like(x) if residual_grad is None else residual_grad
    torch.autograd.backward((y, *residual), (grad, *[beside] * len(residual)))
    of_x, sums = kernel.exact_backward(grad.double(), wide_x, wide_weight, EPSILON)
    terms = grad.double().abs() * wide_weight.abs()
    means = kernel.centres * terms.mean(-1, keepdim=True) + size * (terms * size).mean(-1, keepdim=True)
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(found) == len(leaves)
    assert_within(found[0], of_x + beside, 2 * inverse * (terms + means) + beside.abs())
    sizes = [(grad.double().abs() * size).sum(0), grad.double().abs().sum(0)]
    for of_parameter, exact_sum, of_terms in zip(found[1:], sums.view(-1, x.shape[-1]), sizes, strict=False):
        assert_within(of_parameter, exact_sum, 2 * of_terms)


@pytest.mark.parametrize("rows", [0, 1, 35])
@pytest.mark.parametrize("columns", [1, 3, 127, 4097])
def test_is_exact(kernel: Kernel, columns: int, rows: int, dtype: torch.dtype) -> None:
    x, grad = (numbers(rows, columns, dtype=dtype, seed=seed) for seed in (7, 8))
    check(kernel, x, kernel.parameters(columns, dtype), grad)


@pytest.mark.parametrize("columns", [1, 127, 4097])
def test_the_residual_s_gradient_is_added(kernel: Kernel, columns: int, dtype: torch.dtype) -> None:
    x, grad, beside = (numbers(35, columns, dtype=dtype, seed=seed) for seed in (7, 8, 9))
    check(kernel, x, kernel.parameters(columns, dtype), grad, beside)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_both_outputs_alone_has_a_gradient(kernel: Kernel, used: int) -> None:
    x, parameters = numbers(5, 12, dtype=torch.float32), kernel.parameters(12, torch.float32)
    leaf = x.requires_grad_()
    kernel.with_residual(leaf, *parameters, EPSILON)[used].sum().backward()
    expected = torch.ones_like(x)
    if used == 0:
        (expected,) = torch.autograd.grad(kernel.function(leaf, *parameters, EPSILON).sum(), leaf)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("columns", [6100, 6144, 12288])
def test_rows_that_fill_what_a_gpu_s_block_has_unasked(kernel: Kernel, columns: int) -> None:
    """LayerNorm's sums of 6144 columns are 48 KiB, and so are RMSNorm's of 12288."""
    x, grad = (numbers(3, columns, dtype=torch.float32, seed=seed) for seed in (7, 8))
    check(kernel, x, kernel.parameters(columns, torch.float32), grad)


def test_many_rows(kernel: Kernel) -> None:
    """Their sums are made in tiles."""
    x, grad = (numbers(1100, 24, dtype=torch.float32, seed=seed) for seed in (7, 8))
    check(kernel, x, kernel.parameters(24, torch.float32), grad)


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.floats(-200, 200, width=16), min_size=1, max_size=70),
    rows=st.integers(1, 40),
    name=st.sampled_from(list(KERNELS)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_numbers(values: list[float], rows: int, name: str, dtype: torch.dtype) -> None:
    kernel, n = KERNELS[name], len(values)
    x = torch.tensor(values, dtype=dtype).view(1, -1).repeat(rows, 1)
    grad = torch.linspace(-1, 1, rows * n).view(rows, -1).to(dtype)
    check(kernel, x, kernel.parameters(n, dtype), grad)


def test_a_row_of_zeros_and_one_that_is_not_a_number(kernel: Kernel) -> None:
    x = torch.zeros(3, 40)
    x[1, 7] = torch.nan
    x.requires_grad_()
    y = kernel.function(
        x, *kernel.parameters(40, torch.float32)[:1], *[torch.zeros(40)] * kernel.centres, EPSILON
    )
    assert y.isnan().all(-1).tolist() == [False, True, False]
    assert not y[::2].any()


def test_inputs_that_lie_apart(kernel: Kernel) -> None:
    x, parameters = numbers(5, 3, 12, dtype=torch.float32), kernel.parameters(12, torch.float32)
    there = x.transpose(0, 1)
    assert torch.equal(
        kernel.function(there, *parameters, EPSILON),
        kernel.function(there.contiguous(), *parameters, EPSILON),
    )
    leaf = x.clone().requires_grad_()
    kernel.function(leaf, *parameters, EPSILON).sum().backward()  # its gradient is a number expanded
    assert leaf.grad is not None and leaf.grad.is_contiguous()


@pytest.mark.usefixtures("compiled")
def test_threads_change_nothing() -> None:
    x, weight = numbers(901, 258, dtype=torch.bfloat16), numbers(258, dtype=torch.bfloat16)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (3, 1):
            torch.set_num_threads(count)
            leaf, scale = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = rms_norm(leaf, scale, EPSILON)
            y.backward(torch.ones_like(y))
            results.append((y, leaf.grad, scale.grad))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_autograd_opcheck_and_compile(kernel: Kernel) -> None:
    leaves = [torch.randn(4, 6, dtype=torch.float64), *kernel.parameters(6, torch.float64)]
    leaves = [tensor.requires_grad_() for tensor in leaves]
    function = functools.partial(kernel.function, epsilon=EPSILON)
    assert torch.autograd.gradcheck(function, tuple(leaves))
    op = getattr(torch.ops.megalite, kernel.function.__name__).default
    torch.library.opcheck(op, (*leaves, EPSILON))
    whole = torch.compile(kernel.function, backend="aot_eager", fullgraph=True)
    assert torch.equal(whole(*leaves, EPSILON), kernel.function(*leaves, EPSILON))


def test_with_the_residual_autograd_opcheck_and_compile(kernel: Kernel) -> None:
    leaves = [torch.randn(4, 6, dtype=torch.float64), *kernel.parameters(6, torch.float64)]
    leaves = [tensor.requires_grad_() for tensor in leaves]
    function = functools.partial(kernel.with_residual, epsilon=EPSILON)
    assert torch.autograd.gradcheck(lambda *all: function(*all), tuple(leaves))
    x, weight = leaves[0].detach(), leaves[1].detach()
    op = getattr(torch.ops.megalite, f"{kernel.function.__name__}_backward").default
    torch.library.opcheck(op, (torch.randn_like(x), x, weight, EPSILON, torch.randn_like(x)))
    whole = torch.compile(kernel.with_residual, backend="aot_eager", fullgraph=True)
    results = []
    for form in (whole, kernel.with_residual):
        y, residual = form(*leaves, EPSILON)
        results.append(torch.autograd.grad(((y * y).sum() + residual.prod()), leaves))
    # A graph computes the norm with PyTorch's operators.
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


def test_keeps_its_input_and_its_weight_alone(kernel: Kernel) -> None:
    saved: list[Tensor] = []
    leaves = [torch.randn(7, 6), *kernel.parameters(6, torch.float32)]
    leaves = [tensor.requires_grad_() for tensor in leaves]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        kernel.function(*leaves, EPSILON)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in leaves[:2]]


@pytest.mark.parametrize(("name", "choose"), [("rms_norm", rms_norm_on), ("layer_norm", layer_norm_on)])
def test_a_device_without_a_kernel_has_pytorch_s(
    name: str, choose: Callable[[str], norm.NormFunctions]
) -> None:
    kernel, functions = KERNELS[name], choose("mps")
    x = numbers(4, 6, dtype=torch.float32)
    arguments = x, *kernel.parameters(6, torch.float32), EPSILON
    assert functions.alone is not kernel.function
    torch.testing.assert_close(functions.alone(*arguments), kernel.function(*arguments))
    y, residual = functions.with_residual(*arguments)
    assert residual is x and torch.equal(y, functions.alone(*arguments))


@pytest.mark.parametrize(("name", "choose"), [("rms_norm", rms_norm_on), ("layer_norm", layer_norm_on)])
def test_meta_tensors_have_the_kernels_of_a_gpu(
    name: str, choose: Callable[[str], norm.NormFunctions]
) -> None:
    functions = choose("meta")
    assert functions.alone is KERNELS[name].function
    assert functions.norm_of_sum in (norm.bias_dropout_add_norm, norm._rms_norm_of_sum)


@pytest.mark.usefixtures("compiled")
def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(RuntimeError, match="weight"):
        rms_norm(torch.randn(2, 4), torch.randn(6), EPSILON)
    assert rms_norm_on("cpu")[:2] == (rms_norm, rms_norm_with_residual)
