"""The CUDA kernels without a GPU: their very sources, run thread by thread, pass the tests of the CPU's.

How, and what it proves, is told in tests/cuda_on_cpu/cuda_runtime.h. What it cannot tell is speed, and races
that no order of threads between two barriers shows.
"""

import ctypes
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import megalite.kernels
from megalite.kernels.library import _load
from tests.unit.kernels.posing import ROOT, SANITIZERS, build, run_sanitized_tests, run_tests

CUDA = ROOT / "csrc" / "cuda"
EMULATION = ROOT / "tests" / "cuda_on_cpu"
FLAGS = [f"-I{EMULATION}", f"-I{ROOT / 'csrc'}", "-DMEGALITE_DISPATCH_KEY=CPU", "-Wno-unknown-pragmas"]
CUBLAS_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Werror")
ORDERS = ("forward", "reverse", "shuffled")

NVCC_FLAGS = ("-std=c++17", "-arch=compute_80", "-ptx", "--fmad=false")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def sources() -> list[Path]:
    return [*sorted(CUDA.glob("*.cu")), *sorted(CUDA.glob("*.cpp")), EMULATION / "emulator.cpp"]


def registered(path: Path) -> set[str]:
    return set(re.findall(r'library\.impl\("(\w+)"', path.read_text()))


def test_both_libraries_have_the_same_operators() -> None:
    on_cpu = registered(ROOT / "csrc" / "library.cpp")
    others_are_as_fast = {
        *("adamw_", "add_weight_and_bias_gradient_", "linear_gelu", "gelu_linear_backward"),
        *(f"{op}{end}" for op in ("layer_norm", "bias_dropout_add_norm") for end in ("", "_backward")),
    }
    assert registered(CUDA / "bindings.cpp") - on_cpu == others_are_as_fast
    assert on_cpu - registered(CUDA / "bindings.cpp") == {"round_moments_"}  # Triton's, on a GPU


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_start_up_says_why_no_cuda_kernel_serves() -> None:
    assert megalite.kernels.describe("cuda").endswith(": eager (torch has no CUDA)")
    assert "install it again, beside torch and with nvcc" in _load("megalite.kernels._NONE", "nvcc")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda") / "_C.so", sources(), FLAGS)


@pytest.fixture(scope="module")
def cublas_lt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cuBLASLt's functions on the CPU, under the name of the library that torch loads on a GPU."""
    path = tmp_path_factory.mktemp("cublas") / "libcublasLt.so.13"
    command = [
        "g++",
        *CUBLAS_FLAGS,
        f"-Wl,-soname,{path.name}",
        str(EMULATION / "cublas_lt.cpp"),
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True)
    return path


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("order", ORDERS[1:])
def test_kernels_pass_the_tests_of_the_cpu(library: Path, cublas_lt: Path, order: str) -> None:
    run_tests(library, CUDA_ON_CPU_ORDER=order, LD_PRELOAD=str(cublas_lt))


@pytest.mark.slow
@needs_compiler
def test_no_kernel_touches_what_is_not_its_own(tmp_path: Path, cublas_lt: Path) -> None:
    """In the order left out above."""
    library = build(tmp_path / "_C.so", sources(), [*FLAGS, "-g", *SANITIZERS])
    run_sanitized_tests(library, cublas_lt)


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[float]]]:
    """Runs a kernel of tests/cuda_on_cpu/mistakes.cu: what went wrong, and what it wrote."""
    path = tmp_path_factory.mktemp("mistakes") / "mistakes.so"
    function = ctypes.CDLL(
        str(build(path, [EMULATION / "mistakes.cu", EMULATION / "emulator.cpp"], FLAGS))
    ).run
    function.restype = ctypes.c_char_p

    def run(name: str) -> tuple[str, list[float]]:
        out = (ctypes.c_float * 2048)()
        message: bytes = function(name.encode(), out)
        return message.decode(), list(out)[:64]

    return run


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lonely barrier", "waits for others"),
        ("lonely shuffle", "waits for others"),
        ("half mask", "not of the whole warp"),
        ("too large", "1024 threads"),
        ("no guard", "not the current one"),
        ("no stream", "not the current stream"),
        ("unasked memory", "not asked for"),
    ],
)
def test_emulation_refuses_what_cuda_does(
    mistakes: Callable[[str], tuple[str, list[float]]], name: str, message: str
) -> None:
    assert message in mistakes(name)[0]


@pytest.mark.slow
@needs_compiler
def test_emulation_shows_a_missing_barrier(
    mistakes: Callable[[str], tuple[str, list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbours = [(i + 1.0) % 64 for i in range(64)]
    wrong = []
    for order in ORDERS:
        monkeypatch.setenv("CUDA_ON_CPU_ORDER", order)
        assert mistakes("neighbour") == ("", neighbours)
        assert mistakes("reduced") == ("", [63 * 32.0] * 64)
        wrong.append(mistakes("no barrier")[1])
        assert [math.isnan(value) for value in mistakes("half written")[1]] == [False] * 32 + [True] * 32
    assert all(result != neighbours for result in wrong)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("name", ["dropout", "dropout_add", "normal"])
def test_kernels_that_promise_their_bits_round_each_operation(name: str, tmp_path: Path) -> None:
    """The CPU's bits need a product and a sum to round apart, which nvcc fuses unless told otherwise."""

    def fused(*flags: str) -> bool:
        target = tmp_path / "kernel.ptx"
        command = ["nvcc", *NVCC_FLAGS, *flags, str(CUDA / f"{name}.cu"), "-o", str(target)]
        subprocess.run(command, check=True)
        return re.search(r"\bfma\.", target.read_text()) is not None

    assert not fused()
    assert fused("--fmad=true") == (name == "normal")


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize(
    ("name", "width", "num_reads", "first_use"), [("gelu", 8, 4, "ex2.approx"), ("adamw", 4, 8, "div.rn")]
)
def test_a_thread_has_several_wide_reads_in_flight(
    name: str, width: int, num_reads: int, first_use: str, tmp_path: Path
) -> None:
    """Of 16 bytes before the first is used, as memory-bound kernels need to keep a GPU's memory busy."""
    target = tmp_path / "kernel.ptx"
    subprocess.run(["nvcc", *NVCC_FLAGS, str(CUDA / f"{name}.cu"), "-o", str(target)], check=True)
    kernels = target.read_text().split(".entry ")[1:]
    assert not any(".local" in kernel for kernel in kernels)
    (kernel,) = [each for each in kernels if re.match(rf"\S*row_kernel\S*BFloat16ELi{width}", each)]
    steps = re.findall(rf"ld\.global\.v4|{re.escape(first_use)}|st\.global\.v4", kernel)
    expected = ["ld.global.v4"] * num_reads + [first_use]
    assert expected in [steps[i : i + len(expected)] for i in range(len(steps))]


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("name", ["norm", "add_norm"])
def test_rows_in_registers_are_not_spilled(name: str, tmp_path: Path) -> None:
    flags = ["-std=c++17", "-arch=sm_90a", "-cubin", "--fmad=false", "-Xptxas=-v"]
    command = ["nvcc", *flags, str(CUDA / f"{name}.cu"), "-o", str(tmp_path / "kernel.cubin")]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = [int(num_bytes) for num_bytes in re.findall(r"(\d+) bytes spill stores", report)]
    assert spilled and max(spilled) <= 16
