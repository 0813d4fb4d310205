"""Options of timers, traces and profilers: which are rejected, and which have no effect."""

from __future__ import annotations

import shlex

import pytest

from megalite.config import LoggingConfig, check_config
from megalite.frontends.command_line import parse
from tests.command_line import mistakes_of

ENOUGH = "--train-iters 100 --mock-data --vocab-size 256 "


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--timing-log-level 3", "--timing-log-level 3 is out of range: it must be 0, 1 or 2"),
        (
            "--trace-pipeline 5..6 --save s",
            "--trace-pipeline 5..6 is not a range: pass FIRST:LAST counted from 1",
        ),
        ("--trace-pipeline 6:5 --save s", "--trace-pipeline 6:5 is not a range"),
        ("--record-routing-iterations 6:5", "--record-routing-iterations 6:5 is not a range"),
        ("--trace-pipeline 5:6", "--trace-pipeline has no folder to write to: pass --tensorboard-dir"),
        ("--profile --use-pytorch-profiler", "--use-pytorch-profiler without --tensorboard-dir"),
        ("--profile --profile-execution --tensorboard-dir t", "both start the profiler; remove one"),
        (
            "--profile --profile-step-start 8 --profile-step-end 8",
            "--profile-step-start 8 is not below --profile-step-end 8, the last profiled iteration",
        ),
        ("--profile --profile-ranks 0 4", "--profile-ranks 4: the run's ranks are 0 to 3"),
        ("--record-memory-history --profile-ranks 5", "--profile-ranks 5: the run's ranks are 0 to 3"),
        ("--log-layer-grad-norms-interval 5", "--log-layer-grad-norms-interval has no folder to write to"),
        ("--tensorboard-log-interval 0", "--tensorboard-log-interval 0 is out of range"),
        ("--profile-modules 2 --profile-modules-depth -1", "--profile-modules-depth -1 is out of range"),
        ("--profile-modules 2 --profile-modules-top 0", "--profile-modules-top 0 is out of range"),
    ],
)
def test_what_is_refused(line: str, problem: str) -> None:
    assert problem in "\n".join(mistakes_of(ENOUGH + line, 4))


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        ("--timing-log-option max", "--timing-log-option max has no effect: --timing-log-level is not set"),
        (
            "--trace-pipeline-path x",
            "--trace-pipeline-path x has no effect: --trace-pipeline is not set",
        ),
        ("--trace-pipeline 101:102 --save s", "has no effect: the run ends at --train-iters 100"),
        ("--profile-step-end 13", "--profile-step-end 13 has no effect: --profile is not set"),
        ("--profile-ranks 1", "--profile-ranks 1 has no effect: neither --profile nor"),
        ("--use-pytorch-profiler", "--use-pytorch-profiler has no effect: --profile is not set"),
        ("--profile --profile-name x", "--profile-name x has no effect: PyTorch's profiler is off"),
        (
            "--profile --pytorch-profiler-collect-shapes",
            "--pytorch-profiler-collect-shapes has no effect: PyTorch's profiler is off",
        ),
        ("--profile-modules-file x", "--profile-modules-file x has no effect: --profile-modules is not set"),
        (
            "--log-time-breakdown --log-interval 101",
            "--log-time-breakdown has no effect: the run ends at --train-iters 100, before the first "
            "--log-interval 101",
        ),
        ("--profile-modules 101", "--profile-modules 101 has no effect: the run ends at --train-iters 100"),
        ("--wandb-exp-name x", "--wandb-exp-name x has no effect: --wandb-project is not set"),
        ("--memory-snapshot-path x", "--memory-snapshot-path x has no effect: --record-memory-history"),
        ("--tensorboard-log-interval 5", "no effect: --tensorboard-dir is not set"),
        ("--no-barrier-with-level-1-timing", "is not needed: timers never make ranks wait"),
    ],
)
def test_what_is_without_effect_is_told(line: str, notice: str) -> None:
    _, notices = parse(shlex.split(ENOUGH + line))
    assert [text for text in notices if notice in text]


@pytest.mark.parametrize(
    "line",
    [
        "--timing-log-level 2 --timing-log-option all",
        "--trace-pipeline 5:6 --save s --trace-pipeline-path x",
        "--profile --profile-ranks 0 3 --use-pytorch-profiler --profile-name n --tensorboard-dir t",
        "--profile-execution --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack "
        "--pytorch-profiler-collect-memory --tensorboard-dir t",
        "--record-memory-history --profile-ranks 1 --memory-snapshot-path x",
        "--profile-modules 2 --profile-modules-depth 0 --profile-modules-top 3 --profile-modules-file x",
        "--wandb-project p --wandb-exp-name n --tensorboard-log-interval 5 --log-timers-to-tensorboard",
        "--log-layer-grad-norms-interval 5 --tensorboard-dir t",
        "--log-layer-grad-norms-interval 5 --mlflow-experiment e --tensorboard-log-interval 5",
        "--opentelemetry prometheus --log-optimizer-states-to-tensorboard --log-timers-to-tensorboard",
    ],
)
def test_what_is_honoured_is_not_remarked_upon(line: str) -> None:
    config, notices = parse(shlex.split(ENOUGH + line))
    check_config(config, 4)
    assert notices == []


def test_the_level_of_timers() -> None:
    """Check that timers for TensorBoard alone are those of the parts of an iteration."""
    assert LoggingConfig().timers_level == 0
    assert LoggingConfig(log_timers_to_tensorboard=True).timers_level == 0
    assert LoggingConfig(log_timers_to_tensorboard=True, tensorboard_dir="t").timers_level == 1
    assert LoggingConfig(log_timers_to_tensorboard=True, wandb_project="p").timers_level == 1
    assert LoggingConfig(log_timers_to_tensorboard=True, opentelemetry="otlp").timers_level == 1
    given = LoggingConfig(log_timers_to_tensorboard=True, tensorboard_dir="t", timing_log_level=0)
    assert given.timers_level == 0


@pytest.mark.parametrize(("words", "numbers"), [("5:6", [5, 6]), ("7", [7]), ("0:3", []), ("x", [])])
def test_traced_iterations(words: str, numbers: list[int]) -> None:
    assert list(LoggingConfig(trace_pipeline=words).traced_iterations) == numbers
