"""Allocate large blocks of host memory, and find the free memory of this machine."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path

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
