"""Copy device memory to reusable buffers in pinned host memory, on separate streams."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.hardware.host_memory import allocate_bytes, pin


class HostMemoryError(Exception):
    """Raised if host memory cannot be allocated or pinned."""


@dataclass(eq=False)
class HostBuffer:
    """Copy of device memory.

    Attributes:
        memory: uint8 ``[num_bytes]``; empty for copies from the meta device.
        read: end of the latest copy out of the buffer, after which it can be overwritten.
    """

    num_bytes: int
    memory: Tensor
    read: torch.cuda.Event | None = None


class HostBuffers:
    """Host buffers for copies of device memory, which are kept for later copies.

    On a GPU the host memory is pinned, and each direction has its own stream, so copies overlap with
    computation and with each other. On a CPU the calls copy immediately; on the meta device they only count
    bytes.

    Args:
        device: the device whose memory is copied.

    Attributes:
        num_bytes: size of all buffers so far, used or not.
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
        """Start to copy uint8 ``[n]`` from the device, after all work that is queued on the device.

        The caller must keep `source` until it has called `wait` for a later `mark_copied`.

        Raises:
            HostMemoryError: host memory cannot be allocated or pinned.
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
        """Return an event for the end of all copies to the host so far; None if they have ended."""
        return None if self._down is None else self._down.record_event()

    def copy_to_device(self, buffer: HostBuffer) -> Tensor:
        """Start to copy a buffer into new device memory, uint8 ``[n]``, and give the buffer back.

        The copy starts after all work that is queued on the device, which may still use this memory for
        something else. The caller must wait for `mark_arrived` before it uses the result.
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
        """Return an event for the end of all copies to the device so far; None if they have ended."""
        return None if self._up is None else self._up.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let later work on the device wait for an event; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def keep_for_copies(self, source: Tensor) -> None:
        """Keep a tensor's memory from being reused before all copies to the host so far have ended."""
        if self._down is not None:
            source.record_stream(self._down)

    def give_back(self, buffer: HostBuffer) -> None:
        """Let other copies use a buffer after all copies from it so far have ended."""
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
