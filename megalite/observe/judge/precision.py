"""Run a program that was written for 32 or 16 bits in fp64, so that layouts can agree to 14 digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megalite.utils.torch_private import backward_within

_WIDE: dict[Any, Any] = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((Tensor.float, Tensor.bfloat16, Tensor.half), Tensor.double),
}
"""Replacements of dtypes, and of methods that cast to them."""
_CASTS = {Tensor: ("float", "bfloat16", "half", "to"), torch: ("zeros", "zeros_like", "empty", "empty_like")}
"""Functions that also replace dtypes within calls that the mode handles, such as attention of DTensors."""


class _Widened(TorchFunctionMode):
    """Mode in which each call that names a narrower dtype gets fp64 instead."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _wide_call(func)(*args, **(kwargs or {}))


def _wide_call(function: Callable[..., Any]) -> Callable[..., Any]:
    wide = _WIDE.get(function, function)
    return lambda *args, **kwargs: wide(
        *map(_widened, args), **{name: _widened(each) for name, each in kwargs.items()}
    )


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
    casts = [(owner, name, getattr(owner, name)) for owner, names in _CASTS.items() for name in names]
    for owner, name, function in casts:
        setattr(owner, name, _wide_call(function))
    try:
        with _Widened() as mode, backward_within(mode):
            yield
    finally:
        for owner, name, function in casts:
            setattr(owner, name, function)
        torch.set_default_dtype = set_default
        torch.set_default_dtype(before)
