"""Pinned buffers through which ranges of gradients and weights pass between a device and the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.errors import UserError, first_line
from megalite.optim.offload_sizes import NUM_STAGED


def staging_bytes(size: int, dtypes: Sequence[torch.dtype]) -> int:
    """Return the host memory of `Staging` with these arguments."""
    return NUM_STAGED * size * sum(dtype.itemsize for dtype in dtypes)


class Staging:
    """Copy ranges to the host ahead of their update, and back behind it, each way on its own CUDA stream.

    On another device the copies are made at once. Ranges are numbered from 0 in each update, and `down`,
    `arrived` and `up` are called for each in this order; `down` at most `NUM_STAGED` ahead of `up`.

    Args:
        device: of the tensors to copy from and to; with meta, the buffers have no memory.
        size: largest number of elements of a range.
        dtypes: of the tensors of a range that are copied, such as gradient and weights: a buffer each.

    Raises:
        UserError: the system does not let the process pin the buffers.
    """

    def __init__(self, device: torch.device, size: int, dtypes: Sequence[torch.dtype]) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        host = "meta" if device.type == "meta" else "cpu"
        try:
            self._buffers = [
                [torch.empty(size, dtype=dtype, device=host, pin_memory=is_cuda) for dtype in dtypes]
                for _ in range(NUM_STAGED)
            ]
        except RuntimeError as error:
            raise UserError(
                f"{staging_bytes(size, dtypes) / 1e6:.0f} MB of host memory cannot be pinned for the "
                f"offloaded optimizer ({first_line(error)}): raise the limit of locked memory (ulimit -l)"
            ) from None
        self._down = torch.cuda.Stream(device) if is_cuda else None
        self._up = torch.cuda.Stream(device) if is_cuda else None
        self._copied_down: list[torch.cuda.Event | None] = [None] * NUM_STAGED
        self._copied_up: list[torch.cuda.Event | None] = [None] * NUM_STAGED

    def start(self) -> None:
        """Begin an update, after the work that the device has queued so far."""
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))

    def buffers(self, number: int, numel: int) -> list[Tensor]:
        """Return a range's buffers, ``[numel]`` each; ranges `NUM_STAGED` apart share them."""
        return [buffer[:numel] for buffer in self._buffers[number % NUM_STAGED]]

    def down(self, number: int, sources: Sequence[Tensor]) -> None:
        """Start to copy tensors of the device, ``[n]`` each, into the first of the range's buffers."""
        slot = number % NUM_STAGED
        with torch.cuda.stream(self._down):
            if self._down is not None and (before := self._copied_up[slot]) is not None:
                self._down.wait_event(before)
            for buffer, source in zip(self.buffers(number, sources[0].numel()), sources, strict=False):
                buffer.copy_(source, non_blocking=True)
            if self._down is not None:
                self._copied_down[slot] = self._down.record_event()

    def arrived(self, number: int) -> None:
        """Wait until the host may read the range's buffers, and write to them."""
        if (event := self._copied_down[number % NUM_STAGED]) is not None:
            event.synchronize()  # the copy down has waited for the copy up before it

    def up(self, number: int, source: Tensor, target: Tensor) -> None:
        """Start to copy one of the range's buffers to a tensor of the device."""
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
            if self._up is not None:
                self._copied_up[number % NUM_STAGED] = self._up.record_event()

    def finish(self) -> None:
        """Let the device's later work wait for the copies."""
        if self._up is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._up)
