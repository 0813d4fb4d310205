"""Record megalite's own run on one rank: the weights to start from, the samples, and a second opinion."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config import Config
from megalite.data.batch.microbatch import LM_LOSS
from megalite.distributed.topology import Topology
from megalite.observe.verify.record_run import gather_buffers, gather_stage
from megalite.train.run_context import build_data, resolve_run
from megalite.train.trainer import Trainer

Tensors = dict[str, Tensor]


class OwnRun(NamedTuple):
    """Megalite's run on one rank.

    Attributes:
        start, weights: parameters and saved buffers, before the first iteration and after the last one.
        gradients: those of the first iteration, by parameter.
        samples: ``[iterations, global batch, sequence + 1]``.
        reports: figures of each iteration, by the names that adapters use.
    """

    start: Tensors
    samples: Tensor
    gradients: Tensors
    weights: Tensors
    reports: list[dict[str, float]]


def record_ours(topology: Topology, config: Config, num_iterations: int) -> OwnRun:
    """Train on this rank."""
    run = resolve_run(config, topology)
    gradients: Tensors = {}
    samples: list[Tensor] = []
    reports: list[dict[str, float]] = []
    with Trainer(run, build_data(run)) as trainer:

        def keep_gradients() -> None:
            if not gradients:
                gradients.update(gather_stage(trainer, trainer.optimizer.gradient))

        start = gather_stage(trainer, trainer.optimizer.weight) | gather_buffers(trainer)
        trainer.train_step.before_update.append(keep_gradients)
        for _ in range(num_iterations):
            samples.append(_samples(trainer))
            result = trainer.step()
            reports.append(
                {
                    "loss": result.losses[LM_LOSS],
                    "gradient norm": result.grad_norm,
                    "learning rate": result.plan.learning_rate,
                    **{name: value for name, value in result.losses.items() if name != LM_LOSS},
                }
            )
        trainer.optimizer.finish_weights()
        weights = gather_stage(trainer, trainer.optimizer.weight) | gather_buffers(trainer)
        return OwnRun(start, torch.stack(samples), gradients, weights, reports)


def _samples(trainer: Trainer) -> Tensor:
    """Return the tokens of the next global batch."""
    first = trainer.progress.consumed_samples
    batches = [trainer.load_batch.load_for_replica(first, i, 0) for i in range(trainer.num_microbatches)]
    return torch.cat([torch.cat([each.tokens, each.labels[:, -1:]], dim=1) for each in batches])
