"""Runs the steps of all ranks on paper: proves them free of deadlock and tells their times.

A message is a rendezvous, the strictest rule that any backend follows. A rank's batches run one after the
other; a message moves once it is in the current batch of its sender and of its receiver; a batch is over when
all its messages have moved, and not before then is any of them read. Steps that end under this rule end on
NCCL, where the operations of a communicator form one queue, and on gloo, which asks for less. Messages take
no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.pipeline.action import Action
from megalite.pipeline.check import check_order, peak_in_flight
from megalite.pipeline.messages import MAX_OPEN_BATCHES, Batch, Message, Step, plan_steps
from megalite.pipeline.schedule import SCHEDULES
from megalite.pipeline.stages import StageMap
from megalite.pipeline.timing import Duration, ScheduleError


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
        peaks_in_flight: by rank, most microbatches whose activations it held at once; with several chunks,
            each chunk's part of them counts by itself.
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
        return 1 - self._busy / (len(self.slots) * self.makespan)

    @property
    def bubble_to_work(self) -> float:
        """Time in which ranks wait, over that in which they work: the papers' (p - 1) / m for 1F1B."""
        return len(self.slots) * self.makespan / self._busy - 1

    @property
    def _busy(self) -> float:
        return sum(slot.end - slot.start for row in self.slots for slot in row)


def simulate_schedule(
    schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int | None, duration: Duration
) -> Timeline:
    """Runs a training step of a schedule of SCHEDULES; `num_chunks` as in `Schedule.stage_map`."""
    stages = SCHEDULES[schedule].stage_map(num_ranks, num_chunks)
    actions = [SCHEDULES[schedule].train(rank, stages, num_microbatches) for rank in range(num_ranks)]
    return simulate(actions, stages, duration)


def simulate(actions: Sequence[Sequence[Action]], stages: StageMap, duration: Duration) -> Timeline:
    """Plans the messages of every rank's actions and runs all of it.

    Raises:
        ScheduleError: a rank's own order is wrong, an input never comes, or what `run_steps` finds.
    """
    for rank, own in enumerate(actions):
        check_order(rank, own)
    slots = run_steps(plan_steps(actions, stages), duration)
    return Timeline(slots, tuple(peak_in_flight(own) for own in actions))


def run_steps(steps: Sequence[Sequence[Step]], duration: Duration) -> tuple[tuple[Slot, ...], ...]:
    """Runs the steps of all ranks against each other; when each of their actions ran.

    Raises:
        ScheduleError: two ranks' messages cross, or no rank can go on.
    """
    ranks = [_Rank(number, own, duration) for number, own in enumerate(steps)]
    while not all(rank.is_done for rank in ranks):
        moved = False
        for rank in ranks:
            moved |= rank.advance()
        for rank in ranks:
            moved |= _deliver(rank, ranks)
        if not moved:
            raise ScheduleError("no rank can go on: " + "; ".join(rank.complaint() for rank in ranks))
    return tuple(tuple(rank.slots) for rank in ranks)


class _Open:
    """A batch under way: what of it has not moved, when its turn came, and the earliest that it can end."""

    def __init__(self, batch: Batch, time: float) -> None:
        self.send = batch.send
        self.receives = deque(batch.receives)
        self.readers = [message.reader for message in batch.receives]
        self.opened = self.end = time

    def receive_from(self, sender: int) -> Message | None:
        """The message that the next one from this sender has to be."""
        return next((message for message in self.receives if message.sender == sender), None)


class _Rank:
    """Where one rank stands: its next step, its batches under way, and its clock."""

    def __init__(self, rank: int, steps: Sequence[Step], duration: Duration) -> None:
        self.rank = rank
        self.slots: list[Slot] = []
        self.open: deque[_Open] = deque()  # the first one is the current one
        self._steps = steps
        self._next = 0
        self._duration = duration
        self._clock = 0.0
        self._link_free = [0.0] * MAX_OPEN_BATCHES  # when the last batches were over
        self._awaited = {m.reader for step in steps if isinstance(step, Batch) for m in step.receives}
        self._arrived: dict[Action, float] = {}

    @property
    def is_done(self) -> bool:
        return self._next == len(self._steps) and not self.open

    def advance(self) -> bool:
        """Computes and opens batches as far as it can; tells whether there was anything to do."""
        first = self._next
        while self._next < len(self._steps) and self._step(self._steps[self._next]):
            self._next += 1
        return self._next > first

    def _step(self, step: Step) -> bool:
        if isinstance(step, Batch):
            if len(self.open) == MAX_OPEN_BATCHES:
                return False
            self._clock = max(self._clock, self._link_free[len(self.open)])
            self.open.append(_Open(step, max(self._clock, self._link_free[-1])))
            return True
        if step in self._awaited and step not in self._arrived:
            return False
        start = max(self._clock, self._arrived.get(step, 0.0))
        self._clock = start + self._duration(self.rank, step)
        self.slots.append(Slot(step, start, self._clock))
        return True

    def close(self) -> None:
        """Ends the current batch if all of it has moved."""
        batch = self.open[0]
        if batch.send is None and not batch.receives:
            self.open.popleft()
            self._link_free = [*self._link_free[1:], batch.end]
            self._arrived.update(dict.fromkeys(batch.readers, batch.end))
            if self.open:
                following = self.open[0]
                following.opened = following.end = max(following.opened, batch.end)

    def complaint(self) -> str:
        if self.is_done:
            return f"rank {self.rank} is done"
        if not self.open:
            return f"rank {self.rank} waits to run {self._steps[self._next]}"
        send = self.open[0].send
        waits = [f"rank {send.receiver} to take the input of {send.reader}"] if send else []
        waits += [f"rank {m.sender} to give the input of {m.reader}" for m in self.open[0].receives]
        return f"rank {self.rank} waits for " + " and ".join(waits)


def _deliver(sender: _Rank, ranks: Sequence[_Rank]) -> bool:
    """Moves what the sender's current batch sends if its receiver's current one has something from it."""
    message = sender.open[0].send if sender.open else None
    if message is None:
        return False
    receiver = ranks[message.receiver]
    expected = receiver.open[0].receive_from(sender.rank) if receiver.open else None
    if expected is None:
        return False
    if expected != message:
        raise ScheduleError(
            f"messages cross: rank {sender.rank} sends rank {receiver.rank} the input of {message.reader}, "
            f"which expects that of {expected.reader}"
        )
    sender.open[0].send = None
    receiver.open[0].receives.remove(message)
    time = max(rank.open[0].opened for rank in (sender, receiver))
    for rank in (sender, receiver):
        rank.open[0].end = max(rank.open[0].end, time)
        rank.close()
    return True
