"""The point-to-point messages of a schedule, and when each rank starts them: all follows from the actions.

NCCL has no tags and runs the operations of a communicator one after another, in the order in which each of
its ranks started them: that order must be one that all ranks agree on. It is the order of time. A pass over
the schedule with the usual durations gives the moment at which each message is there to be sent; a rank's
messages are put between its actions at their moments, those of one moment in one batch, whose members move
together. Since no two ranks ever see two moments in another order, none waits for ever, whatever the actions
and the messages take in reality (`simulate` checks it); and a receive is under way while the rank computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from megalite.pipeline.action import Action
from megalite.pipeline.stages import StageMap
from megalite.pipeline.timing import Times, compute_times, reader_of, source_of


@dataclass(frozen=True)
class Message:
    """A tensor that one rank's action made and another rank's action reads; the same on both ranks.

    Attributes:
        sender: coordinate along the axis, as `receiver` is.
        reader: the receiver's action: hidden states for a forward, their gradient for a backward.
    """

    sender: int
    receiver: int
    reader: Action

    def __str__(self) -> str:
        return f"the input of {self.reader} from rank {self.sender} to rank {self.receiver}"


@dataclass(frozen=True)
class Batch:
    """Messages that a rank starts together; there is at least one.

    Attributes:
        send: the output of the action in front of the batch.
        receives: in the order in which their senders send them.
    """

    send: Message | None
    receives: tuple[Message, ...] = ()


Step = Action | Batch
"""What a rank does next: it computes or it exchanges."""

MAX_OPEN_BATCHES = 2
"""Batches that a rank may have under way: it waits for an older one before it starts the next.

Room for jitter, and a bound on the tensors that are kept until they have left.
"""


def plan_steps(actions: Sequence[Sequence[Action]], stages: StageMap) -> list[list[Step]]:
    """Puts the batches of messages between each rank's actions.

    Args:
        actions: by rank.
        stages: as the schedule lays them out.

    Raises:
        ScheduleError: an action's input is never made before it.
    """
    times = _usual_times(actions, stages)
    return [list(_steps_of(rank, own, stages, times)) for rank, own in enumerate(actions)]


def plan_rank(rank: int, actions: Sequence[Sequence[Action]], stages: StageMap) -> list[Step]:
    """The same for one rank alone: of a long schedule on many ranks, in a fraction of the time."""
    return list(_steps_of(rank, actions[rank], stages, _usual_times(actions, stages)))


def _usual_times(actions: Sequence[Sequence[Action]], stages: StageMap) -> Times:
    return compute_times(actions, stages, lambda rank, action: action.kind.units)


def _steps_of(rank: int, actions: Sequence[Action], stages: StageMap, times: Times) -> Iterator[Step]:
    """A rank's actions, before each of them the batches that it starts there.

    One holds what moves by the time that the action begins, another what comes while it runs, or until the
    next one begins if it sends nothing.
    """
    due = sorted(_receives(rank, actions, stages, times), key=lambda pair: pair[0], reverse=True)
    send: Message | None = None
    for action, following in zip_longest(actions, actions[1:]):
        start, end = times[rank, action]
        arrived = _until(due, start, inclusive=True)
        if send or arrived:
            yield Batch(send, arrived)
        send = _send(rank, action, stages)
        if send or following is None:
            under_way = _until(due, end, inclusive=False)
        else:
            under_way = _until(due, times[rank, following].start, inclusive=True)
        if under_way:
            yield Batch(None, under_way)
        yield action
    assert not due, due
    if send:
        yield Batch(send)


def _until(due: list[tuple[float, Message]], time: float, *, inclusive: bool) -> tuple[Message, ...]:
    """Takes the messages up to a time off the end of the list, which has the latest ones first."""
    taken = []
    while due and (due[-1][0] < time or (inclusive and due[-1][0] == time)):
        taken.append(due.pop()[1])
    return tuple(taken)


def _receives(
    rank: int, actions: Sequence[Action], stages: StageMap, times: Times
) -> Iterator[tuple[float, Message]]:
    """What a rank is sent, each with the time at which it has been made."""
    for action in actions:
        source = source_of(rank, action, stages)
        if source is not None and source[0] != rank:
            yield times[source].end, Message(source[0], rank, action)


def _send(rank: int, action: Action, stages: StageMap) -> Message | None:
    reader = reader_of(rank, action, stages)
    if reader is None or reader[0] == rank:
        return None
    return Message(rank, *reader)
