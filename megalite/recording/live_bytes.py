"""Count the bytes of live tensors by observing every operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from megalite.torch_private import EagerMode, storage_number


@dataclass
class _Held:
    """A storage and its size in bytes."""

    storage: weakref.ref[torch.UntypedStorage]
    size: int


class LiveBytes(EagerMode):
    """Counts the bytes of storages that operators in this block created and that are still referenced.

    This includes tensors saved by autograd, but not workspace that a kernel allocates while it runs.

    Attributes:
        now: current bytes.
        peak: largest value of `now`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._held: dict[int, _Held] = {}  # by the storage's number

    def __enter__(self) -> LiveBytes:
        self._resizing = patch.object(torch.UntypedStorage, "resize_", self._resize)
        self._resizing.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.stop()

    @property
    def _resize(self) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
        """Return a `resize_` method of storages that counts: ZeRO stage 3 frees gathered weights with it."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            out = original(storage, size)
            if held := self._held.get(storage_number(storage)):
                self._add(size - held.size)
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
        for tensor in _tensors(out):
            self._see(tensor)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        number, size = storage_number(storage), storage.nbytes()
        if number in self._held:  # a view, an in-place result, or seen before
            return

        def forget(_: object) -> None:
            self.now -= self._held.pop(number).size

        self._held[number] = _Held(weakref.ref(storage, forget), size)
        self._add(size)

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an operator's result, which can have nested lists."""
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, list | tuple):
        for each in out:
            yield from _tensors(each)
