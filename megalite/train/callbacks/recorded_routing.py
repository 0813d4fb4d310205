"""Record the experts of each token of a run, and send the tokens of another run to them.

Shapes: s tokens of a rank's samples, b microbatch, n samples of a rank in an iteration, e experts, k experts
of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.routing_files import (
    IterationFolder,
    RecordedExperts,
    recorded_iterations,
    tensors_of_file,
)
from megalite.config import ModelConfig
from megalite.data.batch_loader import microbatch_samples
from megalite.distributed.collectives import all_reduce
from megalite.model.experts import Router
from megalite.model.routing_record import ChoiceObserver, ChoiceRecorder, ChoiceReplayer
from megalite.optim.expert_balance import sum_over_tokens
from megalite.train.iteration_plan import IterationPlan
from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError
from megalite.utils.files import make_writable
from megalite.utils.log import log


class RoutingRecording(Callback):
    """Record of the experts of each token in the folder of --record-routing."""

    def on_start(self, loop: TrainingLoop) -> None:
        trainer = loop.trainer
        assert trainer.config.logging.record_routing is not None
        self._folder = Path(trainer.config.logging.record_routing)
        with trainer.topology.agreed():
            make_writable(self._folder, "--record-routing")
        check_routers(trainer, "--record-routing")

    def before_step(self, loop: TrainingLoop) -> None:
        self._recorders: dict[str, ChoiceRecorder] = {}
        if loop.trainer.config.logging.records_routing(loop.next_iteration):
            self._recorders = {name: ChoiceRecorder() for name in routers_of(loop.trainer)}
            observe_choices(loop.trainer, self._recorders)

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        observe_choices(loop.trainer, {})

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        plan = result.plan
        if loop.trainer.config.logging.records_routing(plan.iteration) and not plan.is_excluded:
            samples = range(plan.first_sample, plan.first_sample + plan.num_samples)
            folder = IterationFolder.of(self._folder, plan.iteration, samples)
            write_routing(folder, self._recorders, loop.trainer)


def write_routing(folder: IterationFolder, recorders: Mapping[str, ChoiceRecorder], trainer: Trainer) -> None:
    """Write the experts of an iteration; a collective.

    Raises:
        UserError: a file cannot be written; raised on every rank.
    """
    topology = trainer.topology
    # Without sequence parallelism, the ranks along tp route the same tokens.
    num_copies = 1 if trainer.config.parallel.sequence_parallel else topology.tp.size
    with topology.agreed(), _written(folder):
        if topology.rank == 0:
            folder.clear()
    with topology.agreed(), _written(folder):
        if num_copies == 1 or topology.tp.rank == 0:
            folder.write(topology.rank, topology.world_size // num_copies, _tensors(recorders))


@contextmanager
def _written(folder: IterationFolder) -> Iterator[None]:
    """Raise a UserError if the block cannot write to the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--record-routing {folder.path}: {error.strerror}") from None


def _tensors(recorders: Mapping[str, ChoiceRecorder]) -> dict[str, Tensor]:
    """Return the tensors of this rank's file; an empty one if its stage has no router."""
    found = {name: recorder.by_sample() for name, recorder in recorders.items()}
    experts = {name: of_layer for name, (_, _, of_layer) in found.items()}
    for samples, positions, _ in found.values():  # all of them route the same tokens
        return tensors_of_file(samples, positions, experts)
    return tensors_of_file(torch.empty(0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.int64), experts)


class RoutingReplay(Callback):
    """Replay that sends tokens to the experts in the folder of --replay-routing-from."""

    def on_start(self, loop: TrainingLoop) -> None:
        trainer = loop.trainer
        assert trainer.config.training.replay_routing_from is not None
        with trainer.topology.agreed():
            self._recorded = recorded_iterations(Path(trainer.config.training.replay_routing_from))
        check_routers(trainer, "--replay-routing-from")
        first, last = self._recorded[0].samples[0], self._recorded[-1].samples[-1]
        num = len(self._recorded)
        log.info("replaying the experts of %d recorded iterations, samples %d to %d", num, first, last)

    def before_step(self, loop: TrainingLoop) -> None:
        trainer = loop.trainer
        plan = trainer.train_step.plan_iteration(trainer.progress)
        self._replayers: dict[str, ChoiceReplayer] = {}  # none if the iteration is not recorded
        samples = range(plan.first_sample, plan.first_sample + plan.num_samples)
        with trainer.topology.agreed():
            recorded = self._read(samples, trainer.config.model)
        if recorded is not None:
            self._replayers = {name: ChoiceReplayer(name, recorded) for name in routers_of(trainer)}
            observe_choices(trainer, self._replayers)

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        observe_choices(loop.trainer, {})  # until now, a NaN may be located by running the iteration again
        interval = loop.trainer.config.logging.log_interval
        has_choices = self._replayers and not result.plan.is_excluded
        if has_choices and (loop.is_ending or is_due(loop.iteration, interval)):
            num_others, num_tokens = count_others(self._replayers, result.plan, loop.trainer)
            log.info(
                "iteration %d: recorded experts replace others for %d of %d tokens, counted in each layer",
                *(loop.iteration, num_others, num_tokens),
            )

    def _read(self, samples: range, model: ModelConfig) -> RecordedExperts | None:
        """Return the experts of an iteration's samples; None if none are recorded.

        Raises:
            UserError: only some of them are recorded, or files are missing or damaged.
        """
        found = [each for each in self._recorded if each.has_some_of(samples)]
        if not found:
            return None
        recorded = RecordedExperts(found, model.seq_length, model.num_experts or 0)
        if missing := recorded.missing(samples):
            raise UserError(
                f"--replay-routing-from has {len(samples) - len(missing)} of the samples {samples[0]} to "
                f"{samples[-1]} of an iteration, not sample {missing[0]}: pass the --global-batch-size and "
                "the iterations of the run that recorded them"
            )
        return recorded


def count_others(
    replayers: Mapping[str, ChoiceReplayer], plan: IterationPlan, trainer: Trainer
) -> tuple[int, int]:
    """Return how many tokens got other experts than routers select, and of how many; a collective."""
    topology, size = trainer.topology, trainer.config.training.micro_batch_size
    ranks = topology.sample_ranks
    counts = torch.zeros(2, dtype=torch.int64, device=topology.device)
    for index in range(plan.num_microbatches):  # an audit also runs samples of other ranks
        samples = microbatch_samples(plan.first_sample, index, size, ranks.rank, ranks.size).tolist()
        for each in replayers.values():
            is_other = torch.stack([each.gaps[sample] for sample in samples]) != -math.inf
            counts += torch.stack((is_other.sum(), torch.ones_like(is_other).sum()))
    for router in list(routers_of(trainer).values())[:1]:
        sum_over_tokens(counts, router.weight, topology)
    all_reduce(counts, topology.pp, of="replayed tokens")
    num_others, num_tokens = topology.to_host(counts).tolist()
    return num_others, num_tokens


def routers_of(trainer: Trainer) -> dict[str, Router]:
    """Return the routers of this rank by their names in the model."""
    return {
        name: module
        for chunk in trainer.chunks
        for name, module in chunk.named_modules()
        if isinstance(module, Router)
    }


def observe_choices(trainer: Trainer, observers: Mapping[str, ChoiceObserver]) -> None:
    """Let routers ask their observer by name, and those without one select by themselves."""
    for name, router in routers_of(trainer).items():
        router.choice_observer = observers.get(name)


def check_routers(trainer: Trainer, flag: str) -> None:
    """Check that the model has a router that can be observed; a collective.

    Raises:
        UserError: it has none.
    """
    topology = trainer.topology
    count = torch.tensor([len(routers_of(trainer))], device=topology.device)
    all_reduce(count, topology.pp, of="number of routers")
    if not topology.to_host(count).item():
        raise UserError(
            f"{flag}: the model has no megalite.model.experts.Router: pass --num-experts, or remove {flag}"
        )
