"""Runs the schedule of all ranks on paper: proves it free of deadlock and tells its times.

A message is a rendezvous, the strictest rule that any backend follows. A rank's batches run one after the
other; a message moves once it is in the current batch of its sender and of its receiver; a batch is over when
all its messages have moved. A schedule that ends under this rule ends on NCCL, where the operations of a
communicator form one queue, and on gloo, which asks for less. Messages take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megalite.pipeline.messages import Batch, Message, Step, steps_of
from megalite.pipeline.schedule import Action, Kind

Duration = Callable[[int, Action], float]
"""Time that an action takes on a rank, in any unit."""


class ScheduleError(RuntimeError):
    """A schedule that no executor could run: a defect of the schedule, not of its user."""


@dataclass(frozen=True)
class Slot:
    """An action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank ran each of its actions.

    Attributes:
        slots: by rank, in order of time.
        peaks_in_flight: by rank, most microbatches whose activations it held at once.
    """

    slots: tuple[tuple[Slot, ...], ...]
    peaks_in_flight: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Time from the first action's start to the last one's end."""
        return max(slot.end for row in self.slots for slot in row)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they wait; (p - 1) / (m + p - 1) for GPipe and 1F1B."""
        busy = sum(slot.end - slot.start for row in self.slots for slot in row)
        return 1 - busy / (len(self.slots) * self.makespan)


def simulate(actions: Sequence[Sequence[Action]], duration: Duration) -> Timeline:
    """Runs every rank's actions against each other's messages.

    Args:
        actions: by rank.
        duration: of an action on a rank.

    Raises:
        ScheduleError: a rank's own order is wrong, two ranks' messages cross, or no rank can go on.
    """
    for number, own in enumerate(actions):
        check_order(number, own)
    ranks = [
        _Rank(number, steps_of(own, number, len(actions)), duration) for number, own in enumerate(actions)
    ]
    while not all(rank.is_done for rank in ranks):
        moved = False
        for rank in ranks:
            moved |= rank.compute()
        for rank in ranks:
            moved |= _deliver(rank, ranks)
        if not moved:
            raise ScheduleError("no rank can go on: " + "; ".join(rank.complaint() for rank in ranks))
    return Timeline(tuple(tuple(rank.slots) for rank in ranks), tuple(peak_in_flight(own) for own in actions))


def check_order(rank: int, actions: Sequence[Action]) -> None:
    """Sees that each forward comes once and, in a schedule that has backwards, its one backward after it.

    Raises:
        ScheduleError: it is not so.
    """
    seen: set[Action] = set()
    for action in actions:
        if action in seen:
            raise ScheduleError(f"rank {rank} runs {action} twice")
        if action.kind is Kind.BACKWARD and _forward_of(action) not in seen:
            raise ScheduleError(f"rank {rank} runs {action} before {_forward_of(action)}")
        seen.add(action)
    backwards = {action for action in seen if action.kind is Kind.BACKWARD}
    if backwards and (lost := seen - backwards - {_forward_of(action) for action in backwards}):
        raise ScheduleError(f"rank {rank} never runs the backward of {min(map(str, lost))}")


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Most microbatches that had their forward and not yet their backward; each chunk's counts by itself.

    Without any backward, as in an evaluation, nothing is kept and the figure means nothing.
    """
    peak = in_flight = 0
    for action in actions:
        in_flight += 1 if action.kind is Kind.FORWARD else -1
        peak = max(peak, in_flight)
    return peak


def _forward_of(backward: Action) -> Action:
    return Action(Kind.FORWARD, backward.microbatch, backward.chunk)


class _Rank:
    """Where one rank stands: its next step, the batch it has open, and its two clocks."""

    def __init__(self, rank: int, steps: Sequence[Step], duration: Duration) -> None:
        self.rank = rank
        self.slots: list[Slot] = []
        self._steps = steps
        self._next = 0
        self._duration = duration
        self._clock = 0.0  # when the last action, or the wait for a receive behind it, was over
        self._link_free = 0.0  # when the last batch was over
        self.send: Message | None = None  # of the current batch, as long as it has not moved
        self.receive: Message | None = None
        self.opened = 0.0  # when the current batch began
        self._receives = False  # whether the current batch has a receive, moved or not

    @property
    def is_done(self) -> bool:
        return self._next == len(self._steps) and not self.send and not self.receive

    def compute(self) -> bool:
        """Runs actions up to the next batch and opens it; tells whether there was anything to do."""
        if self.send or self.receive or self.is_done:
            return False
        while self._next < len(self._steps):
            step = self._steps[self._next]
            self._next += 1
            if isinstance(step, Batch):
                self._open(step)
                break
            start, self._clock = self._clock, self._clock + self._duration(self.rank, step)
            self.slots.append(Slot(step, start, self._clock))
        return True

    def _open(self, batch: Batch) -> None:
        self.send, self.receive = batch.send, batch.receive
        self._receives = batch.receive is not None
        self.opened = max(self._clock, self._link_free)
        self._link_free = self.opened

    def moved(self, message: Message, time: float) -> None:
        """Takes a message out of the current batch; the last one ends it, and any wait for its receive."""
        if message == self.send:
            self.send = None
        else:
            self.receive = None
        self._link_free = max(self._link_free, time)
        if self._receives and not self.send and not self.receive:
            self._clock = max(self._clock, self._link_free)

    def complaint(self) -> str:
        if self.is_done:
            return f"rank {self.rank} is done"
        waits = [f"rank {self.send.receiver} to take the input of {self.send.reader}"] if self.send else []
        if self.receive:
            waits.append(f"rank {self.receive.sender} to give the input of {self.receive.reader}")
        return f"rank {self.rank} waits for " + " and ".join(waits)


def _deliver(sender: _Rank, ranks: Sequence[_Rank]) -> bool:
    """Moves the sender's open message if its receiver has one open from this sender."""
    message = sender.send
    if message is None:
        return False
    receiver = ranks[message.receiver]
    expected = receiver.receive
    if expected is None or expected.sender != sender.rank:
        return False
    if expected != message:
        raise ScheduleError(
            f"messages cross: rank {sender.rank} sends rank {receiver.rank} the input of {message.reader}, "
            f"which expects that of {expected.reader}"
        )
    time = max(sender.opened, receiver.opened)
    sender.moved(message, time)
    receiver.moved(message, time)
    return True
