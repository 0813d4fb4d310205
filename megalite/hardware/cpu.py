"""CPU settings of a rank's process: threads, their scheduling and the allocator."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import torch

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1


def limit_threads(num_threads: int | None, local_world_size: int) -> None:
    """Set torch's number of threads; the default is one per rank if several ranks share a machine.

    More threads than cores slow each other down. OMP_NUM_THREADS, if set, replaces the default.
    """
    if num_threads is None and local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        num_threads = 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def schedule_as_batch() -> None:
    """Let Linux schedule this thread and the threads that it starts as batch work (sched(7), SCHED_BATCH).

    A batch thread that wakes up does not interrupt the running thread. This helps ranks that share cores.
    While a thread holds the lock of a connection, gloo's own thread polls the socket without pause. If gloo's
    thread takes the core from the thread that holds the lock, both wait for the end of its time slice.
    Figures are in benchmarks/RESULTS.md. There is no effect on free cores, on other systems, or if the
    process was started with a policy other than the default.
    """
    if hasattr(os, "sched_setscheduler") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # a sandbox can forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensor; no effect with another C library.

    By default glibc maps each large tensor and unmaps it when it is freed, so every training step takes page
    faults for all its memory. Keeping the memory makes steps up to a third faster, and the process up to a
    third larger, because blocks of many sizes leave gaps. Figures are in benchmarks/RESULTS.md.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)
