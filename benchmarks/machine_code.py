"""Read the machine code of GPU kernels (cubin files), and count what a kernel and its loops take.

cuobjdump reads it, which comes with Triton. Nothing here needs a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megalite.utils.hardware.gpus import GPUS

WARP = 32
REGISTERS, MAX_WARPS = 64 << 10, 64
"""of a multiprocessor of the GPUs in `TARGETS`"""
RESERVED_SHARED = 1 << 10
"""bytes of shared memory that the driver takes for each program"""
_LANES = 128
"""threads that execute an instruction in a clock, on a multiprocessor"""
_FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.MULTILINE)
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_PARTS = re.compile(r"(@!?\w+\s+)?([A-Z]\w*)((?:\.\w+)*)\s*(.*)")
_ADDRESS = re.compile(r"0x([0-9a-f]+)")
_UNIFORM = re.compile(r"\bUR(\d+)")
_WRITES_UNIFORM = re.compile(r"U[A-Z]|R2UR|S2UR|CS2UR|LDCU|VOTEU|REDUX")
"""opcodes whose first operand, if it is a uniform register, is their result"""
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


class Target(NamedTuple):
    """Describes the multiprocessor that code is compiled for.

    Attributes:
        gpu: the GPU in `megalite.utils.hardware.gpus`.
        nvcc: nvcc's name of the architecture.
        shared: bytes of shared memory for all programs.
        tensor_columns: columns of tensor memory, where tcgen05 keeps sums; 0 if it has none.
        clock: GHz under load.
    """

    gpu: str
    nvcc: str
    shared: int
    tensor_columns: int
    clock: float

    @property
    def instructions_per_byte(self) -> float:
        """Return the instructions of a thread that fit into the time of a byte, at 80% of the bandwidth."""
        sheet = GPUS[self.gpu]
        return sheet.num_sms * _LANES * self.clock / (sheet.memory_share * sheet.memory_gbps)


TARGETS: Mapping[int, Target] = {
    80: Target("a100-80", "sm_80", 164 << 10, 0, 1.41),
    90: Target("h200", "sm_90a", 228 << 10, 0, 1.70),
    100: Target("b200", "sm_100a", 228 << 10, 512, 1.85),
}
"""By compute capability, times 10."""


class Instruction(NamedTuple):
    """An instruction: `opcode` and `modifiers` of "@!P0 LDG.E.128 R4, [R2.64]" are "LDG" and ".E.128"."""

    address: int
    guard: str
    opcode: str
    modifiers: str
    operands: str

    @property
    def uniform_writes(self) -> set[int]:
        """Return the numbers of the uniform registers that it writes."""
        found = _UNIFORM.match(self.operands) if _WRITES_UNIFORM.match(self.opcode) else None
        widths = (n for name, n in (("128", 4), ("64", 2), ("WIDE", 2)) if f".{name}" in self.modifiers)
        return set() if found is None else _numbers(found[1], next(widths, 1))

    @property
    def uniform_reads(self) -> set[int]:
        """Return the numbers of the uniform registers that it reads: the first of two for some operands.

        `gdesc[UR4]` of WGMMA is the address of the first matrix in UR4 and UR5, unless the matrix is in
        registers, and that of the second one in UR6 and UR7.
        """
        found = set()
        operands = self.operands.split(", ")
        for place, operand in enumerate(operands):
            if place == 0 and self.uniform_writes:
                continue
            for number in _UNIFORM.findall(operand):
                if not operand.startswith("gdesc"):
                    found |= _numbers(number, 1)
                elif place == 1:
                    found |= _numbers(number, 4)
                else:
                    found |= _numbers(int(number) + 2, 2)
        return found


class Code(list[Instruction]):
    """Instructions of a kernel or of a loop."""

    def count(self, *opcodes: str, modifier: str = "") -> int:  # type: ignore[override]
        """Return how many instructions have one of the opcodes, and the modifier."""
        return sum(each.opcode in opcodes and modifier in each.modifiers for each in self)

    @property
    def exponentials(self) -> int:
        """Return the exponentials of base 2."""
        return self.count("MUFU", modifier=".EX2")

    @property
    def moves(self) -> int:
        """Return the loads and stores of spilled registers."""
        return self.count("LDL", "STL")

    @property
    def products(self) -> dict[str, int]:
        """Return the GEMM instructions of bf16 and fp16, such as "HGMMA.64x128x16", and how many there are.

        HMMA is `mma.sync` of all GPUs, HGMMA is WGMMA of Hopper, and UTCHMMA is tcgen05 of Blackwell.
        """
        found = (each for each in self if each.opcode in {"HMMA", "HGMMA", "UTCHMMA"})
        return dict(Counter(".".join([each.opcode, *each.modifiers.split(".")[1:2]]) for each in found))

    @property
    def without_value(self) -> list[Instruction]:
        """Return the instructions that read a uniform register which no instruction before them writes."""
        written: set[int] = set()
        found = []
        for each in self:
            if not each.uniform_reads <= written:
                found.append(each)
            written |= each.uniform_writes
        return found

    def bytes_of(self, opcode: str) -> int:
        """Return the bytes of global memory that a thread loads with LDG, or stores with STG."""
        modifiers = (each.modifiers.split(".") for each in self if each.opcode == opcode)
        return sum(next((_WIDTHS[m] for m in each if m in _WIDTHS), 4) for each in modifiers)

    @property
    def traffic(self) -> int:
        """Return the bytes of global memory that a thread loads and stores."""
        return self.bytes_of("LDG") + self.bytes_of("STG")


class Kernel(NamedTuple):
    """Holds a compiled kernel.

    Attributes:
        name: as the compiler wrote it.
        registers: registers per thread.
        stack: bytes of memory per thread, where spilled registers go.
        code: all instructions.
    """

    name: str
    registers: int
    stack: int
    code: Code

    @property
    def warps(self) -> int:
        """Return how many warps the registers of a multiprocessor suffice for."""
        return min(MAX_WARPS, REGISTERS // (-(-self.registers // 8) * 8 * WARP))

    def programs(self, target: Target, warps: int, shared: int, tensor_columns: int = 0) -> int:
        """Return how many programs (blocks of threads) a multiprocessor runs at once.

        Args:
            warps: warps of a program.
            shared: bytes of shared memory of a program.
            tensor_columns: columns of tensor memory of a program.
        """
        limits = [self.warps // warps, target.shared // (shared + RESERVED_SHARED)]
        if tensor_columns:
            limits.append(target.tensor_columns // (1 << (tensor_columns - 1).bit_length()))
        return min(limits)

    def loops(self, wanted: Callable[[Code], Any]) -> list[Code]:
        """Return the innermost of the loops for which `wanted` is true.

        A loop is natural: its first block dominates the block that jumps back. A wait that the compiler has
        moved out of a loop, and that jumps back into it, is part of it.
        """
        blocks, successors = _graph(self.code)
        codes = {
            frozenset(body): Code(each for block in sorted(body) for each in blocks[block])
            for body in _natural_loops(successors)
        }
        found = {body: code for body, code in codes.items() if wanted(code)}
        return [code for body, code in found.items() if not any(other < body for other in found)]

    def product_loop(self) -> Code:
        """Return the shortest loop with GEMM instructions; empty without one.

        Loops over blocks without a mask are the shortest: those with one compute more.
        """
        return min(self.loops(lambda code: code.products), key=len, default=Code())

    def busiest_loop(self) -> Code:
        """Return the loop that loads the most bytes of global memory; the whole code if no loop moves any.

        Branches are counted as if a thread took both.
        """
        loops = self.loops(lambda code: code.traffic)
        return max(
            loops, key=lambda code: (code.bytes_of("LDG"), code.traffic, -len(code)), default=self.code
        )


class Counts(NamedTuple):
    """Holds what the lint compares of a kernel.

    Attributes:
        registers: registers per thread.
        at_once: programs of a Triton kernel that a multiprocessor runs at once; warps of a CUDA kernel.
        exponentials: exponentials per score of attention, or per two bytes that a memory-bound kernel stores
            (loads, if it stores nothing).
        instructions: instructions of a thread per score of attention, or per byte of memory traffic.
        products: GEMM instructions of the loop.
        spilled: bytes of memory per thread, where spilled registers go.
        moves: loads and stores of spilled registers in the loop.
    """

    registers: int
    at_once: int
    exponentials: float
    instructions: float
    products: str
    spilled: int
    moves: int


def count_of_scores(kernel: Kernel, at_once: int, scores_per_thread: float) -> Counts:
    """Count the inner loop of an attention kernel, in which a thread has this many scores."""
    loop = kernel.product_loop()
    exponentials, instructions = (round(n / scores_per_thread, 2) for n in (loop.exponentials, len(loop)))
    products = ", ".join(loop.products)
    return Counts(kernel.registers, at_once, exponentials, instructions, products, kernel.stack, loop.moves)


def count_of_bytes(kernel: Kernel, at_once: int) -> Counts:
    """Count the busiest loop of a memory-bound kernel in bf16."""
    loop = kernel.busiest_loop()
    elements = (loop.bytes_of("STG") or loop.bytes_of("LDG")) / 2
    exponentials, instructions = round(loop.exponentials / elements, 2), round(len(loop) / loop.traffic, 2)
    return Counts(kernel.registers, at_once, exponentials, instructions, "", kernel.stack, loop.moves)


def read(cubin: bytes | Path) -> list[Kernel]:
    """Return the kernels of a cubin file."""
    if isinstance(cubin, bytes):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            return read(Path(file.name))
    usage, text = (_cuobjdump(option, cubin) for option in ("--dump-resource-usage", "--dump-sass"))
    _, *parts = _FUNCTION.split(text)
    codes = dict(zip(parts[::2], map(_parse, parts[1::2]), strict=True))
    return [
        Kernel(name, int(registers), int(stack), codes[name])
        for name, registers, stack in _USAGE.findall(usage)
    ]


def _numbers(first: int | str, count: int) -> set[int]:
    return set(range(int(first), int(first) + count))


def has_cuobjdump() -> bool:
    """Return whether this machine can read machine code."""
    return _program() is not None


def _program() -> str | None:
    spec = find_spec("triton")
    bundled = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    return str(bundled) if bundled is not None and bundled.exists() else shutil.which("cuobjdump")


def _cuobjdump(option: str, path: Path) -> str:
    program = _program()
    assert program is not None, "cuobjdump comes with Triton"
    return subprocess.run([program, option, path], capture_output=True, text=True, check=True).stdout


def _parse(text: str) -> Code:
    code = Code()
    for address, instruction in _INSTRUCTION.findall(text):
        if parts := _PARTS.match(instruction):
            guard, opcode, modifiers, operands = (part or "" for part in parts.groups())
            code.append(Instruction(int(address, 16), guard.strip(), opcode, modifiers, operands))
    return code


def _graph(code: Code) -> tuple[list[Code], list[list[int]]]:
    """Return the basic blocks, and for each the numbers of the blocks that can follow it."""
    targets = {each.address: int(found[1], 16) for each in code if (found := _jump(each))}
    first = {code[0].address, *targets.values()}
    first |= {b.address for a, b in pairwise(code) if a.address in targets or a.opcode in {"EXIT", "RET"}}
    blocks: list[Code] = []
    for each in code:
        if each.address in first:
            blocks.append(Code())
        blocks[-1].append(each)
    number = {block[0].address: place for place, block in enumerate(blocks)}
    successors = []
    for place, block in enumerate(blocks):
        last, following = block[-1], []
        if last.address in targets:
            following.append(number[targets[last.address]])
        is_taken_by_all = not last.guard and last.operands.startswith("0x") and last.address in targets
        ends = last.opcode in {"EXIT", "RET"} and not last.guard
        if not is_taken_by_all and not ends and place + 1 < len(blocks):
            following.append(place + 1)
        successors.append(following)
    return blocks, successors


def _jump(instruction: Instruction) -> re.Match[str] | None:
    return _ADDRESS.search(instruction.operands) if instruction.opcode == "BRA" else None


def _natural_loops(successors: Sequence[Sequence[int]]) -> list[set[int]]:
    """Return the blocks of each loop of a graph that starts at block 0."""
    predecessors: dict[int, list[int]] = {}
    order, seen, stack = [], {0}, [(0, iter(successors[0]))]
    while stack:  # depth first; `order` has each block after its successors
        block, rest = stack[-1]
        for following in rest:
            predecessors.setdefault(following, []).append(block)
            if following not in seen:
                seen.add(following)
                stack.append((following, iter(successors[following])))
                break
        else:
            order.append(block)
            stack.pop()
    order.reverse()
    dominators = {block: set(seen) for block in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            new = set.intersection(*(dominators[each] for each in predecessors[block])) | {block}
            changed |= new != dominators[block]
            dominators[block] = new
    loops: dict[int, set[int]] = {}
    for block in order:
        for head in successors[block]:
            if head in dominators[block]:
                body = loops.setdefault(head, {head})
                pending = [block]
                while pending:
                    if (each := pending.pop()) not in body:
                        body.add(each)
                        pending += predecessors[each]
    return [loops[head] for head in sorted(loops)]
