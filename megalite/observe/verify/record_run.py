"""Run a config for a few iterations in one layout, and record values that must not depend on the layout."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megalite.config import CheckpointConfig, Config
from megalite.data.microbatch import Microbatch
from megalite.data.samples import Samples
from megalite.distributed.local_ranks import LocalRanks, RankError, run_ranks
from megalite.distributed.topology import Topology
from megalite.model.routing_record import ChoiceRecorder, ChoiceReplayer, RoutedToken, RoutingRecord
from megalite.tensor_parallel.parameter_spec import gather_full, spec_of
from megalite.train.callbacks.metrics_logging import begin_counts, end_counts, loads_of_layers
from megalite.train.callbacks.recorded_routing import observe_choices, routers_of
from megalite.train.global_batch import Evaluator
from megalite.train.model_chunks import named_parameters, saved_buffers
from megalite.train.run_context import Providers, RunContext, build_data, resolve_run
from megalite.train.telemetry.metrics import LayerLoads
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError


@dataclass(frozen=True)
class RunRecord:
    """Results of a run.

    Attributes:
        terms: terms of the loss of each iteration, by name; none if --iterations-to-skip excludes it.
        grad_norms: gradient norm of each iteration; 0 if it is excluded.
        gradients: gradients of the first iteration that updates the weights, as full tensors by parameter.
        weights: weights and buffers after the last iteration, as full tensors by name, and the averages of
            weights as ``ema.NAME``.
        evaluation: mean of each term of the loss in an evaluation with masks; none in a quick record.
        expert_use: figures of the routers in the last iteration, as a log has them; none in a quick record.
        num_before: iterations before the first recorded one, of the run that this one resumes.
        routing: experts of the tokens, if they were recorded.
        rerouted: tokens that went to recorded experts instead of their own; see `ChoiceReplayer`.
    """

    terms: list[Mapping[str, float]]
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    routing: RoutingRecord | None = None
    rerouted: Mapping[RoutedToken, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    expert_use: Mapping[str, float] = field(default_factory=dict)
    num_before: int = 0

    @property
    def losses(self) -> list[float]:
        """Return the loss of each iteration."""
        return [sum(terms.values()) for terms in self.terms]


def record_run(
    config: Config,
    num_iterations: int,
    world_size: int,
    providers: Providers | None = None,
    routing: RoutingRecord | None = None,
    ranks: LocalRanks | None = None,
    *,
    is_quick: bool = True,
) -> RunRecord:
    """Train `num_iterations` iterations on `world_size` ranks of this machine.

    Args:
        providers: providers of a custom model and datasets, from a module that the ranks can import.
        routing: experts to which tokens go; an empty record to record them, on one rank; None for neither.
        ranks: ranks that stay alive between runs; by default new ones are started.
        is_quick: do not evaluate, save and resume; see `record_rank`.

    Raises:
        UserError: the config's data or tokenizer cannot be read, or it skips all iterations.
    """
    training = config.training
    if all(map(training.is_skipped, range(1, num_iterations + 1))):
        raise UserError(
            f"--iterations-to-skip {' '.join(training.iterations_to_skip)} skips the first {num_iterations} "
            "iterations: pass more --iterations, or remove it"
        )
    stages = (run_ranks if ranks is None else ranks.run)(
        record_rank,
        config.mesh,
        world_size,
        config,
        num_iterations,
        providers,
        routing,
        is_quick,
        timeout=3600.0,
    )
    return merge_stages(stages)


def merge_stages(stages: Sequence[RunRecord]) -> RunRecord:
    """Return the record of a run from the records of all its ranks."""
    gradients: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for stage in stages:
        gradients.update(stage.gradients)
        weights.update(stage.weights)
    rerouted = {token: gap for stage in stages for token, gap in stage.rerouted.items()}
    first = stages[0]
    return dataclasses.replace(first, gradients=gradients, weights=weights, rerouted=rerouted)


def record_rank(
    topology: Topology,
    config: Config,
    num_iterations: int,
    providers: Providers | None = None,
    routing: RoutingRecord | None = None,
    is_quick: bool = True,
) -> RunRecord:
    """Train on this rank, and return the gradients and weights of its stage in host memory.

    Args:
        is_quick: do not evaluate, save and resume. Otherwise --save is where the run saves after half of its
            iterations, and --load what it resumes.
    """
    run = resolve_run(config, topology, providers=providers)
    evaluation, expert_use = dict[str, float](), dict[str, float]()
    with Trainer(run, build_data(run)) as trainer:
        if not is_quick and config.checkpoint.load is not None:
            trainer.load()
        num_before = trainer.progress.iteration
        observers = {} if routing is None else _observe_choices(trainer, routing)
        gradients: dict[str, Tensor] = {}
        results: list[StepResult] = []

        def keep_first() -> None:
            if all(result.skipped for result in results):
                gradients.update(gather_stage(trainer, trainer.optimizer.gradient))

        trainer.train_step.before_update.append(keep_first)  # before they are clipped
        counted = num_iterations - 1 if not is_quick and config.model.has_experts else None
        for iteration in range(num_before, num_iterations):
            if not is_quick and config.checkpoint.save is not None and iteration == (num_iterations + 1) // 2:
                trainer.save(is_last=True)
            if iteration == counted:
                begin_counts(trainer)
            # As on a GPU: the save must not depend on the queued iteration.
            results.append(trainer.step(queues_next=iteration + 1 not in (num_iterations, counted)))
        if counted is not None:
            expert_use = _figures(loads_of_layers(end_counts(trainer), trainer))
        trainer.optimizer.finish_weights()
        weights = gather_stage(trainer, trainer.optimizer.weight) | gather_buffers(trainer)
        if trainer.optimizer.averages is not None:
            with trainer.averaged_weights():
                trainer.optimizer.finish_weights()
                averages = gather_stage(trainer, trainer.optimizer.weight)
            weights |= {f"ema.{name}": average for name, average in averages.items()}
        if not is_quick:
            evaluation = _evaluate(trainer, run)
    losses = [r.losses for r in results]
    norms = [0.0 if r.plan.is_excluded else r.grad_norm for r in results]
    rerouted: dict[RoutedToken, float] = {}
    for name, observer in observers.items():
        if isinstance(observer, ChoiceReplayer):
            rerouted.update(observer.rerouted())
        elif routing is not None:
            samples, positions, experts = observer.by_sample()
            assert positions.shape[1] == positions.max() + 1, "a rank records whole samples"
            numbers = samples.tolist()
            routing.experts.update({(name, n): each for n, each in zip(numbers, experts, strict=True)})
    return RunRecord(losses, norms, gradients, weights, routing, rerouted, evaluation, expert_use, num_before)


def _figures(layers: Mapping[str, LayerLoads]) -> dict[str, float]:
    """Return the tokens of each expert and the other figures of each layer, by what they are."""
    figures: dict[str, float] = {}
    for layer, loads in layers.items():
        figures |= {f"tokens of expert {i} of {layer}": float(each) for i, each in enumerate(loads.tokens)}
        figures |= {f"{name} of the router of {layer}": each for name, each in loads.figures.items()}
    return figures


_NUM_EVALUATED = 2
"""Number of global batches of an evaluation."""


class _PartlyMasked:
    """Mask of the last tokens of a run's samples, of each another number."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def marked(self, microbatch: Microbatch) -> Microbatch:
        whole = self._samples.marked(microbatch)
        if whole.label_positions is not None or self._samples.are_masked:
            return whole  # the samples have masks of their own
        length, numbers = whole.tokens.shape[1], whole.sample_numbers
        num_with_loss = 1 + numbers * 5 % 7 * length // 8  # [b]
        mask = torch.arange(length, device=whole.tokens.device) < num_with_loss[:, None].to(
            whole.tokens.device
        )
        return dataclasses.replace(
            whole, loss_mask=mask if whole.loss_mask is None else whole.loss_mask & mask
        )


def _evaluate(trainer: Trainer, run: RunContext) -> dict[str, float]:
    """Return the losses of an evaluation on training samples, of which each replica has other masks."""
    config, dataset = trainer.config, trainer.datasets.train
    assert dataset is not None
    num_samples = config.num_samples(trainer.topology.sample_ranks.size)
    num_batches = min(_NUM_EVALUATED, num_samples // trainer.global_batch_size)
    if num_batches == 0:  # a ramp-up of the batch size, which these iterations do not end
        return {}
    data = config.data if run.samples.are_masked else dataclasses.replace(config.data, eod_mask_loss=True)
    masked = dataclasses.replace(
        run,
        config=dataclasses.replace(config, data=data),
        samples=cast(Samples, _PartlyMasked(run.samples)),
    )
    evaluator = Evaluator(masked, trainer.chunks, trainer.pipeline)
    evaluator.num_batches = num_batches
    return evaluator(dataset, first_sample=0)


def _observe_choices(trainer: Trainer, routing: RoutingRecord) -> dict[str, ChoiceRecorder | ChoiceReplayer]:
    """Let the routers record their choices if the record is empty, or replay it; return their observers."""
    observers: dict[str, ChoiceRecorder | ChoiceReplayer] = {
        name: ChoiceReplayer(name, routing) if routing.experts else ChoiceRecorder()
        for name in routers_of(trainer)
    }
    observe_choices(trainer, observers)
    return observers


def gather_stage(trainer: Trainer, local: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Gather full tensors without vocabulary padding on one rank of each pipeline stage."""
    topology = trainer.topology
    full: dict[str, Tensor] = {}
    for name, parameter in named_parameters(trainer.chunks):
        tensor = gather_full(local(name), spec_of(parameter), topology)
        spec = spec_of(parameter)
        full[name] = tensor[: spec.used_shape[0]].clone().cpu()
    return full if topology.is_first_outside(topology.pp) else {}


def gather_buffers(trainer: Trainer) -> dict[str, Tensor]:
    """Gather the full buffers that checkpoints hold on one rank of each pipeline stage, in fp64."""
    topology = trainer.topology
    full = {
        name: gather_full(buffer.tensor.view(buffer.shape), buffer.spec, topology).double().cpu()
        for name, buffer in saved_buffers(trainer.chunks, topology).items()
    }
    return full if topology.is_first_outside(topology.pp) else {}


Record = Callable[[Config, int], RunRecord]
"""Records the run of a config on a number of ranks; it saves and resumes as the config says."""


class SaveChain:
    """Runs of which each resumes what the one before has saved.

    Args:
        folder: folder of the saves, which are as large as two checkpoints; None to save nothing.
    """

    def __init__(self, folder: Path | None, record: Record) -> None:
        self._folder = folder
        self._record = record
        self._last: tuple[str, Path] | None = None
        self._num_saves = 0

    def run(self, name: str, config: Config, world_size: int) -> tuple[RunRecord, RunRecord | str | None]:
        """Record a run and its save, then what this layout makes of the save of the run before.

        Args:
            name: what to call the run.

        Returns:
            The run, and what `resume` returns.

        Raises:
            UserError: the config cannot run; the next run then resumes the save before it.
        """
        if self._folder is None:
            return self._record(config, world_size), None
        self._num_saves += 1
        own = self._folder / str(self._num_saves)
        own.mkdir()
        run = self._record(_with(config, CheckpointConfig(save=str(own))), world_size)
        resumed = self.resume(config, world_size)
        self._last = name, own
        return run, resumed

    @property
    def last(self) -> str:
        """Return the name of the run whose save is resumed next."""
        return "" if self._last is None else self._last[0]

    def resume(self, config: Config, world_size: int) -> RunRecord | str | None:
        """Record the run that resumes the last save, and delete the save.

        Returns:
            The run, or the error that ends it; None if there is no save.
        """
        if self._last is None:
            return None
        (_, folder), self._last = self._last, None
        try:
            return self._record(_with(config, CheckpointConfig(load=str(folder))), world_size)
        except (RankError, UserError) as error:
            return f"the run ends with {str(error).strip().splitlines()[-1]}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _with(config: Config, checkpoint: CheckpointConfig) -> Config:
    return dataclasses.replace(config, checkpoint=checkpoint)
