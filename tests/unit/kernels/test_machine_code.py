"""The machine code of all GPU kernels against the limits in benchmarks/MACHINE_CODE.md. No GPU is needed."""

import re
import shutil
from itertools import product
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import cuda_kernels, kernel_limits, triton_kernels
from benchmarks.kernel_limits import Limits, Row, cuda_problems, read_tables, triton_problems
from benchmarks.machine_code import TARGETS, Code, Counts, Instruction, Kernel, has_cuobjdump
from megalite.kernels.flash_attention import SIZES, BlockSizes, has_triton
from megalite.plan.kernel_time import DROPOUT_INSTRUCTIONS

needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None or not has_cuobjdump(), reason="needs nvcc, and cuobjdump from Triton"
)
BERT = "dropout, documents, both sides"
FAST = {(90, 64, "dropout"), (90, 128, "dropout"), (90, 256, "dropout")}
FAST_FILES = {(90, "adamw"), (90, "cross_entropy")}  # others take nvcc three times as long


@needs_triton
@pytest.mark.parametrize(
    ("capability", "head_dim", "options"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in product(TARGETS, triton_kernels.HEAD_DIMS, triton_kernels.OPTIONS)
    ],
)
def test_attention_is_within_its_limits(capability: int, head_dim: int, options: str) -> None:
    assert triton_problems(kernel_limits.attention(head_dim, options, capability)) == []


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("head_dim", triton_kernels.HEAD_DIMS)
@pytest.mark.parametrize("options", ["documents, alibi", BERT])
def test_other_options_compute_each_score_as_often(capability: int, head_dim: int, options: str) -> None:
    """Exponentials and GEMM instructions are the same as without them; the table has no rows of their own."""
    table = read_tables()
    for row, found in kernel_limits.attention(head_dim, options, capability).items():
        limits = table[row._replace(kernel=row.kernel.partition(" with")[0])].counts
        assert found.exponentials == limits.exponentials, row
        assert found.products == limits.products, row


@needs_triton
@pytest.mark.parametrize(
    "capability", [pytest.param(each, marks=() if each == 90 else pytest.mark.slow) for each in TARGETS]
)
def test_memory_bound_kernels_are_within_their_limits(capability: int) -> None:
    assert triton_problems(kernel_limits.others(capability)) == []


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("is_delta", [False, True], ids=["state space", "delta rule"])
def test_recurrences_are_within_their_limits(capability: int, is_delta: bool) -> None:
    assert triton_problems(kernel_limits.recurrence(capability, is_delta=is_delta)) == []


@needs_nvcc
@pytest.mark.parametrize(
    ("capability", "file"),
    [
        pytest.param(*case, marks=() if case in FAST_FILES else pytest.mark.slow)
        for case in product(TARGETS, cuda_kernels.FILES)
    ],
)
def test_cuda_kernels_are_within_their_limits(capability: int, file: str) -> None:
    assert cuda_problems(kernel_limits.cuda(file, capability), cuda_kernels.release()) == []


@needs_triton
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (BlockSizes(32, 64, 8, 2), "exponentials per score or element: 2, more than 1"),
        (BlockSizes(32, 32, 8, 2), r"GEMM instructions: HMMA\S+ instead of HGMMA.+"),
        (BlockSizes(64, 128, 8, 2), r"bytes of spilled registers: \d+, more than \d+"),
    ],
    ids=["scores twice", "mma.sync", "spills"],
)
def test_worse_block_sizes_are_found(sizes: BlockSizes, message: str) -> None:
    worse = SIZES[2, 128]._replace(key_gradients=sizes)
    with mock.patch.dict(SIZES, {(2, 128): worse}):
        lines = triton_problems(kernel_limits.attention(128, "", 90))
    start = r"attention 128, key_gradients, sm_90, [\d.]+: "
    assert any(re.fullmatch(start + message, line) for line in lines), lines
    assert all(re.match(start, line) for line in lines), lines  # the other kernels are as they are


def test_the_table_has_every_file_and_option() -> None:
    rows = set(read_tables())
    for capability in TARGETS:
        for head_dim in triton_kernels.HEAD_DIMS:
            for options in triton_kernels.OPTIONS:
                suffix = f" with {options}" if options else ""
                assert Row(f"attention {head_dim}, forward{suffix}", capability) in rows
        for file in cuda_kernels.FILES:
            assert Row(f"{file}, all types", capability) in rows
        assert Row("state space, outputs", capability) in rows
        assert Row("delta rule, outputs", capability) in rows
        assert Row("sum_rows", capability) in rows


def test_the_page_has_the_instructions_that_fit_into_the_time_of_a_byte() -> None:
    page = " ".join(kernel_limits.PATH.read_text(encoding="utf-8").split())
    a100, h200, b200 = (f"{target.instructions_per_byte:.1f}" for target in TARGETS.values())
    assert f"an A100 has time for {a100} instructions, an H200 for {h200} and a B200 for {b200}" in page


def test_the_planner_counts_the_instructions_of_dropout() -> None:
    table = read_tables()
    for head_dim, kernels in DROPOUT_INSTRUCTIONS.items():
        has_own_launch = SIZES[2, head_dim].value_gradients is not None
        assert ("value_gradients" in kernels) == has_own_launch
        for name, instructions in kernels.items():
            plain, dropped = (
                table[Row(f"attention {head_dim}, {name}{options}", 90)].counts.instructions
                for options in ("", " with dropout")
            )
            assert dropped - plain == pytest.approx(instructions, abs=0.06)


def test_attention_multiplies_with_the_instructions_of_each_gpu() -> None:
    rows = {row: limits.counts for row, limits in read_tables().items() if row.kernel.startswith("attention")}
    for capability, instruction in ((80, "HMMA."), (90, "HGMMA.64x"), (100, "UTCHMMA")):
        products = [counts.products for row, counts in rows.items() if row.capability == capability]
        assert products
        assert all(each.startswith(instruction) for cell in products for each in cell.split(", "))


FOUND = Counts(40, 2, 1.0, 10.0, "HMMA.16816", 8, 1)
LIMITS = Limits(FOUND, {"3.6": (8, 1), "3.9": (8, 1)})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"registers": 41}, "registers of a thread: 41, more than 40"),
        ({"at_once": 1}, "programs or warps at once: 1, fewer than 2"),
        ({"exponentials": 2.0}, "exponentials per score or element: 2, more than 1"),
        ({"instructions": 10.5}, "instructions per score or byte: 10.5, more than 10"),
        ({"products": ""}, "GEMM instructions: none instead of HMMA.16816"),
        ({"spilled": 16}, "bytes of spilled registers: 16, more than 8"),
        ({"moves": 2}, "moves of spilled registers in the loop: 2, more than 1"),
    ],
)
def test_each_count_that_grew_is_named(change: dict[str, float], line: str) -> None:
    row = Row("k", 90)
    assert kernel_limits.problems(row, FOUND, LIMITS, "3.6") == []
    assert kernel_limits.problems(row, FOUND._replace(**change), LIMITS, "3.6") == [f"k, sm_90, 3.6: {line}"]


def test_an_update_keeps_what_other_versions_need(tmp_path: Path) -> None:
    path = tmp_path / "limits.md"
    path.write_text("<!-- Triton -->\n<!-- end -->\n<!-- CUDA -->\n<!-- end -->\n")
    more = FOUND._replace(registers=60, spilled=24)
    limits = kernel_limits.updated(LIMITS, more, "3.7", replace=False)
    kernel_limits.write_tables({Row("k", 90): limits}, path)
    read = read_tables(path)[Row("k", 90)]
    assert read.counts.registers == 60
    assert read.spills == {"3.6": (8, 1), "3.7": (24, 1), "3.8": None, "3.9": (8, 1)}


def _kernel(text: str) -> Kernel:
    """Write one instruction a line: its address follows from its place."""
    code = Code()
    for place, line in enumerate(text.split("\n")):
        opcode, _, operands = line.strip().partition(" ")
        guard = "@P0" if opcode.startswith("@") else ""
        name, *modifiers = opcode.lstrip("@").split(".")
        code.append(Instruction(16 * place, guard, name, "".join(f".{m}" for m in modifiers), operands))
    return Kernel("k", 40, 0, code)


def test_a_wait_that_was_moved_out_of_a_loop_is_no_loop() -> None:
    kernel = _kernel(
        """MOV
        LDG.E.128
        @BRA 0x70
        MUFU.EX2
        STG.E.64
        @BRA 0x10
        EXIT
        @BRA 0x70
        BRA 0x30"""
    )
    (loop,) = kernel.loops(lambda code: code.traffic)
    assert [each.address for each in loop] == [0x10, 0x20, 0x30, 0x40, 0x50, 0x70, 0x80]
    assert (loop.exponentials, loop.bytes_of("LDG"), loop.bytes_of("STG")) == (1, 16, 8)
