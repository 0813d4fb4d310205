"""Pinned buffers through which gradients and weights pass between a device and the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.optim import NUM_STAGED
from megalite.utils.errors import UserError, first_line
from megalite.utils.hardware.host_memory import allocate_bytes, pin


def staging_bytes(size: int, dtypes: Sequence[torch.dtype]) -> int:
    """Return the host memory of `Staging` with these arguments."""
    return NUM_STAGED * size * sum(dtype.itemsize for dtype in dtypes)


class Staging:
    """Copies of ranges to the host before their update and back after it, each way on its own CUDA stream.

    On other devices copies are made at once. Ranges are numbered from 0 in each update. Call `down`,
    `arrived` and `up` for each range in this order, and `down` at most `NUM_STAGED` ranges ahead of `up`.

    Args:
        device: device of the tensors to copy from and to; with meta, the buffers have no memory.
        size: largest number of elements in a range.
        dtypes: dtypes of a range's tensors to copy, such as gradient and weights; each has a buffer.

    Raises:
        UserError: the system does not allow the process to pin the buffers.
    """

    def __init__(self, device: torch.device, size: int, dtypes: Sequence[torch.dtype]) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self._memory = _host_memory(staging_bytes(size, dtypes), device)
        parts = self._memory.split([NUM_STAGED * size * dtype.itemsize for dtype in dtypes])
        pairs = zip(parts, dtypes, strict=True)
        self._buffers = [part.view(dtype).view(NUM_STAGED, size) for part, dtype in pairs]
        self._down = torch.cuda.Stream(device) if is_cuda else None
        self._up = torch.cuda.Stream(device) if is_cuda else None
        self._copied_down: list[torch.cuda.Event | None] = [None] * NUM_STAGED
        self._copied_up: list[torch.cuda.Event | None] = [None] * NUM_STAGED

    def start(self) -> None:
        """Begin an update after the work that the device has queued so far."""
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))

    def buffers(self, number: int, numel: int) -> list[Tensor]:
        """Return a range's buffers, ``[numel]`` each; ranges that are `NUM_STAGED` apart share them."""
        return [slots[number % NUM_STAGED, :numel] for slots in self._buffers]

    def down(self, number: int, sources: Sequence[Tensor]) -> None:
        """Start to copy tensors of the device, ``[n]`` each, into the range's first buffers."""
        slot = number % NUM_STAGED
        with torch.cuda.stream(self._down):
            if self._down is not None and (before := self._copied_up[slot]) is not None:
                self._down.wait_event(before)
            for slots, source in zip(self._buffers, sources, strict=False):
                slots[slot, : source.numel()].copy_(source, non_blocking=True)
            if self._down is not None:
                self._copied_down[slot] = self._down.record_event()

    def arrived(self, number: int) -> None:
        """Wait until the host may read and write the range's buffers."""
        if (event := self._copied_down[number % NUM_STAGED]) is not None:
            event.synchronize()  # the copy down has waited for the previous copy up

    def up(self, number: int, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Start to copy one of the range's buffers to a tensor of the device; return the copy's event."""
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
        event = None if self._up is None else self._up.record_event()
        self._copied_up[number % NUM_STAGED] = event
        return event


class HostGradient(NamedTuple):
    """Gradient in pinned host memory, ``[n]``, and the event of its copy, which may still run."""

    memory: Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """Wait until the gradient has arrived, and return it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.memory


class HostGradients:
    """Gradients of offloaded states in pinned host memory; they are copied while backward runs.

    Args:
        numels: number of elements of each state.

    Raises:
        UserError: the system does not allow the process to pin the memory.

    Attributes:
        copied: gradients that have been copied or are being copied, by state.
    """

    def __init__(self, device: torch.device, numels: Sequence[int], dtype: torch.dtype) -> None:
        self._device = device
        self._memory = _host_memory(sum(numels) * dtype.itemsize, device)
        self._tensors = list(self._memory.view(dtype).split(list(numels)))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied: dict[int, HostGradient] = {}

    def forget(self) -> None:
        """Let later copies replace all gradients; a running update keeps the old `copied`."""
        self.copied = {}

    def copy(self, state: int, gradient: Tensor) -> None:
        """Start to copy a state's gradient, after the work that the current stream has queued so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._tensors[state].copy_(gradient, non_blocking=True)
        event = None if self._stream is None else self._stream.record_event()
        self.copied[state] = HostGradient(self._tensors[state], event)

    def copy_missing(self, gradients: Sequence[Tensor]) -> None:
        """Copy the gradients that have not been copied yet; the device's later work waits for all copies."""
        for state, gradient in enumerate(gradients):
            if state not in self.copied:
                self.copy(state, gradient)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Return uint8 ``[num_bytes]`` that the device copies to and from; pinned while this tensor exists."""
    if device.type == "meta":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    memory = allocate_bytes(num_bytes)
    if device.type == "cuda":
        try:
            pin(memory)
        except RuntimeError as error:
            raise UserError(
                f"{num_bytes / 1e6:.0f} MB of host memory cannot be pinned for the offloaded optimizer "
                f"({first_line(error)}): raise the limit of locked memory (ulimit -l)"
            ) from None
    return memory
