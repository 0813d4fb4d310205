"""One training iteration, from its plan to the updated weights, and the check that skips an update."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor

from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config, TrainingConfig
from megalite.config.parameter_schedules import OptimizerSchedules
from megalite.data.batch_loader import BatchLoader
from megalite.data.microbatch import Microbatch
from megalite.distributed.axis import DEVICE
from megalite.optim.optimizer import Optimizer
from megalite.pipeline.executor import Pipeline
from megalite.tensor_parallel.fp8 import Fp8Weights
from megalite.train.global_batch import GlobalBatches, LossMasks, global_losses, hidden_shape
from megalite.train.run_context import RunContext
from megalite.train.telemetry.timers import BATCH_GENERATOR
from megalite.utils.hardware.host_memory import AsyncValues


@dataclass(frozen=True)
class IterationPlan:
    """Settings of one iteration, before it runs.

    Attributes:
        iteration: its number, from 1.
        first_sample: number of the first sample of its global batch.
        num_samples: size of its global batch.
        num_microbatches: number of microbatches on each data-parallel rank.
        seq_length: tokens of a sequence; --seq-length-schedule may cut each sample into several sequences.
        sequences_per_sample: number of sequences that each of its samples is cut into.
        is_excluded: whether --iterations-to-skip consumes its samples without training.
        decoupled_learning_rate: learning rate of the word embedding and the output layer; None for
            `learning_rate`.
    """

    iteration: int
    first_sample: int
    num_samples: int
    num_microbatches: int
    seq_length: int
    sequences_per_sample: int
    learning_rate: float
    weight_decay: float
    is_excluded: bool
    decoupled_learning_rate: float | None = None

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences of the global batch."""
        return self.num_samples * self.sequences_per_sample


class IterationPlanner:
    """Plan of each iteration of a run, from its number and its first sample alone, so a run can resume.

    Args:
        dp: data-parallel size.
    """

    def __init__(self, config: Config, dp: int) -> None:
        schedules = OptimizerSchedules.of(config, dp)
        self._training = config.training
        self._full_length = config.model.seq_length
        self._sequences_per_sample = config.sequences_per_sample
        self._samples_per_microbatch = config.training.micro_batch_size * dp  # over all replicas
        self._batch_size = config.batch_size(dp)
        self._learning_rate = schedules.learning_rate
        self._decoupled_learning_rate = schedules.decoupled_learning_rate
        self._weight_decay = schedules.weight_decay

    def __call__(self, progress: TrainingProgress) -> IterationPlan:
        """Plan the iteration that follows `progress`."""
        iteration, first_sample = progress.iteration + 1, progress.consumed_samples
        num_samples, count = self._batch_size(first_sample), self._sequences_per_sample(first_sample)
        position = self._training.position(iteration, first_sample + num_samples)
        return IterationPlan(
            iteration,
            first_sample,
            num_samples,
            num_samples // self._samples_per_microbatch,
            self._full_length // count,
            count,
            self._learning_rate(position),
            self._weight_decay(position),
            self._training.is_skipped(iteration),
            self._decoupled_learning_rate(position) if self._decoupled_learning_rate else None,
        )


MIN_LOSSES = 10
"""Number of earlier losses that the check needs: the first losses of a run fall too fast."""


@dataclass(frozen=True)
class Anomaly:
    """Reason for skipping an update.

    Attributes:
        what: a clause for the log, such as "the loss is nan".
    """

    kind: Literal["loss", "gradient", "spike"]
    what: str


class AnomalyCheck:
    """Check of an iteration by numbers that are the same on every rank, so every rank decides the same.

    A loss is a spike if it is above `spiky_loss_factor` times the median of the recent losses. Unlike their
    maximum (Megatron-LM's measure), which stays at the loss of the first iterations, the median follows the
    loss down.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._checks_nan = config.check_for_nan_in_loss_and_grad
        self._checks_spikes = config.check_for_spiky_loss
        self._factor = config.spiky_loss_factor

    def find(
        self,
        loss: float,
        grad_norm: float,
        recent_losses: Sequence[float],
        may_overflow: bool = False,
    ) -> Anomaly | None:
        """Return what is wrong with an iteration, or None if its update is allowed.

        Args:
            loss: loss of the global batch.
            grad_norm: norm of the whole model's gradient.
            recent_losses: losses of earlier iterations that updated the weights, oldest first.
            may_overflow: an infinite gradient may come from the loss scale, which will be lowered.
        """
        if self._checks_nan and not math.isfinite(loss):
            return Anomaly("loss", f"the loss is {loss}")
        if self._checks_nan and not math.isfinite(grad_norm) and not may_overflow:
            return Anomaly("gradient", f"the grad norm is {grad_norm}")
        median = self._median(recent_losses)
        if median is None or not loss > self._factor * median:
            return None
        return Anomaly(
            "spike",
            f"the loss {loss:.6g} is above {self._factor:g} times {median:.6g}, the median of the last "
            f"{len(recent_losses)}",
        )

    def allows(self, loss: Tensor, recent_losses: Sequence[float]) -> Tensor:
        """Return whether `find` would accept the loss, as a bool scalar on the loss' device.

        The device uses it to skip an update before the host has read the loss.
        """
        median = self._median(recent_losses)
        highest = math.inf if median is None else self._factor * median
        is_low = loss.gt(highest).logical_not_()  # a comparison with NaN is False
        return is_low.logical_and_(loss.isfinite()) if self._checks_nan else is_low

    def losses_to_keep(self, loss: float) -> tuple[float, ...]:
        """Return the loss of an iteration that updated the weights, if later losses are compared with it."""
        return (loss,) if self._checks_spikes and math.isfinite(loss) else ()

    def _median(self, recent_losses: Sequence[float]) -> float | None:
        if not self._checks_spikes or len(recent_losses) < MIN_LOSSES:
            return None
        return statistics.median(recent_losses)


@dataclass(frozen=True)
class StepResult:
    """Result of one iteration, the same on every rank.

    Attributes:
        plan: the iteration's number, samples and learning rate.
        loss: mean loss over the global batch's tokens, before the update; NaN if the iteration was excluded.
            If the loss has several terms, it is their sum.
        grad_norm: norm of the whole model's gradient, before clipping; NaN if the iteration was excluded.
        skipped: whether the weights were not updated.
        anomaly: the reason, if a check skipped the update; None if the iteration was excluded, or if only an
            infinite gradient norm prevented the update.
        scale_too_high: whether the gradient norm was infinite under a dynamic loss scale that can still be
            lowered, which is expected now and then.
        losses: each term of the loss by its name.
        losses_to_keep: the loss, if the weights were updated and later losses are compared with it.
    """

    plan: IterationPlan
    loss: float
    grad_norm: float
    skipped: bool
    anomaly: Anomaly | None = None
    scale_too_high: bool = False
    losses: Mapping[str, float] = field(default_factory=dict)
    losses_to_keep: tuple[float, ...] = ()


class TrainStep:
    """Training iterations of this rank.

    The run's progress determines the next iteration.

    The device decides whether to update the weights, by the same rules as the host, from its own loss and
    gradient norm. The host reads both numbers after it has queued the update and, if the caller allows it,
    the gradients of the next iteration. So the device has work while the host waits for the numbers and
    checks them, and while callbacks run. The weights, the optimizer state and the progress are those after
    this iteration: only its update changes them for the next one.

    Args:
        run: config, topology and timers of the run.
        load: loads a microbatch, given its batch's first sample and its index in the batch.
        fp8_weights: holds the layers' weights in 8 bits during an iteration.
        loss_names: names of all terms of the model's loss, on any stage.

    Attributes:
        before_update: functions that are called before the weights and the optimizer state are overwritten.
        hidden_shape: see `global_batch.hidden_shape`; takes the tokens of a sequence.
        queued: result of `compute_gradients` for the next iteration by its plan, if it is queued. Without it,
            the iteration computes its gradients itself, so what overwrites them only has to clear it.
    """

    def __init__(
        self,
        run: RunContext,
        pipeline: Pipeline[Microbatch],
        optimizer: Optimizer,
        load: BatchLoader,
        fp8_weights: Fp8Weights,
        loss_names: Sequence[str],
    ) -> None:
        self.topology = run.topology
        self.timers = run.timers
        self.pipeline = pipeline
        self.optimizer = optimizer
        self.load = load
        self.fp8_weights = fp8_weights
        self.caches_fp8_weights = run.config.training.fp8_weight_cache and not optimizer.shards_weights
        self.before_update: list[Callable[[], None]] = []
        self.plan_iteration = IterationPlanner(run.config, run.topology.sample_ranks.size)
        self.check = AnomalyCheck(run.config.training)
        self.batches = GlobalBatches(run)
        self.hidden_shape = cache(partial(hidden_shape, run.config))
        self.loss_names = loss_names
        self.queued: dict[IterationPlan, tuple[Tensor, Tensor]] = {}

    def __call__(self, progress: TrainingProgress, *, queues_next: bool = False) -> StepResult:
        """Run the iteration that follows `progress`.

        Args:
            queues_next: queue the gradients of the next iteration before the host waits for this one's
                results. The next iteration must not depend on them: see `Trainer.can_queue_next`.
        """
        plan = self.plan_iteration(progress)
        queued, self.queued = self.queued, {}
        if plan.is_excluded:
            return StepResult(plan, math.nan, math.nan, skipped=True)

        mean_losses, norm = queued.get(plan) or self.compute_gradients(plan)
        mean_loss = mean_losses.sum()
        scalars = AsyncValues(torch.stack((norm, *mean_losses)))

        is_allowed = self.check.allows(mean_loss, progress.recent_losses)
        for function in self.before_update:
            function()
        with self.timers("optimizer"):
            self.optimizer.step(
                plan.learning_rate, plan.weight_decay, norm, is_allowed, plan.decoupled_learning_rate
            )

        if queues_next:
            next_plan = self.plan_iteration(progress.after(plan.num_samples))
            if not next_plan.is_excluded:
                self.queued = {next_plan: self.compute_gradients(next_plan)}

        with self.topology.events.during(DEVICE):
            grad_norm, *each_loss = scalars.read()
        loss = sum(each_loss)
        losses = dict(zip(self.loss_names, each_loss, strict=True))
        scaler = self.optimizer.scaler
        can_go_down = scaler.can_go_down
        anomaly = self.check.find(loss, grad_norm, progress.recent_losses, can_go_down)
        if anomaly is not None:
            self.queued.clear()  # to locate it, microbatches run again and overwrite gradients
            return StepResult(plan, loss, grad_norm, skipped=True, anomaly=anomaly, losses=losses)
        overflowed = not math.isfinite(grad_norm)
        scaler.update(overflowed)
        return StepResult(
            plan,
            loss,
            grad_norm,
            overflowed,
            scale_too_high=overflowed and can_go_down,
            losses=losses,
            losses_to_keep=() if overflowed else self.check.losses_to_keep(loss),
        )

    def compute_gradients(self, plan: IterationPlan) -> tuple[Tensor, Tensor]:
        """Run forward and backward over the microbatches and reduce the gradients over all ranks.

        Returns:
            The mean of each term of the loss, ``[terms]``, and the gradient's norm, a scalar: fp64 on the
                device, not yet synchronized with the host.
        """
        masks = LossMasks()

        def read(index: int) -> Microbatch:
            with self.timers(BATCH_GENERATOR):
                return masks.counted(self.load(plan.first_sample, index))

        load, divisors = self.batches.open(read, plan.num_microbatches, plan.num_sequences, plan.seq_length)
        self.optimizer.begin(plan.num_microbatches)
        keeps_copies = self.caches_fp8_weights and plan.num_microbatches > 1  # otherwise each is used once
        with self.timers("forward-backward"), self.fp8_weights.iteration(keeps_copies=keeps_copies):
            losses = self.pipeline.train_step(
                plan.num_microbatches,
                load,
                self.hidden_shape(plan.seq_length),
                divisors=divisors,
                loss_scale=self.optimizer.scaler.scale,
            )
        ratio = masks.token_ratio(self.topology) if self.batches.counts_afterwards else None
        means = global_losses(losses, self.loss_names, self.topology, ratio)
        return means, self.optimizer.finish_gradients(ratio)

    def divisors(self, plan: IterationPlan) -> Mapping[str, float | Tensor]:
        """Return the divisors of an iteration's losses; a collective, which reads nothing ahead."""
        load, own = self.load.load_for_replica, self.topology.sample_ranks.rank
        _, divisors = self.batches.open(
            lambda index: load(plan.first_sample, index, own),
            plan.num_microbatches,
            plan.num_sequences,
            plan.seq_length,
        )
        return divisors

    def run_microbatch(
        self, plan: IterationPlan, index: int, replica: int, divisors: Mapping[str, float | Tensor]
    ) -> Tensor:
        """Compute one microbatch as in the iteration, and return its gradient's norm; a collective.

        It overwrites the gradients.

        Args:
            replica: a rank of those that read different samples; it may differ between these ranks.
            divisors: those of the iteration.
        """
        self.optimizer.begin(1)
        with self.fp8_weights.iteration(keeps_copies=False):
            self.pipeline.train_step(
                1,
                lambda _: self.load.load_for_replica(plan.first_sample, index, replica),
                self.hidden_shape(plan.seq_length),
                divisors=divisors,
                loss_scale=self.optimizer.scaler.scale,
            )
        return self.optimizer.finish_gradients()
