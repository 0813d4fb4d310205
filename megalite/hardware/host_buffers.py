"""Copies of device memory in pinned host memory, made by streams of their own, in buffers that are reused."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.hardware.host_memory import allocate_bytes, pin


class HostMemoryError(Exception):
    """Host memory cannot be allocated or pinned."""


@dataclass(eq=False)
class HostBuffer:
    """Hold a copy of device memory.

    Attributes:
        memory: uint8 ``[num_bytes]``; empty for a copy of the meta device's.
        read: end of the latest copy out of it, after which it may be written again.
    """

    num_bytes: int
    memory: Tensor
    read: torch.cuda.Event | None = None


class HostBuffers:
    """Copy memory between a device and the host, and keep the host's buffers for the next copies.

    On a GPU the two directions have a stream each, so that copies overlap with computation and with each
    other, and the host's memory is pinned. On a CPU the same calls copy at once; on the meta device they only
    count.

    Args:
        device: whose memory is copied.

    Attributes:
        num_bytes: of all buffers so far, used or not.
        copied_down: bytes copied from the device to the host so far.
        copied_up: bytes copied from the host to the device so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = self.copied_down = self.copied_up = 0
        self._device = device
        self._down = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._up = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._unused: dict[int, list[HostBuffer]] = defaultdict(list)  # by size

    def copy_to_host(self, source: Tensor) -> HostBuffer:
        """Start to copy uint8 ``[n]`` from the device, after the work that the device has queued so far.

        The caller keeps `source` until `wait` for a later `mark_copied`.

        Raises:
            HostMemoryError: the host's memory cannot be allocated or pinned.
        """
        buffer = self._take(source.numel())
        self.copied_down += buffer.num_bytes
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self._device))
            if buffer.read is not None:
                self._down.wait_event(buffer.read)
            with torch.cuda.stream(self._down):
                buffer.memory.copy_(source, non_blocking=True)
        elif self._device.type == "cpu":
            ctypes.memmove(buffer.memory.data_ptr(), source.data_ptr(), buffer.num_bytes)
        return buffer

    def mark_copied(self) -> torch.cuda.Event | None:
        """Return the event of the end of all copies to the host so far; None if they have ended."""
        return None if self._down is None else self._down.record_event()

    def copy_to_device(self, buffer: HostBuffer) -> Tensor:
        """Start to copy a buffer into new memory of the device, uint8 ``[n]``, and give the buffer back.

        The copy starts after the work that the device has queued so far, which may still use that memory for
        something else. The caller waits for `mark_arrived` before it uses the result.
        """
        target = torch.empty(buffer.num_bytes, dtype=torch.uint8, device=self._device)
        self.copied_up += buffer.num_bytes
        if self._up is not None:
            self._up.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._up):
                target.copy_(buffer.memory, non_blocking=True)
            target.record_stream(self._up)
            buffer.read = self._up.record_event()
        elif self._device.type == "cpu":
            ctypes.memmove(target.data_ptr(), buffer.memory.data_ptr(), buffer.num_bytes)
        self.give_back(buffer)
        return target

    def mark_arrived(self) -> torch.cuda.Event | None:
        """Return the event of the end of all copies to the device so far; None if they have ended."""
        return None if self._up is None else self._up.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let later work of the device wait for an event; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def keep_for_copies(self, source: Tensor) -> None:
        """Let a tensor's memory be used for something else only after the copies to the host so far."""
        if self._down is not None:
            source.record_stream(self._down)

    def give_back(self, buffer: HostBuffer) -> None:
        """Let other copies use a buffer, once the copies from it so far have ended."""
        self._unused[buffer.num_bytes].append(buffer)

    def _take(self, num_bytes: int) -> HostBuffer:
        if self._unused[num_bytes]:
            return self._unused[num_bytes].pop()
        buffer = HostBuffer(num_bytes, self._allocate(num_bytes))
        self.num_bytes += num_bytes
        return buffer

    def _allocate(self, num_bytes: int) -> Tensor:
        try:
            memory = allocate_bytes(0 if self._device.type == "meta" else num_bytes)
            if self._device.type == "cuda":
                pin(memory)
        except (RuntimeError, OSError) as error:
            raise HostMemoryError(str(error)) from error
        return memory
