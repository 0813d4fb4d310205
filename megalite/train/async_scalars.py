"""Copy scalars from the device to the host without a synchronization."""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncScalars:
    """Copies scalars to the host in one transfer, after the work that the device has queued so far.

    Work that is queued later runs while the host waits in `read` and decides what to do next, so the
    device's queue does not run empty. On a CPU there is no copy and no wait.
    """

    def __init__(self, *scalars: Tensor) -> None:
        """Start the copy; the scalars are on one device and may change afterwards."""
        self._values = torch.stack(scalars)
        self._arrived: torch.cuda.Event | None = None
        if self._values.is_cuda:
            on_host = torch.empty(len(scalars), dtype=self._values.dtype, pin_memory=True)
            self._values = on_host.copy_(self._values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        """Wait for the copy and return the values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [value.item() for value in self._values]
