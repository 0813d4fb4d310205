"""Rotary embedding: against fp64, and heads that lie apart."""

import pytest
import torch
from torch import Tensor

from megalite.kernels import rotate
from megalite.kernels.rotary import reference
from tests.unit.kernels.ulps import assert_within


def tables(s: int, b: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.randn(s, b, 1, half, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    angles = torch.cat((angles, angles), dim=-1)
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize(("s", "n"), [(0, 2), (1, 1), (127, 3), (5, 0)])
@pytest.mark.parametrize("half", [1, 3, 127])
def test_is_exact(half: int, s: int, n: int, per_sample: bool, dtype: torch.dtype) -> None:
    x = torch.randn(s, 2, n, 2 * half + 3, generator=torch.Generator().manual_seed(0)).to(dtype)[
        ..., : 2 * half
    ]
    x, (cosine, sine) = x.detach().requires_grad_(), tables(s, 2 if per_sample else 1, half, dtype)
    y = rotate(x, cosine, sine)
    assert y.is_contiguous()
    exact = reference(x.detach().double(), cosine.double(), sine.double(), False)
    assert_within(y.detach(), exact, 2 * x.detach().double().abs().amax() if x.numel() else 1.0)
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad.transpose(0, 1).contiguous().transpose(0, 1))
    assert x.grad is not None
    exact = reference(grad.double(), cosine.double(), sine.double(), True)
    assert_within(x.grad, exact, 2 * grad.double().abs().amax() if x.numel() else 1.0)


def test_autograd_opcheck_and_compile() -> None:
    x = torch.randn(3, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    cosine, sine = tables(3, 1, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda t: rotate(t, cosine, sine), x)
    torch.library.opcheck(torch.ops.megalite.rotate.default, (x, cosine, sine, False))
    whole = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    assert torch.equal(whole(x, cosine, sine), rotate(x, cosine, sine))


@pytest.mark.usefixtures("compiled")
def test_tables_that_do_not_fit_are_refused() -> None:
    cosine, sine = tables(4, 1, 3, torch.float32)
    with pytest.raises(RuntimeError, match=r"\[s, b or 1, 1, d\]"):
        rotate(torch.randn(3, 2, 2, 6), cosine, sine)
    with pytest.raises(RuntimeError, match="fp64 for fp64"):
        rotate(torch.randn(4, 2, 2, 6, dtype=torch.float64), cosine, sine)
