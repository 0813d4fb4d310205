"""The parts of a run put together on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from megalite.checkpoint.lease import FolderLease
from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.progress import Progress
from megalite.checkpoint.save import Contents
from megalite.checkpoint.saver import Saver
from megalite.config import Config
from megalite.data.build import DatasetSplits
from megalite.data.gpt import Dataset
from megalite.log import log
from megalite.optim.part import Part
from megalite.parallel.weight_gradient_store import WeightGradientStore
from megalite.pipeline.schedule import SCHEDULES
from megalite.topology import Topology
from megalite.train.batches import BatchLoader
from megalite.train.chunks import build_chunks
from megalite.train.course import Course
from megalite.train.evaluation import Evaluator
from megalite.train.fault_finder import FaultFinder
from megalite.train.guard import Guard
from megalite.train.optimizer import build_optimizer
from megalite.train.step import BatchTokens, StepResult, TrainStep, build_pipeline
from megalite.train.telemetry.timers import Timers
from megalite.train.weight_gradients import fusion_of


class Trainer:
    """Model, optimizer, pipeline and data of one rank, and how far it has come.

    Use it in a ``with`` block, or call `close` at its end: it reads data ahead in a thread.

    Args:
        config: validated, its vocabulary size known.
        datasets: what to train and evaluate on; the training part exists.
        lease: on the folder of checkpoints; None where nothing is saved, or no other run can write there.

    Attributes:
        chunks: the parts of the model that this rank holds.
        progress: iterations and samples so far; `step` moves it on.
        global_batch_size: samples of a batch once a ramp-up is at its end, and of one in an evaluation.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        datasets: DatasetSplits,
        timers: Timers,
        lease: FolderLease | None = None,
    ) -> None:
        self.config = config
        self.topology = topology
        self.datasets = datasets
        self.timers = timers
        self.progress = Progress()
        self.saver = Saver(config.checkpoint, topology, lease)
        dp = topology.dp.size
        self.global_batch_size = config.global_batch(dp)
        self.num_microbatches = config.num_microbatches(dp)
        self.batch_tokens = BatchTokens(self.global_batch_size * config.model.seq_length)
        with timers("model-and-optimizer-setup"):
            store = WeightGradientStore() if SCHEDULES[config.parallel.schedule].splits_backward else None
            fuses = fusion_of(config, topology).is_on
            self.chunks = build_chunks(config, topology, store, fuses_weight_gradients=fuses)
            self.optimizer = build_optimizer(self.chunks, config, topology, fuses_weight_gradients=fuses)
        self.pipeline = build_pipeline(self.chunks, config, topology, self.batch_tokens, store)
        if timers.level > 0:
            for observers in self.observer_lists():
                observers.append(timers)
        self.evaluator = Evaluator(
            self.chunks, self.pipeline, config, topology, self.batch_tokens, datasets.ends
        )
        assert datasets.train is not None
        load = self._loader(datasets.train)
        self.train_step = TrainStep(
            self.pipeline,
            self.optimizer,
            Course(config, dp),
            load,
            config.model.seq_length,
            self.batch_tokens,
            Guard(config.training),
            FaultFinder(
                self.chunks,
                self.pipeline,
                self.optimizer,
                load,
                config.training.micro_batch_size,
                topology,
                config.training.compile,
            ),
            topology,
            timers,
            config.data.eod_mask_loss,
            self.saver.before_update,
        )

    def observer_lists(self) -> list[list[Any]]:
        """Where to put an observer that is to be told of all that happens on this rank."""
        topology = self.topology
        axes = (topology.pp, topology.tp, topology.dp, topology.world)
        return [self.pipeline.observers, self.optimizer.observers, *(axis.observers for axis in axes)]

    def step(self) -> StepResult:
        """Trains one iteration and moves the progress on."""
        for chunk in self.chunks:
            chunk.train()
        result = self.train_step(self.progress)
        self.progress = self.progress.after(
            result.num_samples,
            skipped=result.skipped,
            is_nan=not result.is_left_out and not math.isfinite(result.loss),
            losses=result.kept_losses,
        )
        return result

    def evaluate(
        self, dataset: Dataset, first_sample: int, before_batch: Callable[[], None] = lambda: None
    ) -> float:
        """Mean loss of `eval_iters` global batches from `first_sample` on, without dropout.

        The mean is over all of their tokens that have a loss. What `before_batch` raises ends it.
        """
        return self.evaluator(dataset, first_sample, before_batch)

    def tensors(self) -> dict[str, Tensor | Part]:
        """All that a checkpoint holds of this rank, by name: views of weights and optimizer state."""
        self.optimizer.finish_weights()
        weights: dict[str, Tensor | Part] = {
            f"model.{name}": tensor for name, tensor in self.optimizer.weights().items()
        }
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}

    def saved_tensors(self) -> dict[str, Tensor | Part]:
        """Those that this run's checkpoints hold: with --no-save-optim the weights alone."""
        tensors = self.tensors()
        if self.config.checkpoint.save_optim:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}

    def save(self, *, is_last: bool = False) -> None:
        """Saves a checkpoint of the present progress to the config's folder, or begins to; see `Saver`."""
        with self.timers("save-checkpoint"):
            contents = Contents.of(self.progress, self.config, self.topology, self.datasets.record)
            self.saver.save(contents, self.saved_tensors(), is_last=is_last)

    def save_local(self) -> None:
        """Makes a non-persistent save, or begins to; see `Saver`."""
        with self.timers("save-checkpoint-non-persistent"):
            contents = Contents.of(self.progress, self.config, self.topology, self.datasets.record)
            self.saver.save_local(contents, self.tensors())

    def load(self) -> bool:
        """Resumes from the latest checkpoint in the config's folder; False where there is none yet."""
        assert self.config.checkpoint.load is not None
        with self.timers("load-checkpoint"):
            intake = load_checkpoint(
                Path(self.config.checkpoint.load),
                self.tensors(),
                self.config,
                self.topology,
                self.saver.local,
                self.datasets.record,
            )
        if intake is None:
            return False
        for notice in intake.notices:
            log.warning("%s", notice)
        self.progress, self.config = intake.progress, intake.config
        self.train_step.course = Course(self.config, self.topology.dp.size)
        return True

    def close(self, *, waits: bool = True) -> None:
        """End the reading ahead of training data, as `BatchLoader.close`; a second call does nothing."""
        self.train_step.load.close(waits=waits)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(waits=error is None)

    def _loader(self, dataset: Dataset) -> BatchLoader:
        return BatchLoader(dataset, self.config.training.micro_batch_size, self.topology, self.datasets.ends)
