"""Estimate the time of the Triton kernels of recurrences, which have not been measured on a GPU."""

from __future__ import annotations

from megalite.hardware.gpus import Gpu
from megalite.observe.recurrence_call import RecurrenceCall

FULL_SIZE = 128
"""Key size from which on the GEMMs of a chunk are assumed to be as fast as FlashAttention-2's."""


def recurrence_seconds(gpu: Gpu, call: RecurrenceCall, bandwidth: float) -> float:
    """Return the seconds of a call: of each kernel, the time of its GEMMs or of its memory accesses.

    The kernels that loop over chunks have one program for some columns of a head. If there are fewer of them
    than multiprocessors, some of these have nothing to do.

    Args:
        bandwidth: bytes per second that programs reach in GPU memory.
    """
    rate = gpu.tflops * 1e12 * gpu.attention_share * 2 / call.element_bytes
    rate *= min(1.0, (call.key_size + 64) / (FULL_SIZE + 64))
    return sum(
        max(kernel.flops / (rate * min(1.0, kernel.num_programs / gpu.num_sms)), kernel.num_bytes / bandwidth)
        for kernel in call.kernels
    )
