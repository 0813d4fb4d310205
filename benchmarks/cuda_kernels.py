"""Compile the kernels of csrc/cuda for GPUs that are absent, and count their machine code. Needs nvcc."""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine_code import TARGETS, Counts, Kernel, count_of_bytes, read

ROOT = Path(__file__).parents[1]
FILES = tuple(sorted(each.stem for each in (ROOT / "csrc" / "cuda").glob("*.cu") if each.stem != "rows"))
"""without rows.cu, which has no kernels"""
_NAMESPACES = {"megalite", "cuda", "BFloat16"}


def kernels(file: str, capability: int) -> list[Kernel]:
    """Return the kernels of a file, compiled with the flags of setup.py."""
    flags = re.search(r"^NVCC_FLAGS = (.+)$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert flags
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernels.cubin"
        options = [*ast.literal_eval(flags[1]), f"-arch={TARGETS[capability].nvcc}", "-cubin", "-o", target]
        command = ["nvcc", *options, ROOT / "csrc" / "cuda" / f"{file}.cu"]
        subprocess.run(command, capture_output=True, text=True, check=True)
        return read(target)


def counts(file: str, capability: int) -> dict[str, Counts]:
    """Return the counts of the kernels of a file in bf16, and of all its kernels together."""
    every = kernels(file, capability)
    registers, stack = max(each.registers for each in every), max(each.stack for each in every)
    moves = max(each.busiest_loop().moves for each in every)
    least = min(each.warps for each in every)
    found = {f"{file}, all types": Counts(registers, least, 0.0, 0.0, "", stack, moves)}
    for each in every:
        # Rows that are not aligned to vectors are rare. They take more instructions.
        if "BFloat16" in each.name and any(".128" in i.modifiers for i in each.busiest_loop()):
            found[f"{file}, {' '.join(_words(each.name))}"] = count_of_bytes(each, each.warps)
    return found


def _words(mangled: str) -> Iterator[str]:
    """Yield the names and numbers of a template in a mangled name, such as "row_kernel", "Forward", "8"."""
    template, place = mangled.partition("Ev")[0] + "E", 0  # a kernel returns void; its arguments follow
    while match := re.compile(r"S[0-9A-Z]*_|L[a-z](\d+)E|(\d+)").search(template, place):
        place = match.end()
        word = match[1]
        if match[2]:
            word = template[place : place + int(match[2])]
            place += len(word)
        if word is not None and word not in _NAMESPACES and not word.startswith("_GLOBAL_"):
            yield word


def release() -> str:
    """Return nvcc's release, such as "13.0"."""
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", text)
    assert found, text
    return found[1]
