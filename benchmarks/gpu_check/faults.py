"""Stages 4 and 9: a killed run that resumes, a run without enough memory, and memory errors in kernels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu_check.commands import run_python
from benchmarks.gpu_check.installation import find_nvcc, outcome_of_tests
from benchmarks.gpu_check.results import Result, failed, info, passed, skipped
from benchmarks.gpu_check.runner import ROOT, CheckContext

MODEL = (
    *("--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8", "--seq-length", "512"),
    *("--vocab-size", "4096", "--micro-batch-size", "4", "--global-batch-size", "8"),
)
SMALL_MODEL = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16"),
    *("--vocab-size", "128", "--micro-batch-size", "1", "--global-batch-size", "2", "--num-threads", "1"),
)
NUM_ITERATIONS, SAVE_INTERVAL, KILL_AFTER = 40, 10, 25
SECONDS_TO_KILL = 60.0


def memcheck(context: CheckContext) -> Iterator[Result]:
    """Run the kernels' tests under compute-sanitizer's memcheck."""
    yield from _sanitized("memcheck")


def racecheck(context: CheckContext) -> Iterator[Result]:
    """Run the kernels' tests under compute-sanitizer's racecheck."""
    yield from _sanitized("racecheck")


def _sanitized(tool: str) -> Iterator[Result]:
    _add_toolkit_to_path()
    if shutil.which("compute-sanitizer") is None:
        yield skipped(tool, "compute-sanitizer is neither in PATH nor beside nvcc")
        return
    test = f"tests/gpu/test_kernels.py::test_no_kernel_touches_what_is_not_its_own[{tool}]"
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", "-m", "slow", test)
    yield from outcome_of_tests(tool, done.status, done.text)


def _add_toolkit_to_path() -> None:
    """Let this process and its children find the programs that lie beside nvcc."""
    with suppress(LookupError):
        nvcc, _ = find_nvcc()
        os.environ["PATH"] += os.pathsep + str(Path(nvcc).parent)


def resume_sync(context: CheckContext) -> Iterator[Result]:
    """Kill a run and resume it; its saves block."""
    yield from _resumes(context, ())


def resume_async(context: CheckContext) -> Iterator[Result]:
    """Kill a run and resume it; its saves do not block."""
    yield from _resumes(context, ("--async-save",))


def _resumes(context: CheckContext, saves: Sequence[str]) -> Iterator[Result]:
    """Compare the losses of a killed and resumed run with an uninterrupted run's, to the bit."""
    for deterministic in ((), ("--deterministic",)):
        name = " ".join(["resume", *saves, *deterministic])
        folder = context.scratch / name.replace(" ", "")
        flags = [*(SMALL_MODEL if context.is_small else MODEL), *saves, *deterministic]
        whole, killed = (_command(context, flags, folder / which) for which in ("whole", "killed"))
        done = run_python(*whole)
        if done.status:
            yield failed(name, done.reason)
            continue
        if problem := _run_until_killed(killed, folder / "killed"):
            yield failed(name, problem)
            continue
        done = run_python(*killed)
        line = next((each for each in done.text.splitlines() if "resumed from" in each), "")
        if done.status or not line:
            yield failed(name, done.reason if done.status else "it did not resume from its checkpoint")
            continue
        yield from _compared(
            name, losses_of(folder / "whole"), losses_of(folder / "killed"), line, bool(deterministic)
        )


def _compared(
    name: str, whole: dict[int, float], resumed: dict[int, float], line: str, must_be_equal: bool
) -> Iterator[Result]:
    unequal = [i for i, loss in whole.items() if resumed.get(i) != loss]
    found = f"{len(whole) - len(unequal)} of {len(whole)} losses equal"
    if unequal:
        first = unequal[0]
        line = f"first at iteration {first}: {resumed.get(first)!r} and {whole[first]!r}; {line}"
    is_right = bool(whole) and (not unequal if must_be_equal else len(resumed) == len(whole))
    expected = "all equal" if must_be_equal else "all there"
    yield passed(name, is_right, found, expected, line)


def _command(context: CheckContext, flags: Sequence[str], folder: Path) -> list[str]:
    backend = ["--distributed-backend", "gloo"] if context.device == "cpu" else []
    return [
        *("pretrain_gpt.py", *flags, "--bf16", "--attention-dropout", "0", "--hidden-dropout", "0.1"),
        *("--mock-data", "--train-iters", str(NUM_ITERATIONS), "--lr", "1e-3", "--eval-iters", "0"),
        *("--log-interval", "1", "--save-interval", str(SAVE_INTERVAL), *backend),
        *("--save", str(folder), "--load", str(folder), "--metrics-file", str(folder / "metrics.jsonl")),
    ]


def _run_until_killed(command: Sequence[str], folder: Path) -> str:
    """Start a run and kill it once it is past two saves; return what went wrong, or an empty string."""
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT)
    try:
        end = time.monotonic() + SECONDS_TO_KILL
        while max(losses_of(folder), default=0) < KILL_AFTER:
            if process.poll() is not None:
                return f"the run to be killed ended by itself, with status {process.returncode}"
            if time.monotonic() > end:
                return f"the run to be killed did not reach iteration {KILL_AFTER} in {SECONDS_TO_KILL:.0f} s"
            time.sleep(0.005)
        return ""
    finally:
        process.kill()
        process.wait()


def losses_of(folder: Path) -> dict[int, float]:
    """Return the loss of each iteration that was written; of one that ran twice, the later."""
    file = folder / "metrics.jsonl"
    losses: dict[int, float] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the run was killed in this line
            continue
        if "lm_loss" in entry:
            losses[entry["iteration"]] = entry["lm_loss"]
    return losses


def out_of_memory(context: CheckContext) -> Iterator[Result]:
    """Start a run that cannot fit, and read its error: what took the memory, and what would save some."""
    if context.device == "cpu":
        yield skipped("out of memory", "it would take all of this machine's memory")
        return
    flags = "--preset gpt-1.3b --bf16 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 96"
    done = run_python(
        "pretrain_gpt.py",
        *flags.split(),
        *["--mock-data", "--train-iters", "1", "--lr", "1e-4", "--eval-iters", "0"],
    )
    is_explained = done.status == 1 and "ran out of memory" in done.reason and "would save" in done.text
    yield passed(
        "out of memory",
        is_explained and "Traceback" not in done.text,
        f"status {done.status}",
        "status 1",
        done.reason,
    )
    yield info("out of memory, lines", float(len(done.text.splitlines())))
