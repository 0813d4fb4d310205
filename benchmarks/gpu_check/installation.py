"""Stage 1: versions, the build, and the tests that need a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_check.commands import first_line, run_python
from benchmarks.gpu_check.results import Result, failed, info, passed, skipped
from benchmarks.gpu_check.runner import CheckContext


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
        sys.path.insert(0, "scripts")
        from cuda_toolkit import find_toolkit

        try:
            toolkit = find_toolkit(torch.version.cuda)
            yield info("nvcc", ".".join(map(str, toolkit.release)), detail=toolkit.nvcc)
        except LookupError as error:
            yield failed("nvcc", str(error))


def build(context: CheckContext) -> Iterator[Result]:
    """Build the extensions in place; what is built already is only looked at."""
    temp = Path("build") / f"editable-{sys.implementation.cache_tag}" / "temp"
    done = run_python("setup.py", "build_ext", "--inplace", "--build-temp", str(temp))
    warnings = [line for line in done.text.splitlines() if "left out" in line or "error:" in line.lower()]
    detail = warnings[0] if warnings else done.reason if done.status else ""
    yield passed("build", done.status == 0 and not warnings, f"status {done.status}", "status 0", detail)


def kernels(context: CheckContext) -> Iterator[Result]:
    """Report whether every operator is compiled for the device."""
    import megalite.kernels

    described = megalite.kernels.describe(context.device)
    is_compiled = "reference" not in described
    yield passed(
        f"kernels on {context.device}",
        is_compiled,
        "compiled" if is_compiled else "reference",
        "compiled",
        described,
    )


def gpu_tests(context: CheckContext) -> Iterator[Result]:
    """Run the tests that need a GPU."""
    tests = ["tests/gpu"]
    if context.device == "cuda":
        tests.append("tests/unit/model/test_attention.py")
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", *tests)
    yield from outcome_of_tests("GPU tests", done.status, done.text)


def outcome_of_tests(name: str, status: int, text: str) -> Iterator[Result]:
    """Read pytest's last lines: a result for each test that failed, and one for all."""
    for line in re.findall(r"^FAILED (.*)$", text, flags=re.MULTILINE):
        yield failed(name, line)
    counts = dict.fromkeys(("passed", "failed", "skipped", "error"), 0)
    for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text):
        counts[word] = int(count)
    if status == 0 and not counts["passed"]:
        yield skipped(name, f"{counts['skipped']} tests skipped themselves")
    else:
        last = next(iter(reversed(text.strip().splitlines())), "no output")
        yield passed(name, status == 0, f"{counts['passed']} passed", "all", last)
