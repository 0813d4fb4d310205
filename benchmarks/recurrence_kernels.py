"""Print what the compiled kernels of recurrences take of a GPU, without a GPU.

    python -m benchmarks.recurrence_kernels --key-dim 128 --value-dim 128 --capability 90

A kernel that spills keeps bytes of its registers in memory: `stack`. It needs Triton.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.machine_code import TARGETS, read
from benchmarks.triton_kernels import compile_recurrence

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    """Print a line for each kernel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--key-dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--capability", type=int, choices=TARGETS, default=90)
    parser.add_argument("--no-delta-rule", action="store_true", help="kernels of Mamba-2")
    arguments = parser.parse_args()
    found = compile_recurrence(
        arguments.key_dim,
        arguments.value_dim,
        DTYPES[arguments.dtype],
        arguments.capability,
        is_delta=not arguments.no_delta_rule,
    )
    print(f"{'kernel':24} {'registers':>9} {'stack':>6} {'shared':>7} {'warps':>6}")
    for name, each in found.items():
        (kernel,) = read(each.asm["cubin"])
        shared, warps = each.metadata.shared, each.metadata.num_warps
        print(f"{name:24} {kernel.registers:9} {kernel.stack:6} {shared:7} {warps:6}")


if __name__ == "__main__":
    main()
