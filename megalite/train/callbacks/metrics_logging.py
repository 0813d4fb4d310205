"""Log metrics, norms and the loads of experts to the log, the metrics file and the dashboards.

Shapes: L layers of the model and of multi-token prediction, e experts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from megalite.config import Config, ModelConfig
from megalite.distributed.collectives import all_reduce, largest_of_all
from megalite.distributed.topology import Topology
from megalite.model.experts import Router
from megalite.model.routing_record import RoutingStatistics
from megalite.optim.adamw import MOMENTUM
from megalite.optim.gradient_scale import sum_of_squares
from megalite.optim.optimizer import Optimizer
from megalite.optim.post_step_hooks import sum_over_tokens
from megalite.train.callbacks.recorded_routing import routers_of
from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.telemetry.metrics import (
    CompileTime,
    ExpertUse,
    IntervalMeter,
    IterationMetrics,
    LayerLoads,
    ValidationMetrics,
    compile_time,
)
from megalite.train.telemetry.time_recorder import TimeRecorder
from megalite.train.telemetry.time_terms import TimeSample
from megalite.train.telemetry.writers import Writers, clock_text
from megalite.train.train_step import StepResult
from megalite.train.trainer import LayoutChange, Trainer
from megalite.utils.log import log


class MetricsLogging(Callback):
    """Metrics of intervals of iterations, passed to the writers.

    The time between two iterations (evaluations, checkpoints, other callbacks) and the compilation time of
    torch.compile do not count.
    """

    def __init__(self, writers: Writers) -> None:
        self.writers = writers
        self.meters: dict[int, IntervalMeter] = {}  # by interval
        self.compiling: CompileTime
        self.times: TimeRecorder | None = None  # with --log-time-breakdown

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        trainer, topology = loop.trainer, loop.trainer.topology
        self.writers.start(loop.iteration, trainer.progress.consumed_samples)
        self.meters = {
            interval: IntervalMeter(
                trainer.config.model,
                loop.num_iterations,
                topology.world_size,
                topology.device,
                topology.tp.size,
            )
            for interval in self.writers.intervals
        }
        with ExitStack() as stack:
            if trainer.config.logging.log_time_breakdown:
                self.times = TimeRecorder(trainer)
                stack.enter_context(self.times.running())
            self.compiling = stack.enter_context(compile_time(trainer.config.training))
            yield

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        logging = loop.trainer.config.logging
        if logging.log_num_zeros_in_grad:  # also after an iteration that a signal makes the last one
            return True
        if self.times is not None:  # it records the last iteration of an interval, and kernels before it
            return any(is_due(iteration + ahead, logging.log_interval) for ahead in range(3))
        return loop.trainer.timers.level > 0 and any(is_due(iteration, each) for each in self.meters)

    def before_step(self, loop: TrainingLoop) -> None:
        self.compiling.take()  # compilation in an evaluation, while the meters are paused
        if self.times is not None:
            interval = loop.trainer.config.logging.log_interval
            measured = loop.next_iteration + 1 if interval > 1 else loop.next_iteration
            self.times.begin(
                is_sampled=is_due(loop.next_iteration, interval), measures_kernels=is_due(measured, interval)
            )
        for meter in self.meters.values():
            meter.resume()

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        seconds, sample = self.compiling.take(), None
        if self.times is not None:
            seconds += self.times.end_iteration()
            sample = self.times.sample(result.plan.num_microbatches)
        begin = time.perf_counter()
        for interval, meter in self.meters.items():
            meter.add(result)
            meter.subtract(seconds)
            if loop.is_ending or is_due(loop.iteration, interval):
                metrics = _metrics(loop.trainer, meter, result, sample)
                self.writers.iteration(interval, metrics, loop.trainer.timers)
        for meter in self.meters.values():
            meter.pause()
        if self.times is not None:
            self.times.end(time.perf_counter() - begin)

    def after_layout_change(self, loop: TrainingLoop, change: LayoutChange) -> None:
        self.writers.layout_change(loop.iteration, change._asdict())
        for meter in self.meters.values():
            meter.tp = loop.trainer.topology.tp.size

    def on_evaluation(self, loop: TrainingLoop, metrics: ValidationMetrics) -> None:
        self.writers.validation(metrics)


def _metrics(
    trainer: Trainer, meter: IntervalMeter, result: StepResult, sample: TimeSample | None
) -> IterationMetrics:
    progress, logging = trainer.progress, trainer.config.logging
    # An excluded iteration has no gradient; the NaN locator has overwritten an anomaly's gradient.
    has_gradient = not result.plan.is_excluded and result.anomaly is None
    return replace(
        meter.take(progress.consumed_samples, trainer.optimizer.scaler.scale),
        total_skipped=progress.num_skipped,
        total_nan=progress.num_nan,
        time_breakdown=sample,
        params_norm=trainer.optimizer.params_norm() if logging.log_params_norm else None,
        num_zeros=trainer.optimizer.num_zeros() if logging.log_num_zeros_in_grad and has_gradient else None,
    )


_EMBEDDING, _HEAD = "embedding", "head"


class LayerNorms(Callback):
    """Log of the gradient's norm of each layer every --log-layer-grad-norms-interval iterations."""

    def __init__(self, writers: Writers) -> None:
        self.writers = writers

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return is_due(iteration, loop.trainer.config.logging.log_layer_grad_norms_interval)

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        trainer = loop.trainer
        has_gradient = not result.plan.is_excluded and result.anomaly is None
        interval = trainer.config.logging.log_layer_grad_norms_interval
        if is_due(loop.iteration, interval) and has_gradient and math.isfinite(result.grad_norm):
            num_layers = trainer.config.model.num_layers
            norms = layer_grad_norms(trainer.optimizer, num_layers, result.grad_norm, trainer.topology)
            self.writers.layer_norms(loop.iteration, norms)


def layer_grad_norms(
    optimizer: Optimizer, num_layers: int, grad_norm: float, topology: Topology
) -> Mapping[str, float]:
    """Return the 2-norms of the gradients of "embedding", "layers.0" and so on, and "head"; a collective.

    Call it between an update and the next gradients.

    Args:
        grad_norm: norm of the whole model's gradient before clipping. The squares of the layers' norms
            add up to its square.
    """
    names = [_EMBEDDING, *(f"layers.{layer}" for layer in range(num_layers)), _HEAD]
    squares = torch.zeros(len(names), dtype=torch.float64, device=topology.device)
    for shard in optimizer.counted_shards():
        # An update may have unscaled and clipped the gradients, which keeps their ratios.
        squares[names.index(_layer_of(shard.name))] += sum_of_squares([shard.gradient], topology.device)
    shares = all_reduce(squares, topology.world, of="layer norms")
    total = shares.sum().clamp_min(torch.finfo(torch.float64).tiny)
    norms = grad_norm * (shares / total).sqrt()
    return dict(zip(names, topology.to_host(norms).tolist(), strict=True))


def _layer_of(name: str) -> str:
    """Return the part of the model that a parameter belongs to; everything after the layers is the head."""
    first, *rest = name.split(".")
    if first == "layers":
        return f"layers.{rest[0]}"
    return _EMBEDDING if first == "embedding" else _HEAD


_KINDS = {"weight": ("main",), "momentum": ("exp_avg", MOMENTUM), "variance": ("exp_avg_sq",)}
"""Megatron-DeepSpeed's names of the measured tensors, and torch's names. Not every state has a variance."""


class OptimizerNorms(Callback):
    """Log of norms of the optimizer's tensors with --log-optimizer-states-to-tensorboard."""

    def __init__(self, writers: Writers) -> None:
        self.writers = writers

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return is_due(iteration, loop.trainer.config.logging.dashboard_interval)

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        if is_due(loop.iteration, loop.trainer.config.logging.dashboard_interval):
            norms = optimizer_norms(loop.trainer.optimizer)
            self.writers.scalars(loop.iteration, {f"optimizer/{tag}": norm for tag, norm in norms.items()})


@torch.no_grad()
def optimizer_norms(optimizer: Optimizer) -> Mapping[str, float]:
    """Return 2-norms, 1-norms and largest magnitudes over the whole model; every rank must call it.

    The norms of the variance's (Adam's second moment's) square root are returned too, as Megatron-DeepSpeed
    logs them: ``variance_sqrt_l2`` and so on. The vocabulary's padding is not counted.
    """
    if optimizer.offload is not None:
        optimizer.offload.finish()
    topology = optimizer.topology
    sums = torch.zeros(len(_KINDS), 3, dtype=torch.float64, device=topology.device)
    largest = torch.zeros(len(_KINDS), dtype=torch.float64, device=topology.device)
    for shard in optimizer.counted_shards():
        tensors = {"main": shard.main, **shard.moments}
        for number, kinds in enumerate(_KINDS.values()):
            tensor = next((tensors[kind][: shard.num_used] for kind in kinds if kind in tensors), None)
            if tensor is None or not tensor.numel():
                continue
            sums[number, 0] += sum_of_squares([tensor], topology.device)
            sums[number, 1] += tensor.abs().sum(dtype=torch.float64).to(topology.device)
            sums[number, 2] += tensor.abs().sqrt().sum(dtype=torch.float64).to(topology.device)
            largest[number] = largest[number].maximum(tensor.abs().max().to(topology.device))
    found = torch.cat([all_reduce(sums, topology.world), largest_of_all(largest, topology)[:, None]], dim=1)
    norms: dict[str, float] = {}
    for name, (squares, total, roots, most) in zip(_KINDS, topology.to_host(found).tolist(), strict=True):
        norms |= {f"{name}_l2": squares**0.5, f"{name}_l1": total, f"{name}_abs_max": most}
        if name == "variance":  # it has no negative elements
            root = f"{name}_sqrt"
            norms |= {f"{root}_l2": total**0.5, f"{root}_l1": roots, f"{root}_abs_max": most**0.5}
    return norms


_LAYERS, _MTP = "layers", "mtp"


class ExpertLogging(Callback):
    """Log of the loads of all experts every --log-experts-interval iterations.

    Routers count in these iterations only. Put it before callbacks that run a microbatch again.
    """

    def __init__(self, writers: Writers) -> None:
        self.writers = writers
        self._counted: dict[int, RoutingStatistics] = {}  # by row

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        interval = logged_interval(loop.trainer.config)
        return is_due(iteration, interval) or is_due(iteration + 1, interval)

    def before_step(self, loop: TrainingLoop) -> None:
        if is_due(loop.next_iteration, logged_interval(loop.trainer.config)):
            begin_counts(loop.trainer)

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        if is_due(loop.iteration, logged_interval(loop.trainer.config)):
            self._counted = end_counts(loop.trainer)

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        trainer = loop.trainer
        if is_due(loop.iteration, logged_interval(trainer.config)) and not result.plan.is_excluded:
            layers = loads_of_layers(self._counted, trainer)
            if layers:  # a model of your own may route otherwise
                samples = trainer.progress.consumed_samples
                self.writers.expert_use(ExpertUse(loop.iteration, samples, layers))


def logged_interval(config: Config) -> int | None:
    """Return --log-experts-interval; None if nothing is written."""
    logging, has_file = config.logging, config.logging.metrics_path(config.checkpoint.run_folder) is not None
    if not config.model.has_experts or not (has_file or logging.has_dashboards):
        return None
    return logging.log_experts_interval or None


def begin_counts(trainer: Trainer) -> None:
    """Let the routers count the tokens of the next iteration."""
    for router in _routers(trainer).values():
        router.statistics = RoutingStatistics(router.num_experts, trainer.topology.device)


def end_counts(trainer: Trainer) -> dict[int, RoutingStatistics]:
    """Let the routers count no more, and return what they counted on this rank by row."""
    found = {}
    for row, router in _routers(trainer).items():
        assert router.statistics is not None
        found[row], router.statistics = router.statistics, None
    return found


def loads_of_layers(counted: Mapping[int, RoutingStatistics], trainer: Trainer) -> Mapping[str, LayerLoads]:
    """Return the loads of the global batch in each layer by its name; a collective."""
    model, topology = trainer.config.model, trainer.topology
    assert model.num_experts is not None
    # [L, e + 2] counts, dropped choices and sums of entropies. fp64 holds whole numbers up to 2^53 exactly.
    shape = (model.num_layers + model.mtp_num_layers, model.num_experts + 2)
    totals = torch.zeros(shape, dtype=torch.float64, device=topology.device)
    for row, statistics in counted.items():
        others = torch.stack((statistics.num_dropped.double(), statistics.entropy))
        totals[row] = torch.cat((statistics.num_tokens.double(), others))
    for router in list(_routers(trainer).values())[:1]:
        sum_over_tokens(totals, router.weight, topology)
    all_reduce(totals, topology.pp, of="tokens of each expert")
    found = {}
    for row, (*counts, dropped, entropy) in enumerate(topology.to_host(totals).tolist()):
        if num_choices := sum(counts):
            num_tokens = num_choices / model.moe_router_topk
            tokens = tuple(map(int, counts))
            found[_name(row, model)] = LayerLoads(tokens, entropy / num_tokens, int(dropped))
    return found


def _routers(trainer: Trainer) -> dict[int, Router]:
    """Return the routers of this rank by their rows: the layers, then those of multi-token prediction."""
    first_rows = {_LAYERS: 0, _MTP: trainer.config.model.num_layers}
    found = ((name.split("."), router) for name, router in routers_of(trainer).items())
    return {first_rows[path[0]] + int(path[1]): router for path, router in found if path[0] in first_rows}


def _name(row: int, model: ModelConfig) -> str:
    return f"{_LAYERS}.{row}" if row < model.num_layers else f"{_MTP}.{row - model.num_layers}"


class Goodput(Callback):
    """Share of the time since the run's first start in which iterations ran that count, by rank 0's clock.

    The rest is starts, evaluations, saves, the time between two jobs, and iterations that ran again because a
    checkpoint did not have them. It is the first callback, whose `on_end` comes last.
    """

    def __init__(self, writers: Writers) -> None:
        self.writers = writers
        self._trained = self._step_began_at = 0.0
        self._began_at: float | None = None  # the first start, in seconds since 1970

    def state(self) -> dict[str, Any]:
        return {"began_at": self._began_at, "trained_seconds": self._trained}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._began_at, self._trained = state["began_at"], state["trained_seconds"]

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return False

    def on_start(self, loop: TrainingLoop) -> None:
        if self._began_at is None or not loop.trainer.config.checkpoint.loads_own:
            self._trained = 0.0  # what another run has saved is its own
            self._began_at = time.time() - (time.monotonic() - loop.stop_conditions.signals.start)

    def before_step(self, loop: TrainingLoop) -> None:
        self._step_began_at = time.perf_counter()

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self._trained += time.perf_counter() - self._step_began_at

    def on_save(self, loop: TrainingLoop) -> None:
        self.writers.scalars(loop.iteration, {"goodput": self._trained / self._seconds()})

    def on_end(self, loop: TrainingLoop) -> None:
        seconds = self._seconds()
        log.info(
            "goodput: %.1f%% of the %s since the first start went into iterations that count",
            *(100 * self._trained / seconds, clock_text(seconds)),
        )

    def _seconds(self) -> float:
        assert self._began_at is not None
        return max(time.time() - self._began_at, self._trained, 1e-9)
