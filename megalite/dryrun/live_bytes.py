"""Memory that tensors hold, counted on any device from the tensors themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megalite.dryrun.mode import Mode


class LiveBytes(Mode):
    """Bytes of the storages that operators in this block made and that something still holds.

    Autograd's saved tensors are among them; what a kernel takes for itself while it runs is not.

    Attributes:
        now: bytes at this moment.
        peak: the most that there were at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by the storage's address

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
        address, size = storage._cdata, storage.nbytes()
        if address in self._held:  # a view, in place, or seen before
            return

        def forget(_: object) -> None:
            del self._held[address]
            self.now -= size

        self._held[address] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    """Those of an operator's result: a tensor, or several in lists."""
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, list | tuple):
        for each in out:
            yield from _tensors(each)
