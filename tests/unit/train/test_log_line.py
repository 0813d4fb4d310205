"""Test the log lines, byte for byte as parsers of Megatron-LM's logs read them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megalite.config import LoggingConfig, ParallelConfig
from megalite.config.command_line import parse
from megalite.distributed.topology import Topology
from megalite.log import configure_logging, log
from megalite.train.setup import startup_line
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.writers import LogLineWriter, iteration_line, validation_block

GOLDEN = (
    " iteration      100/     100 | consumed samples:          800 | elapsed time per iteration (ms): 537.3 |"
    " learning rate: 5.822E-05 | global batch size:     8 | lm loss: 7.448950E+00 | loss scale: 1.0 |"
    " grad norm: 1.303 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_iteration(metrics: IterationMetrics) -> None:
    assert iteration_line(metrics, LoggingConfig()) == GOLDEN


def test_throughput_follows_the_elapsed_time(metrics: IterationMetrics) -> None:
    before, elapsed, after = GOLDEN.partition(" elapsed time per iteration (ms): 537.3 |")
    expected = f"{before}{elapsed} throughput per GPU (TFLOP/s/GPU): 117.7 |{after}"
    assert iteration_line(metrics, LoggingConfig(log_throughput=True)) == expected


def test_optional_fields_follow_the_grad_norm(metrics: IterationMetrics) -> None:
    before, norm, after = GOLDEN.partition(" grad norm: 1.303 |")
    further = dataclasses.replace(metrics, num_zeros=0, params_norm=12.345)
    expected = f"{before}{norm} num zeros: 0 | params norm: 12.345 |{after}"
    assert iteration_line(further, LoggingConfig()) == expected


def test_the_decoupled_rate_follows_the_learning_rate(metrics: IterationMetrics) -> None:
    before, rate, after = GOLDEN.partition(" learning rate: 5.822E-05 |")
    expected = f"{before}{rate} decoupled learning rate: 4.500E-05 |{after}"
    decoupled = dataclasses.replace(metrics, decoupled_learning_rate=4.5e-5)
    assert iteration_line(decoupled, LoggingConfig()) == expected


def test_the_fields_of_blooms_logs(metrics: IterationMetrics) -> None:
    """They stand where Megatron-DeepSpeed has them; --deepspeed requests them."""
    config, _ = parse(["--deepspeed"])
    metrics = dataclasses.replace(metrics, consumed_tokens=800 * 1024, tokens_per_second=15_246.6)
    before, elapsed, after = GOLDEN.partition(" elapsed time per iteration (ms): 537.3 |")
    expected = (
        f"{before} consumed tokens:       819200 |{elapsed}{after}"
        " samples per second: 14.889 | TFLOPs: 117.70 |"
    )
    assert iteration_line(metrics, config.logging) == expected


@pytest.mark.parametrize(("loss", "shown"), [(math.nan, "NAN"), (math.inf, "INF"), (-math.inf, "-INF")])
def test_a_loss_that_is_no_number_is_shown(metrics: IterationMetrics, loss: float, shown: str) -> None:
    line = iteration_line(dataclasses.replace(metrics, lm_loss=loss), LoggingConfig())
    assert f" lm loss: {shown} |" in line


def test_validation() -> None:
    line = "validation loss at iteration 40 | lm loss value: 7.416743E+00 | lm loss PPL: 1.663606E+03 |"
    block = validation_block(ValidationMetrics(40, 320, "valid", 7.416743))
    assert block.splitlines() == ["-" * len(line), line, "-" * len(line)]
    test_line = validation_block(ValidationMetrics(40, 320, "test", math.nan)).splitlines()[1]
    assert test_line == (
        "validation loss at iteration 40 on test set | lm loss value: NAN | lm loss PPL: NAN |"
    )

    named = validation_block(ValidationMetrics(40, 320, "valid", 7.416743, "ARABIC")).splitlines()[1]
    assert named.startswith("validation loss at iteration 40 on ARABIC | lm loss value: 7.416743E+00 |")


def test_startup() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    with Topology.fake(parallel, world_size=4, rank=3) as topology:
        assert startup_line(topology) == (
            "using world size: 4, data-parallel-size: 1, "
            "tensor-model-parallel size: 2, pipeline-model-parallel size: 2"
        )


def test_any_rank_prints_it_as_it_is(metrics: IterationMetrics, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(rank=3)
    log.info("for rank 0 to say")
    broken = dataclasses.replace(metrics, warnings=("iteration 98: the loss is nan; the update was skipped",))
    LogLineWriter(LoggingConfig()).iteration(broken, {})
    assert capsys.readouterr().out.splitlines() == [
        "warning: iteration 98: the loss is nan; the update was skipped",
        GOLDEN,
    ]
