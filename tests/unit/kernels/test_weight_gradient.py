"""The weight gradient's product that writes a sum or adds to it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels.weight_gradient import add_weight_gradient_, has_widening_gemm

CPU = torch.device("cpu")
SHAPES = [(0, 3, 5), (1, 1, 1), (127, 3, 65), (64, 129, 1)]
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What one test finds out about the device is not another's."""
    has_widening_gemm.cache_clear()
    yield
    has_widening_gemm.cache_clear()


def tensors(n: int, o: int, i: int, dtype: torch.dtype, total_dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(n + o + i)
    shapes = (o, i), (n, o), (n, i)
    total, grad, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return total.to(total_dtype), grad.to(dtype), x.to(dtype)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("dtype", "total_dtype"), DTYPES)
@pytest.mark.parametrize(("n", "o", "i"), SHAPES)
def test_adds_or_writes_the_product(
    n: int, o: int, i: int, dtype: torch.dtype, total_dtype: torch.dtype, overwrite: bool
) -> None:
    total, grad, x = tensors(n, o, i, dtype, total_dtype)
    expected = grad.double().t() @ x.double()
    if overwrite:
        total.fill_(torch.nan)
    else:
        expected += total
    add_weight_gradient_(total, grad, x, overwrite=overwrite)
    tolerance = 4.0 * torch.finfo(dtype).eps * (1.0 + n**0.5)
    torch.testing.assert_close(total.double(), expected, rtol=tolerance, atol=tolerance)


def test_into_a_part_of_a_flat_buffer() -> None:
    """Of a gated activation's weight, which has three dims."""
    buffer = torch.ones(2 + 2 * 3 * 5 + 1)
    grad, x = torch.ones(4, 6), torch.ones(4, 5)
    add_weight_gradient_(buffer[2:32].view(2, 3, 5), grad, x)
    assert buffer.tolist() == [1.0] * 2 + [5.0] * 30 + [1.0]


@pytest.mark.parametrize(("dtype", "total_dtype"), DTYPES)
@pytest.mark.parametrize(("n", "o", "i"), SHAPES)
def test_a_written_product_has_the_bits_of_one_added_to_zeros(
    n: int, o: int, i: int, dtype: torch.dtype, total_dtype: torch.dtype
) -> None:
    total, grad, x = tensors(n, o, i, dtype, total_dtype)
    zeros = torch.zeros_like(total)
    add_weight_gradient_(zeros, grad, x)
    add_weight_gradient_(total, grad, x, overwrite=True)
    assert torch.equal(total, zeros)


@pytest.mark.parametrize(("dtype", "total_dtype"), DTYPES)
def test_opcheck(dtype: torch.dtype, total_dtype: torch.dtype) -> None:
    op = torch.ops.megalite.add_weight_gradient_.default
    for overwrite in (False, True):
        torch.library.opcheck(op, (*tensors(7, 3, 5, dtype, total_dtype), overwrite))


@pytest.mark.parametrize("rounds", [False, True])
def test_a_widening_product_is_used_where_it_is_right(rounds: bool) -> None:
    """A device that has the op, and one whose op rounds to the factors' dtype on its way."""
    calls: list[tuple[int, ...]] = []

    def product(
        total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, out: Tensor, **_: Any
    ) -> Tensor:
        assert total is out
        assert total.dtype == dtype == torch.float32
        calls.append(tuple(out.shape))
        wide = a.float() @ b.float()
        wide = wide.to(a.dtype).float() if rounds else wide
        return out.copy_(wide) if beta == 0 else out.add_(wide)

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", product, "CPU", allow_override=True)
    try:
        total, grad, x = tensors(64, 3, 5, torch.bfloat16, torch.float32)
        exact = total + grad.float().t() @ x.float()
        rounded = total + grad.t() @ x
        add_weight_gradient_(total, grad, x)
        is_known = has_widening_gemm(torch.bfloat16, torch.float32, CPU)
    finally:
        library._destroy()
    assert calls == ([(16, 16)] * 2 if rounds else [(16, 16)] * 2 + [(3, 5)])
    assert is_known is not rounds
    torch.testing.assert_close(total, rounded if rounds else exact, rtol=1e-6, atol=1e-6)


def test_no_compiler_is_imported_to_train() -> None:
    """It takes a second and more of each rank's start, for a compiler that is not used."""
    program = (
        "import sys, torch, megalite.kernels as kernels;"
        "kernels.add_weight_gradient_(torch.zeros(4, 4), torch.ones(3, 4), torch.ones(3, 4));"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
