"""Compile megalite's Triton kernels for GPUs that are absent, and count their machine code.

The operators' own launchers run, but the kernels are only compiled. `benchmarks/kernel_limits.py` prints the
counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.machine_code import TARGETS, WARP, Counts, Kernel, count_of_bytes, count_of_scores, read
from megalite.kernels import CausalSoftmax, Drop, VisibleKeys, moments, softmax, token_rows
from megalite.kernels.dropout import key_tensor, launch_kernel
from megalite.kernels.flash_attention import (
    SIZES,
    KernelSizes,
    different_sizes,
    launch,
    launch_backward,
    padded,
)
from megalite.kernels.recurrence import SIZES as RECURRENCE_SIZES
from megalite.kernels.recurrence import launch as launch_recurrence
from megalite.kernels.recurrence import launch_backward as launch_recurrence_backward

HEAD_DIMS = (64, 128, 256)
ALL = "dropout, documents, alibi"
OPTIONS = ("", "dropout", ALL)
"""Options of attention in the table."""
RECURRENT_DIM = 128
"""Size of the heads of recurrences in the table."""


@contextmanager
def only_compiled(capability: int) -> Iterator[list[tuple[str, Any]]]:
    """Compile kernels for this compute capability instead of launching them; yield their names and code."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    gpu = mock.Mock()
    gpu.get_current_target.return_value = GPUTarget("cuda", capability, WARP)
    gpu.get_current_device.return_value = capability  # Triton keeps the kernels of each device
    run, kernels = JITFunction.run, []

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        kernels.append((self.__name__, run(self, *arguments, warmup=True, **options)))

    with mock.patch.object(JITFunction, "run", compile_only), mock.patch.object(driver, "_active", gpu):
        yield kernels


def compile_attention(
    head_dim: int,
    dtype: torch.dtype,
    options: str,
    capability: int,
    seq_length: int = 128,
    num_heads: int = 4,
    num_groups: int = 2,
) -> dict[str, Any]:
    """Compile the kernels of attention; return each by its name in `KernelSizes`.

    Args:
        options: of dropout, documents, both sides, alibi, caps, slice (the last half of the queries) and keys
            (those of the first half of a sample, for queries of the second half), those that the kernels
            support, as text.
    """
    heads = (num_heads, num_groups, num_groups, num_heads)
    q, k, v, grad = (torch.empty(seq_length, 2, n, head_dim, dtype=dtype).permute(1, 2, 0, 3) for n in heads)
    slopes = torch.zeros(num_heads, dtype=torch.float64) if "alibi" in options else None
    whole_length = seq_length * (2 if "keys" in options else 1)
    starts = torch.zeros(2, whole_length, dtype=torch.int64) if "documents" in options else None
    site = (torch.arange(2), key_tensor(1 << 63)) if "dropout" in options else (None, None)
    ends = torch.full_like(starts, whole_length) if starts is not None and "both sides" in options else None
    probability, cap = 0.1 if "dropout" in options else 0.0, 50.0 if "caps" in options else None
    start = seq_length // 2 if "slice" in options else 0
    q, grad = q[:, :, start:], grad[:, :, start:]
    start += whole_length - seq_length
    rest = slopes, starts, ends, *site, head_dim**-0.5, probability, 0, cap, start, 0, whole_length
    with only_compiled(capability) as kernels:
        out, log_sums = launch(q, k, v, *rest)
        launch_backward(grad, q, k, v, out, log_sums, *rest)
    (_, forward), _, *of_keys, (_, of_queries) = kernels  # the second one computes delta
    names = ("key_gradients", "value_gradients")
    named = {name: kernel for name, (_, kernel) in zip(names, of_keys, strict=False)}
    return {"forward": forward, **named, "query_gradients": of_queries}


def compile_recurrence(
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    capability: int,
    *,
    is_delta: bool,
    seq_length: int = 256,
) -> dict[str, Any]:
    """Compile the kernels of a recurrence with documents, of two value heads for each key head, by name."""
    q, k = (torch.empty(seq_length, 2, 2, key_dim, dtype=dtype).permute(1, 2, 0, 3) for _ in range(2))
    v = torch.empty(seq_length, 2, 2, 2, value_dim, dtype=dtype).permute(1, 2, 3, 0, 4)
    decay, rate = (torch.empty(2, 2, 2, seq_length) for _ in range(2))
    starts = torch.zeros(2, seq_length, dtype=torch.int64)
    arguments = q, k, v, decay, rate, starts, None, is_delta
    with only_compiled(capability) as kernels:
        out, _ = launch_recurrence(*arguments)
        launch_recurrence_backward(out, None, *arguments)
    return dict(kernels)


@contextmanager
def sizes_for(capability: int) -> Iterator[None]:
    """Let the launchers use the block sizes of a GPU in `TARGETS`."""
    shared_memory = TARGETS[capability].shared - 1024
    with mock.patch.dict(SIZES, different_sizes(capability // 10, shared_memory)):
        yield


def attention_counts(head_dim: int, options: str, capability: int) -> dict[str, Counts]:
    """Return the counts of each kernel of attention in bf16, with grouped-query attention."""
    with sizes_for(capability):
        return _counts(compile_attention(head_dim, torch.bfloat16, options, capability), head_dim, capability)


def recurrence_counts(capability: int, *, is_delta: bool) -> dict[str, Counts]:
    """Return the counts of each kernel of a recurrence in bf16, with heads of `RECURRENT_DIM`."""
    sizes = RECURRENCE_SIZES[2, RECURRENT_DIM]
    compiled = compile_recurrence(RECURRENT_DIM, RECURRENT_DIM, torch.bfloat16, capability, is_delta=is_delta)
    found = {}
    for name, each in compiled.items():
        pairs_per_thread = sizes.tokens**2 / (WARP * each.metadata.num_warps)
        found[name.removesuffix("_kernel")] = count_of_scores(*_read(each, capability), pairs_per_thread)
    return found


def _counts(compiled: dict[str, Any], head_dim: int, capability: int) -> dict[str, Counts]:
    sizes: KernelSizes = SIZES[2, padded(head_dim)]
    found = {}
    for name, each in compiled.items():
        block = getattr(sizes, name)
        scores_per_thread = block.queries * block.keys / (WARP * block.warps)
        kernel, at_once = _read(each, capability)
        found[name] = count_of_scores(kernel, at_once, scores_per_thread)
    return found


def _read(compiled: Any, capability: int) -> tuple[Kernel, int]:
    """Return a compiled kernel's code, and how many programs run at once."""
    (kernel,) = read(compiled.asm["cubin"])
    data = compiled.metadata
    columns = getattr(data, "tmem_size", 0) or 0
    return kernel, kernel.programs(TARGETS[capability], data.num_warps, data.shared, columns)


def run_dropout(dtype: torch.dtype, key: int = 0, base: int = 0) -> None:
    """Launch residual + dropout(x + bias)."""
    x = torch.empty(512, 2, 2048, dtype=dtype)
    launch_kernel(x, x[0, 0], x, torch.arange(2), 0.1, key, base, 2048)


def run_dropout_backward(dtype: torch.dtype, key: int = 0, base: int = 0) -> None:
    """Launch the gradients of residual + dropout(x + bias)."""
    grad = torch.empty(512, 2, 2048, dtype=dtype)
    launch_kernel(grad, None, None, torch.arange(2), 0.1, key, base, 2048, has_sums=True)


def run_moments(dtype: torch.dtype, key: int = 0, base: int = 0) -> None:
    """Launch the rounding of moments to bf16, or of the first to e4m3 for another dtype."""
    wide = torch.empty(4096)
    rounded = wide.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float8_e4m3fn)
    moments.launch(wide, wide, rounded, wide.bfloat16(), torch.tensor(1.0), key, base, base, 640, 1280)


def run_softmax(dtype: torch.dtype, key: int = 0, base: int = 0) -> None:
    """Launch the softmax with all options, and its gradient."""
    drop = Drop(0.1, key % 2**64, torch.arange(2), base)
    slopes, starts = torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2048).long()
    arguments = CausalSoftmax(2048, 0.1, slopes, VisibleKeys(starts), drop).arguments(1920)
    scores = torch.empty(2, 4, 128, 2048, dtype=dtype)
    log_sums = softmax.launch(scores, *arguments)
    softmax.launch_backward(scores, scores, log_sums, *arguments)


def run_token_rows(dtype: torch.dtype, *, drops: bool = False) -> None:
    """Launch the copies of 8 rows for each token, and their sums."""
    places = torch.arange(512)
    starts = torch.arange(0, 512, 8) if drops else None
    rows = token_rows.launch_copy(torch.empty(64, 2048, dtype=dtype), places, starts, 8)
    token_rows.launch_sum(rows, places, starts, 8)


def other_counts(capability: int) -> dict[str, Counts]:
    """Return the counts of the memory-bound kernels in bf16."""
    with only_compiled(capability) as kernels:
        run_dropout(torch.bfloat16)
        run_dropout_backward(torch.bfloat16)
        run_softmax(torch.bfloat16)
        run_token_rows(torch.bfloat16, drops=True)
    names = (
        *("bias_dropout_add", "bias_dropout_add_backward", "softmax", "softmax_backward"),
        *("copy_to_rows", "sum_rows"),
    )
    return {
        name: count_of_bytes(*_read(each, capability)) for name, (_, each) in zip(names, kernels, strict=True)
    }
