"""What one rank holds, and what an iteration of it does: counted while the real code runs, on any device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalite.config import Config
from megalite.data.build import DatasetSplits
from megalite.dryrun.live_bytes import LiveBytes
from megalite.dryrun.repetition import Repetition
from megalite.dryrun.traffic import Call, Traffic
from megalite.log import log
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


PROGRESS_SECONDS = 5.0
"""Between two lines that say how far an iteration is."""


@dataclass(frozen=True)
class _Mark:
    """What has been counted when an action begins.

    Attributes:
        held: bytes that tensors hold then.
        peak: the most that they held since the mark before.
        calls: since the iteration's start.
    """

    held: int
    peak: int
    calls: Counter[Call]


class _Noted:
    """An observer of a pipeline that keeps its actions, and marks what was counted before some of them.

    Args:
        marked: numbers of the actions to mark.
        total: actions that will run, for the progress.
    """

    def __init__(self, live: LiveBytes, traffic: Traffic, marked: Sequence[int], total: int) -> None:
        self.actions: list[Action] = []
        self.marks: list[_Mark] = []
        self._live, self._traffic, self._marked, self._total = live, traffic, marked, total
        self._next_line = time.monotonic() + PROGRESS_SECONDS

    def begins(self, what: Action) -> None:
        if len(self.actions) in self._marked:
            self.mark()
        if time.monotonic() >= self._next_line:
            log.info("dry run: %d of %d actions are done", len(self.actions), self._total)
            self._next_line = time.monotonic() + PROGRESS_SECONDS
        self.actions.append(what)

    def ends(self, what: Action) -> None:
        pass

    def mark(self) -> None:
        """Mark this moment, and look for the next peak from here on."""
        live = self._live
        self.marks.append(_Mark(live.now, live.peak, Counter(self._traffic.calls)))
        live.peak = live.now


def count_iteration(
    config: Config, topology: Topology, datasets: DatasetSplits, repetition: Repetition | None = None
) -> Counts:
    """Builds this rank's part of a run, trains the first iteration, and tells what that took.

    Args:
        config: validated, its vocabulary's size known; no ZeRO stage 3.
        topology: of a run, or a fake one.
        datasets: what is trained on.
        repetition: run the shorter iteration, and add what it lacks. It is not used where the repeated part
            proves to be different from the one before it.
    """
    marked: tuple[int, ...] = ()
    whole = config
    if repetition is not None:
        marked = tuple(repetition.first + i * repetition.period for i in (-1, 0, 1))
        config = _with_microbatches(config, repetition.num_microbatches * topology.dp.size)
    traffic = Traffic(topology)
    with LiveBytes() as live, Trainer(config, topology, datasets, Timers()) as trainer:
        assert isinstance(trainer.optimizer, Optimizer), "weights that are shared out"
        held = live.peak = live.now
        noted = _Noted(live, traffic, marked, _num_actions(trainer, repetition))
        trainer.pipeline.observers.append(noted)
        with traffic:
            trainer.step()
        noted.mark()
    actions, calls, peak = tuple(noted.actions), traffic.calls, noted.marks[-1].peak
    if repetition is not None:
        extended = _extended(noted.marks, repetition.times)
        if extended is None:
            return count_iteration(whole, topology, datasets)
        actions, (calls, peak) = repetition.actions, extended
    return Counts(
        sum(parameter.numel() for _, parameter in named_parameters(trainer.chunks)),
        Buffers.of(trainer.optimizer),
        calls,
        actions,
        peak - held,
    )


def _with_microbatches(config: Config, number: int) -> Config:
    """Return the config with a first iteration of so many microbatches, over all replicas."""
    samples = number * config.training.micro_batch_size
    training = replace(config.training, global_batch_size=samples, rampup_batch_size=None)
    return replace(config, training=training)


def _num_actions(trainer: Trainer, repetition: Repetition | None) -> int:
    """Return how many actions the first iteration will run."""
    if repetition is not None:
        return len(repetition.actions) - repetition.times * repetition.period
    return trainer.pipeline.num_actions(trainer.train_step.num_microbatches(0))


def _extended(marks: Sequence[_Mark], times: int) -> tuple[Counter[Call], int] | None:
    """Return the calls and the peak of an iteration whose repeated part comes `times` more often.

    Args:
        marks: at the beginnings of the part before the repeated one, of that and of what follows, and at
            the end. What the part leaves in memory (the loss of each microbatch) adds up.

    Returns:
        None where the repeated part differs from the one before: it is not the steady state.
    """
    before, start, end, last = marks
    calls, growth = end.calls - start.calls, end.held - start.held
    same = (start.calls - before.calls, start.held - before.held, start.peak - before.held)
    if same != (calls, growth, end.peak - start.held) or growth < 0:
        return None
    total = Counter(last.calls)
    for call, count in calls.items():
        total[call] += times * count
    # The peaks up to the first mark and between the next two stay; what follows comes on top of what is kept.
    return total, max(before.peak, start.peak, end.peak + times * growth, last.peak + times * growth)
