"""The trainer of one rank: model, optimizer, pipeline, data, checkpoints and progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from megalite.checkpoint.lease import FolderLease
from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.progress import TrainingProgress
from megalite.checkpoint.save import Contents
from megalite.checkpoint.saver import Saver
from megalite.config import Config
from megalite.data.batch_loader import NUM_AHEAD, BatchLoader
from megalite.data.build_datasets import DatasetSplits
from megalite.data.gpt_dataset import Dataset
from megalite.distributed.topology import Topology
from megalite.log import log
from megalite.microbatch import Microbatch
from megalite.model.activation_offload import ActivationOffload
from megalite.model.stage import DTYPES, Stage
from megalite.optim.flat_buffers import ParameterShard
from megalite.pipeline.executor import Pipeline
from megalite.pipeline.schedules import SCHEDULES
from megalite.tensor_parallel.weight_gradient_store import WeightGradient, WeightGradientStore, run_stored
from megalite.train.build_optimizer import build_optimizer
from megalite.train.evaluator import Evaluator
from megalite.train.iteration_plan import IterationPlanner
from megalite.train.model_chunks import build_chunks, hidden_shape
from megalite.train.own_model import check_first_iteration, is_own
from megalite.train.run_context import Providers, RunContext, resolve_run
from megalite.train.run_datasets import build_data
from megalite.train.telemetry.timers import Timers
from megalite.train.train_step import StepResult, TrainStep
from megalite.train.verification import warn_if_unverified
from megalite.train.weight_gathering import choose_weight_gathering
from megalite.train.weight_gradients import weight_gradient_fusion


def build_pipeline(
    chunks: Sequence[Stage],
    config: Config,
    topology: Topology,
    store: WeightGradientStore | None = None,
    run_weight_gradients: Callable[[Sequence[WeightGradient]], None] = run_stored,
) -> Pipeline[Microbatch]:
    """Create the executor of this rank's chunks; the last two arguments are passed to `Pipeline`."""
    return Pipeline(
        chunks,
        topology.pp,
        config.parallel.schedule,
        hidden_shape=hidden_shape(config, topology.tp.size),
        dtype=DTYPES[config.model.params_dtype],
        device=topology.device,
        store=store,
        run_weight_gradients=run_weight_gradients,
    )


class Trainer:
    """Trains one rank's part of the model.

    Use it in a ``with`` block, or call `close`: it reads data ahead in a thread.

    Args:
        run: objects that all parts of the run share.
        datasets: datasets of the run; the training split must exist.

    Attributes:
        config: the run's config; resuming may change it.
        chunks: this rank's model chunks.
        activation_offload: holds their activations in host memory; None if the config offloads none.
        progress: iterations and samples so far; `step` advances it.
        gathering: whether ZeRO stage 3 keeps gathered weights.
        global_batch_size: samples per batch after the ramp-up, and per batch in an evaluation.
    """

    def __init__(self, run: RunContext, datasets: DatasetSplits) -> None:
        config, topology = run.config, run.topology
        self.config = config
        self.topology = topology
        self.timers = run.timers
        self.datasets = datasets
        self.progress = TrainingProgress()
        self.global_batch_size = config.global_batch(topology.dp.size)
        self.num_microbatches = config.num_microbatches(topology.dp.size)
        self.saver = Saver(config.checkpoint, topology, run.lease)
        with self.timers("model-and-optimizer-setup"):
            store = WeightGradientStore() if SCHEDULES[config.parallel.schedule].splits_backward else None
            fuses = weight_gradient_fusion(config, topology).is_on
            is_offloaded = config.recompute.cpu_offload_activations > 0
            self.activation_offload = ActivationOffload(topology.device) if is_offloaded else None
            self.chunks = build_chunks(
                config,
                topology,
                store,
                fuses_weight_gradients=fuses,
                offload=self.activation_offload,
                build_stage=run.providers.model,
            )
            self.gathering = choose_weight_gathering(config, topology)
            self.optimizer = build_optimizer(
                self.chunks,
                config,
                topology,
                fuses_weight_gradients=fuses,
                keeps_weights=self.gathering.keeps_weights,
            )
        self.pipeline = build_pipeline(self.chunks, config, topology, store, self.optimizer.run_stored)
        assert datasets.train is not None
        # A masked batch is read whole before it runs: its samples are prepared during the previous batch.
        num_ahead = self.num_microbatches if run.samples.are_masked else 0
        self.load_batch = BatchLoader(
            datasets.train,
            config.training.micro_batch_size,
            topology,
            run.samples,
            max(NUM_AHEAD, num_ahead),
        )
        self.train_step = TrainStep(
            run, self.pipeline, self.optimizer, self.load_batch, self.saver.before_update
        )
        self.evaluator = Evaluator(run, self.chunks, self.pipeline)
        self._is_unchecked = is_own(run.providers.model)
        if self.timers.level > 0:
            for observers in self.observer_lists():
                observers.append(self.timers)

    def step(self) -> StepResult:
        """Train one iteration and advance the progress."""
        for chunk in self.chunks:
            chunk.train()
        result = self.train_step(self.progress)
        if self._is_unchecked:
            self._is_unchecked = False
            check_first_iteration(self.optimizer.unreached, result.loss, self.topology)
        self.progress = self.progress.after(
            result.plan.num_samples,
            skipped=result.skipped,
            is_nan=not result.plan.is_excluded and not math.isfinite(result.loss),
            losses=result.losses_to_keep,
        )
        return result

    def evaluate(
        self, dataset: Dataset, first_sample: int, before_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Return the mean of each loss over the global batches of an evaluation; see `Evaluator`."""
        return self.evaluator(dataset, first_sample, before_batch)

    def observer_lists(self) -> list[list[Any]]:
        """Return the lists to which an observer of all events on this rank is appended."""
        topology = self.topology
        axes = (topology.pp, topology.tp, topology.dp, topology.world)
        return [self.pipeline.observers, self.optimizer.observers, *(axis.observers for axis in axes)]

    def tensors(self) -> dict[str, Tensor | ParameterShard]:
        """Return this rank's tensors in a checkpoint, by name: views of weights and optimizer state."""
        self.optimizer.finish_weights()
        weights: dict[str, Tensor | ParameterShard] = {
            f"model.{name}": tensor for name, tensor in self.optimizer.weights().items()
        }
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}

    def saved_tensors(self) -> dict[str, Tensor | ParameterShard]:
        """Return the tensors that this run's checkpoints hold: only the weights with --no-save-optim."""
        tensors = self.tensors()
        if self.config.checkpoint.save_optim:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}

    def verify_data(self) -> None:
        """Check that no dataset's files have changed since they were read; every rank must call it.

        Raises:
            UserError: a file was changed or became unreadable; raised on every rank.
        """
        with self.topology.agreed():
            self.datasets.verify_files()

    def save(self, *, is_last: bool = False) -> None:
        """Save a checkpoint to the config's folder, or begin an asynchronous save; see `Saver`.

        Raises:
            UserError: a data file has changed; raised on every rank, and nothing is saved.
        """
        self.verify_data()
        with self.timers("save-checkpoint"):
            self.optimizer.check_state()
            self.saver.save(self._contents(), self.saved_tensors(), is_last=is_last)

    def save_local(self) -> None:
        """Make a non-persistent save, or begin an asynchronous one; see `Saver`."""
        self.verify_data()
        with self.timers("save-checkpoint-non-persistent"):
            self.optimizer.check_state()
            self.saver.save_local(self._contents(), self.tensors())

    def _contents(self) -> Contents:
        return Contents.of(self.progress, self.config, self.topology, self.datasets.record)

    def load(self) -> bool:
        """Resume from the latest checkpoint in the config's folder; return False if there is none yet."""
        assert self.config.checkpoint.load is not None
        with self.timers("load-checkpoint"):
            loaded = load_checkpoint(
                Path(self.config.checkpoint.load),
                self.tensors(),
                self.config,
                self.topology,
                self.saver.local,
                self.datasets.record,
            )
            if loaded is not None:
                self.optimizer.seal_state()
        if loaded is None:
            return False
        for notice in loaded.notices:
            log.warning("%s", notice)
        self.progress, self.config = loaded.progress, loaded.config
        self.train_step.plan_iteration = IterationPlanner(self.config, self.topology.dp.size)
        return True

    def close(self, *, waits: bool = True) -> None:
        """Stop reading training data ahead; see `BatchLoader.close`. A second call does nothing."""
        self.load_batch.close(waits=waits)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(waits=error is None)


def start_trainer(
    config: Config,
    topology: Topology,
    timers: Timers | None = None,
    providers: Providers | None = None,
    lease: FolderLease | None = None,
) -> Trainer:
    """Create a trainer from a config: resolve the run, build its datasets and its model.

    Args:
        providers: builders of your own model and datasets; by default the config's are used.
        lease: lease on the checkpoint folder, from `hold_folder`, if the run saves.
    """
    run = resolve_run(config, topology, timers, lease, providers)
    warn_if_unverified(run)
    return Trainer(run, build_data(run))
