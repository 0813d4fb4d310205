"""What the meter makes of iterations, by a clock that the test sets."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.config import ModelConfig
from megalite.train.telemetry.flops import flops_per_token
from megalite.train.telemetry.metrics import IntervalMeter, IterationMetrics, ValidationMetrics

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


def _take(meter: IntervalMeter, iteration: int) -> IterationMetrics:
    return meter.take(iteration, consumed_samples=8 * iteration, learning_rate=1e-3, global_batch_size=8)


def test_interval_gives_means_and_the_last_norm(meter: IntervalMeter, clock: Clock) -> None:
    for loss in (4.0, 3.0, 2.5, 2.5):
        clock.now += 0.5
        meter.add(loss, grad_norm=loss / 2, skipped=loss == 3.0, num_samples=8)
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


def test_take_starts_anew(meter: IntervalMeter, clock: Clock) -> None:
    meter.add(9.0, 1.0, True, 8)
    clock.now += 7.0
    _take(meter, 1)
    assert meter.num_iterations == 0
    meter.add(1.0, 1.0, False, 8)
    clock.now += 2.0
    metrics = _take(meter, 2)
    assert (metrics.lm_loss, metrics.iteration_time_ms, metrics.num_skipped) == (1.0, 2000.0, 0)


def test_paused_time_does_not_count(meter: IntervalMeter, clock: Clock) -> None:
    clock.now += 1.0
    meter.add(1.0, 1.0, False, 8)
    with meter.paused():
        clock.now += 60.0
    clock.now += 1.0
    meter.add(1.0, 1.0, False, 8)
    assert _take(meter, 2).iteration_time_ms == 1000.0


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_loss_that_is_no_number_is_shown_and_named(
    meter: IntervalMeter, clock: Clock, value: float, word: str
) -> None:
    clock.now += 1.0
    for loss in (1.0, value, 1.0, 1.0):
        meter.add(loss, loss, skipped=loss != 1.0, num_samples=8)
    metrics = _take(meter, 14)
    assert not math.isfinite(metrics.lm_loss)
    assert (metrics.num_nan, metrics.num_skipped) == (1, 1)
    assert metrics.warnings == (f"iteration 12: the loss is {word}; the update was skipped",)


def test_further_broken_iterations_are_counted(meter: IntervalMeter, clock: Clock) -> None:
    clock.now += 1.0
    meter.add(2.0, math.inf, False, 8)
    for _ in range(3):
        meter.add(math.nan, math.nan, True, 8)
    assert _take(meter, 4).warnings == (
        "iteration 1: the grad norm is inf; the weights were updated all the same "
        "(and 3 more of the iterations up to 4)",
    )


def test_what_was_told_at_once_is_not_told_again(meter: IntervalMeter, clock: Clock) -> None:
    clock.now += 1.0
    meter.add(math.nan, math.nan, True, 8, is_told=True)
    metrics = _take(meter, 1)
    assert metrics.warnings == ()
    assert (metrics.num_nan, metrics.num_skipped) == (1, 1)


def test_what_was_left_out_is_in_no_mean(meter: IntervalMeter, clock: Clock) -> None:
    clock.now += 1.0
    meter.add(3.0, 1.5, False, 8)
    meter.leave_out()
    metrics = _take(meter, 2)
    assert metrics.lm_loss == 3.0
    assert metrics.tokens_per_second == 8 * 16 / 1.0
    assert (metrics.num_skipped, metrics.num_nan, metrics.skipped) == (1, 0, True)
    assert metrics.warnings == ("left out 1 of the iterations up to 2, as --iterations-to-skip says",)
    clock.now += 1.0
    meter.leave_out()
    assert math.isnan(_take(meter, 3).lm_loss)


def test_batches_of_several_sizes_make_the_speed(meter: IntervalMeter, clock: Clock) -> None:
    for num_samples in (2, 4, 8):
        clock.now += 0.5
        meter.add(1.0, 1.0, False, num_samples)
    assert _take(meter, 3).tokens_per_second == 14 * 16 / 1.5


def test_perplexity_is_capped_but_never_hides_a_nan() -> None:
    assert ValidationMetrics(1, 8, "valid", 2.0).ppl == math.exp(2.0)
    assert ValidationMetrics(1, 8, "valid", 30.0).ppl == math.exp(20.0)
    assert ValidationMetrics(1, 8, "valid", math.inf).ppl == math.exp(20.0)
    assert math.isnan(ValidationMetrics(1, 8, "valid", math.nan).ppl)
