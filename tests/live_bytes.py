"""Memory that tensors hold, counted on any device from the tensors themselves."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Storages that operators in this block made: autograd's saved tensors are among them, parameters not."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:  # neither a view nor in place
                self.storages[storage._cdata] = weakref.ref(storage)
        return out

    def settled_count(self) -> int:
        """The same once it is at rest: gloo's threads let go of a finished collective's tensors late."""
        wait_for_other_threads()
        return self.count()

    def count(self) -> int:
        """Bytes of those that something still holds."""
        alive = (reference() for reference in self.storages.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of an operator's arguments or results, faster than by torch's pytree."""
    if isinstance(tree, torch.Tensor):
        yield tree.untyped_storage()
    elif isinstance(tree, (tuple, list, dict)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _storages(each)


def wait_for_other_threads() -> None:
    """Wait until no other thread of this process has anything to do."""
    num_idle = 0
    while num_idle < 3:
        time.sleep(0.005)
        num_idle = 0 if _others_run() else num_idle + 1


def _others_run() -> bool:
    """Return whether another thread of this process runs or waits for a core, where there is a /proc."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            is_other = int(thread.parent.name) != threading.get_native_id()
            if is_other and thread.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
