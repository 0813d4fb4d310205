"""The checks of a GPU machine: stages, time limits, table and failures, with programs in place of checks."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import __main__ as program
from benchmarks.gpu_check import runner, speed
from benchmarks.gpu_check.ceilings import _is_named
from benchmarks.gpu_check.commands import Finished
from benchmarks.gpu_check.faults import _compared, losses_of
from benchmarks.gpu_check.installation import outcome_of_tests
from benchmarks.gpu_check.results import (
    Result,
    at_most,
    duration,
    failed,
    has_failed,
    info,
    rate,
    skipped,
    table,
)
from benchmarks.gpu_check.runner import STAGE_SECONDS, Check, CheckContext, Stage, run_stage
from benchmarks.gpu_check.same_numbers import difference
from benchmarks.gpu_check.speed import kind_of, train_step_row
from benchmarks.gpu_check.stages import BUILD, STAGES
from benchmarks.gpu_check.watch import Watch

ROOT = Path(__file__).parents[3]
REPORT = """
import json, os, subprocess, sys, time
def report(name, value=1.0):
    with open({file!r}, "a") as results:
        results.write(json.dumps(dict(
            name=name, measured=value, expected=None, unit="", verdict="info", detail="")) + "\\n")
"""


def programs(**scripts: str) -> tuple[Stage, Callable[[Check, CheckContext, Path], Sequence[str]]]:
    """A stage with a check of each name, which runs the script."""

    def command(check: Check, context: CheckContext, file: Path) -> Sequence[str]:
        return [sys.executable, "-c", REPORT.format(file=str(file)) + scripts[check.name]]

    return Stage(3, "of programs", [Check(name, "none.none", 20.0) for name in scripts]), command


def test_a_failed_check_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    stage, command = programs(
        dies="report('before'); print('out of luck'); os.abort()",
        silent="pass",
        good="report('after', 2.5)",
    )
    results = run_stage(stage, tmp_path, "cpu", True, command=command)
    assert [(r.name, r.verdict) for r in results] == [
        ("before", "info"),
        ("dies", "failed"),
        ("silent", "failed"),
        ("after", "info"),
    ]
    assert results[1].detail == "its process ended with status -6: out of luck"
    assert results[2].detail == "it reported nothing"
    content = json.loads((tmp_path / "stage_3.json").read_text())
    assert [Result(**each) for each in content["results"]] == results
    assert (content["stage"], content["device"]) == (3, "cpu")
    log = (tmp_path / "stage_3.log").read_text()
    assert log.index("=== dies") < log.index("out of luck") < log.index("=== good")
    assert log.rstrip().endswith("0 ok, 0 low, 2 failed, 0 skipped")


def test_a_check_over_its_time_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SECONDS_TO_END", 0.5)
    child = tmp_path / "child"
    hangs = f"""
report("first")
sleeper = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
process = subprocess.Popen([sys.executable, "-c", sleeper])
open({str(child)!r}, "w").write(str(process.pid))
print("waiting", flush=True)
time.sleep(100)
"""
    stage, command = programs(hangs=hangs, next="report('second')")
    stage = Stage(3, "", [Check("hangs", stage.checks[0].function, 3.0), stage.checks[1]])
    start = time.monotonic()
    results = run_stage(stage, tmp_path, "cpu", True, command=command)
    assert time.monotonic() - start < 30
    assert [r.name for r in results] == ["first", "hangs", "second"]
    assert results[1].detail == "not finished after 3 s: waiting"
    assert not _is_running(int(child.read_text()))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stage_keeps_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SECONDS_TO_END", 0.5)
    stage, command = programs(slow="time.sleep(100)", late="report('late')")
    start = time.monotonic()
    results = run_stage(stage, tmp_path, "cpu", True, limit=3.0, command=command)
    assert time.monotonic() - start < 5
    assert [(r.name, r.verdict) for r in results] == [("slow", "failed"), ("late", "failed")]
    assert "not run: the stage's 3 s are over" in results[1].detail


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.title)
def test_the_limits_of_a_stage_come_to_nine_minutes(stage: Stage) -> None:
    assert stage.checks[0] is BUILD
    assert sum(check.seconds for check in stage.checks[1:]) <= STAGE_SECONDS == 540.0


def test_checks_exist() -> None:
    for check in (check for stage in STAGES for check in stage.checks):
        module, function = check.function.split(".")
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu_check.{module}"), function))


def test_the_build_imports_nothing_that_must_be_built() -> None:
    loads = (
        "import sys, benchmarks.gpu_check.worker, benchmarks.gpu_check.installation; "
        "sys.exit('megalite' in sys.modules)"
    )
    assert BUILD.function == "installation.build"
    assert subprocess.run([sys.executable, "-c", loads], cwd=ROOT).returncode == 0


def test_names_of_checks_are_unique() -> None:
    names = [check.name for stage in STAGES for check in stage.checks if check is not BUILD]
    assert len(names) == len(set(names))


def test_a_check_runs_in_a_process_and_reports_its_exception(tmp_path: Path) -> None:
    """A check on a device that is none fails in torch, with the line of the check."""
    stage = Stage(1, "", [check for check in STAGES[0].checks if check.name in ("kernels", "copy")])
    results = run_stage(stage, tmp_path, "nonsense", True)
    kernels, copy = results
    assert kernels.verdict == "failed" and kernels.expected == "compiled"
    assert copy.verdict == "failed" and "RuntimeError" in copy.detail and "nonsense" in copy.detail


def test_verdicts() -> None:
    assert rate("", 91.0, 100.0, "").verdict == "ok"
    assert rate("", 89.0, 100.0, "").verdict == "low"
    assert rate("", 89.0, None, "").verdict == "info"
    assert duration("", 1.1, 1.0, "").verdict == "ok"
    assert duration("", 1.2, 1.0, "").verdict == "low"
    assert at_most("", 1e-12, 1e-11).verdict == "ok"
    assert at_most("", float("nan"), 1e-11).verdict == "failed"
    slow = [rate("", 1.0, 100.0, ""), skipped("", "x"), info("", 1.0)]
    assert not has_failed(slow)
    assert has_failed([*slow, failed("", "x")])


def test_the_table_is_aligned() -> None:
    lines = table(
        [rate("copy", 4.28731, 4.32, "TB/s", detail="of 4 GB"), skipped("x", "no\nGPU")]
    ).splitlines()
    assert lines == [
        "check  measured  expected  unit  verdict",
        "copy      4.287      4.32  TB/s  ok       of 4 GB",
        "x             -         -        skipped  no GPU",
        "1 ok, 0 low, 0 failed, 1 skipped",
    ]


def test_a_machine_without_a_gpu_is_told_so_in_one_line(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [ROOT / "scripts" / "check_gpu.sh", "--out", tmp_path / "out", "--stage", "3"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and "finds no GPU on this machine" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_status_says_whether_a_check_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def stage_of(stage: Stage, out: Path, device: str, is_small: bool) -> list[Result]:
        ran.append((stage.number, device, is_small))
        return [failed("x", "y")] if stage.number == 2 else []

    monkeypatch.setattr(program, "run_stage", stage_of)
    assert program.main(["--out", str(tmp_path), "--rehearse", "--stage", "1", "3"]) == 0
    assert program.main(["--out", str(tmp_path), "--rehearse"]) == 1
    assert ran == [(number, "cpu", True) for number in (1, 3, 1, 2, 3, 4, 5, 6, 7)]


def test_the_row_of_train_step_is_read() -> None:
    text = """torch 2.11.0, NVIDIA H200
dropout   megalite      plain  ratio
             tok/s      tok/s
    0.0      65432      50000   1.31   1.20      554      730  75.9%  56.0%   85.4      99.9
"""
    row = train_step_row(text)
    assert row is not None
    assert (row["tok/s"], row["ratio"], row["MFU"], row["GB"]) == ("65432", "1.31", "56.0%", "85.4")
    assert train_step_row("error: does not fit") is None


@pytest.mark.parametrize(
    ("printed", "verdict"),
    [
        (
            "error: --model gpt-7b needs 139.6 GB by the plan, and 79.1 GB are free: small would fit",
            "skipped",
        ),
        ("Traceback\nRuntimeError: CUDA error", "failed"),
    ],
)
def test_a_model_that_is_too_large_is_no_failure(
    printed: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "run_python", lambda *arguments: Finished(1, printed))
    (result,) = speed.step_7b(CheckContext("cpu", False, tmp_path))
    assert (result.verdict, result.detail) == (verdict, printed.splitlines()[-1])


def test_kernels_have_kinds() -> None:
    names = {
        "nvjet_hsh_192x192_64x4_2x1_v_bz_coopA_NNT": "gemm",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "gemm",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
        "void pytorch_flash::flash_fwd_kernel<...>": "attention",
        "megalite::cuda::layer_norm_backward_kernel<bf16>": "memory",
        "void at::native::vectorized_elementwise_kernel<4>": "memory",
    }
    assert {name: kind_of(name) for name in names} == names


@pytest.mark.parametrize(
    ("named", "ran", "is_right"),
    [
        ("cuDNN (cuDNN 9.19.0)", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", True),
        ("cuDNN (cuDNN 9.19.0)", "void pytorch_flash::flash_fwd_kernel", False),
        ("FlashAttention 2 (cuDNN 9.19.0)", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", False),
        ("FlashAttention 2 (cuDNN 9.19.0)", "void pytorch_flash::flash_fwd_kernel", True),
        ("memory-efficient attention (no cuDNN)", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80", True),
    ],
)
def test_a_kernel_is_the_named_one_by_its_name(named: str, ran: str, is_right: bool) -> None:
    assert _is_named(named, ran) == is_right


def test_the_outcome_of_tests_is_read() -> None:
    text = "FAILED tests/gpu/test_kernels.py::test_x - assert 1 == 2\n1 failed, 3 passed in 2.00s\n"
    one, all_ = outcome_of_tests("GPU tests", 1, text)
    assert one.detail == "tests/gpu/test_kernels.py::test_x - assert 1 == 2"
    assert (all_.verdict, all_.measured) == ("failed", "3 passed")
    (none,) = outcome_of_tests("GPU tests", 0, "9 skipped in 0.1s\n")
    assert none.verdict == "skipped"
    (good,) = outcome_of_tests("GPU tests", 0, "9 passed, 1 skipped in 0.1s\n")
    assert good.verdict == "ok"


def test_resumed_losses_are_compared_to_the_bit(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [{"iteration": 1, "lm_loss": 2.0}, {"iteration": 2, "lm_loss": 9.0}, {"validation": {}}]
    lines.append({"iteration": 2, "lm_loss": 1.5})
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"iteration": 3, "lm_')
    assert losses_of(tmp_path) == {1: 2.0, 2: 1.5}
    whole, last_bit = {1: 2.0, 2: 1.5}, {1: 2.0, 2: 1.5 + 2e-16}
    for resumed, must_be_equal, verdict in (
        (whole, True, "ok"),
        (last_bit, True, "failed"),
        (last_bit, False, "ok"),
        ({1: 2.0}, False, "failed"),
    ):
        (result,) = _compared("resume", whole, resumed, "resumed from x", must_be_equal)
        assert result.verdict == verdict, result
    assert "first at iteration 2" in next(_compared("", whole, last_bit, "", True)).detail


def test_differences_are_relative_and_see_nan() -> None:
    a = torch.tensor([100.0, 1.0])
    assert difference([a, a + 1], [a, a]) == pytest.approx(0.01)
    assert not difference([a * torch.nan], [a]) <= 1.0


def test_clock_and_power_are_medians_of_the_later_half() -> None:
    watch = Watch()
    watch.read("345, 3201, 90.5, 30, 0x1\n1980, 3201, 690.0, 60, 0x4\n[N/A], 1, 1, 1, x\n")
    watch.read("1900, 3201, 700.0, 62, 0x4\n")
    assert len(watch.samples) == 3
    assert watch.summary().startswith("clocks.sm 1940 MHz, clocks.mem 3201 MHz, power.draw 695 W")
    assert "0x1 0x4" in watch.summary()
    assert "none" in Watch().summary()
