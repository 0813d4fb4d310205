"""The trainer of one rank: model, optimizer, pipeline, data, checkpoints and progress."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint.lease import FolderLease
from megalite.checkpoint.load import LoadPlan, load_checkpoint
from megalite.checkpoint.parameter_range import Tensors
from megalite.checkpoint.progress import TrainingProgress
from megalite.checkpoint.relayout import exchange, hold, load_local
from megalite.checkpoint.save import Contents
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.stored_run import StoredRun
from megalite.config import Config, check_config
from megalite.data.batch_loader import NUM_AHEAD, BatchLoader
from megalite.data.build_datasets import DatasetSplits
from megalite.data.gpt_dataset import Dataset
from megalite.data.microbatch import Microbatch
from megalite.distributed.axis import CHECKPOINT
from megalite.distributed.topology import Topology
from megalite.model.experts import Router
from megalite.model.stage import DTYPES, Stage, is_own_model
from megalite.optim.gradient_scale import DynamicLossScaler
from megalite.optim.weight_gathering import WeightGathering
from megalite.pipeline.executor import Pipeline, PointToPoint
from megalite.tensor_parallel.fp8 import Fp8Weights
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.train.gemm_epilogues import choose_gemm_epilogues
from megalite.train.global_batch import Evaluator, reads_whole_batches
from megalite.train.model_chunks import ChunkResources, build_chunks, build_optimizer, saved_buffers
from megalite.train.own_model import check_first_iteration, warn_if_unverified
from megalite.train.run_context import Providers, RunContext, build_data, resolve_run
from megalite.train.stopping import Stopped
from megalite.train.telemetry.timers import Timers
from megalite.train.train_step import IterationPlanner, StepResult, TrainStep
from megalite.utils.log import log
from megalite.utils.torch_private import forget_compiled_code


def build_pipeline(
    chunks: Sequence[Stage],
    config: Config,
    topology: Topology,
    resources: ChunkResources | None = None,
) -> Pipeline[Microbatch]:
    """Create the executor of this rank's chunks.

    Args:
        resources: those of `build_chunks`; none are needed to evaluate.
    """
    resources = resources or ChunkResources()
    exchange = PointToPoint(topology.pp, DTYPES[config.model.params_dtype], topology.device)
    return Pipeline(
        chunks,
        exchange,
        config.parallel.schedule,
        resources.store,
        resources.overlap_slots,
        resources.backward_samples.set,
    )


class Trainer:
    """Trains one rank's part of the model.

    Use it in a ``with`` block, or call `close`: it reads data ahead in a thread.

    Args:
        run: objects that all parts of the run share.
        datasets: datasets of the run; the training split must exist.
        gathering: how long ZeRO stage 3 keeps gathered weights, such as the result of
            `RankPlan.weight_gathering`; by default only as long as the config says.

    Attributes:
        config: the run's config; resuming may change it.
        activation_offload: holds their activations in host memory; None if the config offloads none.
        progress: iterations and samples so far; `step` advances it.
        gathering: how long ZeRO stage 3 keeps gathered weights.
        epilogues: where GELU and bias gradients are computed on a GPU, for the log.
        can_queue_next: whether an iteration's gradients do not depend on the results of the one before.
            They do with a dynamic loss scale. And a model of your own with buffers may change them in
            forward, which could not be undone.
        global_batch_size: samples per batch after the ramp-up, and per batch in an evaluation.
    """

    def __init__(
        self, run: RunContext, datasets: DatasetSplits, gathering: WeightGathering | None = None
    ) -> None:
        self.topology = run.topology
        self.timers = run.timers
        self.progress = TrainingProgress()
        self.saver = Saver(run.config.checkpoint, run.topology, run.lease)
        self._build(run, datasets, gathering)

    def _build(
        self, run: RunContext, datasets: DatasetSplits, gathering: WeightGathering | None = None
    ) -> None:
        """Build what depends on the layout."""
        config, topology = run.config, run.topology
        self._run = run
        self.config = config
        self.datasets = datasets
        self.gathering = gathering or WeightGathering.configured(config.parallel)
        self.global_batch_size = config.global_batch(topology.sample_ranks.size)
        self.num_microbatches = config.num_microbatches(topology.sample_ranks.size)
        with self.timers("model-and-optimizer-setup"):
            resources = ChunkResources.of(config, topology)
            self.activation_offload = resources.offload
            self.chunks = build_chunks(config, topology, resources, run.providers.model)
            for chunk in self.chunks:
                for length in config.seq_lengths[:-1]:  # the last one's tables are built with the layers
                    chunk.prepare_tables(length)
            self.optimizer = build_optimizer(
                self.chunks,
                config,
                topology,
                fuses_weight_gradients=resources.fuses_weight_gradients,
                keeps_weights=self.gathering.keeps_weights,
            )
            is_gpu = topology.device.type == "cuda"
            self.epilogues = choose_gemm_epilogues(self.chunks, config, topology) if is_gpu else ""
        self.pipeline = build_pipeline(self.chunks, config, topology, resources)
        assert datasets.train is not None
        self.load_batch = _batch_loader(run, datasets.train, self.num_microbatches)
        self.train_step = TrainStep(
            run,
            self.pipeline,
            self.optimizer,
            self.load_batch,
            resources.fp8_weights or Fp8Weights(),
            self.chunks[0].loss_names,
        )
        if config.checkpoint.async_save:
            self.train_step.before_update.append(self.saver.before_update)
        self.evaluator = Evaluator(run, self.chunks, self.pipeline)
        changed_by_updates = Router, ColumnParallelLinear, RowParallelLinear
        changes_buffers = any(
            next(module.buffers(recurse=False), None) is not None
            for chunk in self.chunks
            for module in chunk.modules()
            if not isinstance(module, changed_by_updates)
        )
        self.can_queue_next = not (changes_buffers or isinstance(self.optimizer.scaler, DynamicLossScaler))
        self._is_unchecked = is_own_model(run.providers.model) and topology.device.type != "meta"
        if self.timers.level > 0:
            topology.observers.append(self.timers)
        self._is_open = True

    def step(self, *, queues_next: bool = False) -> StepResult:
        """Train one iteration and advance the progress.

        Args:
            queues_next: let a GPU begin the next iteration before the host waits for this one's results, if
                `can_queue_next`. The results are the same. Until the next call, gradients are those of the
                next iteration, and you may evaluate, save, and read weights and state, but change nothing.
        """
        for chunk in self.chunks:
            chunk.train()
        queues_next = queues_next and self.can_queue_next and not self._is_unchecked
        result = self.train_step(self.progress, queues_next=queues_next)
        if self._is_unchecked:
            self._is_unchecked = False
            buffers = saved_buffers(self.chunks, self.topology)
            check_first_iteration(self.optimizer.unreached, result.loss, buffers, self.topology)
        self.progress = self.progress.after(
            result.plan.num_samples,
            skipped=result.skipped,
            is_nan=not result.plan.is_excluded and not math.isfinite(result.loss),
            losses=result.losses_to_keep,
        )
        return result

    def evaluate(
        self,
        dataset: Dataset,
        first_sample: int,
        before_batch: Callable[[], None] = lambda: None,
        *,
        num_samples: int | None = None,
    ) -> dict[str, float]:
        """Return the mean of each loss over the samples of an evaluation; see `Evaluator`."""
        self.train_step.queued.clear()  # forward would raise the largest scores for QK-clip
        return self.evaluator(dataset, first_sample, before_batch, num_samples=num_samples)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Let forward use the averages of --ema-decay in the block, and afterwards the weights again.

        Every rank must enter it. In the block, call only `evaluate`. Only a `Stopped`, which all ranks raise
        together, may end the block early and let the run continue.
        """
        optimizer = self.optimizer
        assert optimizer.averages is not None
        self.saver.before_update()
        optimizer.finish_weights()
        optimizer.averages.exchange()
        optimizer.gatherer.start()
        stopped: Stopped | None = None
        try:
            yield
        except Stopped as error:
            stopped = error
        optimizer.finish_weights()
        optimizer.averages.exchange()
        optimizer.gatherer.start()
        if stopped is not None:
            raise stopped

    def tensors(self) -> dict[str, Tensor | ParameterShard]:
        """Return this rank's tensors in a checkpoint, by name: views of the model and the optimizer state."""
        self.optimizer.finish_weights()
        model = self.optimizer.weights() | saved_buffers(self.chunks, self.topology)
        weights: dict[str, Tensor | ParameterShard] = {
            f"model.{name}": tensor for name, tensor in model.items()
        }
        averages = {} if self.optimizer.averages is None else self.optimizer.averages.shards()
        weights |= {f"ema.{name}": tensor for name, tensor in averages.items()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}

    def saved_tensors(self) -> dict[str, Tensor | ParameterShard]:
        """Return the tensors that this run's checkpoints hold: only weights with --no-save-optim."""
        tensors = self.tensors()
        if self.config.checkpoint.save_optim:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}

    def verify_data(self) -> None:
        """Check that no dataset's files have changed since they were read; every rank must call it.

        Raises:
            UserError: a file was changed or became unreadable; raised on every rank.
        """
        with self.topology.agreed():
            self.datasets.verify_files()

    def save(self, *, is_last: bool = False, callbacks: Mapping[str, str] | None = None) -> None:
        """Save a checkpoint to the config's folder, or begin an asynchronous save; see `Saver`.

        Args:
            callbacks: states of the run's callbacks, from `TrainingLoop.states`.

        Raises:
            UserError: a data file has changed; raised on every rank, and nothing is saved.
        """
        self.verify_data()
        with self.timers("save-checkpoint"):
            self.optimizer.check_state()
            self.saver.save(self._contents(callbacks), self.saved_tensors(), is_last=is_last)

    def save_local(self, callbacks: Mapping[str, str] | None = None) -> None:
        """Make a non-persistent save, or begin an asynchronous one; see `save` and `Saver`."""
        self.verify_data()
        with self.timers("save-checkpoint-non-persistent"):
            self.optimizer.check_state()
            self.saver.save_local(self._contents(callbacks), self.tensors())

    def _contents(self, callbacks: Mapping[str, str] | None) -> Contents:
        return Contents.of(self.progress, self.config, self.topology, self.datasets.record, callbacks)

    def load(self) -> LoadPlan | None:
        """Resume from the latest checkpoint in the config's folder.

        Returns:
            What was loaded; None if there is no checkpoint yet.
        """
        checkpoint = self.config.checkpoint
        assert checkpoint.load is not None
        with self.timers("load-checkpoint"):
            tensors = self.tensors()
            folder = StoredRun.at(checkpoint.load, checkpoint.save_stage) or Path(checkpoint.load)
            loaded, record = None, self.datasets.record
            if self.saver.local is not None:
                loaded = load_local(self.saver.local, folder, tensors, self.config, record)
            if loaded is None:
                loaded = load_checkpoint(folder, tensors, self.config, self.topology, record)
            if loaded is not None:
                self._seal(tensors)
        if loaded is None:
            return None
        for notice in loaded.notices:
            log.warning("%s", notice)
        self.progress, self.config = loaded.progress, loaded.config
        self.train_step.queued.clear()
        self.train_step.plan_iteration = IterationPlanner(self.config, self.topology.sample_ranks.size)
        return loaded

    def change_layout(
        self, config: Config, choose_gathering: Callable[[], WeightGathering] | None = None
    ) -> int:
        """Continue the run in another layout of the same ranks; every rank must call it between iterations.

        The weights and the optimizer state move through host memory: see `bytes_to_hold`. What was read from
        this trainer before, such as its chunks or its optimizer, is no longer trained, and its topology is
        changed in place.

        Args:
            config: config of the run in the new layout, such as `Layout.apply` returns.
            choose_gathering: called in the new layout, on every rank; see `Trainer`.

        Returns:
            The bytes that all ranks have sent to each other.

        Raises:
            UserError: the config cannot run on this number of ranks, or a data file has changed; raised on
                every rank, before the layout changes.
        """
        check_config(config, self.topology.world_size)
        with self.topology.events.during(CHECKPOINT):
            self.verify_data()
            self.saver.finish()
            self.optimizer.check_state()
            held = hold(self.tensors(), self.topology)
            self.close()
            # The device has no memory for two layouts.
            del self.chunks, self.optimizer, self.pipeline, self.train_step, self.evaluator
            del self.datasets, self.load_batch, self.activation_offload
            if self.config.training.compile:
                forget_compiled_code()
            gc.collect()
            torch.cuda.empty_cache()
            self.topology.change_layout(config.mesh)
            run = replace(self._run, config=config)
            self._build(run, build_data(run), choose_gathering() if choose_gathering is not None else None)
            tensors = self.tensors()
            num_sent = exchange(held, tensors, self.topology)
            self._seal(tensors)
        return num_sent

    def _seal(self, written: Tensors) -> None:
        """Accept new values of `tensors`, an earlier result."""
        self.optimizer.seal_state(
            {name.removeprefix("optimizer."): tensor for name, tensor in written.items()}
        )

    def close(self, *, waits: bool = True) -> None:
        """Stop reading training data ahead; the trainer cannot train again. A second call does nothing.

        See `BatchLoader.close`.
        """
        if not self._is_open:
            return
        self._is_open = False
        self.load_batch.close(waits=waits)
        if self.timers in self.topology.observers:
            self.topology.observers.remove(self.timers)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self.close(waits=error is None)


class LayoutChange(NamedTuple):
    """Change of the layout between two iterations.

    Attributes:
        before, after: the layouts, for people to read.
        num_bytes: bytes that all ranks have sent to each other.
        num_lost: ranks that were lost, if the layout changed for that reason.
        num_repeated: iterations that are trained again.
    """

    before: str
    after: str
    seconds: float
    num_bytes: int
    num_lost: int = 0
    num_repeated: int = 0


Relayout = Callable[[Trainer], LayoutChange]
"""Changes the layout of a trainer; every rank calls it."""


def _batch_loader(run: RunContext, dataset: Dataset, num_microbatches: int) -> BatchLoader:
    # A batch that is counted is read whole before it runs: its samples are prepared during the previous one.
    num_ahead = max(NUM_AHEAD, num_microbatches if reads_whole_batches(run) else 0)
    micro_batch_size = run.config.training.micro_batch_size
    num_later = run.config.model.mtp_num_layers
    count = run.config.sequences_per_sample
    return BatchLoader(dataset, micro_batch_size, run.topology, run.samples, num_ahead, num_later, count)


def start_trainer(
    config: Config,
    topology: Topology,
    timers: Timers | None = None,
    providers: Providers | None = None,
    lease: FolderLease | None = None,
    gathering: WeightGathering | None = None,
) -> Trainer:
    """Create a trainer from a config: resolve the run, build its datasets and its model.

    Args:
        providers: builders of your own model and datasets; by default the config's are used.
        lease: lease on the checkpoint folder, from `hold_folder`, if the run saves.
        gathering: see `Trainer`.
    """
    run = resolve_run(config, topology, timers, lease, providers)
    if is_own_model(run.providers.model):
        warn_if_unverified(run)
    return Trainer(run, build_data(run), gathering)
