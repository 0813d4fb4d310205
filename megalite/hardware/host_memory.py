"""Host memory: large blocks of it, and how much of it is free on this machine."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor


def allocate_bytes(num_bytes: int) -> Tensor:
    """Return zeroed memory of its own, which returns to the system when nothing uses it any more.

    It begins at a page. Huge pages, if the system has them, make its first use four times faster.

    Returns:
        uint8 ``[num_bytes]``.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that processes can still allocate without swapping; None if Linux does not say.

    That is the machine's available memory, or what is left of the limit of this process' control group.

    Args:
        root: of the file systems proc and sys.
    """
    free = [
        *_available_of_machine(root / "proc/meminfo"),
        *_left_of_group(root / "sys/fs/cgroup", "memory.max", "memory.current"),
        *_left_of_group(root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ]
    return min(free, default=None)


def _available_of_machine(file: Path) -> list[int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _left_of_group(folder: Path, limit: str, usage: str) -> list[int]:
    """Return what is left of a control group's limit; the page cache that it can drop counts as free."""
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return []
    cached = sum(int(line.split()[1]) for line in lines if line.split()[0] == "inactive_file")
    return [most - used + cached]
