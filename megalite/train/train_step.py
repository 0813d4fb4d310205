"""One training iteration, from its plan to the updated weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.batch.loss_terms import REAL_TOKEN, later_real_token, later_token
from megalite.batch.microbatch import Microbatch
from megalite.checkpoint.progress import TrainingProgress
from megalite.data.batch_loader import BatchLoader
from megalite.distributed.axis import DEVICE
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.hardware.host_memory import AsyncValues
from megalite.model.experts import names_of_terms
from megalite.optim.optimizer import Optimizer
from megalite.pipeline.executor import Pipeline
from megalite.tensor_parallel.fp8 import Fp8Weights
from megalite.train.anomaly_check import Anomaly, AnomalyCheck
from megalite.train.iteration_plan import IterationPlan, IterationPlanner
from megalite.train.model_chunks import hidden_shape
from megalite.train.run_context import RunContext
from megalite.train.telemetry.timers import BATCH_GENERATOR


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

    It has no state of its own: the run's progress determines the next iteration.

    The device decides whether to update the weights, by the same rules as the host, from its own loss and
    gradient norm. The host reads both numbers after the update is queued, so the device has work while the
    host waits for them, checks them and prepares the next iteration.

    Args:
        run: config, topology and timers of the run.
        load: loads a microbatch, given its batch's first sample and its index in the batch.
        fp8_weights: holds the layers' weights in 8 bits during an iteration.
        loss_names: names of all terms of the model's loss, on any stage.
        before_update: called before the weights and the optimizer state are overwritten.

    Attributes:
        before_update: functions that are called then.
    """

    def __init__(
        self,
        run: RunContext,
        pipeline: Pipeline[Microbatch],
        optimizer: Optimizer,
        load: BatchLoader,
        fp8_weights: Fp8Weights,
        loss_names: Sequence[str],
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self.topology = run.topology
        self.timers = run.timers
        self.pipeline = pipeline
        self.optimizer = optimizer
        self.load = load
        self.fp8_weights = fp8_weights
        self.config = run.config
        self.caches_fp8_weights = run.config.training.fp8_weight_cache
        self.before_update = [before_update]
        self.plan_iteration = IterationPlanner(run.config, run.topology.sample_ranks.size)
        self.check = AnomalyCheck(run.config.training)
        self.batches = GlobalBatches(run)
        self.loss_names = loss_names

    def __call__(self, progress: TrainingProgress) -> StepResult:
        """Run the iteration that follows `progress`."""
        plan = self.plan_iteration(progress)
        if plan.is_excluded:
            return StepResult(plan, math.nan, math.nan, skipped=True)

        mean_losses, norm = self.compute_gradients(plan)
        mean_loss = mean_losses.sum()
        scalars = AsyncValues(torch.stack((norm, *mean_losses)))

        is_allowed = self.check.allows(mean_loss, progress.recent_losses)
        for function in self.before_update:  # an asynchronous save must have copied the weights
            function()
        with self.timers("optimizer"):
            self.optimizer.step(
                plan.learning_rate, plan.weight_decay, norm, is_allowed, plan.decoupled_learning_rate
            )

        with self.topology.events.during(DEVICE):
            grad_norm, *each_loss = scalars.read()
        loss = sum(each_loss)
        losses = dict(zip(self.loss_names, each_loss, strict=True))
        scaler = self.optimizer.scaler
        can_go_down = scaler.can_go_down
        anomaly = self.check.find(loss, grad_norm, progress.recent_losses, can_go_down)
        if anomaly is not None:
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
                hidden_shape(self.config, plan.seq_length),
                divisors=divisors,
                loss_scale=self.optimizer.scaler.scale,
            )
        ratio = masks.token_ratio(self.topology) if self.batches.counts_afterwards else None
        means = global_losses(losses, self.loss_names, self.topology, ratio)
        return means, self.optimizer.finish_gradients(ratio)

    def run_first_microbatch(self, plan: IterationPlan, replica: int) -> None:
        """Run forward and backward of the first microbatch that a replica has in an iteration; a collective.

        It is computed as in the iteration, and overwrites the gradients.

        Args:
            replica: a rank of those that read different samples; it may differ between these ranks.
        """
        load, own = self.load.load_for_replica, self.topology.sample_ranks.rank
        _, divisors = self.batches.open(
            lambda index: load(plan.first_sample, index, own),
            plan.num_microbatches,
            plan.num_sequences,
            plan.seq_length,
        )
        self.optimizer.begin(1)
        with self.fp8_weights.iteration(keeps_copies=False):
            self.pipeline.train_step(
                1,
                lambda _: load(plan.first_sample, 0, replica),
                hidden_shape(self.config, plan.seq_length),
                divisors=divisors,
                loss_scale=self.optimizer.scaler.scale,
            )
        self.optimizer.finish_gradients()


class GlobalBatches:
    """Divisors of a global batch's losses, computed before its first microbatch runs.

    Attributes:
        counts_afterwards: tokens with a loss are counted while the batch runs, and `LossMasks.token_ratio`
            then corrects loss and gradients as a whole.
    """

    def __init__(self, run: RunContext) -> None:
        self._topology = run.topology
        self._num_later = run.config.model.mtp_num_layers
        self._has_masks = run.config.data.masks_loss or run.samples.are_masked
        self._reads_all = reads_whole_batches(run)
        self.counts_afterwards = run.config.data.masks_loss and not self._reads_all

    def open(
        self,
        read: Callable[[int], Microbatch],
        num_microbatches: int,
        num_sequences: int,
        seq_length: int,
        *,
        counts_afterwards: bool | None = None,
    ) -> tuple[Callable[[int], Microbatch], dict[str, float | Tensor]]:
        """Return a function that loads a microbatch by its index, and the divisors by `LossTerm.per`.

        Where a term is a mean over something else than the tokens with a loss, masks are counted before, over
        all ranks with a loss: the batch is loaded here, and this is a collective. A stage that reads no
        samples has only the divisors of the terms that it can have.

        Args:
            read: reads a microbatch by its index; called once for each.
            num_microbatches: number of microbatches of this rank.
            num_sequences: number of sequences of the global batch.
            seq_length: tokens of each.
            counts_afterwards: divide the sum over the tokens with a loss by the number of all tokens; by
                default as the attribute says.
        """
        batch = [read(index) for index in range(num_microbatches)] if self._reads_all else []
        afterwards = self.counts_afterwards if counts_afterwards is None else counts_afterwards
        divisors = self._divisors(batch, num_sequences, seq_length, afterwards)
        if self._num_later:
            divisors |= self._later_token_divisors(batch, num_sequences, seq_length)
        return batch.__getitem__ if batch else read, divisors

    def _divisors(
        self, batch: Sequence[Microbatch], num_sequences: int, seq_length: int, counts_afterwards: bool
    ) -> dict[str, float | Tensor]:
        """Return the numbers of tokens with a loss, of tokens that are not padding, and of sequences."""
        num_tokens = num_sequences * seq_length
        if counts_afterwards and not batch:  # the correction is of the whole gradient
            return {"token": num_tokens}
        divisors: dict[str, float | Tensor] = {
            "token": num_tokens,
            REAL_TOKEN: num_tokens,
            "sample": num_sequences,
        }
        if self._has_masks and not counts_afterwards:
            del divisors["token"]  # a stage without masks has no loss
            divisors |= self._count("token", [each.loss_mask for each in batch])
        return divisors | self._count(REAL_TOKEN, [each.is_real for each in batch])

    def _count(self, name: str, masks: Sequence[Tensor | None]) -> dict[str, float | Tensor]:
        """Return the number of marked tokens by its name; nothing if this stage has no masks."""
        marked = [mask.sum() for mask in masks if mask is not None]
        if not marked:
            return {}
        total = torch.stack(marked).sum().double()
        all_reduce(total, self._topology.loss_ranks, of=f"the number of {name}s")
        return {name: total}

    def _later_token_divisors(
        self, batch: Sequence[Microbatch], num_sequences: int, seq_length: int
    ) -> dict[str, float | Tensor]:
        """Return the numbers of tokens that have a later one, and of those whose later label has a loss.

        Args:
            batch: the rank's microbatches, if they must be counted.
        """
        divisors: dict[str, float | Tensor] = {}
        for ahead in range(1, self._num_later + 1):
            masks = {
                later_real_token(ahead): [each.later_real for each in batch],
                later_token(ahead): [each.later_mask for each in batch],
            }
            for name, marked in masks.items():
                if batch:
                    own = [None if mask is None else mask[:, ahead - 1] for mask in marked]
                    divisors |= self._count(name, own)
                else:
                    divisors[name] = num_sequences * (seq_length - ahead)
        return divisors


def reads_whole_batches(run: RunContext) -> bool:
    """Return whether a global batch is read whole before it runs, because it must be counted."""
    model, data = run.config.model, run.config.data
    counts_later_tokens = model.mtp_num_layers > 0 and (data.masks_loss or data.masks_attention)
    counts_real_tokens = data.masks_loss and bool(names_of_terms(model))
    return run.samples.are_masked or counts_later_tokens or counts_real_tokens


class LossMasks:
    """Numbers of tokens that have a loss in the microbatches of one or several global batches.

    A microbatch's loss is divided by the number of all tokens in its global batch, before any rank knows how
    many of them have a loss. Multiplying its mean over these, and its gradients, by `token_ratio` corrects
    the divisor.
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

        The ranks of the first stage count, because they load every microbatch in any schedule. If no token
        has a loss, the divisor is one.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=topology.device)
        if topology.pp.is_first and self._num_with_loss:
            totals[0].fill_(self._num_tokens)  # `totals[0] = number` would wait for the device
            totals[1] = torch.stack(self._num_with_loss).sum()
        for axis in (topology.loss_ranks, topology.pp):
            all_reduce(totals, axis, of="the number of tokens")
        return totals[0] / totals[1].clamp_min(1.0)


def global_losses(
    losses: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    topology: Topology,
    token_ratio: Tensor | None = None,
) -> Tensor:
    """Sum the terms of the microbatches' losses over all stages and replicas; return them on every rank.

    Args:
        losses: this rank's terms by name, already divided by the number of units of the global batch.
        names: names of all terms, on any stage.
        token_ratio: factor on the sum, a scalar; see `LossMasks`.

    Returns:
        fp64 ``[names]`` on the device, not yet synchronized with the host.
    """
    total = torch.zeros(len(names), dtype=torch.float64, device=topology.device)
    totals = dict(zip(names, total, strict=True))  # views of the elements
    for terms in losses:
        for name, loss in terms.items():
            totals[name] += loss
    for axis in (topology.loss_ranks, topology.pp):  # a stage without a term adds zero
        all_reduce(total, axis, of="the loss")
    if token_ratio is not None:
        total *= token_ratio
    return total
