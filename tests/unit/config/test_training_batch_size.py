"""The ramp-up, compared with Megatron's own calculator, and its sums with counting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.training import BatchSize, schedule_steps

Ramp = tuple[int, tuple[int, int, int] | None]


@st.composite
def ramps(draw: st.DrawFn) -> Ramp:
    """Draw a full batch, and a START INCREMENT SAMPLES that reaches it."""
    start, increment = draw(st.integers(1, 40)), draw(st.integers(1, 16))
    steps = draw(st.integers(1, 30))
    return start + steps * increment, (start, increment, draw(st.integers(1, 5000)))


def run(batch_size: BatchSize, num_iterations: int) -> list[int]:
    """Return the global batch sizes of the first iterations."""
    batches: list[int] = []
    for _ in range(num_iterations):
        batches.append(batch_size(sum(batches)))
    return batches


def test_blooms_ramp_up() -> None:
    """Check 192 to 2048 by 16 over 9,765,625 samples against the log of the run."""
    batch_size = BatchSize(2048, (192, 16, 9_765_625))
    assert batch_size(0) == batch_size(84_185) == 192
    assert batch_size(84_187) == 208
    assert batch_size(9_765_625) == batch_size(10**8) == 2048


@given(ramps())
@settings(deadline=None)
def test_as_megatron_computes_it(ramp: Ramp) -> None:
    module = pytest.importorskip("megatron.core.num_microbatches_calculator")
    full, rampup = ramp
    assert rampup is not None
    theirs = module.RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, *rampup)
    ours = BatchSize(full, rampup)
    consumed = 0
    for _ in range(60):
        theirs.update(consumed, consistency_check=True)
        assert ours(consumed) == theirs.get_current_global_batch_size()
        consumed += ours(consumed)
    for consumed in (rampup[2] - 1, rampup[2], rampup[2] + 1):
        theirs.update(consumed, consistency_check=True)
        assert ours(consumed) == theirs.get_current_global_batch_size()


@given(ramps() | st.tuples(st.integers(1, 50), st.none()), st.integers(1, 200))
@settings(deadline=None)
def test_sums_are_those_of_counting(ramp: Ramp, num_iterations: int) -> None:
    batch_size = BatchSize(*ramp)
    batches = run(batch_size, num_iterations)
    total = sum(batches)
    assert batch_size.consumed_before(num_iterations + 1) == total
    assert batch_size.consumed_before(1) == 0
    assert batch_size.num_iterations(total) == num_iterations
    assert batch_size.num_iterations(total - 1) == num_iterations - 1


def test_a_long_run_is_counted_without_going_through_it() -> None:
    batch_size = BatchSize(2048, (192, 16, 9_765_625))
    num_iterations = batch_size.num_iterations(10**15)
    consumed = batch_size.consumed_before(num_iterations + 1)
    assert 0 <= 10**15 - consumed < 2048


GPT3 = "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"


def test_the_schedule_of_gpt3() -> None:
    """The schedule of Megatron-LM's example of 175B parameters; thresholds in tokens of 2048 per sample."""
    steps = schedule_steps(GPT3.split(), 2048)
    assert steps == schedule_steps([GPT3], 2048) == schedule_steps([GPT3.replace(" ", ",")], 2048)
    batch_size = BatchSize(1536, steps=steps)
    first = 2_400_000_000 // 2048
    assert (batch_size(0), batch_size(first - 1), batch_size(first)) == (16, 16, 320)
    assert batch_size(12_000_000_000 // 2048 - 1) == 1232
    assert batch_size(12_000_000_000 // 2048) == batch_size(10**12) == 1536


@pytest.mark.parametrize("schedule", ["0:16 32:8 64:16", "0:4 8:8 16:16", "0:3"])
@pytest.mark.parametrize("num_iterations", [1, 7, 30])
def test_sums_of_a_schedule_are_those_of_counting(schedule: str, num_iterations: int) -> None:
    steps = schedule_steps([schedule], 1)
    batch_size = BatchSize(steps[-1][1], steps=steps)
    total = sum(run(batch_size, num_iterations))
    assert batch_size.consumed_before(num_iterations + 1) == total
    assert batch_size.num_iterations(total) == num_iterations


@pytest.mark.parametrize(
    "schedule", ["", "16", "1:16", "0:16 8", "0:16 8:x", "0:0", "0:16 8:8 8:4", "0:16 8:8 4:4"]
)
def test_what_is_no_schedule(schedule: str) -> None:
    assert schedule_steps([schedule], 1) == []
