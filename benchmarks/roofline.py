#!/usr/bin/env python
"""What a training step of a GPT should take on one GPU: each GEMM and memory-bound kernel, from a data sheet.

python benchmarks/roofline.py
python benchmarks/roofline.py --gpu h100-80 --micro-batch-size 8 --flash2

`floor` is the time at the rate that one large GEMM and one large copy reach; `expected` is what we expect of
our kernels: GEMMs in whole waves of tiles (megalite/plan/layer_time.py), attention at published rates,
memory-bound kernels at the share of the bandwidth that is usual. It is the step of train_step.py: bf16, no
dropout, compiled operators, one microbatch. scripts/check_gpu.sh compares measurements with it.

Shapes: T tokens of a microbatch, h hidden size, X a tensor [T, h] in bf16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megalite.config import ModelConfig
from megalite.config.entry_point import run_main
from megalite.config.presets import PRESETS
from megalite.hardware.gpus import GPUS, Gpu, find_gpu
from megalite.plan.layer_time import gemm_seconds
from megalite.plan.model_flops import flops_per_token
from megalite.plan.model_parameters import total_parameters

COPY_SHARE = 0.9
"""Share of the data sheet's bandwidth that a copy reaches: 4.3 of 4.8 TB/s (H200), 3.0 of 3.35 (H100)."""
FLOOR_SHARE = 788 / 989.4
"""Share of the data sheet's TFLOP/s that one large GEMM reaches for a moment: 788 TFLOP/s on an H200."""
CUDNN, FLASH2 = (484e12, 465e12), (298e12, 291e12)
"""FLOP/s of attention on Hopper, forward and backward, causal with 2k positions and heads of 128 (Shah et al.
2024, arXiv 2407.08608, figures 5 and 6)."""
BACKWARD_GEMMS = 2.5
"""Number of GEMMs in fused attention's backward, relative to its forward."""
OPTIMIZER_BYTES = 34
"""Bytes per parameter: read the gradient for the norm (4); read gradient, main weight and moments (16), write
the latter three (12) and the bf16 weight (2)."""


class Row(NamedTuple):
    """Describes one kernel.

    Attributes:
        kind: gemm, attention or memory.
        count: calls in a step.
        flops, num_bytes: FLOPs and bytes of a call.
        floor, expected: seconds of a call.
    """

    name: str
    kind: str
    count: int
    flops: float
    num_bytes: float
    floor: float
    expected: float


class Gemm(NamedTuple):
    """Describes one matrix product, ``[m, k] x [k, n]``."""

    name: str
    count: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Return the operations of a call."""
        return 2.0 * self.m * self.n * self.k


def gemms(model: ModelConfig, micro_batch_size: int) -> list[Gemm]:
    """Return the products of the linear layers and of the logits: forward, dgrad and wgrad of each."""
    h, tokens = model.hidden_size, micro_batch_size * model.seq_length
    linears = (
        ("qkv", model.num_layers, 3 * h, h),
        ("projection", model.num_layers, h, h),
        ("mlp up", model.num_layers, model.ffn_size, h),
        ("mlp down", model.num_layers, h, model.ffn_size),
        ("logits", 1, model.padded_vocab_size(1), h),
    )
    return [
        gemm
        for name, count, n, k in linears
        for gemm in (
            Gemm(f"{name} forward", count, tokens, n, k),
            Gemm(f"{name} dgrad", count, tokens, k, n),
            Gemm(f"{name} wgrad", count, n, k, tokens),
        )
    ]


def rows(model: ModelConfig, micro_batch_size: int, gpu: Gpu, flash2: bool = False) -> Iterator[Row]:
    """Yield all kernels of a step.

    Args:
        flash2: attention runs on FlashAttention 2 instead of cuDNN.
    """
    for gemm in gemms(model, micro_batch_size):
        floor = gemm.flops / (gpu.tflops * 1e12 * FLOOR_SHARE)
        expected = gemm_seconds(gpu, gemm.m, gemm.n, gemm.k)
        yield Row(gemm.name, "gemm", gemm.count, gemm.flops, 0.0, floor, expected)
    layers, b, s, h = model.num_layers, micro_batch_size, model.seq_length, model.hidden_size
    forward = 4 * b * s * s * h / 2
    scale = gpu.tflops / GPUS["h100-80"].tflops
    for name, flops, fast, slow in zip(
        ("forward", "backward"), (forward, BACKWARD_GEMMS * forward), CUDNN, FLASH2, strict=True
    ):
        rate = (slow if flash2 else fast) * scale
        yield Row(f"attention {name}", "attention", layers, flops, 0.0, flops / (fast * scale), flops / rate)
    hidden = 2.0 * b * s * h  # bytes of X
    for name, count, num_bytes in _memory_bound(model, b * s, hidden):
        floor = num_bytes / (gpu.memory_gbps * 1e9 * COPY_SHARE)
        expected = num_bytes / (gpu.memory_gbps * 1e9 * gpu.memory_share)
        yield Row(name, "memory", count, 0.0, num_bytes, floor, expected)


def _memory_bound(model: ModelConfig, tokens: int, hidden: float) -> Iterator[tuple[str, int, float]]:
    """Yield name, calls in a step, and bytes of a call, each tensor read and written once per kernel."""
    layers, ffn = model.num_layers, model.ffn_size / model.hidden_size
    yield "norm forward", layers + 1, 2 * hidden
    yield "bias + residual + norm forward", layers, 4 * hidden
    yield "norm backward, adds the residual's gradient", 2 * layers + 1, 4 * hidden
    yield "bias + residual forward", layers, 3 * hidden
    yield "GELU's input, written by the up GEMM", layers, ffn * hidden
    yield "GELU's input, read by the down GEMM's dgrad", layers, ffn * hidden
    # Bias gradients: wgrad sums qkv's, a norm's backward the projection's, the down GEMM's dgrad up's.
    yield "gradient of down's bias", layers, hidden
    yield "gradients of q, k, v into one tensor", layers, 6 * hidden
    yield "embedding forward and backward", 1, 11 * hidden
    yield "cross-entropy forward", 1, 2.0 * tokens * model.padded_vocab_size(1)
    yield "cross-entropy backward", 1, 4.0 * tokens * model.padded_vocab_size(1)
    parameters = total_parameters(model, 1)
    yield "wgrads write fp32 sums", 1, 4.0 * parameters
    yield "clipping and AdamW", 1, OPTIMIZER_BYTES * parameters


def step_seconds(all_rows: Sequence[Row], kind: str | None = None, floor: bool = False) -> float:
    """Return the seconds of a step, or of its kernels of one kind."""
    return sum(
        row.count * (row.floor if floor else row.expected) for row in all_rows if kind in (None, row.kind)
    )


def mfu(model: ModelConfig, micro_batch_size: int, gpu: Gpu, seconds: float) -> float:
    """Return the share of the data sheet's TFLOP/s of a step that takes so long."""
    flops = flops_per_token(model, 1) * micro_batch_size * model.seq_length
    return flops / seconds / (gpu.tflops * 1e12)


def predicted_mfu(model: ModelConfig, micro_batch_size: int, gpu: Gpu, num_microbatches: int = 1) -> float:
    """Return the expected MFU of a step with several microbatches.

    Clipping and the update run once. In microbatches after the first, GEMMs also read the sums they write.
    """
    table = list(rows(model, micro_batch_size, gpu))
    expected = {row.name: row.expected for row in table}
    once, sums = expected["clipping and AdamW"], expected["wgrads write fp32 sums"]
    num_later = num_microbatches - 1
    seconds = step_seconds(table) + num_later / num_microbatches * (sums - once)
    return mfu(model, micro_batch_size, gpu, seconds)


def gpu_of_device(name: str) -> tuple[str, Gpu] | None:
    """Return the data sheet of a GPU by its name in CUDA, such as "NVIDIA H100 80GB HBM3"."""
    words = name.upper().replace("-", " ").split()
    for word, key in (("H200", "h200"), ("H100", "h100-80"), ("A100", "a100-80"), ("B200", "b200")):
        if word in words and not {"PCIE", "NVL", "MIG"} & set(words):
            return key, GPUS[key]
    return None


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt-1.3b", choices=[name for name in PRESETS if "gpt" in name])
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--flash2", action="store_true", help="FlashAttention 2 instead of cuDNN's attention")
    args = parser.parse_args(arguments)
    model, gpu = PRESETS[args.preset], find_gpu(args.gpu)
    table = list(rows(model, args.micro_batch_size, gpu, args.flash2))
    print(
        f"{args.preset}, micro-batch {args.micro_batch_size}, on one {args.gpu}: floor at "
        f"{gpu.tflops * FLOOR_SHARE:.0f} TFLOP/s and {gpu.memory_gbps * COPY_SHARE / 1e3:.2f} TB/s"
    )
    print(f"{'kernel':44} {'calls':>5} {'TFLOP':>7} {'GB':>7} {'floor ms':>9} {'expected ms':>11}")
    for row in table:
        amount = f"{row.flops / 1e12:7.3f}" if row.flops else " " * 7
        moved = f"{row.num_bytes / 1e9:7.3f}" if row.num_bytes else " " * 7
        milliseconds = [row.count * seconds * 1e3 for seconds in (row.floor, row.expected)]
        print(f"{row.name:44} {row.count:5} {amount} {moved} {milliseconds[0]:9.2f} {milliseconds[1]:11.2f}")
    for kind in ("gemm", "attention", "memory", None):
        floor, expected = (step_seconds(table, kind, floor=is_floor) for is_floor in (True, False))
        name = f"all of kind {kind}" if kind else "step"
        print(f"{name:66} {floor * 1e3:9.1f} {expected * 1e3:11.1f}")
    shares = [
        mfu(model, args.micro_batch_size, gpu, step_seconds(table, floor=floor)) for floor in (True, False)
    ]
    print(f"{'MFU':66} {shares[0]:9.1%} {shares[1]:11.1%}")


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
