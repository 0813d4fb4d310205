#!/usr/bin/env python
"""Each kernel against the same in eager PyTorch, in torch.compile and in its own reference.

python benchmarks/kernels.py --threads 1

A line is one op in one precision, forward or backward. All run turn by turn, so that a busy neighbour slows
all, and times are medians of the rounds. GB/s counts what must move at the least, each input and output once,
and its share is of a plain copy of as much, timed in the same rounds; what stays in a cache is faster than
memory. A ratio is another's time over ours: above 1 ours is faster. Columns without a figure did not run:
torch.compile needs a compiler. PyTorch's dropout draws its mask once and keeps it, ours makes it twice.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite import kernels
from megalite.host import keep_freed_memory
from megalite.kernels import cross_entropy, dropout_add, gelu, rotary, swiglu
from megalite.kernels.dropout import reference as dropout_reference
from megalite.parallel.loss import vocab_parallel_cross_entropy
from megalite.topology import Axis

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = ("ours", "eager", "compile", "reference")
P, KEY = 0.1, kernels.site_key(1, "benchmark")
ONE_RANK = Axis("tp", 1, 0, (0,), None)  # type: ignore[arg-type]


class Case(NamedTuple):
    """One op at one shape.

    Attributes:
        inputs: leaves; those of floating point get gradients.
        ours, eager: the op by this library, and as one writes it in PyTorch.
        reference: forward and backward of the reference; backward takes the output's gradient and the inputs.
        passes: tensors of the first input's size that a forward and a backward must move.
    """

    inputs: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    reference: tuple[Callable[..., Any], Callable[..., Any]]
    passes: tuple[float, float]


def cases(args: argparse.Namespace, dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """The ops at the shapes of one layer, and of the loss."""
    s, b, h, d = args.seq_length, args.micro_batch_size, args.hidden, 64
    numbers = torch.arange(b)
    yield "bias + GELU", _gelu(_random(s, b, 4 * h, dtype=dtype), _random(4 * h, dtype=dtype))
    yield "SwiGLU", _swiglu(_random(s, b, 2 * args.hidden * 8 // 3, dtype=dtype))
    x, residual, bias = (_random(*shape, dtype=dtype) for shape in ((s, b, h), (s, b, h), (h,)))
    yield "dropout", _dropout(x, numbers)
    yield "bias + dropout + residual", _dropout_add(x, bias, residual, numbers)
    yield "rotary", _rotary(_random(s, b, h // d, d, dtype=dtype))
    yield "cross-entropy", _cross_entropy(_random(s * b, args.vocab_size, dtype=dtype))


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def _gelu(x: Tensor, bias: Tensor) -> Case:
    return Case(
        (x, bias),
        kernels.bias_gelu,
        lambda x, bias: F.gelu(x + bias, approximate="tanh"),
        (gelu.reference, gelu.backward_reference),
        (2, 3),
    )


def _swiglu(x: Tensor) -> Case:
    def eager(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    forward, backward = swiglu.reference, swiglu.backward_reference
    reference = (lambda x: forward(x, None)), (lambda grad, x: backward(grad, x, None))
    return Case((x,), lambda x: kernels.bias_swiglu(x, None), eager, reference, (1.5, 2.5))


def _dropout(x: Tensor, numbers: Tensor) -> Case:
    def reference(x: Tensor) -> Tensor:
        return dropout_reference(x, numbers, P, site, 0, x.shape[-1])

    site = kernels.philox.signed64(KEY)
    return Case(
        (x,),
        lambda x: kernels.dropout(x, P, KEY, numbers),
        lambda x: F.dropout(x, P),
        (reference, lambda grad, x: reference(grad)),
        (2, 2),
    )


def _dropout_add(x: Tensor, bias: Tensor, residual: Tensor, numbers: Tensor) -> Case:
    site = (numbers, P, kernels.philox.signed64(KEY), 0)
    return Case(
        (x, bias, residual),
        lambda x, bias, residual: kernels.bias_dropout_add(x, bias, residual, P, KEY, numbers),
        lambda x, bias, residual: residual + F.dropout(x + bias, P),
        (
            lambda x, bias, residual: dropout_add.reference(x, bias, residual, *site),
            lambda grad, *_: dropout_add.backward_reference(grad, *site),
        ),
        (3, 2),
    )


def _rotary(x: Tensor) -> Case:
    angles = torch.randn(x.shape[0], 1, 1, x.shape[-1] // 2).repeat(1, 1, 1, 2)
    cosine, sine = angles.cos(), angles.sin()

    def eager(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)

    return Case(
        (x,),
        lambda x: kernels.rotate(x, cosine, sine),
        eager,
        (
            lambda x: rotary.reference(x, cosine, sine, False),
            lambda grad, x: rotary.reference(grad, cosine, sine, True),
        ),
        (2, 2),
    )


def _cross_entropy(logits: Tensor) -> Case:
    rows, columns = logits.shape
    targets = torch.randint(0, columns, (rows,))
    statistics: list[Tensor] = []

    def forward(logits: Tensor) -> Tensor:
        found = cross_entropy.statistics_reference(logits, targets, 0, columns)
        statistics[:] = [found[:2]]
        return found[1].log() + found[0] - found[2]

    def backward(grad: Tensor, logits: Tensor) -> None:
        cross_entropy.gradient_reference(logits.detach(), targets, statistics[0], grad, 0, columns)

    return Case(
        (logits,),
        lambda logits: vocab_parallel_cross_entropy(logits, targets, columns, ONE_RANK),
        lambda logits: F.cross_entropy(logits.float(), targets, reduction="none"),
        (forward, backward),
        (1, 2),
    )


def seconds_of(kind: str, case: Case, functions: dict[str, Callable[..., Tensor]]) -> tuple[float, float]:
    """One forward and one backward; what the loss uses up is made anew before."""
    inputs = [x.clone() for x in case.inputs]
    grad: Tensor | None = None
    start = time.perf_counter()
    if kind == "reference":
        with torch.no_grad():
            y = case.reference[0](*inputs)
            middle = time.perf_counter()
            grad = torch.ones_like(y)
            begin = time.perf_counter()
            case.reference[1](grad, *inputs)
    else:
        y = functions[kind](*inputs)
        middle = time.perf_counter()
        grad = torch.ones_like(y)
        begin = time.perf_counter()
        torch.autograd.grad(y, case.inputs, grad)
    return middle - start, time.perf_counter() - begin


def copy_seconds(x: Tensor) -> float:
    """To copy a tensor of this size to memory that is there."""
    source, target = x.detach(), torch.empty_like(x)
    target.copy_(source)
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start


def compiled(function: Callable[..., Tensor], case: Case) -> Callable[..., Tensor] | None:
    """The same in torch.compile; None where that does not work on this machine."""
    torch._dynamo.reset()
    whole = torch.compile(function)
    try:
        whole(*[x.clone() for x in case.inputs]).sum().backward()
    except Exception as error:
        print(f"torch.compile: {str(error).splitlines()[0][:90]}")
        return None
    return whole


def measure(case: Case, rounds: int, with_compile: bool) -> dict[str, tuple[float, float]]:
    """Median seconds of forward and backward by kind, and of a copy."""
    functions = {"ours": case.ours, "eager": case.eager}
    if with_compile and (whole := compiled(case.eager, case)) is not None:
        functions["compile"] = whole
    kinds = [kind for kind in KINDS if kind in functions or kind == "reference"]
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (*kinds, "copy")}
    for number in range(-2, rounds):
        for kind in kinds:
            seconds = seconds_of(kind, case, functions)
            if number >= 0:
                taken[kind].append(seconds)
        if number >= 0:
            taken["copy"].append((copy_seconds(case.inputs[0]),) * 2)
    return {
        kind: (statistics.median(f for f, _ in pairs), statistics.median(b for _, b in pairs))
        for kind, pairs in taken.items()
    }


def report(name: str, dtype: str, case: Case, seconds: dict[str, tuple[float, float]]) -> None:
    """Prints a forward and a backward."""
    size = case.inputs[0].numel() * case.inputs[0].element_size()
    copy_rate = 2 * size / seconds["copy"][0]
    for place, (direction, passes) in enumerate(zip(("forward", "backward"), case.passes, strict=True)):
        ours = seconds["ours"][place]
        rate = passes * size / ours
        ratios = [
            f"{seconds[kind][place] / ours:10.2f}" if kind in seconds else f"{'-':>10}" for kind in KINDS[1:]
        ]
        print(
            f"{name:26} {dtype:5} {direction:9} {ours * 1e3:8.2f} {rate / 1e9:7.1f} {rate / copy_rate:7.0%}",
            *ratios,
            flush=True,
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    print(f"torch {torch.__version__}, {vars(args)}, load {os.getloadavg()[0]:.1f}")
    print(f"kernels: {kernels.describe()}")
    heads = ("ms", "GB/s", "of copy", "eager/", "compile/", "reference/")
    print(
        f"{'':26} {'':5} {'':9} {heads[0]:>8} {heads[1]:>7} {heads[2]:>7}", *(f"{h:>10}" for h in heads[3:])
    )
    for dtype_name, dtype in DTYPES.items():
        for name, case in cases(args, dtype):
            report(name, dtype_name, case, measure(case, args.rounds, not args.no_compile))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
