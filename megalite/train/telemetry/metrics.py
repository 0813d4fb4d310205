"""Measure intervals of iterations, memory, and compilation time."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megalite.config import ModelConfig, TrainingConfig
from megalite.config.model.model_config import flops_per_token
from megalite.data.microbatch import LM_LOSS
from megalite.train.telemetry.time_terms import TimeSample
from megalite.train.telemetry.timers import TimesByRank
from megalite.train.train_step import StepResult
from megalite.utils.hardware.gpus import peak_tflops
from megalite.utils.log import log
from megalite.utils.torch_private import compilations_observed


class CompileTime:
    """Sum of the time that torch.compile takes to compile in this process.

    Args:
        clock: returns seconds from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin = 0.0
        self._seconds = 0.0

    def begin(self, _: object = None) -> None:
        """Start the clock; torch calls it when an outermost compilation begins."""
        self._begin = self._clock()

    def end(self, _: object = None) -> None:
        """Stop the clock; torch calls it at the end of that compilation."""
        self._seconds += self._clock() - self._begin

    def take(self) -> float:
        """Log and return the seconds of compilation since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        if seconds > 0.0:
            log.info("compiling the layers: %.1f s, not counted in the iteration time", seconds)
        return seconds


@contextmanager
def compile_time(config: TrainingConfig) -> Iterator[CompileTime]:
    """Measure the compilation time in the block, if the run compiles its layers."""
    watch = CompileTime()
    if not config.compile:
        yield watch
        return
    with compilations_observed(watch.begin, watch.end):
        yield watch


_MIB = 2.0**20
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of one rank, in MiB.

    Attributes:
        allocated: CUDA: peak memory of tensors since the process started.
            CPU: the process's current resident set.
        reserved: CUDA: peak device memory of torch's allocator.
            CPU: the process's peak resident set.
    """

    allocated: float
    reserved: float


def measure_memory(device: torch.device) -> ProcessMemory:
    """Return this rank's memory; it only reads counters and does not wait for kernels."""
    if device.type == "cuda":
        return ProcessMemory(
            torch.cuda.max_memory_allocated(device) / _MIB, torch.cuda.max_memory_reserved(device) / _MIB
        )
    return _resident_set()


def _resident_set() -> ProcessMemory:
    # Linux's own figures first: getrusage's peak is inherited from the parent over fork and exec.
    if _STATUS.exists():
        lines = (line.split() for line in _STATUS.read_text().splitlines())
        kib = {words[0].rstrip(":"): float(words[1]) for words in lines if words and words[-1] == "kB"}
        if "VmRSS" in kib and "VmHWM" in kib:
            return ProcessMemory(kib["VmRSS"] / 1024, kib["VmHWM"] / 1024)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_mib = peak / _MIB if sys.platform == "darwin" else peak / 1024
    return ProcessMemory(peak_mib, peak_mib)


@dataclass(frozen=True)
class IterationMetrics:
    """Metrics of a log line: values of its last iteration, and means and counts of the interval.

    Attributes:
        iteration: number of the last iteration, from 1.
        consumed_samples: samples of the run so far, including those before it was resumed.
        lm_loss: mean loss over the interval's iterations; NaN or infinite if one of them was, NaN if all
            were excluded.
        other_losses: further terms of the loss by name, averaged the same way.
        grad_norm: gradient norm of the last iteration, before clipping.
        skipped: whether the last iteration's update was skipped.
        iteration_time_ms: wall time, mean over the interval, without evaluating and saving.
        tokens_per_second: throughput of the whole run, not of one rank.
        tflops_per_gpu: model TFLOP/s of one rank, by the convention of `flops_per_token`.
        mfu: `tflops_per_gpu` as a fraction of the GPU's bf16 peak, whatever the run's precision; None if
            the peak is not known.
        memory_allocated_mb: memory of the reporting rank in MiB; see `ProcessMemory`.
        memory_reserved_mb: memory of the reporting rank in MiB; see `ProcessMemory`.
        num_iterations: length of the interval.
        num_skipped: number of iterations in the interval whose update was skipped.
        num_nan: number of iterations in the interval whose loss was NaN or infinite.
        device: type of the reporting rank's device, "cpu" or "cuda".
        total_skipped: `num_skipped` over the whole run.
        total_nan: `num_nan` over the whole run.
        params_norm: 2-norm of the weights after the last iteration; None if not requested.
        num_zeros: number of zeros in the last iteration's gradient; None if not requested, or if the
            iteration was excluded or had an anomaly.
        decoupled_learning_rate: learning rate of the word embedding and the output layer; None without
            --decoupled-lr.
        time_breakdown: terms of the last iteration's time; None without --log-time-breakdown.
        warnings: warnings about the interval, one line each.
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
    device: str
    total_skipped: int = 0
    total_nan: int = 0
    params_norm: float | None = None
    num_zeros: int | None = None
    other_losses: Mapping[str, float] = field(default_factory=dict)
    decoupled_learning_rate: float | None = None
    time_breakdown: TimeSample | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ValidationMetrics:
    """Result of an evaluation.

    Attributes:
        split: "valid" or "test".
        lm_loss: mean loss over the evaluation's tokens.
        name: name of the dataset, if the split has several; otherwise empty.
        other_losses: means of further terms of the loss by name.
        is_of_average: whether the average of the weights (--ema-decay) was evaluated.
    """

    iteration: int
    consumed_samples: int
    split: str
    lm_loss: float
    name: str = ""
    other_losses: Mapping[str, float] = field(default_factory=dict)
    is_of_average: bool = False

    @property
    def ppl(self) -> float:
        """Return the perplexity exp(min(loss, 20)): without the cap an untrained model's could overflow."""
        # min returns its first argument if it is NaN; with the cap first, NaN would become exp(20).
        return math.exp(min(self.lm_loss, 20.0))


@dataclass(frozen=True)
class TaskScores:
    """Scores of benchmark tasks, by task and metric: ``arc_easy/acc``."""

    iteration: int
    consumed_samples: int
    scores: Mapping[str, float]


class IntervalMeter:
    """Meter of the iterations from one log line to the next.

    The interval's clock starts with the meter and again with each `take`. It is stopped between `pause` and
    `resume`.

    Args:
        train_iters: number of iterations of the whole run.
        world_size: number of ranks that share the work.
        device: this rank's device, whose memory and peak rate are reported.
        clock: returns seconds from any origin.

    Attributes:
        tp: tensor-parallel size, on which the padded vocabulary depends.
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

        @cache
        def tflop_per_token_and_rank(seq_length: int, tp: int) -> float:
            return flops_per_token(replace(model, seq_length=seq_length), tp) / world_size / 1e12

        self._tflop_per_token_and_rank = tflop_per_token_and_rank
        self.tp = tp
        self._peak_tflops = peak_tflops(device)
        self._train_iters = train_iters
        self._device = device
        self._clock = clock
        self._results: list[StepResult] = []
        self._start = clock()
        self._paused_at: float | None = None

    def add(self, result: StepResult) -> None:
        """Add the result of one iteration."""
        self._results.append(result)

    def pause(self) -> None:
        """Stop the clock until `resume`, which does nothing without a `pause` before it."""
        self._paused_at = self._clock()

    def resume(self) -> None:
        """Let the clock run again."""
        if self._paused_at is not None:
            self._start += self._clock() - self._paused_at
            self._paused_at = None

    def subtract(self, seconds: float) -> None:
        """Subtract time that has passed since the interval's start."""
        self._start += seconds

    def take(self, consumed_samples: int, loss_scale: float = 1.0) -> IterationMetrics:
        """Return the interval's metrics and start the next interval. Add at least one iteration before.

        Args:
            consumed_samples: samples that the run has consumed, up to the last iteration.
            loss_scale: loss scale of the next iteration.
        """
        results, self._results = self._results, []
        now, start = self._clock(), self._start
        self._start = now
        last = results[-1].plan
        trained = [each for each in results if not each.plan.is_excluded]
        num_samples = sum(each.plan.num_samples for each in trained)
        names = trained[0].losses if trained else ()
        means = {name: sum(each.losses[name] for each in trained) / len(trained) for name in names}
        tokens_per_second = num_samples * self._seq_length / (now - start)
        tflop = sum(
            plan.num_sequences * plan.seq_length * self._tflop_per_token_and_rank(plan.seq_length, self.tp)
            for plan in (each.plan for each in trained)
        )
        tflops = tflop / (now - start)
        memory = measure_memory(self._device)
        return IterationMetrics(
            iteration=last.iteration,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_samples * self._seq_length,
            lm_loss=means.pop(LM_LOSS, math.nan),
            other_losses=means,
            grad_norm=results[-1].grad_norm,
            learning_rate=last.learning_rate,
            decoupled_learning_rate=last.decoupled_learning_rate,
            global_batch_size=last.num_samples,
            loss_scale=loss_scale,
            skipped=results[-1].skipped,
            iteration_time_ms=(now - start) / len(results) * 1e3,
            tokens_per_second=tokens_per_second,
            tflops_per_gpu=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            memory_allocated_mb=memory.allocated,
            memory_reserved_mb=memory.reserved,
            train_iters=self._train_iters,
            num_iterations=len(results),
            num_skipped=sum(each.skipped for each in results),
            num_nan=sum(not math.isfinite(each.loss) for each in trained),
            device=self._device.type,
            warnings=_warnings(results),
        )


def _warnings(results: Sequence[StepResult]) -> tuple[str, ...]:
    """Return a line about iterations without a finite loss or gradient, and one about excluded ones.

    Anomalies are not included: they were logged when they happened. Overflows that lower a dynamic loss
    scale are not included either: they are expected, and counted as skipped.
    """
    lines = []
    last = results[-1].plan.iteration
    broken = [
        each
        for each in results
        if not (each.plan.is_excluded or each.anomaly or each.scale_too_high)
        and not (math.isfinite(each.loss) and math.isfinite(each.grad_norm))
    ]
    if broken:
        first, num_others = broken[0], len(broken) - 1
        what = "the loss" if not math.isfinite(first.loss) else "the grad norm"
        value = first.loss if not math.isfinite(first.loss) else first.grad_norm
        outcome = "the update was skipped" if first.skipped else "the weights were updated anyway"
        line = f"iteration {first.plan.iteration}: {what} is {value}; {outcome}"
        if num_others:
            line += f" (and {num_others} more iterations up to {last})"
        lines.append(line)
    if num_excluded := sum(each.plan.is_excluded for each in results):
        lines.append(f"skipped {num_excluded} of the iterations up to {last} (--iterations-to-skip)")
    return tuple(lines)


@dataclass(frozen=True)
class LayerLoads:
    """Tokens of one layer's experts.

    Attributes:
        tokens: number of tokens that selected each expert.
        entropy: mean over the tokens of the entropy of the router's probabilities, in nats.
        dropped: number of these choices that were dropped because the expert was at capacity.
    """

    tokens: tuple[int, ...]
    entropy: float
    dropped: int = 0

    @property
    def max_violation(self) -> float:
        """Return by which share the largest load is above the mean (Wang et al. 2024, MaxVio)."""
        return max(self.tokens) * len(self.tokens) / max(1, sum(self.tokens)) - 1.0

    @property
    def figures(self) -> dict[str, float]:
        """Return the layer's figures by their names in logs."""
        return {"max_violation": self.max_violation, "entropy": self.entropy, "dropped": self.dropped}


@dataclass(frozen=True)
class ExpertUse:
    """Loads of all layers with experts in one iteration.

    Attributes:
        layers: by the layer's name, such as ``layers.3``.
    """

    iteration: int
    consumed_samples: int
    layers: Mapping[str, LayerLoads]

    def record(self) -> dict[str, Any]:
        """Return the object of the metrics file."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "layers": {
                name: {"tokens": list(each.tokens), **each.figures} for name, each in self.layers.items()
            },
        }


def loads_in(record: object) -> Mapping[str, LayerLoads] | None:
    """Return the loads of layers in the object of a metrics file; None if it is not complete."""
    layers = record.get("layers") if isinstance(record, dict) else None
    if not isinstance(layers, dict) or not layers:
        return None
    try:
        return {str(name): _layer_in(each) for name, each in layers.items()}
    except (KeyError, TypeError, ValueError):
        return None


def _layer_in(record: Mapping[str, Any]) -> LayerLoads:
    """Return the loads of one layer.

    Raises:
        KeyError, TypeError, ValueError: it is not complete.
    """
    tokens = record["tokens"]
    if not isinstance(tokens, list) or not tokens or not all(type(count) is int for count in tokens):
        raise ValueError("tokens are a list of whole numbers")
    return LayerLoads(tuple(tokens), float(record["entropy"]), int(record.get("dropped", 0)))


class MetricsWriter:
    """Base class of writers of a run's metrics to one output. What a writer does not override, it skips."""

    def start(self, iteration: int, consumed_samples: int) -> None:
        """Begin after an iteration, 0 in a new run; what was written of later ones is no longer shown."""

    def iteration(self, metrics: IterationMetrics, times: TimesByRank) -> None:
        """Write the metrics of an interval, and its timers if they are enabled."""

    def validation(self, metrics: ValidationMetrics) -> None:
        """Write the result of an evaluation."""

    def task_scores(self, metrics: TaskScores) -> None:
        """Write the scores of benchmark tasks."""

    def expert_use(self, loads: ExpertUse) -> None:
        """Write how the tokens of an iteration were divided among experts."""

    def layer_norms(self, iteration: int, norms: Mapping[str, float]) -> None:
        """Write the gradient norm of each layer."""

    def scalars(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Write numbers by their tags."""

    def layout_change(self, iteration: int, change: Mapping[str, Any]) -> None:
        """Write the fields of a `LayoutChange` after an iteration."""
        figures = {"seconds": float(change["seconds"]), "bytes": float(change["num_bytes"])}
        self.scalars(iteration, {f"layout change/{name}": each for name, each in figures.items()})

    def close(self, *, has_failed: bool = False) -> None:
        """Write pending metrics, and whether the run has failed."""
