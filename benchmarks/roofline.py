#!/usr/bin/env python
"""What a training step of a GPT should take on one GPU: each GEMM and memory-bound kernel, from a data sheet.

python benchmarks/roofline.py
python benchmarks/roofline.py --gpu h100-80 --micro-batch-size 8 --flash2
python benchmarks/roofline.py --micro-batch-size 1 --cuda-graphs   # prints the rows that it changes

`floor` is the time at the rate that one large GEMM and one large copy reach; `expected` is what we expect of
our kernels: GEMMs in whole waves of tiles and attention as in the planner (megalite/plan/kernel_time.py),
memory-bound kernels at the usual share of the bandwidth or at the rate of their instructions, and the gap
before each kernel. If the host needs longer to launch the kernels than the GPU to run them, the step waits
for the host. It is the step of train_step.py: bf16, no dropout, compiled operators, one microbatch.
scripts/check_gpu.sh compares measurements with it, and roofline_published.py published runs.

Shapes: T tokens of a microbatch, h hidden size, X a tensor [T, h] in bf16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megalite.config import ModelConfig
from megalite.config.model.model_config import flops_per_token, padded_vocab_size
from megalite.config.presets import PRESETS
from megalite.plan.kernel_time import (
    FUSED_BACKWARD,
    KERNEL_SECONDS,
    LANE_RATE,
    fused_attention_seconds,
    gemm_seconds,
    memory_bandwidth,
)
from megalite.plan.planned_run import FusedKernel
from megalite.plan.units import whole_model
from megalite.utils.commands import run_main
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import GPUS, Gpu, find_gpu

LAUNCH_SECONDS = 7e-6
"""Host time per kernel."""
COPY_SHARE = 0.9
"""Share of the data sheet's bandwidth that a copy reaches: 4.3 of 4.8 TB/s (H200), 3.0 of 3.35 (H100)."""
FLOOR_SHARE = 788 / 989.4
"""Share of the data sheet's TFLOP/s that one large GEMM reaches for a moment: 788 TFLOP/s on an H200."""
CUDNN = (484e12, 465e12)
"""FLOP/s of attention on Hopper, forward and backward, causal with 2k positions and heads of 128, on a GPU
that runs nothing else (Shah et al. 2024, arXiv 2407.08608, figures 5 and 6). Backward includes its helper
kernels."""
OPTIMIZER_BYTES = 34
"""Bytes per parameter: read the gradient for the norm (4); read gradient, main weight and moments (16), write
the latter three (12) and the bf16 weight (2)."""

ISSUE_SHARE = 0.7
"""Share of this rate that a kernel with reductions reaches; an estimate. Nsight Compute's rules say that a
kernel below 60% of it waits for latencies, and above 80% for the instructions."""
INSTRUCTIONS_PER_BYTE = 7.5
"""Instructions that an H200 has time for per byte at 80% of its bandwidth. The shares of it in the rows are
counted in our machine code (docs/decisions/cuda_operators.md)."""
NORM_PARTS, ROWS_OF_PART = 1024, 8
"""Most blocks of a norm's backward, and fewest rows of each (csrc/cuda/norm.cuh). Each block writes fp32 sums
for the parameters' gradients, and a second kernel adds them."""
DENSE_BACKWARD_KERNELS = 14
"""Kernels of the embedding's backward in PyTorch: a radix sort of the tokens, and sums of segments; an
estimate from its source (aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu)."""

OPERATOR_SECONDS = 13e-6
"""Host time of an operator in eager PyTorch, views included. gpt-fast's eager Llama-7B generates 25.5 tokens
per second and is bound by the host (PyTorch's blog, Accelerating Generative AI with PyTorch II, 2023): 39 ms
for 32 layers of about 95 operators, by our count. This is without autograd, so training needs more."""
LAYER_OPERATORS, STEP_OPERATORS = 140, 131
"""Operators that PyTorch dispatches in a layer's forward (39), backward (92) and update (9), and in the rest
of a step: counted in a step on meta tensors (tests/unit/benchmarks/test_roofline.py)."""
FP8_OPERATORS = 18
"""More operators of a layer in 8 bits: conversions and GELU."""
SMALL_COPIES = 1
"""Kernels that convert gradients of a layer's biases."""
SMALL_TENSORS, LISTED_TENSORS = 8, 64
"""Biases and weights of norms in a layer, and the tensors of a list that one kernel of PyTorch copies
(aten/src/ATen/native/cuda/MultiTensorApply.cuh)."""
LOSS_KERNELS, UPDATE_KERNELS = 20, 18
"""Kernels on a number per token or on single numbers: of the loss, and of norm, clipping and checks."""
GRAPH_GAIN = 0.4e-6
"""Shorter gap between two kernels in a CUDA graph: 3.4 us per kernel of 2.9 us instead of 3.8 (NVIDIA's blog,
Getting Started with CUDA Graphs, 2019)."""
COMPILED_BYTES, COMPILED_KERNELS = 48, 12
"""X that the memory-bound kernels of a layer move with --compile, and their number, from Inductor's schedule
(benchmarks/compiled_layer.py)."""
FP8_RATE = 2
"""Ratio of the dense rates in 8 and 16 bits, in the data sheets of Hopper and Blackwell."""


class Row(NamedTuple):
    """Describes one operator.

    Attributes:
        kind: gemm, attention, memory, or host: waiting for the host.
        count: calls in a step.
        flops, num_bytes: FLOPs and bytes of a call.
        floor, expected: seconds of a call.
        kernels: number of kernels of a call.
    """

    name: str
    kind: str
    count: int
    flops: float
    num_bytes: float
    floor: float
    expected: float
    kernels: int = 1


class Program(NamedTuple):
    """Describes changes of the program.

    Attributes:
        flash2: attention runs on FlashAttention 2 instead of cuDNN.
        dropout: hidden and attention dropout, with megalite's Triton attention.
        compiled: layers are compiled with --compile.
        cuda_graphs: a CUDA graph launches forward and backward, which megalite does not have.
        fp8: linear layers multiply in 8 bits in forward and for the input gradient, with a scale per row.
        operator_seconds: host time of an operator.
    """

    flash2: bool = False
    dropout: bool = False
    compiled: bool = False
    cuda_graphs: bool = False
    fp8: bool = False
    operator_seconds: float = OPERATOR_SECONDS


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

    @property
    def is_fp8(self) -> bool:
        """Return whether it multiplies in 8 bits where the program does."""
        return not self.name.startswith("logits") and not self.name.endswith("wgrad")


def gemms(model: ModelConfig, micro_batch_size: int) -> list[Gemm]:
    """Return the products of the linear layers and of the logits: forward, dgrad and wgrad of each."""
    h, tokens = model.hidden_size, micro_batch_size * model.seq_length
    linears = (
        ("qkv", model.num_layers, 3 * h, h),
        ("projection", model.num_layers, h, h),
        ("mlp up", model.num_layers, model.ffn_size, h),
        ("mlp down", model.num_layers, h, model.ffn_size),
        ("logits", 1, padded_vocab_size(model, 1), h),
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


def rows(
    model: ModelConfig, micro_batch_size: int, gpu: Gpu, flash2: bool = False, program: Program | None = None
) -> list[Row]:
    """Return all operators of a step, and what the step waits for the host.

    Args:
        flash2: attention runs on FlashAttention 2 instead of cuDNN.
        program: changes of the program; by default none but `flash2`.
    """
    program = program or Program(flash2=flash2)
    table = [*_gemm_rows(model, micro_batch_size, gpu, program)]
    table += _attention_rows(model, micro_batch_size, gpu, program)
    table += _memory_rows(model, micro_batch_size, gpu, program)
    if program.cuda_graphs:
        table = [row._replace(expected=row.expected - GRAPH_GAIN * row.kernels) for row in table]
    if (waiting := host_seconds(model, program) - step_seconds(table)) > 0:
        table.append(Row("waiting for the host", "host", 1, 0.0, 0.0, 0.0, waiting, 0))
    return table


def host_seconds(model: ModelConfig, program: Program) -> float:
    """Return the host's seconds to launch a step."""
    layer = (LAYER_OPERATORS + FP8_OPERATORS * program.fp8) * program.operator_seconds
    if program.compiled:  # Inductor's code launches kernels without PyTorch's dispatcher
        layer = (COMPILED_KERNELS + 2 * 7) * LAUNCH_SECONDS
    if program.cuda_graphs:
        layer = 0.0
    return model.num_layers * layer + STEP_OPERATORS * program.operator_seconds


def _gemm_rows(model: ModelConfig, micro_batch_size: int, gpu: Gpu, program: Program) -> Iterator[Row]:
    for gemm in gemms(model, micro_batch_size):
        used = gpu
        if program.fp8 and gemm.is_fp8:
            used = replace(gpu, tflops=FP8_RATE * gpu.tflops)
        floor = gemm.flops / (used.tflops * 1e12 * FLOOR_SHARE)
        expected = gemm_seconds(used, gemm.m, gemm.n, gemm.k)
        yield Row(gemm.name, "gemm", gemm.count, gemm.flops, 0.0, floor, expected)


def _attention_rows(model: ModelConfig, micro_batch_size: int, gpu: Gpu, program: Program) -> Iterator[Row]:
    s, size = model.seq_length, model.head_dim
    scores = micro_batch_size * model.num_attention_heads * s * s / 2
    kernel: FusedKernel = "triton" if program.dropout else "flash" if program.flash2 else "cudnn"
    expected = fused_attention_seconds(gpu, kernel, scores, s, size, dropout=program.dropout)
    # Backward's helper kernels compute dot products of output and gradient, and convert the query gradient.
    kernels = (1, 3)
    for name, ratio, rate, seconds, num in zip(
        ("forward", "backward"), (1.0, FUSED_BACKWARD), CUDNN, expected, kernels, strict=True
    ):
        flops = ratio * 4 * size * scores
        floor = flops / (rate * gpu.tflops / GPUS["h100-80"].tflops)
        yield Row(
            f"attention {name}",
            "attention",
            model.num_layers,
            flops,
            0.0,
            floor,
            seconds + num * KERNEL_SECONDS,
            num,
        )


class Kernel(NamedTuple):
    """Describes a memory-bound operator.

    Attributes:
        count: calls in a step.
        num_bytes: bytes of a call, each tensor read and written once per kernel.
        share: share of `INSTRUCTIONS_PER_BYTE`; 0 if the instructions do not matter.
        kernels: number of kernels; 0 if a GEMM moves the bytes.
    """

    name: str
    count: int
    num_bytes: float
    share: float = 0.0
    kernels: int = 1


def _memory_rows(model: ModelConfig, micro_batch_size: int, gpu: Gpu, program: Program) -> Iterator[Row]:
    tokens = micro_batch_size * model.seq_length
    for each in (*_layer_kernels(model, tokens, program), *_other_kernels(model, tokens, program)):
        floor = each.num_bytes / (gpu.memory_gbps * 1e9 * COPY_SHARE)
        moving = each.num_bytes / memory_bandwidth(gpu)
        instructions = each.share * INSTRUCTIONS_PER_BYTE * each.num_bytes
        computing = instructions / (gpu.num_sms * LANE_RATE * ISSUE_SHARE)
        expected = max(moving, computing) + each.kernels * KERNEL_SECONDS
        yield Row(each.name, "memory", each.count, 0.0, each.num_bytes, floor, expected, each.kernels)


def _norm_backward_bytes(tokens: int, h: int, accesses: int, num_sums: int) -> float:
    """Return the bytes of a norm's backward: X, and the blocks' sums, which are written and read."""
    parts = min(NORM_PARTS, max(1, tokens // ROWS_OF_PART))
    return 2.0 * accesses * tokens * h + 8.0 * num_sums * h * parts


def _layer_kernels(model: ModelConfig, tokens: int, program: Program) -> Iterator[Kernel]:
    """Yield the memory-bound kernels of the layers."""
    layers, h, ffn = model.num_layers, model.hidden_size, model.ffn_size / model.hidden_size
    x = 2.0 * tokens * h  # bytes of X
    if program.compiled:
        yield Kernel("kernels of a compiled layer", layers, COMPILED_BYTES * x, 0.0, COMPILED_KERNELS)
    else:
        fused, dropped = 4 + program.dropout, 2 * program.dropout
        yield Kernel("norm forward", layers, 2 * x, 0.84)
        yield Kernel("bias + residual + norm forward", layers, 4 * x, 0.86)
        backward = _norm_backward_bytes(tokens, h, fused, 3)
        yield Kernel("bias + residual + norm backward", layers, backward, 0.83, 2)
        backward = _norm_backward_bytes(tokens, h, 4, 2)
        yield Kernel("norm backward, adds the residual's gradient", layers, backward, 0.69, 2)
        yield Kernel("bias + residual forward", layers, 3 * x, 0.51)
        # Bias gradients: wgrad sums qkv's, a norm's backward the projection's, the down GEMM's dgrad up's.
        yield Kernel("gradient of down's bias", layers, (dropped or 1) * x, 0.94 if program.dropout else 0.0)
        yield Kernel("gradients of q, k, v into one tensor", layers, 6 * x)
        if program.fp8:
            yield Kernel("bias + GELU forward", layers, 2 * ffn * x, 0.45)
            yield Kernel("bias + GELU backward", layers, 3 * ffn * x, 0.60, 2)
        else:
            yield Kernel("GELU's input, written by the up GEMM", layers, ffn * x, 0.0, 0)
            yield Kernel("GELU's input, read by the down GEMM's dgrad", layers, ffn * x, 0.0, 0)
    if program.fp8:  # each is read in 16 bits and written in 8; weights also transposed
        yield Kernel("inputs of linear layers to 8 bits", layers, 1.5 * (3 + ffn) * x, 0.0, 4)
        yield Kernel("gradients of linear layers to 8 bits", layers, 1.5 * (5 + ffn) * x, 0.0, 4)
        yield Kernel("weights of linear layers to 8 bits", layers, 6 * (4 + 2 * ffn) * h * h, 0.0, 8)
    yield Kernel("small gradients converted", layers, 0.0, 0.0, SMALL_COPIES)


def _other_kernels(model: ModelConfig, tokens: int, program: Program) -> Iterator[Kernel]:
    """Yield the memory-bound kernels outside of the layers."""
    h, logits = model.hidden_size, 2.0 * tokens * padded_vocab_size(model, 1)
    x, table, parameters = (
        2.0 * tokens * h,
        padded_vocab_size(model, 1) * h,
        whole_model(model, 1).num_parameters,
    )
    yield Kernel("last norm forward", 1, 2 * x, 0.84)
    yield Kernel("last norm backward", 1, _norm_backward_bytes(tokens, h, 3, 2), 0.92, 2)
    yield Kernel("embedding forward", 1, (4 + 2 * program.dropout) * x, 0.0, 2 + program.dropout)
    # It writes zeros and sums of rows; then the whole gradient in bf16 is added to its fp32 sum.
    num_bytes = (1 + 2 * program.dropout) * x + (2 + 2 + 2 + 8) * table
    yield Kernel("embedding backward", 1, num_bytes, 0.0, DENSE_BACKWARD_KERNELS + 2)
    yield Kernel("cross-entropy forward", 1, logits, 0.73)
    yield Kernel("cross-entropy backward", 1, 2 * logits, 0.42)
    yield Kernel("loss of a token", 1, 0.0, 0.0, LOSS_KERNELS)
    num_copies = 1 + model.num_layers * SMALL_TENSORS // LISTED_TENSORS
    yield Kernel("small gradients to fp32 sums", 1, 0.0, 0.0, num_copies)
    yield Kernel("wgrads write fp32 sums", 1, 4.0 * parameters, 0.0, 0)
    yield Kernel("clipping and AdamW", 1, OPTIMIZER_BYTES * parameters, 0.0, 2 + UPDATE_KERNELS)


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
    table = rows(model, micro_batch_size, gpu)
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


KINDS = ("gemm", "attention", "memory", "host")


def table_lines(model: ModelConfig, micro_batch_size: int, gpu: Gpu, program: Program) -> Iterator[str]:
    """Yield the table of all rows, floor and expected."""
    table = rows(model, micro_batch_size, gpu, program=program)
    yield f"{'operator':44} {'calls':>5} {'TFLOP':>7} {'GB':>7} {'floor ms':>9} {'expected ms':>11}"
    for row in table:
        amount = f"{row.flops / 1e12:7.3f}" if row.flops else " " * 7
        moved = f"{row.num_bytes / 1e9:7.3f}" if row.num_bytes else " " * 7
        milliseconds = [row.count * seconds * 1e3 for seconds in (row.floor, row.expected)]
        yield f"{row.name:44} {row.count:5} {amount} {moved} {milliseconds[0]:9.2f} {milliseconds[1]:11.2f}"
    for kind in (*KINDS, None):
        floor, expected = (step_seconds(table, kind, floor=is_floor) for is_floor in (True, False))
        name = f"all of kind {kind}" if kind else "step"
        yield f"{name:66} {floor * 1e3:9.1f} {expected * 1e3:11.1f}"
    shares = [mfu(model, micro_batch_size, gpu, step_seconds(table, floor=floor)) for floor in (True, False)]
    yield f"{'MFU':66} {shares[0]:9.1%} {shares[1]:11.1%}"
    yield _host_line(model, table, program)


def _host_line(model: ModelConfig, table: Sequence[Row], program: Program) -> str:
    """Return how long the gaps between kernels take, and the host to launch the kernels."""
    num_kernels = sum(row.count * row.kernels for row in table)
    gap = KERNEL_SECONDS - GRAPH_GAIN * program.cuda_graphs
    host, each = host_seconds(model, program) * 1e3, program.operator_seconds * 1e6
    return (
        f"{num_kernels} kernels, with {num_kernels * gap * 1e3:.1f} ms of gaps; the host launches them in "
        f"{host:.1f} ms, at {each:.0f} us per operator"
    )


def change_lines(model: ModelConfig, micro_batch_size: int, gpu: Gpu, program: Program) -> Iterator[str]:
    """Yield the rows that differ from the default program, and the step of both."""
    usual = rows(model, micro_batch_size, gpu, program=Program(operator_seconds=program.operator_seconds))
    changed = rows(model, micro_batch_size, gpu, program=program)
    before, after = (
        {row.name: row.count * row.expected * 1e3 for row in table} for table in (usual, changed)
    )
    yield f"{'operator':44} {'before ms':>11} {'after ms':>11}"
    for name in {**before, **after}:
        found = before.get(name, 0.0), after.get(name, 0.0)
        if abs(found[0] - found[1]) >= 0.05:
            yield f"{name:44} {found[0]:11.2f} {found[1]:11.2f}"
    for kind in (*KINDS, None):
        found = step_seconds(usual, kind) * 1e3, step_seconds(changed, kind) * 1e3
        yield f"{f'all of kind {kind}' if kind else 'step':44} {found[0]:11.1f} {found[1]:11.1f}"
    shares = [mfu(model, micro_batch_size, gpu, step_seconds(table)) for table in (usual, changed)]
    yield f"{'MFU of the 16-bit rate':44} {shares[0]:11.1%} {shares[1]:11.1%}"
    yield _host_line(model, changed, program)


def main(arguments: Sequence[str]) -> None:
    """Print the table, or with a change of the program the rows that it changes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt-1.3b", choices=[name for name in PRESETS if "gpt" in name])
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--flash2", action="store_true", help="FlashAttention 2 instead of cuDNN's attention")
    parser.add_argument("--dropout", action="store_true", help="dropout, with megalite's Triton attention")
    parser.add_argument("--compile", action="store_true", help="layers compiled by torch.compile")
    parser.add_argument("--cuda-graphs", action="store_true", help="forward and backward in a CUDA graph")
    parser.add_argument(
        "--fp8", action="store_true", help="8-bit forward and input gradient, a scale per row"
    )
    parser.add_argument(
        "--operator-us", type=float, default=OPERATOR_SECONDS * 1e6, help="host time of an operator"
    )
    args = parser.parse_args(arguments)
    model, gpu = PRESETS[args.preset], find_gpu(args.gpu)
    if args.fp8 and gpu.num_sms < GPUS["h100-80"].num_sms:
        raise UserError(f"--fp8: --gpu {args.gpu} has no 8-bit GEMMs: pass --gpu h100-80, h200 or b200")
    if args.compile and args.dropout:
        raise UserError(
            "--compile: the kernels of compiled layers were counted without --dropout: remove one"
        )
    program = Program(
        args.flash2, args.dropout, args.compile, args.cuda_graphs, args.fp8, args.operator_us / 1e6
    )
    print(
        f"{args.preset}, micro-batch {args.micro_batch_size}, on one {args.gpu}: floor at "
        f"{gpu.tflops * FLOOR_SHARE:.0f} TFLOP/s and {gpu.memory_gbps * COPY_SHARE / 1e3:.2f} TB/s"
    )
    is_usual = program == Program(operator_seconds=program.operator_seconds)
    lines = table_lines if is_usual else change_lines
    for line in lines(model, args.micro_batch_size, gpu, program):
        print(line)


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
