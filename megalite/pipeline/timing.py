"""When each rank could run its actions if messages took no time and were never in each other's way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megalite.pipeline.action import Action
from megalite.pipeline.stages import StageMap

Duration = Callable[[int, Action], float]
"""Time that an action takes on a rank, in any unit."""


class ScheduleError(RuntimeError):
    """A schedule that no executor could run: a defect of the schedule, not of its user."""


class Span(NamedTuple):
    """From when to when an action ran."""

    start: float
    end: float


Times = dict[tuple[int, Action], Span]
"""By rank and action."""


def source_of(rank: int, action: Action, stages: StageMap) -> tuple[int, Action] | None:
    """The rank and the action there that make the input of `action`; None where a pass begins."""
    return _neighbour(rank, action, stages, -action.kind.downstream)


def reader_of(rank: int, action: Action, stages: StageMap) -> tuple[int, Action] | None:
    """The rank and the action there that read the output of `action`; None where a pass ends."""
    return _neighbour(rank, action, stages, action.kind.downstream)


def _neighbour(rank: int, action: Action, stages: StageMap, step: int) -> tuple[int, Action] | None:
    stage = stages.stage_of(rank, action.chunk) + step
    if step == 0 or not 0 <= stage < stages.num_stages:
        return None
    holder, chunk = stages.holder_of(stage)
    return holder, Action(action.kind, action.microbatch, chunk)


def compute_times(actions: Sequence[Sequence[Action]], stages: StageMap, duration: Duration) -> Times:
    """Runs each rank's actions in their order, each as soon as its input is there.

    Raises:
        ScheduleError: an input never comes.
    """
    times: Times = {}
    clocks = [0.0] * len(actions)
    done = [0] * len(actions)
    ready = list(range(len(actions)))  # ranks that something may have changed for
    while ready:
        rank = ready.pop()
        for action in actions[rank][done[rank] :]:
            source = source_of(rank, action, stages)
            if source is not None and source not in times:
                break
            start = max(clocks[rank], times[source].end) if source else clocks[rank]
            clocks[rank] = start + duration(rank, action)
            times[rank, action] = Span(start, clocks[rank])
            done[rank] += 1
            reader = reader_of(rank, action, stages)
            if reader is not None and reader[0] != rank:
                ready.append(reader[0])
    waiting = [
        f"rank {rank} for the input of {own[done[rank]]}"
        for rank, own in enumerate(actions)
        if done[rank] < len(own)
    ]
    if waiting:
        raise ScheduleError("inputs never come: " + "; ".join(waiting))
    return times
