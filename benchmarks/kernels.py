#!/usr/bin/env python
"""Compare each kernel with eager PyTorch, torch.compile and its own reference.

python benchmarks/kernels.py --threads 1

A line is one op in one precision: forward, backward, or both. All run turn by turn, so that a busy neighbour
slows all, and times are medians of the rounds; on a GPU they are the GPU's own, without the host's for
launching. GB/s counts what must move at the least, each input and output once, and its share is of a plain
copy of as much, timed in the same rounds; what stays in a cache is faster than memory. A ratio is another's
time over ours: above 1 ours is faster. Columns without a figure did not run: torch.compile needs a compiler.
PyTorch's dropout draws its mask once and keeps it, ours makes it twice: there `both` is what a step takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
from clock import Clock
from op_cases import Case, Outputs, cases
from torch import Tensor

from megalite import kernels
from megalite.utils.hardware.process_settings import keep_freed_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = ("ours", "eager", "compile", "reference")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {
    "cpu": {"seq_length": 512, "micro_batch_size": 2, "hidden": 768, "vocab_size": 32000},
    "cuda": {"seq_length": 2048, "micro_batch_size": 8, "hidden": 2048, "vocab_size": 50304},
}
"""Sizes of the layer by device: on a GPU those of GPT-1.3B, whose tensors exceed the caches."""
Times = tuple[float, float, float]
"""Seconds of a forward, of a backward, and of both."""


def seconds_of(kind: str, case: Case, functions: dict[str, Callable[..., Outputs]]) -> Times:
    """Time one forward and one backward; inputs that the loss overwrites are created before."""
    inputs, clock = [x.clone() for x in case.inputs], Clock(DEVICE)
    clock.start()
    start = clock.mark()
    if kind == "reference":
        with torch.no_grad():
            y = case.reference[0](*inputs)
            middle = clock.mark()
            grads = ones_for(y)
            begin = clock.mark()
            case.reference[1](*grads, *inputs)
    else:
        y = functions[kind](*inputs)
        middle = clock.mark()
        grads = ones_for(y)
        begin = clock.mark()
        torch.autograd.grad(y, case.inputs, grads)
    end = clock.mark()
    forward, backward = clock.seconds(start, middle), clock.seconds(begin, end)
    return forward, backward, forward + backward


def ones_for(outputs: Outputs) -> list[Tensor]:
    """Return a gradient for each output."""
    return [torch.ones_like(y) for y in ([outputs] if isinstance(outputs, Tensor) else outputs)]


def copy_seconds(x: Tensor) -> float:
    """Return a copy of a tensor of this size to allocated memory."""
    source, target, clock = x.detach(), torch.empty_like(x), Clock(DEVICE)
    target.copy_(source)
    clock.start()
    start = clock.mark()
    target.copy_(source)
    return clock.seconds(start, clock.mark())


def compiled(function: Callable[..., Outputs], case: Case) -> Callable[..., Outputs] | None:
    """Return the function under torch.compile; None if this does not work on this machine."""
    torch._dynamo.reset()
    whole = torch.compile(function)
    try:
        y = whole(*[x.clone() for x in case.inputs])
        torch.autograd.grad(y, case.inputs, ones_for(y))
    except Exception as error:
        print(f"torch.compile: {str(error).splitlines()[0][:90]}")
        return None
    return whole


def measure(case: Case, rounds: int, with_compile: bool) -> dict[str, Times]:
    """Median seconds by kind, and of a copy."""
    functions = {"ours": case.ours, "eager": case.eager}
    if with_compile and (whole := compiled(case.eager, case)) is not None:
        functions["compile"] = whole
    kinds = [kind for kind in KINDS if kind in functions or kind == "reference"]
    taken: dict[str, list[Times]] = {kind: [] for kind in (*kinds, "copy")}
    for number in range(-2, rounds):
        for kind in kinds:
            seconds = seconds_of(kind, case, functions)
            if number >= 0:
                taken[kind].append(seconds)
        if number >= 0:
            taken["copy"].append((copy_seconds(case.inputs[0]),) * 3)
    medians = {
        kind: [statistics.median(column) for column in zip(*all_, strict=True)]
        for kind, all_ in taken.items()
    }
    return {kind: (forward, backward, both) for kind, (forward, backward, both) in medians.items()}


def report(name: str, dtype: str, case: Case, seconds: dict[str, Times]) -> None:
    """Print a forward, a backward and both."""
    size = case.inputs[0].numel() * case.inputs[0].element_size()
    copy_rate = 2 * size / seconds["copy"][0]
    all_passes = (*case.passes, sum(case.passes))
    for place, (direction, passes) in enumerate(
        zip(("forward", "backward", "both"), all_passes, strict=True)
    ):
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
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, size in SIZES[DEVICE.type].items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    on = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {on}, {vars(args)}, load {os.getloadavg()[0]:.1f}")
    print(f"kernels: {kernels.describe(DEVICE.type)}")
    heads = ("ms", "GB/s", "of copy", "eager/", "compile/", "reference/")
    print(
        f"{'':26} {'':5} {'':9} {heads[0]:>8} {heads[1]:>7} {heads[2]:>7}", *(f"{h:>10}" for h in heads[3:])
    )
    for dtype_name, dtype in DTYPES.items():
        for name, case in cases(args, dtype, DEVICE):
            report(name, dtype_name, case, measure(case, args.rounds, not args.no_compile))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
