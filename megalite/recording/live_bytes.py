"""Count the bytes of live tensors by observing every operator."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from megalite.recording.nested_tensors import tensors_in
from megalite.recording.operator_log import recurrence_call
from megalite.torch_private import EagerMode, storage_number

OTHER = "other"
"""Name of what no part of the model makes."""


@dataclass
class _Held:
    """Describes a storage, its size in bytes, and the part of the model that made it."""

    storage: weakref.ref[torch.UntypedStorage]
    size: int
    part: str


class LiveBytes(EagerMode):
    """Counts the bytes of storages that operators in this block created and that are still referenced.

    This includes tensors saved by autograd. Of workspace that a kernel allocates while it runs, it includes
    only that of recurrences.

    Attributes:
        now: current bytes.
        peak: largest value of `now`.
        by_part: current bytes by the innermost part that created them.
        peak_by_part: `by_part` at the time of `peak`.
    """

    def __init__(self) -> None:
        super().__init__()
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

    def enter(self, part: str) -> None:
        """Begin a part of the model, within those that have begun; see `watch_parts`."""
        self._parts.append(part)

    def leave(self) -> None:
        """End the part that began last."""
        self._parts.pop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the tensors of this block as those of a part."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

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

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._see(tensor)
        if recurrence := recurrence_call(func, args):
            self._note_workspace(int(recurrence.workspace_bytes))
        return out

    def _note_workspace(self, size: int) -> None:
        """Count bytes that existed until now."""
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
