"""Compare the machine code of all GPU kernels with the limits in MACHINE_CODE.md, without a GPU.

    python -m benchmarks.kernel_limits                       # needs Triton, nvcc, or both
    python -m benchmarks.kernel_limits --capability 90
    python -m benchmarks.kernel_limits --update              # write what this Triton or nvcc needs

`--update` adds the installed version of the compiler to the rows, and raises their limits where needed.
`--update --replace` forgets what other versions need, after a change of the kernels.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks import cuda_kernels, triton_kernels
from benchmarks.machine_code import TARGETS, Counts, has_cuobjdump
from megalite.kernels.flash_attention import has_triton

PATH = Path(__file__).with_name("MACHINE_CODE.md")
VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""of Triton, with columns of their own for spills"""
OTHER_COMPILER = 1.1
"""Factor of registers and instructions with a newer Triton than `VERSIONS`, or another nvcc than `NVCC`."""
NVCC = "13.0"
_COLUMNS = ("kernel", "sm", "registers", "at once", "exponentials", "instructions", "GEMM instructions")


class Row(NamedTuple):
    """Identifies a row of the tables: the kernel's name and the compute capability."""

    kernel: str
    capability: int


class Limits(NamedTuple):
    """Holds a row of a table.

    Attributes:
        counts: registers, exponentials and instructions are the most of all versions of the compiler, and
            `at_once` is the least; spills are not used.
        spills: bytes and moves of spilled registers by the compiler's version; None where not measured.
    """

    counts: Counts
    spills: Mapping[str, tuple[int, int] | None]


def compiler() -> str:
    """Return the version of Triton, as the columns of the table name it."""
    return ".".join(version("triton").split(".")[:2])


def problems(row: Row, found: Counts, limits: Limits | None, column: str, is_known: bool = True) -> list[str]:
    """Return a line for each count of a kernel that is worse than its limit.

    Args:
        column: the version of the compiler whose spills apply. If it was not measured, only exponentials and
            GEMM instructions are compared.
        is_known: whether it is the version of this compiler.
    """
    if limits is None:
        command = "python -m benchmarks.kernel_limits --update"
        return [f"{row.kernel}, sm_{row.capability}: is not in {PATH.name}: {command}"]
    most, factor = limits.counts, 1.0 if is_known else OTHER_COMPILER
    checks = [("exponentials per score or element", found.exponentials, most.exponentials)]
    spills = limits.spills.get(column)
    if spills is not None:
        checks += [
            ("registers of a thread", found.registers, most.registers * factor),
            ("instructions per score or byte", found.instructions, most.instructions * factor),
            ("bytes of spilled registers", found.spilled, spills[0]),
            ("moves of spilled registers in the loop", found.moves, spills[1]),
        ]
    lines = [f"{name}: {value:g}, more than {limit:g}" for name, value, limit in checks if value > limit]
    if spills is not None and is_known and found.at_once < most.at_once:
        lines.append(f"programs or warps at once: {found.at_once}, fewer than {most.at_once}")
    if found.products != most.products:
        lines.append(f"GEMM instructions: {found.products or 'none'} instead of {most.products or 'none'}")
    return [f"{row.kernel}, sm_{row.capability}, {column}: {line}" for line in lines]


def triton_problems(found: Mapping[Row, Counts]) -> list[str]:
    """Compare the counts of Triton kernels with the table."""
    is_known = compiler() in VERSIONS
    column = compiler() if is_known else VERSIONS[-1]
    table = read_tables()
    lines = (problems(row, counts, table.get(row), column, is_known) for row, counts in found.items())
    return [line for each in lines for line in each]


def cuda_problems(found: Mapping[Row, Counts], release: str) -> list[str]:
    """Compare the counts of CUDA kernels, compiled with this release of nvcc, with the table."""
    table = read_tables()
    lines = (problems(row, counts, table.get(row), NVCC, release == NVCC) for row, counts in found.items())
    return [line for each in lines for line in each]


def attention(head_dim: int, options: str, capability: int) -> dict[Row, Counts]:
    """Compile and count the attention kernels."""
    found = triton_kernels.attention_counts(head_dim, options, capability)
    with_options = f" with {options}" if options else ""
    return {
        Row(f"attention {head_dim}, {name}{with_options}", capability): counts
        for name, counts in found.items()
    }


def recurrence(capability: int, *, is_delta: bool) -> dict[Row, Counts]:
    """Compile and count the kernels of a recurrence, with or without the delta rule."""
    kind = "delta rule" if is_delta else "state space"
    found = triton_kernels.recurrence_counts(capability, is_delta=is_delta)
    return {Row(f"{kind}, {name}", capability): counts for name, counts in found.items()}


def others(capability: int) -> dict[Row, Counts]:
    """Compile and count the Triton kernels of dropout, softmax and tokens' rows."""
    return {Row(name, capability): each for name, each in triton_kernels.other_counts(capability).items()}


def cuda(file: str, capability: int) -> dict[Row, Counts]:
    """Compile and count the kernels of a file of csrc/cuda."""
    return {Row(name, capability): each for name, each in cuda_kernels.counts(file, capability).items()}


def read_tables(path: Path = PATH) -> dict[Row, Limits]:
    """Return all rows of the file's tables."""
    tables, versions = {}, ()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "kernel":
            versions = tuple(cell.removeprefix("spilled, ") for cell in cells[len(_COLUMNS) :])
        elif line.startswith("| ") and len(cells) == len(_COLUMNS) + len(versions):
            name, capability, registers, at_once, exponentials, instructions, products, *rest = cells
            counts = Counts(
                int(registers), int(at_once), float(exponentials), float(instructions), products, 0, 0
            )
            spills = dict(zip(versions, map(_spills, rest), strict=True))
            tables[Row(name, int(capability))] = Limits(counts, spills)
    return tables


def _spills(cell: str) -> tuple[int, int] | None:
    if cell == "?":
        return None
    spilled, moves = map(int, cell.split("/"))
    return spilled, moves


def write_tables(rows: Mapping[Row, Limits], path: Path = PATH) -> None:
    """Write the rows into the tables below the file's marks."""
    text = path.read_text(encoding="utf-8")
    for name, versions in (("Triton", VERSIONS), ("CUDA", (NVCC,))):
        own = {row: limits for row, limits in rows.items() if set(limits.spills) <= set(versions)}
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = "\n".join([before + mark + "\n".join(_table(own, versions)), end + after])
    path.write_text(text, encoding="utf-8")


def _table(rows: Mapping[Row, Limits], versions: tuple[str, ...]) -> Iterator[str]:
    headings = [*_COLUMNS, *(f"spilled, {each}" for each in versions)]
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    for row, (counts, spills) in sorted(rows.items(), key=lambda each: _order(each[0])):
        numbers = (counts.registers, counts.at_once, f"{counts.exponentials:g}", f"{counts.instructions:g}")
        spilled = ("/".join(map(str, spills.get(each) or "?")) for each in versions)
        cells = (row.kernel, row.capability, *numbers, counts.products, *spilled)
        yield "| " + " | ".join(map(str, cells)) + " |"


def _order(row: Row) -> tuple[object, ...]:
    """Sort by capability, and numbers in names by their value."""
    parts = re.split(r"(\d+)", row.kernel)
    return row.capability, [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def updated(old: Limits | None, found: Counts, column: str, *, replace: bool) -> Limits:
    """Return the limits with the counts of one more version of the compiler.

    Args:
        replace: whether counts of other versions are of older code.
    """
    counts = found._replace(spilled=0, moves=0)
    spills = {column: (found.spilled, found.moves)}
    if old is None or replace:
        return Limits(counts, spills)
    most = (max(a, b) for a, b in zip(old.counts[2:4], counts[2:4], strict=True))
    registers, at_once = max(old.counts[0], counts[0]), min(old.counts[1], counts[1])
    return Limits(Counts(registers, at_once, *most, counts.products, 0, 0), {**old.spills, **spills})


def measure(capabilities: list[int]) -> tuple[dict[Row, Counts], dict[Row, Counts]]:
    """Compile all kernels, in two processes; return the counts of Triton's and of nvcc's."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        triton_jobs, cuda_jobs = [], []
        for capability in capabilities:
            if has_triton():
                triton_jobs += [
                    pool.submit(attention, head_dim, options, capability)
                    for head_dim in triton_kernels.HEAD_DIMS
                    for options in triton_kernels.OPTIONS
                ]
                triton_jobs.append(pool.submit(others, capability))
                triton_jobs += [
                    pool.submit(recurrence, capability, is_delta=is_delta) for is_delta in (False, True)
                ]
            if shutil.which("nvcc") and has_cuobjdump():
                cuda_jobs += [pool.submit(cuda, file, capability) for file in cuda_kernels.FILES]
        triton, cuda_rows = (
            {row: counts for job in jobs for row, counts in job.result().items()}
            for jobs in (triton_jobs, cuda_jobs)
        )
    return triton, cuda_rows


def main() -> None:
    """Print what is worse than the limits, or update them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--capability", type=int, choices=TARGETS, help="only this one; default: all")
    parser.add_argument("--update", action="store_true", help="write the limits")
    parser.add_argument("--replace", action="store_true", help="with --update: forget other versions' counts")
    arguments = parser.parse_args()
    triton, cuda_rows = measure([arguments.capability] if arguments.capability else list(TARGETS))
    lines = triton_problems(triton) if triton else []
    lines += cuda_problems(cuda_rows, cuda_kernels.release()) if cuda_rows else []
    print("\n".join(lines) or f"{len(triton) + len(cuda_rows)} kernels are within the limits")
    if arguments.update:
        table = read_tables()
        for column, found in ((compiler() if triton else "", triton), (NVCC, cuda_rows)):
            for row, counts in found.items():
                table[row] = updated(table.get(row), counts, column, replace=arguments.replace)
        write_tables(table)
    elif lines:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
