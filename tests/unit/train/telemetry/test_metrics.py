"""Test the metrics of intervals, with a clock that the test sets, and the memory of the process."""

from __future__ import annotations

import math
import mmap

import pytest
import torch

from megalite.config import ModelConfig
from megalite.config.model.model_config import flops_per_token
from megalite.train.telemetry.metrics import (
    IntervalMeter,
    IterationMetrics,
    ValidationMetrics,
    measure_memory,
)
from megalite.train.train_step import Anomaly, IterationPlan, StepResult

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=100)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> IntervalMeter:
    return IntervalMeter(MODEL, 50, world_size=4, device=torch.device("cpu"), tp=2, clock=clock)


def _add(
    meter: IntervalMeter,
    iteration: int,
    loss: float,
    grad_norm: float,
    skipped: bool = False,
    num_samples: int = 8,
    *,
    is_excluded: bool = False,
    anomaly: Anomaly | None = None,
    scale_too_high: bool = False,
) -> None:
    plan = IterationPlan(
        iteration, 8 * (iteration - 1), num_samples, 1, MODEL.seq_length, 1, 1e-3, 0.0, is_excluded
    )
    meter.add(StepResult(plan, loss, grad_norm, skipped, anomaly, scale_too_high, {"lm_loss": loss}))


def _take(meter: IntervalMeter, iteration: int) -> IterationMetrics:
    metrics = meter.take(consumed_samples=8 * iteration)
    assert metrics.iteration == iteration
    return metrics


def test_interval_gives_means_and_the_last_norm(meter: IntervalMeter, clock: Clock) -> None:
    for iteration, loss in enumerate((4.0, 3.0, 2.5, 2.5), 1):
        clock.now += 0.5
        _add(meter, iteration, loss, grad_norm=loss / 2, skipped=loss == 3.0)
    metrics = _take(meter, 4)
    assert metrics.lm_loss == 3.0
    assert metrics.grad_norm == 1.25
    assert metrics.iteration_time_ms == 500.0
    assert metrics.tokens_per_second == 8 * 16 / 0.5
    assert metrics.tflops_per_gpu == pytest.approx(8 * 16 / 0.5 * flops_per_token(MODEL, 2) / 4 / 1e12)
    assert metrics.mfu is None
    assert metrics.consumed_tokens == 32 * 16
    assert (metrics.num_iterations, metrics.num_skipped, metrics.num_nan, metrics.skipped) == (4, 1, 0, False)
    assert metrics.warnings == ()
    assert 0 < metrics.memory_allocated_mb <= metrics.memory_reserved_mb < 1e5
    meter.tp, clock.now = 5, clock.now + 1.0  # the layout has changed
    _add(meter, 5, 2.0, grad_norm=1.0)
    of_tp_5 = flops_per_token(MODEL, 5)
    assert of_tp_5 != flops_per_token(MODEL, 2)
    assert _take(meter, 5).tflops_per_gpu == pytest.approx(8 * 16 * of_tp_5 / 4 / 1e12)


def test_take_starts_anew(meter: IntervalMeter, clock: Clock) -> None:
    _add(meter, 1, 9.0, 1.0, True)
    clock.now += 7.0
    _take(meter, 1)
    _add(meter, 2, 1.0, 1.0)
    clock.now += 2.0
    metrics = _take(meter, 2)
    assert (metrics.lm_loss, metrics.iteration_time_ms, metrics.num_skipped) == (1.0, 2000.0, 0)
    assert metrics.num_iterations == 1


def test_paused_time_does_not_count(meter: IntervalMeter, clock: Clock) -> None:
    clock.now += 1.0
    _add(meter, 1, 1.0, 1.0)
    meter.pause()
    clock.now += 60.0
    meter.resume()
    clock.now += 1.0
    _add(meter, 2, 1.0, 1.0)
    assert _take(meter, 2).iteration_time_ms == 1000.0


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_loss_that_is_no_number_is_shown_and_named(
    meter: IntervalMeter, clock: Clock, value: float, word: str
) -> None:
    clock.now += 1.0
    for iteration, loss in enumerate((1.0, value, 1.0, 1.0), 11):
        _add(meter, iteration, loss, loss, skipped=loss != 1.0)
    metrics = _take(meter, 14)
    assert not math.isfinite(metrics.lm_loss)
    assert (metrics.num_nan, metrics.num_skipped) == (1, 1)
    assert metrics.warnings == (f"iteration 12: the loss is {word}; the update was skipped",)


def test_further_broken_iterations_are_counted(meter: IntervalMeter, clock: Clock) -> None:
    clock.now += 1.0
    _add(meter, 1, 2.0, math.inf)
    for iteration in (2, 3, 4):
        _add(meter, iteration, math.nan, math.nan, True)
    assert _take(meter, 4).warnings == (
        "iteration 1: the grad norm is inf; the weights were updated anyway (and 3 more iterations up to 4)",
    )


def test_an_anomaly_is_not_logged_again(meter: IntervalMeter, clock: Clock) -> None:
    clock.now += 1.0
    _add(meter, 1, math.nan, math.nan, True, anomaly=Anomaly("loss", "the loss is nan"))
    metrics = _take(meter, 1)
    assert metrics.warnings == ()
    assert (metrics.num_nan, metrics.num_skipped) == (1, 1)


def test_an_overflow_that_lowers_the_loss_scale_is_counted_without_a_warning(
    meter: IntervalMeter, clock: Clock
) -> None:
    clock.now += 1.0
    _add(meter, 1, 2.0, math.inf, True, scale_too_high=True)
    metrics = _take(meter, 1)
    assert metrics.warnings == ()
    assert (metrics.num_nan, metrics.num_skipped) == (0, 1)


def test_excluded_iterations_are_in_no_mean(meter: IntervalMeter, clock: Clock) -> None:
    clock.now += 1.0
    _add(meter, 1, 3.0, 1.5)
    _add(meter, 2, math.nan, math.nan, True, is_excluded=True)
    metrics = _take(meter, 2)
    assert metrics.lm_loss == 3.0
    assert metrics.tokens_per_second == 8 * 16 / 1.0
    assert (metrics.num_skipped, metrics.num_nan, metrics.skipped) == (1, 0, True)
    assert metrics.warnings == ("skipped 1 of the iterations up to 2 (--iterations-to-skip)",)
    clock.now += 1.0
    _add(meter, 3, math.nan, math.nan, True, is_excluded=True)
    assert math.isnan(_take(meter, 3).lm_loss)


def test_batches_of_several_sizes_make_the_speed(meter: IntervalMeter, clock: Clock) -> None:
    for iteration, num_samples in enumerate((2, 4, 8), 1):
        clock.now += 0.5
        _add(meter, iteration, 1.0, 1.0, num_samples=num_samples)
    assert _take(meter, 3).tokens_per_second == 14 * 16 / 1.5


def test_perplexity_is_capped_but_never_hides_a_nan() -> None:
    assert ValidationMetrics(1, 8, "valid", 2.0).ppl == math.exp(2.0)
    assert ValidationMetrics(1, 8, "valid", 30.0).ppl == math.exp(20.0)
    assert ValidationMetrics(1, 8, "valid", math.inf).ppl == math.exp(20.0)
    assert math.isnan(ValidationMetrics(1, 8, "valid", math.nan).ppl)


def test_resident_set_grows_and_its_peak_stays() -> None:
    cpu = torch.device("cpu")
    before = measure_memory(cpu)
    held = mmap.mmap(-1, 64 * 2**20)  # past the allocator, which may keep what is freed
    for _ in range(64):
        held.write(b"x" * 2**20)
    during = measure_memory(cpu)
    assert 60 < during.allocated - before.allocated < 80
    assert during.reserved >= during.allocated
    held.close()
    after = measure_memory(cpu)
    assert after.allocated < during.allocated - 50
    assert after.reserved >= during.allocated - 1  # the kernel counts pages in batches
