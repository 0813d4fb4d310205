"""One training iteration, from its plan to the updated weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.checkpoint.progress import TrainingProgress
from megalite.data.batch_loader import BatchLoader
from megalite.distributed.collectives import all_reduce
from megalite.distributed.observer import DEVICE
from megalite.distributed.topology import Topology
from megalite.microbatch import Microbatch
from megalite.optim.optimizer import BaseOptimizer
from megalite.pipeline.executor import Pipeline
from megalite.train.anomaly_check import Anomaly, AnomalyCheck
from megalite.train.async_scalars import AsyncScalars
from megalite.train.iteration_plan import IterationPlan, IterationPlanner
from megalite.train.run_context import RunContext
from megalite.train.telemetry.timers import BATCH_GENERATOR


@dataclass(frozen=True)
class StepResult:
    """The result of one iteration, the same on every rank.

    Attributes:
        plan: of the iteration: its number, samples and learning rate.
        loss: mean over the global batch's tokens, before the update; NaN if the iteration was excluded.
        grad_norm: of the whole model's gradient, before clipping; NaN likewise.
        skipped: the weights were not updated.
        anomaly: the reason, if a check skipped the update; None if the iteration was excluded, or if only the
            infinite gradient norm kept the weights from being updated.
        losses_to_keep: the loss, if the weights were updated and later losses are compared with it.
    """

    plan: IterationPlan
    loss: float
    grad_norm: float
    skipped: bool
    anomaly: Anomaly | None = None
    losses_to_keep: tuple[float, ...] = ()


class TrainStep:
    """Runs training iterations.

    It keeps no count of its own: an iteration follows from the run's progress.

    The device decides for itself whether it updates the weights, by the same rules as the host, from its own
    loss and gradient norm. The host reads both numbers once the update is queued, so that the device has work
    while the host waits for them, checks them and prepares the next iteration.

    Args:
        run: config, topology and timers of the run.
        load: loads a microbatch by its batch's first sample and its index in the batch.
        before_update: called before the weights and the optimizer state are overwritten.
    """

    def __init__(
        self,
        run: RunContext,
        pipeline: Pipeline[Microbatch],
        optimizer: BaseOptimizer,
        load: BatchLoader,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self.topology = run.topology
        self.timers = run.timers
        self.pipeline = pipeline
        self.optimizer = optimizer
        self.load = load
        self.before_update = before_update
        self.plan_iteration = IterationPlanner(run.config, run.topology.dp.size)
        self.check = AnomalyCheck(run.config.training)
        self.seq_length = run.config.model.seq_length
        self.masks_loss = run.config.data.eod_mask_loss

    def __call__(self, progress: TrainingProgress) -> StepResult:
        """Run the iteration that follows `progress`."""
        plan = self.plan_iteration(progress)
        if plan.is_excluded:
            return StepResult(plan, math.nan, math.nan, skipped=True)

        mean_loss, norm = self.compute_gradients(plan)
        scalars = AsyncScalars(mean_loss, norm)

        is_allowed = self.check.allows(mean_loss, progress.recent_losses)
        self.before_update()  # an asynchronous save must have copied the weights
        with self.timers("optimizer"):
            self.optimizer.step(plan.learning_rate, plan.weight_decay, norm, is_allowed)

        with self.topology.events.during(DEVICE):
            loss, grad_norm = scalars.read()
        scaler = self.optimizer.scaler
        anomaly = self.check.find(loss, grad_norm, progress.recent_losses, scaler.can_go_down)
        if anomaly is not None:
            return StepResult(plan, loss, grad_norm, skipped=True, anomaly=anomaly)
        overflowed = not math.isfinite(grad_norm)
        scaler.update(overflowed)
        kept = () if overflowed else self.check.losses_to_keep(loss)
        return StepResult(plan, loss, grad_norm, skipped=overflowed, losses_to_keep=kept)

    def compute_gradients(self, plan: IterationPlan) -> tuple[Tensor, Tensor]:
        """Run forward and backward over the microbatches and reduce the gradients over all ranks.

        Returns:
            The mean loss and the gradient's norm: fp64 scalars on the device, not yet read by the host.
        """
        masks = LossMasks()

        def load(index: int) -> Microbatch:
            with self.timers(BATCH_GENERATOR):
                return masks.counted(self.load(plan.first_sample, index))

        self.optimizer.begin(plan.num_microbatches)
        with self.timers("forward-backward"):
            losses = self.pipeline.train_step(
                plan.num_microbatches,
                load,
                num_tokens=plan.num_samples * self.seq_length,
                loss_scale=self.optimizer.scaler.scale,
            )
        ratio = masks.token_ratio(self.topology) if self.masks_loss else None
        return global_loss(losses, self.topology, ratio), self.optimizer.finish_gradients(ratio)


class LossMasks:
    """Counts the tokens that have a loss in the microbatches of one or several global batches.

    A microbatch's loss is divided by all tokens of its global batch, before any rank can know how many of
    them have a loss. Multiplying loss and gradients by `token_ratio` makes them means over those tokens.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_with_loss: list[Tensor] = []

    def counted(self, microbatch: Microbatch) -> Microbatch:
        """Count the microbatch's tokens and return it."""
        if microbatch.loss_mask is not None:
            self._num_tokens += microbatch.loss_mask.numel()
            self._num_with_loss.append(microbatch.loss_mask.sum())
        return microbatch

    def token_ratio(self, topology: Topology) -> Tensor:
        """Return all tokens divided by those with a loss, an fp64 scalar on the device; a collective.

        The ranks of the first stage count: in any schedule they load every microbatch. If no token has a loss
        the divisor is one.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=topology.device)
        if topology.pp.is_first and self._num_with_loss:
            totals[0] = self._num_tokens
            totals[1] = torch.stack(self._num_with_loss).sum()
        for axis in (topology.dp, topology.pp):
            all_reduce(totals, axis, of="the number of tokens")
        return totals[0] / totals[1].clamp_min(1.0)


def global_loss(losses: Sequence[Tensor], topology: Topology, token_ratio: Tensor | None = None) -> Tensor:
    """Sum the microbatches' losses over the last stage's replicas: the global batch's loss, on every rank.

    Args:
        losses: each divided by the number of tokens of the global batch already.
        token_ratio: multiplies the sum; see `LossMasks`.

    Returns:
        An fp64 scalar on the device, not yet synchronized with the host.
    """
    total = torch.zeros((), dtype=torch.float64, device=topology.device)
    for loss in losses:
        total += loss
    for axis in (topology.dp, topology.pp):  # stages before the last add zeros
        all_reduce(total, axis, of="the loss")
    if token_ratio is not None:
        total *= token_ratio
    return total
