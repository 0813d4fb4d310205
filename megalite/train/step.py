"""One iteration: forward and backward over the microbatches, reduction, clipping, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.checkpoint.progress import Progress
from megalite.config import Config
from megalite.data.batch import Microbatch
from megalite.model.documents import Documents
from megalite.model.stage import DTYPES, GPTStage
from megalite.optim.loss_scaler import scale_gradient
from megalite.parallel.collectives import all_reduce
from megalite.parallel.weight_gradient_store import WeightGradientStore
from megalite.pipeline.executor import Pipeline
from megalite.topology import Topology
from megalite.train.batches import BatchLoader
from megalite.train.counted_tokens import CountedTokens
from megalite.train.course import Course
from megalite.train.fault_finder import FaultFinder
from megalite.train.guard import Guard
from megalite.train.optimizer import RunOptimizer
from megalite.train.readout import Readout
from megalite.train.telemetry.timers import BATCH_GENERATOR, Timers


@dataclass(frozen=True)
class StepResult:
    """What one iteration came to, the same on every rank.

    Attributes:
        loss: mean over the global batch's tokens, of the weights before the update.
        grad_norm: of the whole model's gradient, before clipping.
        learning_rate: of this update.
        skipped: the weights are as they were.
        num_samples: of the global batch.
        is_left_out: the samples were passed over, by --iterations-to-skip; loss and norm are NaN.
        fault: why the update was left out and where it began, in words; None where nothing is to be told.
        kept_losses: the loss, where later ones are to be judged by it.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    num_samples: int
    is_left_out: bool = False
    fault: str | None = None
    kept_losses: tuple[float, ...] = ()


@dataclass
class BatchTokens:
    """The tokens of the global batch that is run now; it grows in a ramp-up.

    Attributes:
        loss_scale: what backward multiplies the loss by, for gradients in fp16.
    """

    number: int
    loss_scale: float = 1.0


class MeanLoss:
    """A stage as the pipeline runs it: the last one's sum of token losses becomes a part of the batch's mean.

    Every microbatch is divided by the tokens of the *global* batch, so that sums over microbatches and over
    data-parallel ranks give the mean, whatever their number. Where a mask leaves tokens out, `CountedTokens`
    turns it into the mean over the others.
    """

    def __init__(self, stage: GPTStage, batch_tokens: BatchTokens) -> None:
        self.stage = stage
        self.batch_tokens = batch_tokens

    def __call__(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor:
        documents = Documents(microbatch.position_ids, microbatch.document_ids, microbatch.loss_mask)
        output = self.stage(
            microbatch.tokens, microbatch.labels, microbatch.sample_numbers, hidden, documents
        )
        if not self.stage.is_last:
            return output
        return scale_gradient(output / self.batch_tokens.number, self.batch_tokens.loss_scale)


def build_pipeline(
    chunks: Sequence[GPTStage],
    config: Config,
    topology: Topology,
    batch_tokens: BatchTokens,
    store: WeightGradientStore | None = None,
) -> Pipeline[Microbatch]:
    """The executor for this rank's chunks."""
    model, parallel = config.model, config.parallel
    num_positions = model.seq_length // (topology.tp.size if parallel.sequence_parallel else 1)
    return Pipeline(
        [MeanLoss(chunk, batch_tokens) for chunk in chunks],
        topology.pp,
        parallel.schedule,
        hidden_shape=(num_positions, config.training.micro_batch_size, model.hidden_size),
        dtype=DTYPES[model.params_dtype],
        device=topology.device,
        store=store,
    )


def total_loss(losses: Sequence[Tensor], topology: Topology, scale: Tensor | None = None) -> Tensor:
    """Sums the microbatches' losses over the last stage's replicas, in fp64, and gives it to every rank.

    Args:
        scale: what the sum is multiplied by: that of `CountedTokens`.

    Returns:
        A scalar on the device, which has not been waited for.
    """
    total = torch.zeros((), dtype=torch.float64, device=topology.device)
    for loss in losses:
        total += loss
    for axis in (topology.dp, topology.pp):  # stages before the last add zeros
        all_reduce(total, axis)
    if scale is not None:
        total *= scale
    return total


class TrainStep:
    """Runs iterations; holds no count of its own: what an iteration is follows from the run's progress.

    The device decides for itself whether it updates the weights, by the same rules as the host, from the loss
    and the norm that it has; the host reads both in one piece, once the update is in the device's queue. So
    the device always has work while the host waits, judges and gets the next iteration ready. What the host
    knows beforehand, the median that spiky losses are told by, it gives along.

    Args:
        course: plans each iteration.
        load: gives a microbatch by the batch's first sample and its number within the batch.
        seq_length: tokens of a sample.
        batch_tokens: what the pipeline divides losses by; set here to each batch's.
        guard: judges what came out.
        finder: asked where an iteration went bad.
        masks_loss: some tokens have no loss.
        before_update: called before the weights and the optimizer's state are written to.
    """

    def __init__(
        self,
        pipeline: Pipeline[Microbatch],
        optimizer: RunOptimizer,
        course: Course,
        load: BatchLoader,
        seq_length: int,
        batch_tokens: BatchTokens,
        guard: Guard,
        finder: FaultFinder,
        topology: Topology,
        timers: Timers,
        masks_loss: bool = False,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self.pipeline = pipeline
        self.optimizer = optimizer
        self.course = course
        self.load = load
        self.seq_length = seq_length
        self.batch_tokens = batch_tokens
        self.guard = guard
        self.finder = finder
        self.topology = topology
        self.timers = timers
        self.masks_loss = masks_loss
        self.before_update = before_update

    def __call__(self, progress: Progress) -> StepResult:
        """Runs the iteration that follows `progress`."""
        plan, consumed = self.course(progress), progress.consumed_samples
        rate = plan.learning_rate
        if plan.is_left_out:
            return StepResult(math.nan, math.nan, rate, True, plan.num_samples, is_left_out=True)
        mean_loss, norm = self.gradients(consumed)
        readout = Readout(mean_loss, norm)
        is_allowed = self.guard.allows(mean_loss, progress.recent_losses)
        self.before_update()
        with self.timers("optimizer"):
            self.optimizer.step(rate, plan.weight_decay, norm, is_allowed)
        loss, grad_norm = readout.read()
        scaler = self.optimizer.scaler
        fault = self.guard.fault(loss, grad_norm, progress.recent_losses, scaler.can_go_down)
        if fault is not None:
            where = self.finder.where(fault, consumed, self.num_microbatches(consumed))
            told = f"{fault.what}, {where}; the update was skipped"
            return StepResult(loss, grad_norm, rate, True, plan.num_samples, fault=told)
        overflowed = not math.isfinite(grad_norm)
        scaler.update(overflowed)
        kept = self.guard.kept(loss)
        return StepResult(loss, grad_norm, rate, overflowed, plan.num_samples, kept_losses=kept)

    def num_microbatches(self, consumed_samples: int) -> int:
        """Microbatches of this rank in the batch from sample `consumed_samples` on."""
        num_samples = self.course.batch_size(consumed_samples)
        return num_samples // (self.load.micro_batch_size * self.topology.dp.size)

    def gradients(self, consumed_samples: int) -> tuple[Tensor, Tensor]:
        """Fills the gradients, complete over all ranks; gives the loss and the gradient's norm.

        Both are fp64 scalars on the device, which have not been waited for.
        """
        counted = CountedTokens(self.topology)

        def load(index: int) -> Microbatch:
            with self.timers(BATCH_GENERATOR):
                return counted.noted(consumed_samples, index, self.load(consumed_samples, index))

        num_microbatches = self.num_microbatches(consumed_samples)
        self.batch_tokens.number = self.course.batch_size(consumed_samples) * self.seq_length
        self.batch_tokens.loss_scale = self.optimizer.scaler.scale
        self.optimizer.begin(num_microbatches)
        with self.timers("forward-backward"):
            losses = self.pipeline.train_step(num_microbatches, load)
        scale = counted.scale() if self.masks_loss else None
        loss = total_loss(losses, self.topology, scale)
        return loss, self.optimizer.finish_gradients(scale)
