"""Count the bytes of live tensors by observing every operator, by the part of the model that made them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from megalite.model.layer import TransformerLayer
from megalite.model.stage import Stage
from megalite.observe.operator_log import recurrence_call
from megalite.observe.recorder import Reader, tensors_in, watch_modules, watch_point
from megalite.utils.torch_private import storage_number

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
