"""What one rank holds, and what an iteration of it does: counted while the real code runs, on any device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megalite.config import Config
from megalite.data.build import DatasetSplits
from megalite.dryrun.live_bytes import LiveBytes
from megalite.dryrun.traffic import Call, Traffic
from megalite.optim.optimizer import Optimizer
from megalite.pipeline.action import Action
from megalite.topology import Topology
from megalite.train.chunks import named_parameters
from megalite.train.telemetry.timers import Timers
from megalite.train.trainer import Trainer


@dataclass(frozen=True)
class Buffers:
    """Bytes of what a rank holds from one iteration to the next, padding included.

    Attributes:
        weights: as the model computes with them.
        gradients: their sums.
        main_weights: those in fp32, where the model's are rounded.
        moments: of Adam.
    """

    weights: int
    gradients: int
    main_weights: int
    moments: int

    @staticmethod
    def of(optimizer: Optimizer) -> Buffers:
        """Those of an optimizer with whole weights."""
        states = optimizer.states
        return Buffers(
            weights=sum(state.bucket.weight.nbytes for state in states),
            gradients=sum(each.summed.untyped_storage().nbytes() for each in optimizer.gradients),
            main_weights=sum(state.main.nbytes for state in states if state.has_own_main),
            moments=sum(moment.nbytes for state in states for moment in state.moments.values()),
        )

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.main_weights + self.moments


@dataclass(frozen=True)
class Counts:
    """What one rank of a layout comes to.

    Attributes:
        num_parameters: of this rank.
        calls: collectives and messages of an iteration, and how often each is made.
        actions: what its part of the pipeline runs in an iteration, in order.
        peak_bytes: the most that tensors held at one time in the iteration, beside the buffers.
    """

    num_parameters: int
    buffers: Buffers
    calls: Counter[Call]
    actions: tuple[Action, ...]
    peak_bytes: int


class _Noted:
    """An observer of a pipeline that keeps its actions."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def begins(self, what: Action) -> None:
        self.actions.append(what)

    def ends(self, what: Action) -> None:
        pass


def count_iteration(config: Config, topology: Topology, datasets: DatasetSplits) -> Counts:
    """Builds this rank's part of a run, trains the first iteration, and tells what that took.

    Args:
        config: validated, its vocabulary's size known; no ZeRO stage 3.
        topology: of a run, or a fake one.
        datasets: what is trained on.
    """
    noted = _Noted()
    with LiveBytes() as live, Trainer(config, topology, datasets, Timers()) as trainer:
        assert isinstance(trainer.optimizer, Optimizer), "weights that are shared out"
        trainer.pipeline.observers.append(noted)
        held = live.peak = live.now
        with Traffic(topology) as traffic:
            trainer.step()
    return Counts(
        sum(parameter.numel() for _, parameter in named_parameters(trainer.chunks)),
        Buffers.of(trainer.optimizer),
        traffic.calls,
        tuple(noted.actions),
        live.peak - held,
    )
