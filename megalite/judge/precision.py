"""Run a program that was written for 32 or 16 bits in fp64, so that layouts can agree to 14 digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDE: dict[Any, Any] = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((Tensor.float, Tensor.bfloat16, Tensor.half), Tensor.double),
}
"""What replaces a dtype, or a method that casts to one."""
_CASTS = {
    Tensor: "float bfloat16 half to type new_zeros new_ones new_empty new_full new_tensor",
    torch: "zeros ones empty full zeros_like ones_like empty_like full_like tensor arange",
}
"""Functions that take a dtype. Autograd calls hooks, and layers that are recomputed, outside of modes."""


class _Widened(TorchFunctionMode):
    """Mode in which each call that names a narrower dtype gets fp64 instead."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        wide = [_widened(each) for each in args]
        return _WIDE.get(func, func)(*wide, **{name: _widened(each) for name, each in (kwargs or {}).items()})


def _wide_call(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: _widened(each) for name, each in kwargs.items()}
        return _WIDE.get(function, function)(*map(_widened, args), **named)

    return call


def _widened(argument: Any) -> Any:
    return _WIDE[argument] if isinstance(argument, torch.dtype) and argument in _WIDE else argument


@contextmanager
def widened() -> Iterator[None]:
    """Let the block compute in fp64 whatever dtype its code names.

    What C++ code chooses is not reached: a kernel that computes in 32 bits inside still does.
    """
    before, set_default = torch.get_default_dtype(), torch.set_default_dtype
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype = lambda dtype: set_default(_widened(dtype))
    casts = [(owner, name, getattr(owner, name)) for owner, names in _CASTS.items() for name in names.split()]
    for owner, name, function in casts:
        setattr(owner, name, _wide_call(function))
    try:
        with _Widened():
            yield
    finally:
        for owner, name, function in casts:
            setattr(owner, name, function)
        torch.set_default_dtype = set_default
        torch.set_default_dtype(before)
