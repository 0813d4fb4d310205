"""Run a training iteration on meta tensors: with fake reads, a GPU's attention, cached results, and FSDP."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from megalite.dry_run.live_bytes import Mode
from megalite.kernels.library import NAMESPACE

_READ = torch.ops.aten._local_scalar_dense.default
FIGURE = 1.0
"""Value of every number that the host reads from the device, such as a loss or a norm."""


@contextmanager
def meta_tensors() -> Iterator[None]:
    """Let the training code run on meta tensors in this block, without changes to that code."""
    with torch.library._scoped_library("aten", "IMPL") as library, _MetaOperators():
        library.impl("scaled_dot_product_attention", _fused_attention, "AutogradMeta")
        yield


@contextmanager
def fsdp_on_meta() -> Iterator[None]:
    """Let `fully_shard` shard, all-gather and reduce-scatter meta tensors in this block.

    FSDP takes its streams and events from the module of the device type, ``torch.cuda`` or ``torch.cpu``. In
    ``torch.cpu`` they do nothing. Except on a CPU, FSDP requires that recording an event returns an event.
    """
    from torch.distributed.fsdp._fully_shard import _fully_shard as interface  # seconds to import
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "meta", torch.cpu, create=True))
        stack.enter_context(patch.object(torch.cpu.Stream, "record_event", lambda stream: torch.cpu.Event()))
        stack.enter_context(
            patch.object(interface, "_get_device_from_mesh", lambda mesh: torch.device("meta"))
        )
        stack.enter_context(patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda group: None))
        yield


class _Like(NamedTuple):
    """Describes a meta tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def new(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


_ITSELF = _Like((), (), torch.float32)
"""Marks an in-place operator, whose result is its first argument: it does nothing on meta tensors."""


class _MetaOperators(Mode):
    """Returns `FIGURE` for reads, and caches the result of each operator for the same sizes.

    torch's meta implementations are Python code, which takes a hundred times as long as a look-up. Layers and
    microbatches repeat the same operators.
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
        """Cache a result, unless it shares the memory of an input or contains anything but meta tensors."""
        if args and out is args[0]:
            self._known[key] = _ITSELF
            return
        results = out if isinstance(out, tuple) else (out,)
        input_storages = {each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)}
        likes: list[_Like | None] = []
        for each in results:
            if each is not None:
                if (
                    not isinstance(each, Tensor)
                    or not each.is_meta
                    or each.untyped_storage()._cdata in input_storages
                ):
                    return
                likes.append(_Like(tuple(each.shape), each.stride(), each.dtype))
            else:
                likes.append(None)
        if isinstance(out, tuple):
            self._known[key] = likes
        elif likes[0] is not None:
            self._known[key] = likes[0]


class _HasValuesError(Exception):
    """Raised if the result can depend on the values of an argument."""


def _is_repeatable(func: Any) -> bool:
    """Return whether an operator only creates new tensors, or only changes its first argument."""
    schema = func._schema
    if func.namespace not in ("aten", NAMESPACE):
        return False
    if schema.name in _IN_PLACE:
        return True
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))


_IN_PLACE = {f"aten::{name}_" for name in ("add", "mul", "copy", "zero", "fill", "div", "sub")}


def _key(argument: Any) -> Hashable:
    """Return everything that the sizes of a result can depend on."""
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
    """Run the attention kernel that torch would choose on a GPU, so that the same tensors are saved.

    For meta tensors, torch would choose the unfused attention, which saves the scores.
    """
    aten = torch.ops.aten
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        return flash[0]
    if query.dtype == torch.float64 or enable_gqa:  # no GPU kernel supports these
        unfused = aten._scaled_dot_product_attention_math
        out = unfused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
