"""What meta tensors lack for a whole training iteration: values that are read, a GPU's attention, speed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.dryrun.mode import Mode
from megalite.kernels.library import NAMESPACE

_READ = torch.ops.aten._local_scalar_dense.default
FIGURE = 1.0
"""What every number that the host reads from the device is: a loss and a norm of a sound iteration."""


@contextmanager
def meta_tensors() -> Iterator[None]:
    """Lets the training code run on meta tensors in this block.

    The seams are all here: the code that runs knows nothing of it.
    """
    with torch.library._scoped_library("aten", "IMPL") as library, _MetaOperators():
        library.impl("scaled_dot_product_attention", _fused_attention, "AutogradMeta")
        yield


class _Like(NamedTuple):
    """A tensor without its values: all that a meta tensor is."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def new(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


_ITSELF = _Like((), (), torch.float32)
"""Stands for the first argument, of an operator that works in place: without values it does nothing."""


class _MetaOperators(Mode):
    """Answers reads, and works out each operator's result once for the same sizes.

    torch does so in Python, which takes a hundred times as long as it takes to look it up: layers and
    microbatches are all alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Hashable, list[_Like | None] | _Like] = {}
        self._repeatable: dict[Any, bool] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _READ and args[0].is_meta:
            return type(args[0].new_empty((), device="cpu").item())(FIGURE)
        if func not in self._repeatable:
            self._repeatable[func] = _is_repeatable(func)
        if not self._repeatable[func]:
            return func(*args, **(kwargs or {}))
        try:
            key = func, _key(args), _key(tuple((kwargs or {}).items()))
        except _HasValuesError:
            return func(*args, **(kwargs or {}))
        if key in self._known:
            known = self._known[key]
            if known is _ITSELF:
                return args[0]
            if isinstance(known, _Like):
                return known.new()
            return tuple(each and each.new() for each in known)
        out = func(*args, **(kwargs or {}))
        self._learn(key, args, out)
        return out

    def _learn(self, key: Hashable, args: Sequence[Any], out: Any) -> None:
        """Keeps a result unless it shares an input's memory, or holds anything but meta tensors."""
        if args and out is args[0]:
            self._known[key] = _ITSELF
            return
        results = out if isinstance(out, tuple) else (out,)
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)}
        likes: list[_Like | None] = []
        for each in results:
            if each is not None:
                if not isinstance(each, Tensor) or not each.is_meta or each.untyped_storage()._cdata in given:
                    return
                likes.append(_Like(tuple(each.shape), each.stride(), each.dtype))
            else:
                likes.append(None)
        if isinstance(out, tuple):
            self._known[key] = likes
        elif likes[0] is not None:
            self._known[key] = likes[0]


class _HasValuesError(Exception):
    """An argument is more than sizes, or may be."""


def _is_repeatable(func: Any) -> bool:
    """Whether an operator makes new tensors and changes none, or changes its first argument alone."""
    schema = func._schema
    if func.namespace not in ("aten", NAMESPACE):
        return False
    if schema.name in _IN_PLACE:
        return True
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))


_IN_PLACE = {f"aten::{name}_" for name in ("add", "mul", "copy", "zero", "fill", "div", "sub")}


def _key(argument: Any) -> Hashable:
    """All that a result's sizes can depend on."""
    if isinstance(argument, Tensor):
        if not argument.is_meta:
            raise _HasValuesError
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, list | tuple):
        return tuple(map(_key, argument))
    return type(argument), argument


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The attention product as a GPU keeps it for backward, by the kernel that torch would choose there.

    On meta tensors torch writes the product out, and would keep the scores.
    """
    aten = torch.ops.aten
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        return flash[0]
    if query.dtype == torch.float64 or enable_gqa:  # no kernel of a GPU takes these
        written_out = aten._scaled_dot_product_attention_math
        out = written_out(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
