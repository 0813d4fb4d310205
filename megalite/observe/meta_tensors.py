"""Run training code on meta tensors: fake its reads, cache its results, and count bytes of live tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from megalite.kernels.library import NAMESPACE
from megalite.model.layer import TransformerLayer
from megalite.model.stage import Stage
from megalite.observe.operator_log import recurrence_call
from megalite.observe.recorder import Reader, reading, tensors_in, watch_modules, watch_point
from megalite.utils.torch_private import (
    efficient_attention,
    flash_attention,
    read_scalar,
    schema_of,
    scoped_library,
    storage_number,
    unfused_attention,
)

FIGURE = 1.0
"""Value of every number that the host reads from the device, such as a loss or a norm."""


@contextmanager
def meta_tensors() -> Iterator[None]:
    """Let the training code run on meta tensors in this block, without changes to that code."""
    with scoped_library("aten", "IMPL") as library, reading(_META_OPERATORS):
        library.impl("scaled_dot_product_attention", fused_attention, "AutogradMeta")
        yield


class _Like(NamedTuple):
    """Size, stride and dtype of a meta tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def new(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


_ITSELF = _Like((), (), torch.float32)
"""Marks an in-place operator, whose result is its first argument: it does nothing on meta tensors."""


class _MetaOperators(Reader):
    """Operators on meta tensors: reads return `FIGURE`, and each result is cached for the same sizes.

    torch's meta implementations are Python code, which takes a hundred times as long as a look-up. Layers and
    microbatches repeat the same operators.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, list[_Like | None] | _Like] = {}
        self._repeatable: dict[Any, bool] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is read_scalar and args[0].is_meta:
            return type(args[0].new_empty((), device="cpu").item())(FIGURE)
        if func not in self._repeatable:
            self._repeatable[func] = _is_repeatable(func)
        if not self._repeatable[func]:
            return func(*args, **kwargs)
        try:
            key = func, _key(args), _key(tuple(kwargs.items()))
        except _HasValuesError:
            return func(*args, **kwargs)
        if key in self._known:
            known = self._known[key]
            if known is _ITSELF:
                return args[0]
            if isinstance(known, _Like):
                return known.new()
            return tuple(each and each.new() for each in known)
        out = func(*args, **kwargs)
        self._learn(key, args, out)
        return out

    def _learn(self, key: Hashable, args: Sequence[Any], out: Any) -> None:
        """Cache a result, unless it shares the memory of an input or contains anything but meta tensors."""
        if args and out is args[0]:
            self._known[key] = _ITSELF
            return
        storages = {storage_number(each.untyped_storage()) for each in args if isinstance(each, Tensor)}

        def like(result: Any) -> _Like | None:
            """Raise `_HasValuesError` if a result cannot be made from its sizes."""
            if result is None:
                return None
            is_meta = isinstance(result, Tensor) and result.is_meta
            if not is_meta or storage_number(result.untyped_storage()) in storages:
                raise _HasValuesError
            return _Like(tuple(result.shape), result.stride(), result.dtype)

        with suppress(_HasValuesError):
            if isinstance(out, tuple):
                self._known[key] = list(map(like, out))
            elif (known := like(out)) is not None:
                self._known[key] = known


_META_OPERATORS = _MetaOperators()
"""The operators of this process, so that runs share their results."""


class _HasValuesError(Exception):
    """Raised if the result can depend on the values of an argument."""


def _is_repeatable(func: Any) -> bool:
    """Return whether an operator only creates new tensors, or only changes its first argument."""
    schema = schema_of(func)
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


def fused_attention(
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
    has_one_size = value.shape[-1] == query.shape[-1]
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16) and has_one_size:
        flash = flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        return flash[0]
    if query.dtype == torch.float64 or enable_gqa:  # no GPU kernel supports these
        out = unfused_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


OTHER = "other"
"""Name of what no part of the model makes."""
RESIDUAL = "residual"
"""Sums of residual connections."""
MODULES = {"attention_norm": "layernorm", "mlp_norm": "layernorm"}
"""Parts of modules whose part is not their name in the layer."""
METHODS = {"attend": "core_attn", "activate": "mlp_act", "losses_of": "loss"}
"""Parts of methods that are wrap points. The names are those of --recompute-modules."""


@dataclass
class _Held:
    """Storage, its size in bytes, and the part of the model that made it."""

    storage: weakref.ref[torch.UntypedStorage]
    size: int
    part: str


class LiveBytes(Reader):
    """Bytes of the storages that operators in this block created and that are still referenced.

    This includes tensors saved by autograd. Of workspace that a kernel allocates while it runs, it includes
    only that of recurrences.

    Attributes:
        now: current bytes.
        peak: largest value of `now`.
        by_part: current bytes by the innermost part that created them.
        peak_by_part: `by_part` at the time of `peak`.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._parts: list[str] = []  # those that run, each within the one before
        self.by_part = Counter[str]()
        self.peak_by_part = Counter[str]()
        self._held: dict[int, _Held] = {}  # by the storage's number

    def __enter__(self) -> LiveBytes:
        self._resizing = patch.object(torch.UntypedStorage, "resize_", self._resize)
        self._resizing.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.stop()

    def start_peak(self) -> None:
        """Forget the peak so far."""
        self.peak, self.peak_by_part = self.now, self.by_part.copy()

    def enters(self, name: str, *_: Any) -> None:
        """Begin a part of the model, within those that have begun; see `watch_parts`."""
        self._parts.append(name)

    def leaves(self, *_: Any) -> None:
        """End the part that began last."""
        self._parts.pop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the tensors of this block as those of a part."""
        self.enters(name)
        try:
            yield
        finally:
            self.leaves()

    def part_of(self, tensor: torch.Tensor) -> str:
        """Return the part that created a tensor."""
        held = self._held.get(storage_number(tensor.untyped_storage()))
        return OTHER if held is None else held.part

    @property
    def _resize(self) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
        """Return a `resize_` method of storages that counts: ZeRO stage 3 frees gathered weights with it."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            out = original(storage, size)
            if held := self._held.get(storage_number(storage)):
                self._add(size - held.size, held.part)
                held.size = size
            return out

        return resize

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        for tensor in tensors_in(out):
            self._see(tensor)
        if recurrence := recurrence_call(func, args):
            size = int(recurrence.workspace_bytes)  # which existed until now
            self._add(size, OTHER)
            self._add(-size, OTHER)

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        number, size = storage_number(storage), storage.nbytes()
        if number in self._held:  # a view, an in-place result, or seen before
            return

        def forget(_: object) -> None:
            held = self._held.pop(number)
            self._add(-held.size, held.part)

        part = self._parts[-1] if self._parts else OTHER
        self._held[number] = _Held(weakref.ref(storage, forget), size, part)
        self._add(size, part)

    def _add(self, size: int, part: str) -> None:
        self.now += size
        self.by_part[part] += size
        if self.now > self.peak:
            self.start_peak()


def watch_parts(stage: Stage, live: LiveBytes) -> None:
    """Let `live` count the tensors of each part of a stage: call it before `apply_recompute`.

    A layer's parts are its modules. What else the layer computes counts as residual, or under the name of its
    class if it is a layer of your own.
    """
    for layer in stage.all_layers():
        part = RESIDUAL if isinstance(layer, TransformerLayer) else type(layer).__name__
        children = ((MODULES.get(name, name), module) for name, module in layer.named_children())
        watch_modules(live, ((part, layer), *children))
    if stage.is_first:
        watch_modules(live, [("embedding", stage.embedding)])
    if stage.is_last:
        watch_modules(live, [("head", stage.last_module)])
    for module in stage.modules():
        for method, part in METHODS.items():
            if hasattr(getattr(type(module), method, None), "communicates"):
                watch_point(live, part, module, method)
