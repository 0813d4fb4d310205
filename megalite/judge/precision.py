"""Run a program that was written for 32 or 16 bits in fp64, so that layouts can agree to 14 digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = {Tensor.float: Tensor.double, Tensor.bfloat16: Tensor.double, Tensor.half: Tensor.double}


class _Widened(TorchFunctionMode):
    """Mode in which every call that names a narrower dtype gets fp64 instead."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map_only(torch.dtype, _widened, (tuple(args), dict(kwargs or {})))
        return _CASTS.get(func, func)(*args, **kwargs)


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _NARROW else dtype


@contextmanager
def widened() -> Iterator[None]:
    """Let the block compute in fp64 whatever dtype its code names.

    What C++ code chooses is not reached: a kernel that computes in 32 bits inside still does.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)
