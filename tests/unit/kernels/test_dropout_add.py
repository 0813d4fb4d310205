"""Bias, dropout and residual add: the mask of `dropout`, and both passes against their parts."""

import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.kernels import bias_dropout_add, dropout, site_key
from megalite.kernels.dropout import backward_reference, sum_reference
from megalite.kernels.philox import signed64
from tests.unit.kernels.ulps import assert_within

KEY = site_key(1234, "layers.0.mlp.output")


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def samples(num: int) -> Tensor:
    return torch.arange(num) * 2**33 + 11


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("base", [0, 2**34 - 2])
@pytest.mark.parametrize("n", [0, 1, 3, 127, 4097])
def test_compiled_equals_reference(n: int, base: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, residual, grad = (numbers(5, 2, n, dtype=dtype, seed=seed) for seed in range(3))
    bias = numbers(n, dtype=dtype, seed=4) if has_bias else None
    site = (samples(2), 0.3, signed64(KEY), base)
    result = torch.ops.megalite.bias_dropout_add(x, bias, residual, *site)
    assert torch.equal(result, sum_reference(x, bias, residual, *site))
    of_x, of_bias = torch.ops.megalite.bias_dropout_add_backward(grad, *site)
    assert torch.equal(of_x, backward_reference(grad, *site)[0])
    exact = backward_reference(grad.double(), *site)[1]
    assert_within(of_bias, exact, 2 * grad.double().abs().sum((0, 1)))


@settings(deadline=None, max_examples=30)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 600)),
    p=st.floats(0.0, 0.99),
    base=st.integers(0, 2**40),
)
@example(shape=(1, 1, 1), p=1e-12, base=0)  # 32 bits cannot tell it from 0
def test_the_mask_is_that_of_dropout(shape: tuple[int, int, int], p: float, base: int) -> None:
    x, residual, bias = (numbers(*size, dtype=torch.float64) for size in (shape, shape, shape[2:]))
    y = bias_dropout_add(x, bias, residual, p, KEY, samples(shape[1]), base=base)
    parts = residual + dropout(x + bias, p, KEY, samples(shape[1]), base=base)
    torch.testing.assert_close(y, parts, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_gradients(p: float) -> None:
    x, residual, bias = (
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 2, 5), (3, 2, 5), (5,))
    )
    for added in (bias, None):

        def function(x: Tensor, residual: Tensor, bias: Tensor | None = added) -> Tensor:
            return bias_dropout_add(x, bias, residual, p, KEY, samples(2), base=3)

        leaves = (x, residual) if added is None else (x, residual, bias)
        assert torch.autograd.gradcheck(function, leaves)


def test_no_random_words_where_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, bias = torch.randn(3, 2, 5), torch.randn(3, 2, 5), torch.randn(5)
    expected = torch.ops.megalite.bias_dropout_add(x, bias, residual, samples(2), 0.0, 1, 0)
    monkeypatch.delattr(sys.modules["megalite.kernels.dropout"], "reference")
    assert torch.equal(sum_reference(x, bias, residual, samples(2), 0.0, 1, 0), expected)


def test_nothing_large_is_saved() -> None:
    saved: list[Tensor] = []
    x, residual = torch.randn(2, 3, 2, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        bias_dropout_add(x, torch.zeros(5), residual, 0.4, KEY, samples(2))
    assert [t.shape for t in saved] == [(2,)]


def test_inputs_that_lie_apart() -> None:
    x, residual = torch.randn(2, 3, 4, 5)
    there, stream = x.transpose(0, 1), residual.transpose(0, 1)
    y = bias_dropout_add(there, None, stream, 0.4, KEY, samples(3))
    assert torch.equal(y, bias_dropout_add(there.contiguous(), None, stream.clone(), 0.4, KEY, samples(3)))


@pytest.mark.usefixtures("compiled")
def test_threads_change_nothing() -> None:
    x, residual = numbers(2, 301, 3, 129, dtype=torch.float32)
    site = (samples(3), 0.1, signed64(KEY), 0)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (3, 1):
            torch.set_num_threads(count)
            forward = torch.ops.megalite.bias_dropout_add(x, None, residual, *site)
            results.append((forward, *torch.ops.megalite.bias_dropout_add_backward(x, *site)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_opcheck_and_compile() -> None:
    x, residual, bias = (torch.randn(size, requires_grad=True) for size in ((3, 2, 5), (3, 2, 5), (5,)))
    for added in (bias, None):
        arguments = (x, added, residual, samples(2), 0.3, -7, 2)
        torch.library.opcheck(torch.ops.megalite.bias_dropout_add.default, arguments)

    def function(x: Tensor) -> Tensor:
        return bias_dropout_add(x, bias, residual, 0.3, KEY, samples(2))

    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))


@pytest.mark.parametrize(
    ("shape", "p", "base", "message"),
    [((3, 2, 5), 1.0, 0, "0 <= p < 1"), ((3, 2, 5), 0.1, -1, "base >= 0"), ((3, 5), 0.1, 0, r"\[n, b, h\]")],
)
def test_mistakes_are_named(shape: tuple[int, ...], p: float, base: int, message: str) -> None:
    x = torch.ones(shape)
    with pytest.raises(ValueError, match=message):
        bias_dropout_add(x, None, x, p, KEY, samples(2), base=base)
