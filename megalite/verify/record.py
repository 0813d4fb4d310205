"""Runs a config for a few iterations in one layout and records what must not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megalite.config import Config
from megalite.local_ranks import run_ranks
from megalite.parallel.shard import gather_full, spec_of
from megalite.topology import Topology
from megalite.train.chunks import named_parameters
from megalite.train.prepare import build_data, resolve_vocabulary
from megalite.train.telemetry.timers import Timers
from megalite.train.trainer import Trainer


@dataclass(frozen=True)
class Record:
    """What a run came to.

    Attributes:
        losses, grad_norms: of each iteration.
        gradients: of the first iteration, full tensors by parameter.
        weights: after the last iteration, full tensors by parameter.
    """

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def record_run(config: Config, num_iterations: int, world_size: int) -> Record:
    """Trains `num_iterations` iterations on `world_size` ranks of this machine.

    Raises:
        UserError: the config's data or tokenizer cannot be read.
    """
    stages = run_ranks(_record_rank, config.parallel, world_size, config, num_iterations, timeout=3600.0)
    gradients: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for stage in stages:
        gradients.update(stage.gradients)
        weights.update(stage.weights)
    return Record(stages[0].losses, stages[0].grad_norms, gradients, weights)


def _record_rank(topology: Topology, config: Config, num_iterations: int) -> Record:
    config = resolve_vocabulary(config, topology)
    timers = Timers()
    with Trainer(config, topology, build_data(config, topology, timers), timers) as trainer:
        # Dropout by counter makes this pass the same as the first iteration's.
        trainer.train_step.gradients(trainer.progress.consumed_samples)
        gradients = _gather(trainer, trainer.optimizer.gradient)
        results = [trainer.step() for _ in range(num_iterations)]
        trainer.optimizer.finish_weights()
        weights = _gather(trainer, trainer.optimizer.weight)
    return Record([r.loss for r in results], [r.grad_norm for r in results], gradients, weights)


def _gather(trainer: Trainer, local: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The full tensors of a rank's chunks, without the vocabulary's padding, on the first such rank."""
    topology, vocab_size = trainer.topology, trainer.config.model.vocab_size
    full: dict[str, Tensor] = {}
    for name, parameter in named_parameters(trainer.chunks):
        tensor = gather_full(local(name), spec_of(parameter), topology)
        is_vocabulary = name.startswith(("embedding.word.", "output."))
        full[name] = tensor[:vocab_size].clone() if is_vocabulary else tensor
    return full if topology.tp.is_first and topology.dp.is_first else {}
