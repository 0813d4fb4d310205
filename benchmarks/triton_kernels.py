#!/usr/bin/env python3
"""Registers, spills and shared memory of the Triton kernels of attention, compiled without a GPU.

    python benchmarks/triton_kernels.py                # needs Triton, and no GPU

The operator's own launchers run, but the kernels are only compiled: for Hopper (compute capability 9.0), in
bf16. cuobjdump, which comes with Triton, reads the machine code. A multiprocessor of Hopper has 64 Ki
registers and 227 KiB of shared memory for programs: "programs" is how many of a kernel it runs at once. With
more than one exponential per score, several threads compute the same scores.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from megalite.kernels.flash_attention import SIZES, BlockSizes, launch, launch_backward
from megalite.kernels.traced import key_tensor

HEAD_DIMS = (64, 128, 256)
NAMES = ("forward", "key_gradients", "query_gradients")
"""Names of the kernels, in the order of `KernelSizes`."""
HOPPER = 90
REGISTERS, SHARED_BYTES, WARPS = 64 << 10, 227 << 10, 64
"""of a multiprocessor of Hopper"""
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA(?:\.\w+)*\b.*?0x([0-9a-f]+)")
_MOVE = re.compile(r"\b(LDL|STL)\b")
_PRODUCT = re.compile(r"\b(HGMMA|HMMA|UTC\w*MMA)\.(\w+)")
"""of bf16 or fp16: WGMMA of Hopper, `mma.sync` of all GPUs, tcgen05 of Blackwell"""


class Resources(NamedTuple):
    """Hold what a program of a kernel takes, and what its innermost loop computes.

    Attributes:
        registers: registers per thread.
        spilled: bytes of a thread's registers that are kept in memory.
        shared: bytes of shared memory.
        exponentials: of a thread, in one pass of the shortest loop with tensor core instructions.
        products: tensor core instructions of that loop, such as "HGMMA.64x128x16", and how many there are.
        moves: loads and stores of spilled registers in that loop.
    """

    registers: int
    spilled: int
    shared: int
    exponentials: int
    products: dict[str, int]
    moves: int

    def programs(self, warps: int) -> int:
        """Return how many programs a multiprocessor of Hopper runs at once."""
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * 32 * warps)
        return min(by_registers, SHARED_BYTES // (self.shared + 1024), WARPS // warps)

    def exponentials_per_score(self, sizes: BlockSizes) -> float:
        """Return 1 if no two threads compute the same score, and 2 if each is computed twice.

        Forward has another exponential for each row of a block.
        """
        return self.exponentials * 32 * sizes.warps / (sizes.queries * sizes.keys)


@contextmanager
def only_compiled(capability: int) -> Iterator[dict[str, Any]]:
    """Compile kernels for this compute capability where they would be launched; yield them by name."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    gpu = mock.Mock()
    gpu.get_current_target.return_value = GPUTarget("cuda", capability, 32)
    gpu.get_current_device.return_value = capability  # Triton keeps the kernels of each device
    run, kernels = JITFunction.run, {}

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        kernels[self.__name__] = run(self, *arguments, warmup=True, **options)

    with mock.patch.object(JITFunction, "run", compile_only), mock.patch.object(driver, "_active", gpu):
        yield kernels


def compile_attention(
    head_dim: int,
    dtype: torch.dtype,
    options: str = "",
    capability: int = HOPPER,
    seq_length: int = 128,
    num_heads: int = 4,
    num_groups: int = 2,
) -> list[Resources]:
    """Compile the kernels of attention; return what each of `NAMES` takes.

    Args:
        options: of dropout, documents, both sides and alibi, those that the kernels support, as text.
    """
    heads = (num_heads, num_groups, num_groups, num_heads)
    q, k, v, grad = (torch.empty(seq_length, 2, n, head_dim, dtype=dtype).permute(1, 2, 0, 3) for n in heads)
    slopes = torch.zeros(num_heads, dtype=torch.float64) if "alibi" in options else None
    starts = torch.zeros(2, seq_length, dtype=torch.int64) if "documents" in options else None
    site = (torch.arange(2), key_tensor(1 << 63)) if "dropout" in options else (None, None)
    ends = torch.full_like(starts, seq_length) if starts is not None and "both sides" in options else None
    rest = slopes, starts, ends, *site, head_dim**-0.5, 0.1 if "dropout" in options else 0.0, 0
    with only_compiled(capability) as kernels:
        out, log_sums = launch(q, k, v, *rest)
        launch_backward(grad, q, k, v, out, log_sums, *rest)
    compiled = (kernels[f"{name}_kernel"] for name in NAMES)
    return [resources(each) for each in compiled]


def resources(kernel: Any) -> Resources:
    """Return what a program of a compiled kernel takes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (_cuobjdump(option, file.name) for option in ("--dump-resource-usage", "--dump-sass"))
    registers, stack = (re.search(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    assert registers and stack
    loop = _loop(code)
    products = Counter(f"{match[1]}.{match[2]}" for line in loop if (match := _PRODUCT.search(line)))
    return Resources(
        int(registers[1]),
        int(stack[1]),  # where spilled registers go
        kernel.metadata.shared,
        sum("MUFU.EX2" in line for line in loop),
        dict(products),
        sum(bool(_MOVE.search(line)) for line in loop),
    )


def _cuobjdump(option: str, path: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([program, option, path], capture_output=True, text=True, check=True).stdout


def _loop(code: str) -> list[str]:
    """Return the instructions of the shortest loop with tensor core instructions; empty without one.

    A loop is the instructions from the target of a branch backward to the branch. Loops over blocks without a
    mask are the shortest: those with one compute more.
    """
    lines = _INSTRUCTION.findall(code)
    places = {int(address, 16): place for place, (address, _) in enumerate(lines)}
    loops = []
    for place, (address, text) in enumerate(lines):
        target = _BRANCH.search(text)
        if target and int(target[1], 16) < int(address, 16):
            loop = [each for _, each in lines[places[int(target[1], 16)] : place + 1]]
            if any(map(_PRODUCT.search, loop)):
                loops.append(loop)
    return min(loops, key=len, default=[])


def main() -> None:
    """Print the table."""
    print(
        "| head size | kernel | queries x keys | warps | with | registers | spilled | shared KiB | programs "
        "| exponentials | WGMMA |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for head_dim in HEAD_DIMS:
        for options in ("dropout", "dropout, documents, alibi"):
            found = compile_attention(head_dim, torch.bfloat16, options)
            for name, sizes, each in zip(NAMES, SIZES[2, head_dim], found, strict=True):
                print(
                    f"| {head_dim} | {name} | {sizes.queries} x {sizes.keys} | {sizes.warps} | {options} "
                    f"| {each.registers} | {each.spilled} | {each.shared / 1024:.0f} "
                    f"| {each.programs(sizes.warps)} | {each.exponentials_per_score(sizes):.2f} "
                    f"| {', '.join(each.products)} |"
                )


if __name__ == "__main__":
    main()
