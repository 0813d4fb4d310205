"""A few numbers of an iteration on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Readout:
    """Copies scalars to the host in one piece, behind the work that the device has to do up to here.

    Work that is put in the device's queue afterwards runs while the host waits in `read`, and while it
    decides what to do next: the queue does not run dry. On a CPU nothing is on its way, and nothing is waited
    for.
    """

    def __init__(self, *scalars: Tensor) -> None:
        """Starts the copy; the scalars are on one device, and may change afterwards."""
        self._values = torch.stack(scalars)
        self._arrived: torch.cuda.Event | None = None
        if self._values.is_cuda:
            on_host = torch.empty(len(scalars), dtype=self._values.dtype, pin_memory=True)
            self._values = on_host.copy_(self._values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [value.item() for value in self._values]
