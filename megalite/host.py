"""What a rank sets in its own process to be fast on a CPU: threads and the allocator."""

from __future__ import annotations

import ctypes
import os

import torch

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1


def limit_threads(num_threads: int | None, local_world_size: int) -> None:
    """One thread a rank where several share a machine's cores, unless told: more only fight each other."""
    if num_threads is None and local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        num_threads = 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def keep_freed_memory() -> None:
    """Makes glibc keep what is freed for the next tensor; with another C library it does nothing.

    glibc maps each large tensor anew and gives it back when it is freed, so that a training step touches all
    its memory for the first time, again and again. Kept, it is faster by up to a third and larger by as much:
    blocks of many sizes leave gaps between them. benchmarks/RESULTS.md has figures of both.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)
