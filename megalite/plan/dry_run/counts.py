"""Count the memory of one rank and the work of an iteration, while the real code runs on any device.

In its steady state a schedule repeats itself: one forward, one backward, and so on. A dry run of hundreds of
microbatches would run the same code on tensors of the same sizes hundreds of times. `find_repetition` returns
a shorter iteration, and which of its actions the whole iteration repeats. It compares the lists of actions
and messages that the executor would run, so it needs no knowledge of the schedule.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from megalite.config import Config
from megalite.config.config import stage_map
from megalite.config.fields import with_fields
from megalite.data.build_datasets import DatasetSplits
from megalite.distributed.axis import Axis, observing
from megalite.observe.meta_tensors import OTHER, LiveBytes, watch_parts
from megalite.observe.operator_log import Traffic
from megalite.observe.unit_record import CollectiveCall
from megalite.optim.flat_buffers import Bucket
from megalite.optim.offload import OffloadBytes
from megalite.pipeline.messages import Step, plan_rank
from megalite.pipeline.schedules import SCHEDULES, Action, actions_by_rank
from megalite.train.model_chunks import named_parameters
from megalite.train.run_context import RunContext
from megalite.train.trainer import Trainer
from megalite.utils.hardware.host_memory import HostBuffers
from megalite.utils.log import log


@dataclass(frozen=True)
class Buffers:
    """Bytes that a rank keeps from one iteration to the next, including padding.

    Attributes:
        weights: the model's weights.
        gradients: the gradient buffers.
        main_weights: fp32 copies of weights in lower precision that are not offloaded.
        moments: the optimizer's moments that are not offloaded.
        averages: averages of the weights (--ema-decay) that are not offloaded.
        module_buffers: buffers of the model's modules, which your own model may have.
    """

    weights: int
    gradients: int
    main_weights: int
    moments: int
    averages: int
    module_buffers: int

    @staticmethod
    def of(trainer: Trainer) -> Buffers:
        """Return the sizes of a trainer's buffers."""
        optimizer = trainer.optimizer
        first = 0 if optimizer.offload is None else optimizer.offload.count
        states = optimizer.updated
        on_device = [*states[first:], *(state for state in states[:first] if state.bucket.main is not None)]
        return Buffers(
            weights=sum(_weight_bytes(each.bucket) for each in optimizer.buffers),
            gradients=sum(each.owned_grad.untyped_storage().nbytes() for each in optimizer.buffers),
            main_weights=sum(state.main.nbytes for state in on_device if state.has_own_main),
            moments=sum(moment.nbytes for state in states[first:] for moment in state.moments.values()),
            averages=sum(state.ema.nbytes for state in states[first:] if state.ema is not None),
            module_buffers=sum(buffer.nbytes for chunk in trainer.chunks for buffer in chunk.buffers()),
        )

    @property
    def total(self) -> int:
        """Return the sum of all kinds."""
        return sum(astuple(self))


def _weight_bytes(bucket: Bucket) -> int:
    """Return a bucket's bytes of weights; at ZeRO stage 3, weights that are not the main ones come and go."""
    if bucket.main is None:
        return bucket.weight.nbytes
    return bucket.main.nbytes if bucket.main.dtype == bucket.weight.dtype else 0


class CopiedBytes(NamedTuple):
    """Bytes of offloaded activations that an iteration copies.

    Attributes:
        down: bytes copied from the device to the host.
        up: bytes copied from the host to the device. It is less than `down` if a backward needs tensors that
            are still on the device.
    """

    down: int = 0
    up: int = 0

    @staticmethod
    def of(buffers: HostBuffers | None) -> CopiedBytes:
        """Return the bytes copied so far."""
        return CopiedBytes() if buffers is None else CopiedBytes(buffers.copied_down, buffers.copied_up)

    def since(self, before: CopiedBytes) -> CopiedBytes:
        """Return the bytes copied since another count."""
        return CopiedBytes(self.down - before.down, self.up - before.up)


@dataclass(frozen=True)
class Counts:
    """Counts of one rank.

    Attributes:
        num_parameters: number of parameters of this rank.
        calls: number of each collective and message in an iteration.
        actions: pipeline schedule of the rank in an iteration.
        peak_bytes: largest total size of tensors during the iteration, without the buffers.
        peak_by_part: sizes of these tensors at the peak, by the part of the model whose forward made them.
            `OTHER` has gradients, recomputed activations and buffers for communication.
        host_bytes: size of the host buffers for offloaded activations.
        copied: bytes of offloaded activations that an iteration copies.
        offload: bytes of offloaded optimizer state; None if none is offloaded.
    """

    num_parameters: int
    buffers: Buffers
    calls: Counter[CollectiveCall]
    actions: tuple[Action, ...]
    peak_bytes: int
    peak_by_part: Counter[str]
    host_bytes: int
    copied: CopiedBytes
    offload: OffloadBytes | None = None


PROGRESS_SECONDS = 5.0
"""Seconds between two progress messages."""


@dataclass(frozen=True)
class _Mark:
    """State of the counts at the start of an action.

    Attributes:
        held: bytes of tensors at this time.
        peak: largest number of bytes since the previous mark.
        peak_by_part: bytes at this peak, by part of the model.
        calls, copied: counts since the start of the iteration.
    """

    held: int
    peak: int
    peak_by_part: Counter[str]
    calls: Counter[CollectiveCall]
    copied: CopiedBytes


class _ActionObserver:
    """Actions of a pipeline, and the counts before some of them.

    Args:
        buffers: buffers of offloaded activations; None if there are none.
        marked: indices of the actions to mark.
        total: number of actions that will run, for progress messages.
    """

    def __init__(
        self,
        live: LiveBytes,
        traffic: Traffic,
        buffers: HostBuffers | None,
        marked: Sequence[int],
        total: int,
    ) -> None:
        self.actions: list[Action] = []
        self.marks: list[_Mark] = []
        self._live, self._traffic, self._buffers = live, traffic, buffers
        self._marked, self._total = marked, total
        self._next_line = time.monotonic() + PROGRESS_SECONDS

    def begins(self, what: object) -> None:
        if not isinstance(what, Action):
            return
        if len(self.actions) in self._marked:
            self.mark()
        if time.monotonic() >= self._next_line:
            log.info("dry run: %d of %d actions done", len(self.actions), self._total)
            self._next_line = time.monotonic() + PROGRESS_SECONDS
        self.actions.append(what)

    def ends(self, what: object) -> None:
        pass

    def mark(self) -> None:
        """Record the counts, and start a new peak."""
        live = self._live
        calls, copied = Counter(self._traffic.calls), CopiedBytes.of(self._buffers)
        self.marks.append(_Mark(live.now, live.peak, live.peak_by_part, calls, copied))
        live.start_peak()


def count_iteration(run: RunContext, datasets: DatasetSplits, repetition: Repetition | None = None) -> Counts:
    """Build this rank's part of a run, train the first iteration, and count.

    Args:
        run: context of the run; its topology can be a fake one.
        datasets: data to train on.
        repetition: run its shorter iteration, and add the repeated parts. If the counts of the repeated part
            differ from the counts of the part before it, the whole iteration runs instead.
    """
    marked: tuple[int, ...] = ()
    topology, whole = run.topology, run
    if repetition is not None:
        marked = tuple(repetition.first + i * repetition.period for i in (-1, 0, 1))
        number = repetition.num_microbatches * topology.sample_ranks.size  # of all replicas
        samples = number * run.config.training.micro_batch_size
        fixed = {"rampup_batch_size": None, "step_batch_size_schedule": None}
        run = replace(run, config=with_fields(run.config, global_batch_size=samples, **fixed))
    traffic = Traffic(topology)
    with LiveBytes() as live, Trainer(run, datasets) as trainer:
        for chunk in trainer.chunks:
            watch_parts(chunk, live)
        held, held_by_part = live.now, live.by_part.copy()
        live.start_peak()
        buffers = trainer.activation_offload.buffers if trainer.activation_offload else None
        observer = _ActionObserver(live, traffic, buffers, marked, _num_actions(trainer, repetition))
        with traffic, observing(topology.observers, observer):
            trainer.step()
        observer.mark()
    actions, last = tuple(observer.actions), observer.marks[-1]
    if repetition is not None:
        extended = _extended(observer.marks, repetition.times)
        if extended is None:
            return count_iteration(whole, datasets)
        actions, last = repetition.actions, extended
    offload = trainer.optimizer.offload
    return Counts(
        sum(parameter.numel() for _, parameter in named_parameters(trainer.chunks)),
        Buffers.of(trainer),
        last.calls,
        actions,
        last.peak - held,
        _difference(last.peak_by_part, held_by_part),
        0 if buffers is None else buffers.num_bytes,
        last.copied,
        None if offload is None else offload.bytes,
    )


def _difference(total: Counter[str], part: Counter[str]) -> Counter[str]:
    """Return the difference of two counts, also if it is negative, without zeros."""
    found = total.copy()
    found.subtract(part)
    return Counter({name: size for name, size in found.items() if size})


def _num_actions(trainer: Trainer, repetition: Repetition | None) -> int:
    if repetition is not None:
        return len(repetition.actions) - repetition.times * repetition.period
    return trainer.pipeline.num_actions(trainer.train_step.plan_iteration(trainer.progress).num_microbatches)


def _extended(marks: Sequence[_Mark], times: int) -> _Mark | None:
    """Return the counts at the end of an iteration in which the repeated part runs `times` more often.

    Args:
        marks: four marks: at the start of the part before the repeated one, at the start of the repeated
            part, at the start of the rest, and at the end.

    Returns:
        A mark with the peak of the whole iteration, or None if the repeated part differs from the part before
        it, because then it is not in the steady state.
    """
    before, start, end, last = marks
    calls, growth, copied = end.calls - start.calls, end.held - start.held, end.copied.since(start.copied)
    repeated = (calls, growth, copied, end.peak - start.held)
    earlier = (start.calls - before.calls, start.held - before.held, start.copied.since(before.copied))
    if (*earlier, start.peak - before.held) != repeated or growth < 0:
        return None
    total = Counter(last.calls)
    for call, count in calls.items():
        total[call] += times * count
    # Each repetition leaves `growth` bytes in memory (the loss of its microbatch), which raise later peaks.
    more = times * growth
    peaks = [(mark.peak, mark.peak_by_part) for mark in (before, start)]
    peaks += [(mark.peak + more, mark.peak_by_part + Counter({OTHER: more})) for mark in (end, last)]
    peak, peak_by_part = max(peaks, key=itemgetter(0))
    return _Mark(
        last.held + more,
        peak,
        peak_by_part,
        total,
        CopiedBytes(last.copied.down + times * copied.down, last.copied.up + times * copied.up),
    )


MIN_SAVED = 8
"""Smallest number of microbatches to save; running fewer takes less time than the search."""

StepsOf = Callable[[int], Sequence[Step]]
"""A rank's actions and messages for a number of microbatches."""


@dataclass(frozen=True)
class Repetition:
    """Shorter iteration, and the part of it that the whole iteration repeats.

    Attributes:
        num_microbatches: number of microbatches in the shorter iteration.
        first: index of the first action of the repeated part in the shorter iteration.
        period: number of actions in the repeated part; the same number of actions before it are equal to it.
        times: number of additional repetitions in the whole iteration.
        actions: actions of the whole iteration, in order.
    """

    num_microbatches: int
    first: int
    period: int
    times: int
    actions: tuple[Action, ...]


def repetition_of(config: Config, pp: Axis, num_microbatches: int) -> Repetition | None:
    """Return the repetition in a rank's iteration of `num_microbatches`; None if there is none."""
    order, stages = SCHEDULES[config.parallel.schedule].train, stage_map(config)

    def steps_of(number: int) -> Sequence[Step]:
        return plan_rank(pp.rank, actions_by_rank(order, stages, number), stages)

    return find_repetition(steps_of, pp.size, num_microbatches)


def find_repetition(steps_of: StepsOf, num_ranks: int, num_microbatches: int) -> Repetition | None:
    """Find a shorter iteration that determines the whole one.

    The period of a schedule is one microbatch, or one per rank if it runs microbatches in groups.
    """
    whole: list[Step] = []
    for group in dict.fromkeys((1, num_ranks)):
        for factor in (2, 3, 4, 6):
            fewer = factor * num_ranks + 2 * group + 2
            fewer += (num_microbatches - fewer) % group
            if num_microbatches - fewer < MIN_SAVED:
                break
            whole = whole or list(steps_of(num_microbatches))
            found = _compare(whole, list(steps_of(fewer)), num_microbatches, fewer, group)
            if found is not None:
                return found
    return None


def _compare(
    whole: Sequence[Step], shorter: Sequence[Step], num_whole: int, num_shorter: int, group: int
) -> Repetition | None:
    """Return the repetition if the whole list equals the shorter list with one part repeated."""
    long, short = _patterns(whole, num_whole), _patterns(shorter, num_shorter)
    added, times = len(long) - len(short), (num_whole - num_shorter) // group
    if added <= 0 or added % times:
        return None
    period = added // times
    end = next((i for i, (a, b) in enumerate(zip(long, short, strict=False)) if a != b), len(short))
    while end < len(short) and not isinstance(shorter[end], Action):
        end -= 1
    start = end - 2 * period
    if start < 0 or end == len(short) or not isinstance(shorter[end], Action):
        return None
    is_repeated = long[start : end + added - period] == long[start + period : end + added]
    if not is_repeated or long[end + added :] != short[end:]:
        return None
    first = sum(isinstance(step, Action) for step in shorter[: end - period])
    per_period = sum(isinstance(step, Action) for step in shorter[end - period : end])
    actions = tuple(step for step in whole if isinstance(step, Action))
    return Repetition(num_shorter, first, per_period, times, actions)


def _patterns(steps: Sequence[Step], num_microbatches: int) -> list[Any]:
    """Replace each step with a pattern; patterns are equal if tensors and messages are equal.

    The first and the last microbatch can differ from the others, because they start and end accumulations.
    """

    def pattern(action: Action) -> Any:
        is_first, is_last = action.microbatch == 0, action.microbatch == num_microbatches - 1
        return action.kind, action.chunk, is_first, is_last

    found: list[Any] = []
    for step in steps:
        if isinstance(step, Action):
            found.append(pattern(step))
        else:
            sent = step.send and (step.send.receiver, pattern(step.send.reader))
            found.append((sent, tuple((each.sender, pattern(each.reader)) for each in step.receives)))
    return found
