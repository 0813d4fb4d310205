"""Copy a few values from the device to the host without a synchronization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AsyncValues:
    """Copy of a few values, ``[n]``, to the host, after the work that the device has queued so far.

    Work that is queued later runs while the host waits in `read` and decides what to do next, so the
    device's queue does not run empty. On a CPU there is no copy and no wait.
    """

    def __init__(self, values: Tensor) -> None:
        """Start the copy; on a GPU, the values may change afterwards."""
        self._values = values
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = on_host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[Any]:
        """Wait for the copy and return the values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [value.item() for value in self._values]
