"""Stages 1, 6, 7 and 10: versions, the build, and the tests that need a GPU."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_check.commands import first_line, run_python
from benchmarks.gpu_check.results import Result, failed, info, passed, skipped
from benchmarks.gpu_check.runner import CheckContext

IDLE_GB = 2.0
"""Memory that a GPU without other programs has in use at most: the driver's, and a context's."""


def versions(context: CheckContext) -> Iterator[Result]:
    """Report the versions of all that a run depends on."""
    import torch

    yield info("python", sys.version.split()[0])
    yield info("torch", torch.__version__)
    yield info("torch's CUDA", torch.version.cuda or "-")
    yield info("cuDNN", str(torch.backends.cudnn.version() or "-"))
    nccl = torch.cuda.nccl.version() if context.device == "cuda" else ()
    yield info("NCCL", ".".join(map(str, nccl)) or "-")
    query = "--query-gpu=driver_version,name,memory.total,power.limit,clocks.max.sm,clocks.max.mem"
    yield info("driver and GPU", first_line("nvidia-smi", query, "--format=csv,noheader"))
    yield info("gcc", first_line("gcc", "--version"))
    if context.device == "cuda":
        yield info("GPUs", float(torch.cuda.device_count()))
        free, total = torch.cuda.mem_get_info()
        others = (total - free) / 1e9  # with this process' own context
        detail = "" if others < IDLE_GB else "other programs use this GPU: speeds and memory are not reliable"
        yield Result("memory in use", others, IDLE_GB, "GB", "low" if detail else "ok", detail)
        try:
            nvcc, release = find_nvcc()
            yield info("nvcc", ".".join(map(str, release)), detail=nvcc)
        except LookupError as error:
            yield failed("nvcc", str(error))


def find_nvcc() -> tuple[str, tuple[int, int]]:
    """Return the path and the release of the compiler that setup.py uses.

    Raises:
        LookupError: there is none for this torch.
    """
    import torch

    sys.path.insert(0, "scripts")
    from cuda_toolkit import find_toolkit

    if torch.version.cuda is None:
        raise LookupError("torch has no CUDA")
    toolkit = find_toolkit(torch.version.cuda)
    return toolkit.nvcc, toolkit.release


def build(context: CheckContext) -> Iterator[Result]:
    """Build the extensions in place; what is built already is only looked at."""
    temp = Path("build") / f"editable-{sys.implementation.cache_tag}" / "temp"
    done = run_python("setup.py", "build_ext", "--inplace", "--build-temp", str(temp))
    warnings = [line for line in done.text.splitlines() if "left out" in line or "error:" in line.lower()]
    detail = warnings[0] if warnings else done.reason if done.status else ""
    yield passed("build", done.status == 0 and not warnings, f"status {done.status}", "status 0", detail)


def kernels(context: CheckContext) -> Iterator[Result]:
    """Report what runs the operators on the device."""
    import megalite.kernels

    described = megalite.kernels.describe(context.device)
    used = ", ".join(dict.fromkeys(re.findall(r": (compiled|torch\.compile|Triton|eager)\b", described)))
    yield passed(f"kernels on {context.device}", used == "compiled", used, "compiled", described)
    if context.device == "cuda":
        yield _triton_attention()


def _triton_attention() -> Result:
    """Compile and run Triton's attention once: importing it does not say whether it can be compiled."""
    import torch

    from megalite.kernels import CausalSoftmax, flash_attention
    from megalite.kernels.flash_attention import has_triton

    if not has_triton():
        return failed("Triton attention", "Triton is not installed")
    q = torch.randn(1, 1, 16, 64, device="cuda", dtype=torch.bfloat16)
    try:
        is_finite = bool(flash_attention(q, q, q, CausalSoftmax(16, 0.125)).isfinite().all())
    except Exception as error:
        traceback.print_exc()
        return failed("Triton attention", f"{type(error).__name__}: {error}")
    return passed("Triton attention", is_finite, "runs" if is_finite else "not finite", "runs")


def operator_tests(context: CheckContext) -> Iterator[Result]:
    """Run the tests of compiled operators, of copies to the GPU, of NCCL and of grouped GEMMs."""
    names = (
        "host_copy",
        "activation_offload",
        "optimizer_offload",
        "communication",
        "gelu_in_gemms",
        "experts",
    )
    others = (f"tests/gpu/test_{name}.py" for name in names)
    return _tests("operator tests", "tests/gpu/test_kernels.py", *others, "-k", "not at_run_time")


def run_time_tests(context: CheckContext) -> Iterator[Result]:
    """Run the tests of operators on what a GPU runs without the library that nvcc compiles."""
    return _tests("operator tests without nvcc", "tests/gpu/test_kernels.py", "-k", "at_run_time")


def triton_tests(context: CheckContext) -> Iterator[Result]:
    """Run the tests of Triton's attention and tokens' rows in bf16, and of masks; cases compile kernels."""
    files = (f"tests/gpu/test_{name}.py" for name in ("flash_attention", "layouts", "token_rows"))
    one_rank = "(same_run and not tp2 and not pp2 and not dp2)"  # stage 11 runs the others
    return _tests("Triton tests", *files, "-k", f"bfloat16 or drops or host or {one_rank}")


def recurrence_tests(context: CheckContext) -> Iterator[Result]:
    """Run the tests of Triton's recurrences at the sizes of models, and with all options."""
    return _tests("recurrences", "tests/gpu/test_recurrence.py", "-k", "everything or (long and bfloat16)")


def compiled_layer_tests(context: CheckContext) -> Iterator[Result]:
    """Run the tests of layers that torch.compile compiles."""
    return _tests("compiled layers", "tests/gpu/test_precision.py")


def backend_tests(context: CheckContext) -> Iterator[Result]:
    """Compare each attention backend with the formula."""
    return _tests("attention backends", "tests/unit/model/test_attention.py", "-k", "on_a_gpu")


def _tests(name: str, *arguments: str) -> Iterator[Result]:
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", *arguments)
    yield from outcome_of_tests(name, done.status, done.text)


def outcome_of_tests(name: str, status: int, text: str) -> Iterator[Result]:
    """Read pytest's last lines: a result for each test that failed, and one for all."""
    for line in re.findall(r"^(?:FAILED|ERROR) (.*)$", text, flags=re.MULTILINE):
        yield failed(name, line)
    counts = dict.fromkeys(("passed", "failed", "skipped", "error"), 0)
    for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text):
        counts[word] = int(count)
    if status == 0 and not counts["passed"]:
        yield skipped(name, f"{counts['skipped']} tests skipped themselves")
    else:
        last = next(iter(reversed(text.strip().splitlines())), "no output")
        yield passed(name, status == 0, f"{counts['passed']} passed", "all", last)
