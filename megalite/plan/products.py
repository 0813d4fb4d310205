"""Time of a product of matrices, by its shape."""

from __future__ import annotations

import math
from functools import lru_cache

from megalite.plan.gpu import Gpu

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
"""Rows and columns of the output that a streaming multiprocessor makes at a time, and the share of the best
rate that it has at it: a small tile reads its inputs again more often."""
FILL_SECONDS = 0.8e-6
"""Until a tile's first operands are there: the latency of a GPU's memory."""
ALIGNED, WHOLE_LINES = 8, 64
"""Elements of a row that 16 bytes and that a cache line of 128 bytes hold."""
UNALIGNED_RATE, BROKEN_LINE_RATE = 0.20, 0.80
"""Share of the rate where rows do not start at 16 bytes, and where they start inside of a line."""
KERNEL_SECONDS = 4e-6
"""From one kernel's end to the next one's full speed."""


@lru_cache(maxsize=4096)
def product_seconds(gpu: Gpu, m: int, n: int, k: int, batch: int = 1, element_bytes: int = 2) -> float:
    """``batch`` products ``[m, k] x [k, n]``.

    The tiles of the output are dealt over the multiprocessors in waves, and the last wave takes as long as a
    full one; of several tile sizes the library takes the one that is done first. Not faster than memory.
    """
    full = gpu.tflops * 1e12 * gpu.product_share * alignment_rate(n, k) * dtype_rate(element_bytes)
    candidates = []
    for rows, columns, share in TILES:
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * batch / gpu.num_sms)
        multiplying = 2 * rows * columns * k * gpu.num_sms / (full * share)
        candidates.append(waves * (multiplying + _edge_seconds(gpu, rows * columns * element_bytes)))
    moved = element_bytes * batch * (m * k + k * n + m * n)
    return max(min(candidates), moved / (gpu.memory_gbps * 1e9 * gpu.memory_share)) + KERNEL_SECONDS


def _edge_seconds(gpu: Gpu, num_bytes: int) -> float:
    """Return the seconds at a tile's start and end in which its multiprocessor multiplies nothing.

    It waits for the first operands, and writes the tile's `num_bytes` at its share of the memory's bandwidth.
    """
    return FILL_SECONDS + num_bytes * gpu.num_sms / (gpu.memory_gbps * 1e9 * gpu.memory_share)


def alignment_rate(*row_lengths: int) -> float:
    """Share of the rate that rows of these lengths leave, by the worst of them."""
    if any(length % ALIGNED for length in row_lengths):
        return UNALIGNED_RATE
    return BROKEN_LINE_RATE if any(length % WHOLE_LINES for length in row_lengths) else 1.0


def dtype_rate(element_bytes: int) -> float:
    """Of the rate in 16 bits: half in 32 (TF32), next to nothing in 64."""
    return {2: 1.0, 4: 0.5}.get(element_bytes, 0.06)
