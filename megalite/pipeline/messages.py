"""Derive the point-to-point messages of a schedule from the actions of all ranks.

`compute_times` computes when each rank could run its actions if messages took no time. `plan_rank` inserts
batches of messages between the actions of a rank in the order of these times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from megalite.pipeline.schedules import Action, Direction, StageMap

Duration = Callable[[int, Action], float]
"""Duration of an action on a rank, in any unit."""
PairSaving = Callable[[int, Action, Action], float]
"""By how much two actions of a rank that run together take less time than one after the other."""


class ScheduleError(RuntimeError):
    """Raised for a schedule that cannot run: a bug in the schedule, not a user's mistake."""


class ActionSpan(NamedTuple):
    """Start and end of an action."""

    start: float
    end: float


Times = dict[tuple[int, Action], ActionSpan]
"""Span of each action, by rank and action. Actions that run together have the same span."""


def saves_nothing(rank: int, first: Action, second: Action) -> float:
    """Let two actions that run together take as long as one after the other."""
    return 0.0


def compute_times(
    actions: Sequence[Sequence[Action]],
    stages: StageMap,
    duration: Duration,
    saving: PairSaving = saves_nothing,
) -> Times:
    """Return the times at which each rank runs its actions in order, each as soon as its input exists.

    Args:
        actions: actions by rank.

    Raises:
        ScheduleError: an input is never produced.
    """
    times: Times = {}
    clocks = [0.0] * len(actions)
    left = [deque(stages.groups(own)) for own in actions]
    ready = list(range(len(actions)))  # ranks that may be able to run their next actions
    while ready:
        rank = ready.pop()
        while left[rank]:
            sources = [stages.source_of(rank, action) for action in left[rank][0]]
            arrivals = [times.get(source) for source in sources if source is not None]
            if None in arrivals:
                break
            start = max(clocks[rank], *(span.end for span in arrivals if span), 0.0)
            group = left[rank].popleft()
            clocks[rank] = start + sum(duration(rank, action) for action in group)
            if len(group) == 2:
                clocks[rank] -= saving(rank, *group)
            for action in group:
                times[rank, action] = ActionSpan(start, clocks[rank])
                reader = stages.reader_of(rank, action)
                if reader is not None and reader[0] != rank:
                    ready.append(reader[0])
    waiting = [
        f"rank {rank} for the input of {' or '.join(map(str, groups[0]))}"
        for rank, groups in enumerate(left)
        if groups
    ]
    if waiting:
        raise ScheduleError("inputs never come: " + "; ".join(waiting))
    return times


@dataclass(frozen=True)
class StageMessage:
    """Tensor that one rank's action produces and another's reads; equal on both ranks.

    Attributes:
        sender, receiver: coordinates along the pipeline axis.
        reader: action of the receiver. A forward reads hidden states, a backward their gradient.
    """

    sender: int
    receiver: int
    reader: Action

    @property
    def direction(self) -> Direction:
        """Return "forward" for hidden states, "backward" for their gradient."""
        return self.reader.direction

    def __str__(self) -> str:
        return f"the input of {self.reader} from rank {self.sender} to rank {self.receiver}"


@dataclass(frozen=True)
class Batch:
    """One or more messages of one direction that a rank starts together.

    Hidden states and their gradients use separate process groups, so they do not wait for each other.

    Attributes:
        send: output of the action before the batch, or of one of the two that ran together.
        receives: messages to receive, in the order in which they are sent.
    """

    send: StageMessage | None
    receives: tuple[StageMessage, ...] = ()

    @property
    def direction(self) -> Direction:
        """Return the direction of the messages."""
        return (self.send or self.receives[0]).direction


Step = Action | Batch
"""Next step of a rank: compute, or exchange messages."""

MAX_OPEN_BATCHES = 2
"""Number of batches of a direction that a rank can have in flight. It waits for the oldest to start another.

Two are enough to absorb jitter, and bound the number of tensors that are kept until they have been sent.
"""


def plan_steps(actions: Sequence[Sequence[Action]], stages: StageMap) -> list[list[Step]]:
    """Return the actions of every rank with batches of messages between them.

    Args:
        actions: actions by rank.

    Raises:
        ScheduleError: an action's input is never produced.
    """
    times = _usual_times(actions, stages)
    return [list(_steps_of(rank, own, stages, times)) for rank, own in enumerate(actions)]


def plan_rank(rank: int, actions: Sequence[Sequence[Action]], stages: StageMap) -> list[Step]:
    """Return one rank's part of `plan_steps`, in a fraction of the time if there are many ranks."""
    return list(_steps_of(rank, actions[rank], stages, _usual_times(actions, stages)))


def _usual_times(actions: Sequence[Sequence[Action]], stages: StageMap) -> Times:
    return compute_times(actions, stages, lambda rank, action: action.kind.units)


def _steps_of(rank: int, actions: Sequence[Action], stages: StageMap, times: Times) -> Iterator[Step]:
    """Yield a rank's actions, and the batches to start before each action or pair that runs together.

    The first batch has the messages that move before the action begins. The second has the messages that
    arrive while the action runs, or until the next action begins if this one sends nothing.
    """
    due = sorted(_receives(rank, actions, stages, times), key=lambda pair: pair[0], reverse=True)
    sends: list[StageMessage] = []
    groups = list(stages.groups(actions))
    for group, following in zip_longest(groups, groups[1:]):
        start, end = times[rank, group[0]]
        yield from _batches(sends, _pop_until(due, start, inclusive=True))
        readers = [stages.reader_of(rank, action) for action in group]
        sends = [StageMessage(rank, *reader) for reader in readers if reader and reader[0] != rank]
        if sends or following is None:
            arriving = _pop_until(due, end, inclusive=False)
        else:
            arriving = _pop_until(due, times[rank, following[0]].start, inclusive=True)
        yield from _batches([], arriving)
        yield from group
    assert not due, due
    yield from _batches(sends, ())


def _batches(sends: Sequence[StageMessage], receives: Sequence[StageMessage]) -> Iterator[Batch]:
    """Yield a batch per direction with messages; first those with sends, because other ranks wait for them.

    Args:
        sends: at most one of each direction.
    """
    for direction in dict.fromkeys(message.direction for message in (*sends, *receives)):
        send = next((message for message in sends if message.direction == direction), None)
        yield Batch(send, tuple(message for message in receives if message.direction == direction))


def _pop_until(
    due: list[tuple[float, StageMessage]], time: float, *, inclusive: bool
) -> tuple[StageMessage, ...]:
    """Remove the messages up to a time from the end of the list, which is sorted from latest to earliest."""
    messages = []
    while due and (due[-1][0] < time or (inclusive and due[-1][0] == time)):
        messages.append(due.pop()[1])
    return tuple(messages)


def _receives(
    rank: int, actions: Sequence[Action], stages: StageMap, times: Times
) -> Iterator[tuple[float, StageMessage]]:
    """Yield the messages to a rank, each with the time at which it is produced."""
    for action in actions:
        source = stages.source_of(rank, action)
        if source is not None and source[0] != rank:
            yield times[source].end, StageMessage(source[0], rank, action)
