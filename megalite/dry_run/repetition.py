"""Find microbatches of an iteration that do not need to run, because the rank does the same for others.

In its steady state a schedule repeats itself: one forward, one backward, and so on. A dry run of hundreds of
microbatches would run the same code on tensors of the same sizes hundreds of times. `find_repetition` returns
a shorter iteration, and which of its actions the whole iteration repeats. It compares the lists of actions
and messages that the executor would run, so it needs no knowledge of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.config import Config
from megalite.config.stage_layers import stage_map
from megalite.distributed.axis import Axis
from megalite.pipeline.messages import Step, plan_rank
from megalite.pipeline.schedules import SCHEDULES, Action, actions_by_rank

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
