"""Find free host memory, allocate large blocks of it, and copy device memory to them on their own streams."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def allocate_bytes(num_bytes: int) -> Tensor:
    """Allocate zeroed memory outside of the allocator; it returns to the system when nothing references it.

    It is page-aligned. Huge pages, if available, make its first use four times faster.

    Returns:
        uint8 ``[num_bytes]``.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A shared mapping has no huge pages. After a fork, pages that a device writes to must not be copied.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # the kernel may not support huge pages
                memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin(memory: Tensor) -> None:
    """Pin memory from `allocate_bytes` while this tensor exists, so that a GPU can access it directly.

    torch's own allocator rounds pinned memory up to powers of two, so up to half of it would be unused.

    Raises:
        RuntimeError: the system does not allow the process to pin it.
    """
    if memory.numel() == 0:
        return
    cuda, address = torch.cuda.cudart(), memory.data_ptr()
    torch.cuda.check_error(int(cuda.cudaHostRegister(address, memory.numel(), 0)))
    # Unpin it then, because other memory may be mapped at this address later. At exit the process unpins
    # everything.
    weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False


def total_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of this machine's memory, or the limit of this process' control group if it is less.

    Args:
        root: folder of the file systems proc and sys.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in _groups(root, "", root / "sys/fs/cgroup"):
        limits += _number_in(group / "memory.max")
    for group in _groups(root, "memory", root / "sys/fs/cgroup/memory"):
        limits += _number_in(group / "memory.limit_in_bytes")
    return min(limits)


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that can still be allocated without swapping; None if Linux does not report them.

    This is the machine's available memory, or the rest of the limit of this process' control group if it is
    less.

    Args:
        root: folder of the file systems proc and sys.
    """
    free = _available_of_machine(root / "proc/meminfo")
    for group in _groups(root, "", root / "sys/fs/cgroup"):
        free += _left_of_group(group, "memory.max", "memory.current")
    for group in _groups(root, "memory", root / "sys/fs/cgroup/memory"):
        free += _left_of_group(group, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(free, default=None)


def _available_of_machine(file: Path) -> list[int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _groups(root: Path, controller: str, mounted: Path) -> list[Path]:
    """Return the folders of this process' control group and of its parents, each of which can have a limit.

    Args:
        controller: controller of the hierarchy, as in proc/self/cgroup; empty in version 2.
        mounted: folder of the outermost group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [mounted]
    entries = (line.split(":", 2) for line in lines)
    own = [mounted / path.lstrip("/") for _, names, path in entries if controller in names.split(",")]
    inner = [each for group in own for each in (group, *group.parents) if each.is_relative_to(mounted)]
    return list(dict.fromkeys([*inner, mounted]))


def _number_in(file: Path) -> list[int]:
    """Return the number in a file of a control group; nothing if there is no such file, or no limit."""
    try:
        return [int(file.read_text())]
    except (OSError, ValueError):
        return []


def _left_of_group(folder: Path, limit: str, usage: str) -> list[int]:
    """Return the unused part of a control group's limit; page cache that can be dropped counts as unused."""
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return []
    cached = sum(int(line.split()[1]) for line in lines if line.split()[0] == "inactive_file")
    return [most - used + cached]


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
