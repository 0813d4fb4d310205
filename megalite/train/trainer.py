"""The parts of a run put together on one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.progress import Progress
from megalite.checkpoint.store import load_checkpoint, save_checkpoint
from megalite.config import Config
from megalite.data.build import DatasetSplits
from megalite.data.gpt import Dataset
from megalite.errors import UserError
from megalite.model.stage import GPTStage
from megalite.optim.learning_rate import LearningRate
from megalite.optim.optimizer import Optimizer
from megalite.pipeline.partition import layers_of_stages
from megalite.topology import Topology
from megalite.train.batches import BatchLoader
from megalite.train.step import StepResult, TrainStep, build_pipeline, total_loss
from megalite.train.timers import Timers


class Trainer:
    """Model, optimizer, pipeline and data of one rank, and how far it has come.

    Args:
        config: validated, its vocabulary size known.
        datasets: what to train and evaluate on; the training part exists.

    Attributes:
        progress: iterations and samples so far; `step` moves it on.
    """

    def __init__(self, config: Config, topology: Topology, datasets: DatasetSplits, timers: Timers) -> None:
        self.config = config
        self.topology = topology
        self.datasets = datasets
        self.timers = timers
        self.progress = Progress()
        dp = topology.dp.size
        self.global_batch_size = config.global_batch(dp)
        self.num_microbatches = config.num_microbatches(dp)
        with timers("model-and-optimizer-setup"):
            self.stage = _build_stage(config, topology)
            self.optimizer = Optimizer(
                self.stage.named_parameters(),
                self.stage.tied_weight,
                config.optimizer,
                topology,
                config.parallel.ddp_bucket_size,
            )
        self.pipeline = build_pipeline(
            self.stage,
            topology,
            config.parallel.pipeline_schedule,
            config.training.micro_batch_size,
            self.global_batch_size,
        )
        assert datasets.train is not None and config.training.train_iters is not None
        self.train_step = TrainStep(
            self.pipeline,
            self.optimizer,
            LearningRate(config.optimizer, config.training.train_iters),
            self._loader(datasets.train),
            self.num_microbatches,
            topology,
            timers,
        )

    def step(self) -> StepResult:
        """Trains one iteration and moves the progress on."""
        self.stage.train()
        result = self.train_step(self.progress.iteration + 1, self.progress.consumed_samples)
        self.progress = self.progress.after(self.global_batch_size)
        return result

    def evaluate(self, dataset: Dataset, first_sample: int) -> float:
        """Mean loss of the tokens of `eval_iters` global batches from `first_sample` on, without dropout."""
        self.stage.eval()
        load = self._loader(dataset)
        num_batches = self.config.training.eval_iters
        total = 0.0
        for batch in range(num_batches):
            consumed = first_sample + batch * self.global_batch_size
            losses = self.pipeline.evaluate(self.num_microbatches, partial(load, consumed))
            total += total_loss(losses, self.topology)
        return total / num_batches

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds of this rank, by name: views of weights and optimizer state."""
        weights = {f"model.{name}": weight.data for name, weight in self.stage.named_parameters()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}

    def save(self) -> Path:
        """Saves a checkpoint of the present progress to the config's folder."""
        assert self.config.checkpoint.save is not None
        with self.timers("save-checkpoint"):
            return save_checkpoint(
                Path(self.config.checkpoint.save),
                self.progress,
                self.tensors(),
                self.config,
                self.topology,
            )

    def load(self) -> bool:
        """Resumes from the latest checkpoint in the config's folder; False where there is none yet."""
        assert self.config.checkpoint.load is not None
        with self.timers("load-checkpoint"), self.topology.agreed():
            progress = load_checkpoint(
                Path(self.config.checkpoint.load), self.tensors(), self.config, self.topology
            )
        self._check_agreement(progress)
        if progress is not None:
            self.progress = progress
        return progress is not None

    def _check_agreement(self, progress: Progress | None) -> None:
        """Refuses a folder in which ranks see different things, as one that each node has for itself."""
        seen: list[Progress | None] = [None] * self.topology.world_size
        dist.all_gather_object(seen, progress)
        if any(each != progress for each in seen):
            iterations = sorted({each.iteration if each else 0 for each in seen})
            raise UserError(
                f"--load {self.config.checkpoint.load} holds iterations {iterations} on different ranks: "
                "give a folder on a file system that all of them share"
            )

    def _loader(self, dataset: Dataset) -> BatchLoader:
        return BatchLoader(dataset, self.config.training.micro_batch_size, self.topology)


def _build_stage(config: Config, topology: Topology) -> GPTStage:
    stages = layers_of_stages(config.model.num_layers, topology.pp.size, config.parallel.pipeline_layers)
    return GPTStage(config.model, topology, stages[topology.pp.rank], config.training.seed)
