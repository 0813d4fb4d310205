"""The checks of a GPU machine: stages, time limits, table and failures, with programs in place of checks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as program
from benchmarks.gpu_check import installation, runner, speed
from benchmarks.gpu_check.ceilings import _is_named
from benchmarks.gpu_check.commands import Finished
from benchmarks.gpu_check.faults import _compared, losses_of
from benchmarks.gpu_check.installation import outcome_of_tests
from benchmarks.gpu_check.results import (
    Result,
    at_most,
    cut,
    duration,
    failed,
    has_failed,
    info,
    rate,
    skipped,
    table,
)
from benchmarks.gpu_check.runner import (
    COMMAND_SECONDS,
    STAGE_SECONDS,
    Check,
    CheckContext,
    Command,
    Stage,
    StageRunner,
    is_complete,
    load_stage,
)
from benchmarks.gpu_check.same_numbers import difference
from benchmarks.gpu_check.speed import kind_of, train_step_row
from benchmarks.gpu_check.stages import BUILD, BUILD_SECONDS, STAGES, fitting
from benchmarks.gpu_check.watch import Watch

ROOT = Path(__file__).parents[3]
REPORT = """
import json, os, subprocess, sys, time
def report(name, value=1.0):
    with open(sys.argv[1], "a") as results:
        results.write(json.dumps(dict(
            name=name, measured=value, expected=None, unit="", verdict="info", detail="")) + "\\n")
def hang():
    open(sys.argv[1] + ".hangs", "w")
    time.sleep(1000)
"""
PROGRAM_SECONDS = 2.0
"""What each program takes by the clock of `clock`, unless it hangs."""


def programs(**scripts: str) -> tuple[Stage, Command]:
    """A stage with a check of each name, which runs the script; one named build comes before the checks."""

    def command(check: Check, context: CheckContext, file: Path) -> Sequence[str]:
        return [sys.executable, "-c", REPORT + scripts[check.name], str(file)]

    checks = [Check(name, "none.none", 200.0) for name in scripts]
    builds = [check for check in checks if check.name == "build"]
    return Stage(3, "of programs", [check for check in checks if check not in builds], builds), command


def run_stage(
    stage: Stage, out: Path, command: Command, limit: float = 300.0, **options: Any
) -> list[Result]:
    return StageRunner(out, "cpu", "a machine", True, command=command, **options).run(stage, limit)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the runner's clock by one that its programs move: a busy machine changes no result.

    A program that calls `hang` takes all the time that it may take, as soon as it has come there.
    """
    now = [1000.0]

    class Program(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout in (None, runner.SECONDS_TO_END):
                return super().wait(timeout and 300.0)
            hangs = Path(f"{self.args[-1]}.hangs")  # type: ignore[index]
            while self.poll() is None and not hangs.exists():
                time.sleep(0.01)
            if hangs.exists():
                now[0] += timeout
                raise subprocess.TimeoutExpired(self.args, timeout)
            now[0] += PROGRAM_SECONDS
            return self.returncode

    names = ("STDOUT", "TimeoutExpired")
    fake = SimpleNamespace(Popen=Program, **{name: getattr(subprocess, name) for name in names})
    monkeypatch.setattr(runner, "subprocess", fake)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_failed_check_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    stage, command = programs(
        dies="report('before'); print('out of luck'); os.abort()",
        silent="pass",
        good="report('after', 2.5)",
    )
    results = run_stage(stage, tmp_path, command)
    assert [(r.name, r.verdict) for r in results] == [
        ("before", "info"),
        ("dies", "failed"),
        ("silent", "failed"),
        ("after", "info"),
    ]
    assert results[1].detail == "its process ended with status -6: out of luck"
    assert results[2].detail == "it reported nothing"
    content = json.loads((tmp_path / "stage_3.json").read_text())
    assert [Result(**each) for check in content["checks"] for each in check["results"]] == results
    assert (content["stage"], content["machine"]) == (3, "a machine")
    log = (tmp_path / "stage_3.log").read_text()
    assert log.index("=== dies") < log.index("out of luck") < log.index("=== good")
    assert log.rstrip().endswith("0 passed, 2 failed, 0 skipped")


def test_a_check_over_its_time_is_ended_with_what_it_started(tmp_path: Path, clock: list[float]) -> None:
    child = tmp_path / "child"
    hangs = f"""
report("first")
sleeper = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
process = subprocess.Popen([sys.executable, "-c", sleeper])
open({str(child)!r}, "w").write(str(process.pid))
print("waiting", flush=True)
hang()
"""
    stage, command = programs(hangs=hangs, next="report('second')")
    stage = Stage(3, "", [Check("hangs", stage.checks[0].function, 3.0), stage.checks[1]])
    results = run_stage(stage, tmp_path, command)
    assert clock == [1000.0 + 3.0 + PROGRAM_SECONDS]
    assert [r.name for r in results] == ["first", "hangs", "second"]
    assert (results[1].verdict, results[1].detail) == ("skipped (time)", "not finished after 3 s: waiting")
    assert not has_failed(results)
    assert not _is_running(int(child.read_text()))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stage_keeps_its_limit(tmp_path: Path, clock: list[float]) -> None:
    stage, command = programs(slow="hang()", late="report('late')")
    results = run_stage(stage, tmp_path, command, limit=11.0)
    assert clock == [1000.0 + 11.0 - runner.SECONDS_TO_END]
    assert [(r.name, r.verdict) for r in results] == [("slow", "skipped (time)"), ("late", "skipped (time)")]
    assert results[1].detail == "not run: the time was over"


def test_a_build_takes_no_time_of_the_checks_and_runs_once(tmp_path: Path, clock: list[float]) -> None:
    builds = tmp_path / "builds"
    build = f"open({str(builds)!r}, 'a').write('x'); report('built')"
    stage, command = programs(build=build, check="report('measured')")
    runner_ = StageRunner(tmp_path, "cpu", "a machine", True, command=command)
    results = runner_.run(stage, limit=runner.SECONDS_TO_END + 1.5)
    assert [r.name for r in results] == ["built", "build: time", "measured"]
    assert results[1].measured == PROGRAM_SECONDS and results[1].unit == "s"
    assert [r.name for r in runner_.run(stage)] == ["measured"]
    assert builds.read_text() == "x"


def test_a_command_keeps_its_end_with_the_build(tmp_path: Path, clock: list[float]) -> None:
    stage, command = programs(build="hang()", check="report('measured')")
    results = run_stage(stage, tmp_path, command, end=clock[0] + 10.0)
    assert clock == [1000.0 + 10.0 - runner.SECONDS_TO_END]
    assert [(r.name, r.verdict) for r in results if r.verdict != "info"] == [
        ("build", "skipped (time)"),
        ("check", "skipped (time)"),
    ]


@pytest.mark.usefixtures("clock")
def test_a_resumed_stage_runs_what_was_cut_off(tmp_path: Path) -> None:
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    note = f"open({str(runs)!r}, 'a').write(sys.argv[0])\n"
    stage, command = programs(
        wrong=note + "report('wrong'); sys.exit(1)",
        cut=f"""
report("first half")
if not os.path.exists({str(gate)!r}):
    hang()
report("second half")
""",
    )
    results = run_stage(stage, tmp_path, command)
    assert [r.name for r in results] == ["wrong", "wrong", "first half", "cut"]
    assert not is_complete(tmp_path, stage, "a machine")
    gate.touch()
    resumed = run_stage(stage, tmp_path, command, resumes=True)
    assert [r.name for r in resumed] == ["wrong", "wrong", "first half", "second half"]
    assert runs.read_text() == "-c"  # once: a failure is a result
    assert is_complete(tmp_path, stage, "a machine")
    assert load_stage(tmp_path, stage, "another machine") == []
    assert "=== wrong" in (tmp_path / "stage_3.log").read_text()


@pytest.mark.usefixtures("clock")
def test_a_resumed_check_goes_on_after_what_it_has_reported(tmp_path: Path) -> None:
    """The check of many rows reports each once, over several commands that time ends."""
    known: list[frozenset[str]] = []

    def command(check: Check, context: CheckContext, file: Path) -> Sequence[str]:
        known.append(context.done)
        new = f"row {len(context.done)}"
        hangs = "hang()" if len(known) < 3 else ""
        return [sys.executable, "-c", REPORT + f"report({new!r}); {hangs}", str(file)]

    stage = Stage(3, "of rows", [Check("rows", "none.none", 1.5)])
    for resumes in (False, True, True):
        results = run_stage(stage, tmp_path, command, resumes=resumes)
    assert known == [frozenset(), {"row 0"}, {"row 0", "row 1"}]
    assert [result.name for result in results] == ["row 0", "row 1", "row 2"]
    assert is_complete(tmp_path, stage, "a machine")


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.title)
def test_a_stage_with_its_build_takes_at_most_ten_minutes(stage: Stage) -> None:
    assert stage.builds[0] is BUILD
    assert stage.seconds <= STAGE_SECONDS
    assert STAGE_SECONDS + 170.0 <= COMMAND_SECONDS < 600.0


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        *((1, [1]), (10, [1]), (30, [1, 3, 6, 8])),
        *((45, [1, 3, 6, 2, 4, 5]), (90, [1, 3, 6, 2, 4, 5, 8, 10, 7, 9, 11])),
    ],
)
def test_a_plan_has_the_stages_that_fit_in_their_order(minutes: float, expected: list[int]) -> None:
    chosen = fitting(STAGES, 60 * minutes)
    assert [stage.number for stage in chosen] == expected
    assert len(chosen) == 1 or BUILD_SECONDS + sum(stage.seconds for stage in chosen) <= 60 * minutes


def test_checks_exist() -> None:
    for check in (check for stage in STAGES for check in (*stage.builds, *stage.checks)):
        module, function = check.function.split(".")
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu_check.{module}"), function))


def test_every_file_of_gpu_tests_is_in_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[str] = set()

    def run_tests(*arguments: str) -> Finished:
        ran.update(arguments)
        return Finished(0, "1 passed in 0.1s\n")

    monkeypatch.setattr(installation, "run_python", run_tests)
    for check in (check for stage in STAGES for check in stage.checks):
        function = check.function.removeprefix("installation.")
        if function.endswith("_tests"):
            assert all(result.verdict == "ok" for result in getattr(installation, function)(None))
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")} <= ran


def test_the_build_imports_nothing_that_must_be_built() -> None:
    loads = (
        "import sys, benchmarks.gpu_check.worker, benchmarks.gpu_check.installation; "
        "sys.exit('megalite' in sys.modules)"
    )
    assert BUILD.function == "installation.build"
    assert subprocess.run([sys.executable, "-c", loads], cwd=ROOT).returncode == 0


def test_names_of_checks_are_unique() -> None:
    names = [check.name for stage in STAGES for check in (*stage.builds[1:], *stage.checks)] + [BUILD.name]
    assert len(names) == len(set(names))


def test_a_check_runs_in_a_process_and_reports_its_exception(tmp_path: Path) -> None:
    """A check on a device that is none fails in torch, with the line of the check."""
    (check,) = (check for check in STAGES[0].checks if check.name == "copy")
    stage = Stage(1, "", [replace(check, seconds=300.0)])  # torch's import takes long on a busy machine
    (copy,) = StageRunner(tmp_path, "nonsense", "a machine", True).run(stage)
    assert copy.verdict == "failed" and "RuntimeError" in copy.detail and "nonsense" in copy.detail


def test_a_device_without_compiled_kernels_fails(tmp_path: Path) -> None:
    (kernels,) = installation.kernels(CheckContext("nonsense", True, tmp_path))
    assert kernels.verdict == "failed" and kernels.expected == "compiled"


def test_verdicts() -> None:
    assert rate("", 91.0, 100.0, "").verdict == "ok"
    assert rate("", 89.0, 100.0, "").verdict == "low"
    assert rate("", 89.0, None, "").verdict == "info"
    assert duration("", 1.1, 1.0, "").verdict == "ok"
    assert duration("", 1.2, 1.0, "").verdict == "low"
    assert at_most("", 1e-12, 1e-11).verdict == "ok"
    assert at_most("", float("nan"), 1e-11).verdict == "failed"
    slow = [rate("", 1.0, 100.0, ""), skipped("", "x"), info("", 1.0)]
    assert not has_failed([*slow, cut("", "x")])
    assert has_failed([*slow, failed("", "x")])


def test_the_table_is_aligned() -> None:
    lines = table(
        [rate("copy", 4.28731, 4.32, "TB/s", detail="of 4 GB"), skipped("x", "no\nGPU"), cut("y", "late")], 5
    ).splitlines()
    assert lines == [
        "check  measured  expected  unit  verdict",
        "copy      4.287      4.32  TB/s  ok              of 4",
        "x             -         -        skipped         no GP",
        "y             -         -        skipped (time)  late",
        "1 passed, 0 failed, 2 skipped (1 for time)",
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


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stages that the program runs; stage 2 fails, and 3 has no time."""
    numbers: list[int] = []

    def run(self: StageRunner, stage: Stage) -> list[Result]:
        numbers.append(stage.number)
        verdicts = {2: [failed("x", "y")], 3: [cut("x", "y")]}
        return verdicts.get(stage.number, [])

    monkeypatch.setattr(StageRunner, "run", run)
    return numbers


def test_the_status_says_whether_a_check_failed(tmp_path: Path, ran: list[int]) -> None:
    assert program.main(["--out", str(tmp_path), "--rehearse", "--stage", "3", "1"]) == 0
    assert program.main(["--out", str(tmp_path), "--rehearse"]) == 1
    assert ran == [1, 3, *(stage.number for stage in STAGES)]
    assert [stage.number for stage in STAGES][:3] == [1, 3, 6]


def test_stages_without_time_are_named_with_the_next_command(
    tmp_path: Path, ran: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StageRunner, "seconds_left", property(lambda self: 2700.0 - 500.0 * len(ran)))
    assert program.main(["--out", str(tmp_path), "--rehearse", "--minutes", "45"]) == 1
    assert ran == [1, 3, 6, 2, 4, 5]
    shown = capsys.readouterr().out
    assert "45 minutes suffice for stages 1, 3, 6, 2, 4, 5; what runs only if time is left: stages 8" in shown
    assert "stage 7: operators without nvcc" in shown and "left out: takes up to 7 minutes" in shown
    assert f"next: scripts/check_gpu.sh --out {tmp_path} --resume --stage 1 --rehearse" in shown
    assert (tmp_path / "summary.txt").read_text().startswith("rehearsal on a CPU; megalite ")


def test_an_interrupted_command_shows_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage, command = programs(good="report('measured')", interrupted="pass")

    def interrupt(check: Check, *rest: Any) -> Sequence[str]:
        if check.name == "interrupted":
            raise KeyboardInterrupt
        return command(check, *rest)

    monkeypatch.setattr(program, "STAGES", (stage,))
    monkeypatch.setattr(program, "StageRunner", partial(StageRunner, command=interrupt))
    with pytest.raises(KeyboardInterrupt):
        program.main(["--out", str(tmp_path), "--rehearse"])
    shown = capsys.readouterr().out
    assert "interrupted; finished are:" in shown and "measured" in shown
    assert f"next: scripts/check_gpu.sh --out {tmp_path} --resume --stage 3" in shown


def test_missing_packages_are_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert program.package_problem([1, 3]) == ""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("pytest", "yaml") else find(name)
    )
    assert "lacks pyyaml, pytest: pip install pyyaml pytest" in program.package_problem([1])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytest" else find(name))
    assert program.package_problem([3, 2]) == ""
    assert "--stage 3 2 4 5 8" in program.package_problem([1])


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
