"""One iteration: forward and backward over the microbatches, reduction, clipping, update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.data.batch import Microbatch
from megalite.model.stage import DTYPES, GPTStage
from megalite.optim.learning_rate import LearningRate
from megalite.optim.optimizer import Optimizer
from megalite.parallel.collectives import all_reduce
from megalite.pipeline.executor import Pipeline
from megalite.topology import Topology
from megalite.train.batches import BatchLoader
from megalite.train.timers import Timers


@dataclass(frozen=True)
class StepResult:
    """What one iteration came to, the same on every rank.

    Attributes:
        loss: mean over the global batch's tokens, of the weights before the update.
        grad_norm: of the whole model's gradient, before clipping.
        learning_rate: of this update.
        skipped: the gradient was not finite, and the weights are as they were.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool


class MeanLoss:
    """A stage as the pipeline runs it: the last one's sum of token losses becomes a part of the batch's mean.

    Every microbatch is divided by the tokens of the *global* batch, so that sums over microbatches and over
    data-parallel ranks give the mean, whatever their number.
    """

    def __init__(self, stage: GPTStage, num_tokens: int) -> None:
        self.stage = stage
        self.num_tokens = num_tokens

    def __call__(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor:
        output = self.stage(microbatch.tokens, microbatch.labels, microbatch.sample_numbers, hidden)
        return output / self.num_tokens if self.stage.is_last else output


def build_pipeline(
    stage: GPTStage, topology: Topology, schedule: str, micro_batch_size: int, global_batch_size: int
) -> Pipeline[Microbatch]:
    """The executor for this rank's stage."""
    model = stage.config
    return Pipeline(
        MeanLoss(stage, global_batch_size * model.seq_length),
        topology.pp,
        schedule,
        hidden_shape=(model.seq_length, micro_batch_size, model.hidden_size),
        dtype=DTYPES[model.params_dtype],
        device=topology.device,
    )


def total_loss(losses: Sequence[Tensor], topology: Topology) -> float:
    """Sums the microbatches' losses over the last stage's replicas, in fp64, and tells every rank."""
    total = torch.zeros((), dtype=torch.float64, device=topology.device)
    for loss in losses:
        total += loss
    for axis in (topology.dp, topology.pp):  # stages before the last add zeros
        all_reduce(total, axis)
    return total.item()


class TrainStep:
    """Runs iterations; holds no count of its own: an iteration is given by its number and first sample."""

    def __init__(
        self,
        pipeline: Pipeline[Microbatch],
        optimizer: Optimizer,
        learning_rate: LearningRate,
        load: BatchLoader,
        num_microbatches: int,
        topology: Topology,
        timers: Timers,
    ) -> None:
        self.pipeline = pipeline
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.load = load
        self.num_microbatches = num_microbatches
        self.topology = topology
        self.timers = timers

    def __call__(self, iteration: int, consumed_samples: int) -> StepResult:
        """Runs iteration `iteration`, counted from 1, on the batch from sample `consumed_samples` on."""
        rate = self.learning_rate(iteration)
        loss, grad_norm = self.gradients(consumed_samples)
        with self.timers("optimizer"):
            updated = self.optimizer.step(rate, grad_norm)
        return StepResult(loss, grad_norm, rate, skipped=not updated)

    def gradients(self, consumed_samples: int) -> tuple[float, float]:
        """Fills the gradients, complete over all ranks; returns the loss and the gradient's norm."""

        def load(index: int) -> Microbatch:
            with self.timers("batch-generator"):
                return self.load(consumed_samples, index)

        self.optimizer.begin(self.num_microbatches)
        with self.timers("forward-backward"):
            losses = self.pipeline.train_step(self.num_microbatches, load)
        with self.timers("all-grads-sync"):
            grad_norm = self.optimizer.finish_gradients()
        return total_loss(losses, self.topology), grad_norm
