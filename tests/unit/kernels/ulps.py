"""How far a kernel may be from the truth: units in the last place of its dtype, of what its terms are."""

import torch
from torch import Tensor


def assert_within(actual: Tensor, exact: Tensor, scale: Tensor | float, ulps: float = 2.0) -> None:
    """Asserts |actual - exact| <= ulps * eps * scale, element by element.

    Args:
        exact: in fp64. Where `actual` is too, both have rounded: it then may be four times as far.
        scale: magnitude of the terms that add up to an element; never taken as less than the smallest normal.
    """
    assert actual.shape == exact.shape
    info = torch.finfo(actual.dtype)
    allowed = ulps * (4 if actual.dtype == torch.float64 else 1) * info.eps
    bound = allowed * torch.as_tensor(scale, dtype=torch.float64).clamp_min(info.tiny / info.eps)
    error = (actual.double() - exact).abs()
    worst = (error / bound).max().item() if error.numel() else 0.0
    assert not error.isnan().any() and worst <= 1.0, f"{worst:.2f} times what is allowed"
