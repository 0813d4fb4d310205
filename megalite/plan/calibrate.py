"""Measure this machine: rates of GEMMs, attention, copies, and of a link if there are several ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megalite.config import Config, ParallelConfig
from megalite.config.fields import with_fields
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.model.stage import DTYPES
from megalite.tensor_parallel.fp8 import E4M3, has_gemms_in_8_bits, in_fp8, scaled_gemm
from megalite.utils.hardware.gpus import Gpu
from megalite.utils.hardware.host_memory import total_bytes

SECONDS = 0.3
"""Approximate length of each measurement."""
LINK_ELEMENTS = 4_000_000
"""fp32 elements of the message that measures a link."""


def measured_gpu(dtype: str, is_quick: bool = False) -> Gpu:
    """Measure this machine's first GPU, or one CPU core, as a type of GPU. Each rank has a GPU or a core.

    The rates are measured, not from a data sheet, so the shares that programs reach are 1, except
    attention's.

    Args:
        dtype: precision of the GEMMs.
        is_quick: measure small sizes, once.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_threads = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)  # as for training's ranks
        kind = DTYPES[dtype]
        gemm = _gemm_rate(device, kind, is_quick)
        attention = _attention_rate(device, kind, is_quick)
        copy = _copy_rate(device, is_quick)
        gemm_in_8_bits = _gemm_rate_in_8_bits(device, is_quick)
    finally:
        torch.set_num_threads(num_threads)
    ranks, num_sms = len(os.sched_getaffinity(0)), 1
    memory_bytes = total_bytes() / ranks
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        ranks, num_sms = torch.cuda.device_count(), properties.multi_processor_count
        memory_bytes = float(properties.total_memory)
    link = _link_gbps(device, ranks, copy)
    rate = gemm if kind.itemsize == 2 else gemm / (0.5 if kind.itemsize == 4 else 0.06)
    return Gpu(
        tflops=rate / 1e12,
        memory_gib=memory_bytes / 2**30,
        memory_gbps=copy / 1e9,
        num_sms=num_sms,
        node_gbps=link,
        network_gbps=link,
        gpus_per_node=ranks,
        host_link_bandwidth=_host_link_rate(device, copy, is_quick),
        product_share=1.0,
        attention_share=attention / rate,
        memory_share=1.0,
        link_share=1.0,
        has_triton=device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0),
        residual_gb=2.2 if device.type == "cuda" else 0.4,
        fp8_tflops=gemm_in_8_bits / 1e12,
    )


def with_local_defaults(config: Config) -> Config:
    """Return the config with training's defaults on this machine's CPU; a plan for a GPU already has them."""
    return config if torch.cuda.is_available() else with_cpu_defaults(config)


def with_cpu_defaults(config: Config) -> Config:
    """Return the config with training's defaults on a CPU, for a plan."""
    if config.model.attention_dropout:  # a CPU has no fused attention with dropout
        config = with_fields(config, attention_backend="unfused")
    return with_fields(
        config,
        overlap_param_gather=config.parallel.gathers_under_forward("cpu"),
        tp_comm_overlap=config.parallel.tp_comm_chunks(0, "cpu") > 1,
    )


def _rate(work: float, function: Callable[[], object], device: torch.device, is_quick: bool) -> float:
    best, end = float("inf"), time.perf_counter() + (0.0 if is_quick else SECONDS)
    function()
    while True:
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return work / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gemm_rate(device: torch.device, dtype: torch.dtype, is_quick: bool) -> float:
    size = 256 if is_quick else 8192 if device.type == "cuda" else 1024
    x = torch.randn(size, size, device=device).to(dtype)
    return _rate(2.0 * size**3, lambda: x @ x, device, is_quick)


def _gemm_rate_in_8_bits(device: torch.device, is_quick: bool) -> float:
    """Return the FLOPs per second of GEMMs in 8 bits; 0 on a device without them."""
    if not has_gemms_in_8_bits(device):
        return 0.0
    size = 256 if is_quick else 8192
    x = in_fp8(torch.randn(size, size, device=device), E4M3, torch.full((), 8.0, device=device))
    multiply = partial(scaled_gemm, x, x, None, torch.bfloat16, is_fast=True)
    return _rate(2.0 * size**3, multiply, device, is_quick)


def _attention_rate(device: torch.device, dtype: torch.dtype, is_quick: bool) -> float:
    """Count half of the scores, as the planner does for causal attention."""
    heads, length, size = (
        (4, 128, 64) if is_quick else (16, 4096, 128) if device.type == "cuda" else (4, 1024, 64)
    )
    q = torch.randn(1, heads, length, size, device=device).to(dtype)
    work = 4.0 * heads * length**2 * size / 2
    small_head = min(1.0, (size + 64) / 192)
    run = lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)  # noqa: E731
    return _rate(work, run, device, is_quick) / small_head


def _copy_rate(device: torch.device, is_quick: bool) -> float:
    """Return the bytes read and written per second."""
    count = 1_000_000 if is_quick else 256_000_000 if device.type == "cuda" else 32_000_000
    source = torch.zeros(count // 4, device=device)
    target = torch.empty_like(source)
    return _rate(2.0 * 4 * source.numel(), lambda: target.copy_(source), device, is_quick)


def _host_link_rate(device: torch.device, copy: float, is_quick: bool) -> float:
    """Return the bytes per second of a copy to pinned memory; on a CPU, of any copy: `copy` / 2."""
    if device.type == "cpu":
        return copy / 2  # `copy` counts bytes read and bytes written
    source = torch.zeros(1_000_000 if is_quick else 64_000_000, device=device)
    target = torch.empty(source.shape, pin_memory=True)
    return _rate(4.0 * source.numel(), lambda: target.copy_(source, non_blocking=True), device, is_quick)


def _link_gbps(device: torch.device, ranks: int, copy: float) -> float:
    """Measure a copy between two GPUs, or an all-reduce of two processes; one rank has the rate of `copy`."""
    if ranks < 2:
        return copy / 1e9
    if device.type == "cuda":
        source = torch.zeros(LINK_ELEMENTS * 16, device="cuda:0")
        target = torch.empty_like(source, device="cuda:1")
        return _rate(4.0 * source.numel(), lambda: target.copy_(source), device, False) / 1e9
    return min(run_ranks(_all_reduce_rate, ParallelConfig(data_parallel_size=2).mesh, 2)) / 1e9


def _all_reduce_rate(topology: Topology) -> float:
    """Return the bytes per second that each of two ranks sends; each sends as much as the message's size."""
    message = torch.zeros(LINK_ELEMENTS)
    return _rate(4.0 * LINK_ELEMENTS, lambda: dist.all_reduce(message), topology.device, True)
