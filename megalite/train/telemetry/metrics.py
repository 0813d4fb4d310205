"""What a run measures of itself between two log lines, and at an evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from megalite.config import ModelConfig
from megalite.train.telemetry.flops import flops_per_token, peak_tflops
from megalite.train.telemetry.memory import measure_memory


@dataclass(frozen=True)
class IterationMetrics:
    """One log line's figures: those of its last iteration, and means and counts since the line before.

    Attributes:
        iteration: number of the last iteration, from 1.
        consumed_samples: samples trained on since the run's beginning, over all resumptions.
        lm_loss: mean over the interval's iterations that were run; NaN or infinite where one of them was, or
            where all were left out.
        grad_norm: of the last iteration, before clipping.
        skipped: the last iteration's update was left out.
        iteration_time_ms: wall time, mean over the interval; evaluating and saving do not count.
        tokens_per_second: of the whole run, not of a rank.
        tflops_per_gpu: model TFLOP/s of one rank, by the convention of `flops_per_token`.
        mfu: `tflops_per_gpu` as a fraction of the GPU's bf16 peak, whatever precision the run has; None
            where that peak is not known.
        memory_allocated_mb: in MiB, of the reporting rank; see `Memory` for what it is on which device.
        memory_reserved_mb: likewise.
        num_iterations: length of the interval.
        num_skipped: its iterations whose update was left out.
        num_nan: its iterations whose loss was NaN or infinite.
        total_skipped: as `num_skipped`, of the whole run.
        total_nan: as `num_nan`, of the whole run.
        params_norm: 2-norm of the weights after the last iteration; None where it is not asked for.
        num_zeros: elements of the last iteration's gradient that are zero; None likewise, and where it was
            left out or had a fault.
        warnings: what the user must be told of the interval, a line each.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    global_batch_size: int
    loss_scale: float
    skipped: bool
    iteration_time_ms: float
    tokens_per_second: float
    tflops_per_gpu: float
    mfu: float | None
    memory_allocated_mb: float
    memory_reserved_mb: float
    train_iters: int
    num_iterations: int
    num_skipped: int
    num_nan: int
    total_skipped: int = 0
    total_nan: int = 0
    params_norm: float | None = None
    num_zeros: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ValidationMetrics:
    """One evaluation's result.

    Attributes:
        split: "valid" or "test".
        lm_loss: mean over the evaluation's tokens.
        name: of the dataset, where the split has several; else empty.
    """

    iteration: int
    consumed_samples: int
    split: str
    lm_loss: float
    name: str = ""

    @property
    def ppl(self) -> float:
        """Perplexity, exp(min(loss, 20)): capped, so that an untrained model's is a number too."""
        # min keeps its first argument where it is NaN: with the cap first, a NaN would look like exp(20).
        return math.exp(min(self.lm_loss, 20.0))


@dataclass(frozen=True)
class _Iteration:
    """One iteration; `is_told` where its fault was told when it happened."""

    loss: float
    grad_norm: float
    skipped: bool
    num_samples: int
    is_left_out: bool
    is_told: bool


class IntervalMeter:
    """Collects iterations from one log line to the next.

    The interval's clock starts with the meter, and again with each `take`; `paused` stops it meanwhile.

    Args:
        train_iters: iterations of the whole run.
        world_size: ranks that share the work.
        device: this rank's, whose memory and peak are told.
        tp: tensor-parallel size, which the padded vocabulary depends on.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        model: ModelConfig,
        train_iters: int,
        world_size: int,
        device: torch.device,
        tp: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seq_length = model.seq_length
        self._tflop_per_token_and_rank = flops_per_token(model, tp) / world_size / 1e12
        self._peak_tflops = peak_tflops(device)
        self._train_iters = train_iters
        self._device = device
        self._clock = clock
        self._iterations: list[_Iteration] = []
        self._start = clock()

    @property
    def num_iterations(self) -> int:
        """Iterations added since the last `take`."""
        return len(self._iterations)

    def add(
        self, loss: float, grad_norm: float, skipped: bool, num_samples: int, *, is_told: bool = False
    ) -> None:
        """Counts one iteration; a NaN or infinite loss is kept as it is.

        Args:
            num_samples: that it trained on.
            is_told: the user knows already what is wrong with it.
        """
        self._iterations.append(_Iteration(loss, grad_norm, skipped, num_samples, False, is_told))

    def leave_out(self) -> None:
        """Counts an iteration whose samples were passed over."""
        self._iterations.append(_Iteration(math.nan, math.nan, True, 0, True, False))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps the time that the block takes out of the iterations' time: evaluating, saving."""
        begin = self._clock()
        try:
            yield
        finally:
            self._start += self._clock() - begin

    def leave_time_out(self, seconds: float) -> None:
        """Takes time that has passed since the interval's start out of the iterations' time."""
        self._start += seconds

    def take(
        self,
        iteration: int,
        consumed_samples: int,
        learning_rate: float,
        global_batch_size: int,
        loss_scale: float = 1.0,
    ) -> IterationMetrics:
        """Gives the interval's figures and starts the next one; at least one iteration has been added.

        Args:
            iteration: the last one's number.
            consumed_samples: by the run up to it.
            learning_rate: of its update.
            global_batch_size: of its batch.
            loss_scale: of the next iteration's backward passes.
        """
        iterations, self._iterations = self._iterations, []
        now, start = self._clock(), self._start
        self._start = now
        assert iterations
        seconds = (now - start) / len(iterations)
        tokens_per_second = sum(each.num_samples for each in iterations) * self._seq_length / (now - start)
        run = [each for each in iterations if not each.is_left_out]
        tflops = tokens_per_second * self._tflop_per_token_and_rank
        memory = measure_memory(self._device)
        return IterationMetrics(
            iteration=iteration,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_samples * self._seq_length,
            lm_loss=sum(each.loss for each in run) / len(run) if run else math.nan,
            grad_norm=iterations[-1].grad_norm,
            learning_rate=learning_rate,
            global_batch_size=global_batch_size,
            loss_scale=loss_scale,
            skipped=iterations[-1].skipped,
            iteration_time_ms=seconds * 1e3,
            tokens_per_second=tokens_per_second,
            tflops_per_gpu=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            memory_allocated_mb=memory.allocated,
            memory_reserved_mb=memory.reserved,
            train_iters=self._train_iters,
            num_iterations=len(iterations),
            num_skipped=sum(each.skipped for each in iterations),
            num_nan=sum(not math.isfinite(each.loss) for each in run),
            warnings=_warnings(iterations, iteration),
        )


@contextmanager
def paused(meters: Iterable[IntervalMeter]) -> Iterator[None]:
    """Stops the clocks of all these in the block."""
    with ExitStack() as stack:
        for meter in meters:
            stack.enter_context(meter.paused())
        yield


def _warnings(iterations: list[_Iteration], last: int) -> tuple[str, ...]:
    """What went wrong and was not told yet, and how many iterations were left out on request."""
    left_out = sum(each.is_left_out for each in iterations)
    text = f"left out {left_out} of the iterations up to {last}, as --iterations-to-skip says"
    return _broken(iterations, last) + ((text,) if left_out else ())


def _broken(iterations: list[_Iteration], last: int) -> tuple[str, ...]:
    """One line that names the first iteration with no finite loss or gradient, and counts the others."""
    first = last - len(iterations) + 1
    broken = [
        (first + offset, each)
        for offset, each in enumerate(iterations)
        if not (each.is_left_out or each.is_told)
        and not (math.isfinite(each.loss) and math.isfinite(each.grad_norm))
    ]
    if not broken:
        return ()
    number, found = broken[0]
    finite_loss = math.isfinite(found.loss)
    what = f"the grad norm is {found.grad_norm}" if finite_loss else f"the loss is {found.loss}"
    outcome = "the update was skipped" if found.skipped else "the weights were updated all the same"
    text = f"iteration {number}: {what}; {outcome}"
    if others := len(broken) - 1:
        text += f" (and {others} more of the iterations up to {last})"
    return (text,)
