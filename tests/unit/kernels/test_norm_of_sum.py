"""The norm of a residual sum and the sum: the bits of its two operators, and the gradients of both outputs.

On a CPU the two operators serve. The kernels of a GPU pass these tests too: see test_cuda_on_cpu.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.kernels import ResidualSum, layer_norm, layer_norm_on, rms_norm_on, site_key
from megalite.kernels.library import is_compiled
from megalite.kernels.norm import (
    NormFunctions,
    bias_dropout_add_norm,
    sum_backward_reference,
    sum_reference,
)
from megalite.kernels.philox import signed64
from tests.unit.kernels.ulps import assert_within

KEY = site_key(1234, "layers.0.attention.output")
EPSILON = 1e-5
NORMS = pytest.mark.parametrize("centres", [False, True], ids=["rms_norm", "layer_norm"])


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def samples(num: int) -> Tensor:
    return torch.arange(num) * 2**33 + 11


def parameters(columns: int, dtype: torch.dtype, centres: bool) -> tuple[Tensor, Tensor | None]:
    weight, bias = (numbers(columns, dtype=dtype, seed=seed) for seed in (21, 22))
    return weight, bias if centres else None


def equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@NORMS
@pytest.mark.parametrize(("p", "has_bias"), [(0.0, True), (0.3, True), (0.3, False)])
@pytest.mark.parametrize("columns", [1, 24, 127, 1024, 8200])
def test_has_the_bits_of_its_two_operators(
    columns: int, p: float, has_bias: bool, centres: bool, dtype: torch.dtype
) -> None:
    """Rows of 8200 are longer than a block's registers hold in fp32 and, in backward, in bf16."""
    x, residual, grad, sum_grad = (numbers(2, 2, columns, dtype=dtype, seed=seed) for seed in range(4))
    bias = numbers(columns, dtype=dtype, seed=4) if has_bias else None
    site = (samples(2), p, signed64(KEY), 2**34 - 2)
    weight, norm_bias = parameters(columns, dtype, centres)
    ops = torch.ops.megalite
    operands = (x, bias, residual, *site, weight, norm_bias, EPSILON)
    normal, total = ops.bias_dropout_add_norm(*operands)
    assert equal((normal, total), sum_reference(*operands))
    operands = (grad, sum_grad, total, weight, centres, EPSILON, *site)
    found = ops.bias_dropout_add_norm_backward(*operands)
    expected = sum_backward_reference(*operands)
    assert equal(found[:2], expected[:2])
    *norm_grads, bias_grad = found[2].view(-1, columns)
    *expected_norm_grads, _ = expected[2].view(-1, columns)
    assert equal(tuple(norm_grads), tuple(expected_norm_grads))
    terms = (expected[1] if p else expected[0]).double().flatten(0, 1)
    assert_within(bias_grad, terms.sum(0), 2 * terms.abs().sum(0))


@NORMS
def test_many_rows(centres: bool) -> None:
    """Each block sums several rows."""
    total, grad, sum_grad = (numbers(550, 2, 24, dtype=torch.float32, seed=seed) for seed in range(3))
    weight, _ = parameters(24, torch.float32, centres)
    operands = (grad, sum_grad, total, weight, centres, EPSILON, samples(2), 0.1, signed64(KEY), 0)
    of_residual, of_x, sums = torch.ops.megalite.bias_dropout_add_norm_backward(*operands)
    wide = [
        each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in operands
    ]
    exact = sum_backward_reference(*wide)
    for found, expected in zip((of_residual, of_x, sums), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


class Case:
    """Leaves of a sum and its norm, and the function of them; the biases are there or not."""

    def __init__(self, p: float, has_bias: bool, centres: bool) -> None:
        shapes = [(3, 2, 6), (3, 2, 6), (6,), *[(6,)] * (has_bias + centres)]
        self.leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        self.p, self.has_bias, self.centres = p, has_bias, centres

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, *biases: Tensor) -> tuple[Tensor, Tensor]:
        total = ResidualSum(x, biases[0] if self.has_bias else None, residual, self.p, KEY, samples(2), 3)
        return bias_dropout_add_norm(total, weight, biases[-1] if self.centres else None, EPSILON)


@NORMS
@pytest.mark.parametrize(("p", "has_bias"), [(0.0, False), (0.0, True), (0.25, True)])
def test_gradients_and_opcheck(p: float, has_bias: bool, centres: bool) -> None:
    case = Case(p, has_bias, centres)
    assert torch.autograd.gradcheck(case, tuple(case.leaves))
    x, residual, weight, *biases = case.leaves
    site = (samples(2), p, -7, 2)
    norm_bias, bias = biases[-1] if centres else None, biases[0] if has_bias else None
    ops = torch.ops.megalite
    torch.library.opcheck(
        ops.bias_dropout_add_norm.default, (x, bias, residual, *site, weight, norm_bias, EPSILON)
    )
    total, weight = x.detach(), weight.detach()
    torch.library.opcheck(
        ops.bias_dropout_add_norm_backward.default, (total, total, total, weight, centres, EPSILON, *site)
    )


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_both_outputs_alone_has_a_gradient(used: int) -> None:
    case = Case(0.25, has_bias=True, centres=True)
    x, bias, residual = case.leaves[0], case.leaves[3], case.leaves[1]
    total = ResidualSum(x, bias, residual, 0.25, KEY, samples(2), 3).compute()
    alone = (layer_norm(total, case.leaves[2], case.leaves[4], EPSILON), total)
    leaves = [x, residual, bias]
    found, expected = (
        torch.autograd.grad(outputs[used].square().sum(), leaves) for outputs in (case(*case.leaves), alone)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_keeps_the_sum_alone() -> None:
    saved: list[Tensor] = []
    case = Case(0.25, has_bias=True, centres=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, total = case(*case.leaves)
    assert [t.data_ptr() for t in saved[:2]] == [total.data_ptr(), case.leaves[2].data_ptr()]
    assert [t.dtype for t in saved[2:]] == [torch.int64]


def test_operands_that_lie_apart() -> None:
    x, residual = torch.randn(2, 3, 4, 8).transpose(1, 2)
    weight = torch.randn(8)
    found, expected = (
        bias_dropout_add_norm(ResidualSum(*each, 0.4, KEY, samples(3)), weight, None, EPSILON)
        for each in ((x, None, residual), (x.contiguous(), None, residual.contiguous()))
    )
    assert equal(found, expected)


@pytest.mark.parametrize("choose", [rms_norm_on, layer_norm_on])
@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_a_device_without_the_kernel_has_two_operators(
    choose: Callable[[str], NormFunctions], device_type: str
) -> None:
    if is_compiled("bias_dropout_add_norm", device_type):
        pytest.skip("the kernel is compiled")
    functions = choose(device_type)
    x, residual = numbers(3, 2, 6, dtype=torch.float32), numbers(3, 2, 6, dtype=torch.float32, seed=1)
    total = ResidualSum(x, None, residual, 0.25, KEY, samples(2))
    rest = (*[torch.randn(6)] * (1 if choose is rms_norm_on else 2), EPSILON)
    normal, found = functions.norm_of_sum(total, *rest)
    assert torch.equal(found, total.compute())
    assert torch.equal(normal, functions.alone(found, *rest))


def test_mistakes_are_named() -> None:
    x, weight = torch.ones(3, 2, 5), torch.ones(5)
    with pytest.raises(ValueError, match="0 <= p < 1"):
        bias_dropout_add_norm(ResidualSum(x, None, x, 1.0, KEY, samples(2)), weight, None, EPSILON)
    if is_compiled("bias_dropout_add_norm", "cpu"):
        with pytest.raises(RuntimeError, match="weight"):
            bias_dropout_add_norm(ResidualSum(x, None, x, 0.0, KEY, samples(2)), weight[:4], None, EPSILON)
