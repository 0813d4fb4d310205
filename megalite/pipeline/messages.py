"""Derive the point-to-point messages of a schedule from the actions of all ranks, and send and receive them.

`compute_times` computes when each rank could run its actions if messages took no time. `plan_rank` inserts
batches of messages between the actions of a rank in the order of these times.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.axis import Axis
from megalite.pipeline.schedules import Action, ActionKind, StageMap

Parcel = tuple[Tensor, int]
"""A tensor to send or to receive into, and the other rank's coordinate along the axis."""

Launched = tuple[list[dist.Work], "dist.Work | None"]
"""The works of a batch's receives, and the work of its send."""


class PointToPoint:
    """Messages of one rank of a pipeline. All tensors of a step have the same shape.

    Args:
        pp: the pipeline axis.
        dtype: dtype of the hidden states.
        device: device of the hidden states.
    """

    def __init__(self, pp: Axis, dtype: torch.dtype, device: torch.device) -> None:
        self.pp = pp
        self._dtype = dtype
        self._device = device
        self._launch = _launch_together if device.type == "cuda" else _launch_each  # by NCCL, and by gloo
        self._groups: dict[Direction, dist.ProcessGroup] = {
            "forward": pp.group,
            "backward": pp.backward_group or pp.group,
        }
        # Sends, oldest first, each with its message and its tensor, which must live until it has been sent.
        self._pending: dict[Direction, deque[tuple[dist.Work, StageMessage, Tensor]]] = defaultdict(deque)
        self._arriving: dict[Action, tuple[dist.Work, Tensor, StageMessage]] = {}  # by its reader

    def start(self, batch: Batch, outgoing: Tensor | None, shape: tuple[int, ...]) -> None:
        """Start a batch without waiting for it.

        Args:
            batch: a batch of this rank's plan; see `plan_rank`.
            outgoing: the tensor to send, if the batch has a send.
            shape: shape of each tensor.
        """
        send: Parcel | None = None
        if batch.send:
            self._wait_for_sends(batch.direction, MAX_OPEN_BATCHES - 1)
            assert outgoing is not None
            send = self._checked(outgoing, shape), batch.send.receiver
        receives = [
            (torch.empty(shape, dtype=self._dtype, device=self._device), message.sender)
            for message in batch.receives
        ]
        received, sent = self._launch(self._groups[batch.direction], receives, send)
        for message, work, (tensor, _) in zip(batch.receives, received, receives, strict=True):
            self._arriving[message.reader] = work, tensor, message
        if send and sent:
            assert batch.send is not None
            self._pending[batch.direction].append((sent, batch.send, send[0]))

    def received(self, reader: Action) -> Tensor:
        """Wait for the input of `reader` and return it; an earlier batch has started to receive it."""
        work, tensor, message = self._arriving.pop(reader)
        self._wait(work, f"{message.direction}-recv", reader, message.sender)
        return tensor

    def finish(self) -> None:
        """Wait for every send."""
        for direction in self._groups:
            self._wait_for_sends(direction, 0)

    def _wait_for_sends(self, direction: Direction, num_left: int) -> None:
        pending = self._pending[direction]
        while len(pending) > num_left:
            work, message, _ = pending.popleft()
            self._wait(work, f"{direction}-send", message.reader, message.receiver)

    def _wait(self, work: dist.Work, what: str, reader: Action, peer: int) -> None:
        self.pp.wait_begins(what, reader, self.pp.ranks[peer])
        work.wait()
        self.pp.wait_ends(what, reader, self.pp.ranks[peer])

    def _checked(self, outgoing: Tensor, shape: tuple[int, ...]) -> Tensor:
        # The receiver does not check the size, and a different number of bytes would abort it.
        assert outgoing.shape == shape, f"a stage returned {tuple(outgoing.shape)}, not {shape}"
        assert outgoing.dtype == self._dtype, f"a stage returned {outgoing.dtype}, not {self._dtype}"
        return outgoing.contiguous()


def _launch_together(group: dist.ProcessGroup, receives: Sequence[Parcel], send: Parcel | None) -> Launched:
    """Start all messages as one NCCL operation with one work.

    A single message is also started this way, because NCCL may use different communicators for batches and
    single messages, and the other rank may have the message in a batch.
    """
    operations = [
        dist.P2POp(dist.irecv, tensor, group=group, group_peer=sender) for tensor, sender in receives
    ]
    if send:
        operations.append(dist.P2POp(dist.isend, send[0], group=group, group_peer=send[1]))
    work = dist.batch_isend_irecv(operations)[-1]
    return [work] * len(receives), work if send else None


def _launch_each(group: dist.ProcessGroup, receives: Sequence[Parcel], send: Parcel | None) -> Launched:
    """Start messages one by one, for gloo, which matches sends and receives in any order.

    This calls the methods of the process group, because torch.distributed's functions add slow checks.
    """
    works = [group.recv([tensor], sender, 0) for tensor, sender in receives]
    return works, group.send([send[0]], send[1], 0) if send else None


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


def source_of(rank: int, action: Action, stages: StageMap) -> tuple[int, Action] | None:
    """Return the rank and action that produce the input of `action`; None if its input is not a message."""
    return _neighbour(rank, action, stages, -action.kind.downstream)


def reader_of(rank: int, action: Action, stages: StageMap) -> tuple[int, Action] | None:
    """Return the rank and action that read the output of `action`; None if no action reads it."""
    return _neighbour(rank, action, stages, action.kind.downstream)


def _neighbour(rank: int, action: Action, stages: StageMap, step: int) -> tuple[int, Action] | None:
    stage = stages.stage_of(rank, action.chunk) + step
    if step == 0 or not 0 <= stage < stages.num_stages:
        return None
    holder, chunk = stages.holder_of(stage)
    return holder, Action(action.kind, action.microbatch, chunk)


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
            sources = [source_of(rank, action, stages) for action in left[rank][0]]
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
                reader = reader_of(rank, action, stages)
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


Direction = Literal["forward", "backward"]


def direction_of(action: Action) -> Direction:
    """Return the direction of an action's input and output."""
    return "forward" if action.kind is ActionKind.FORWARD else "backward"


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
        return direction_of(self.reader)

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
        readers = [reader_of(rank, action, stages) for action in group]
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
    for action in actions:
        source = source_of(rank, action, stages)
        if source is not None and source[0] != rank:
            yield times[source].end, StageMessage(source[0], rank, action)
