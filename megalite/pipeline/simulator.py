"""Simulate a schedule on all ranks: prove that it cannot deadlock, and compute its times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from megalite.pipeline.messages import (
    MAX_OPEN_BATCHES,
    Batch,
    Duration,
    PairSaving,
    ScheduleError,
    StageMessage,
    Step,
    compute_times,
    plan_steps,
    saves_nothing,
)
from megalite.pipeline.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    Direction,
    ScheduleName,
    StageMap,
    actions_by_rank,
    peak_in_flight,
    training_actions,
)

_BEFORE = {
    ActionKind.BACKWARD: ActionKind.FORWARD,
    ActionKind.BACKWARD_INPUT: ActionKind.FORWARD,
    ActionKind.BACKWARD_WEIGHT: ActionKind.BACKWARD_INPUT,
}
"""The kind of action that must run before on the same microbatch and chunk."""


@dataclass(frozen=True)
class TimelineSlot:
    """Action with its start and end; actions that run together have equal ones."""

    action: Action
    start: float
    end: float

    @property
    def span(self) -> tuple[float, float]:
        """Return start and end."""
        return self.start, self.end


@dataclass(frozen=True)
class Timeline:
    """Times of all ranks' actions.

    Attributes:
        slots: actions by rank, in order of time.
        peaks_in_flight: the result of `peak_in_flight` by rank.
    """

    slots: tuple[tuple[TimelineSlot, ...], ...]
    peaks_in_flight: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Return the time from the start of the first action to the end of the last."""
        return max(slot.end for row in self.slots for slot in row)

    @property
    def bubble_fraction(self) -> float:
        """Return the idle share of all ranks' time; (p - 1) / (m + p - 1) for GPipe and 1F1B."""
        busy = sum(end - start for row in self.slots for start, end in {slot.span for slot in row})
        return 1 - busy / (len(self.slots) * self.makespan)


def simulate_schedule(
    schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None, duration: Duration
) -> Timeline:
    """Simulate a training step of a schedule; for `num_chunks` see `PipelineSchedule.stage_map`."""
    stages = SCHEDULES[schedule].stage_map(num_ranks, num_chunks)
    return simulate(actions_by_rank(SCHEDULES[schedule].train, stages, num_microbatches), stages, duration)


MAX_ROUNDS = 3
"""Microbatches per rank that `step_makespan` simulates."""


def step_makespan(
    schedule: ScheduleName,
    stages: StageMap,
    num_microbatches: int,
    duration: Duration,
    max_rounds: int = MAX_ROUNDS,
    saving: PairSaving = saves_nothing,
) -> float:
    """Return the time of a training step whose messages take no time.

    Args:
        duration, saving: do not depend on the microbatch.
    """

    def simulated(count: int) -> float:
        actions = training_actions(schedule, stages, count)
        return max(span.end for span in compute_times(actions, stages, duration, saving).values())

    return extrapolated(simulated, stages.num_ranks, num_microbatches, max_rounds)


def extrapolated(
    count: Callable[[int], float], num_ranks: int, num_microbatches: int, max_rounds: int = MAX_ROUNDS
) -> float:
    """Return what a function of the number of microbatches returns, or for many of them an extrapolation.

    Each further microbatch adds as much as the last of `max_rounds` per rank.
    """
    few, many = (max_rounds - 1) * num_ranks, max_rounds * num_ranks
    if num_microbatches <= many:
        return count(num_microbatches)
    short, long = count(few), count(many)
    return long + (long - short) / (many - few) * (num_microbatches - many)


@lru_cache(maxsize=256)
def pairs_of_rank(
    schedule: ScheduleName, stages: StageMap, num_microbatches: int, rank: int
) -> dict[int, float]:
    """Return in how many pairs of actions that run together the forward is of each chunk of a rank."""

    def num_pairs(chunk: int) -> Callable[[int], float]:
        def count(num_microbatches: int) -> float:
            actions = training_actions(schedule, stages, num_microbatches)[rank]
            return sum(len(group) == 2 and group[0].chunk == chunk for group in stages.groups(actions))

        return count

    return {
        chunk: extrapolated(num_pairs(chunk), stages.num_ranks, num_microbatches)
        for chunk in range(stages.num_chunks)
    }


def simulate(actions: Sequence[Sequence[Action]], stages: StageMap, duration: Duration) -> Timeline:
    """Plan the messages between the actions of all ranks, and simulate actions and messages.

    Raises:
        ScheduleError: the order of a rank is wrong, an input is never produced, or `run_steps` fails.
    """
    for rank, own in enumerate(actions):
        _check_order(rank, own)
    slots = run_steps(plan_steps(actions, stages), stages, duration)
    return Timeline(slots, tuple(map(peak_in_flight, actions)))


def _check_order(rank: int, actions: Sequence[Action]) -> None:
    """Check that no action repeats, and that a backward, or both parts of it, follows each forward.

    Raises:
        ScheduleError: a check fails.
    """
    seen: set[Action] = set()
    for action in actions:
        if action in seen:
            raise ScheduleError(f"rank {rank} runs {action} twice")
        if action.kind in _BEFORE and action._replace(kind=_BEFORE[action.kind]) not in seen:
            raise ScheduleError(
                f"rank {rank} runs {action} before {action._replace(kind=_BEFORE[action.kind])}"
            )
        seen.add(action)
    backward_kinds = {action.kind for action in seen} - {ActionKind.FORWARD}  # empty in an evaluation
    for action in actions:
        if backward_kinds and not any(action._replace(kind=kind) in seen for kind in backward_kinds):
            raise ScheduleError(f"rank {rank} never runs the backward of {action}")
        weight_part = action._replace(kind=ActionKind.BACKWARD_WEIGHT)
        if action.kind is ActionKind.BACKWARD_INPUT and weight_part not in seen:
            raise ScheduleError(f"rank {rank} never runs {weight_part}")


def run_steps(
    steps: Sequence[Sequence[Step]], stages: StageMap, duration: Duration
) -> tuple[tuple[TimelineSlot, ...], ...]:
    """Simulate the steps of all ranks, and return the times of their actions.

    A send and its receive wait for each other, as with NCCL, and each rank runs its batches of one direction
    one after the other.

    Raises:
        ScheduleError: two ranks' messages cross, or no rank can continue.
    """
    ranks = [_SimulatedRank(number, [*stages.groups(own)], duration) for number, own in enumerate(steps)]
    while not all(rank.is_done for rank in ranks):
        moved = False
        for rank in ranks:
            moved |= rank.advance()
        for rank in ranks:
            for direction in get_args(Direction):
                moved |= _deliver(rank, ranks, direction)
        if not moved:
            raise ScheduleError("deadlock: " + "; ".join(rank.status() for rank in ranks))
    return tuple(tuple(rank.slots) for rank in ranks)


class _OpenBatch:
    """Batch in flight.

    Attributes:
        send: the send, or None once it has been delivered.
        receives: receives that have not been delivered.
        started: time at which it became the current batch of its direction.
        end: earliest time at which the whole batch can have been delivered.
    """

    def __init__(self, batch: Batch, time: float) -> None:
        self.send = batch.send
        self.receives = list(batch.receives)
        self.readers = [message.reader for message in batch.receives]
        self.started = self.end = time

    def next_from(self, sender: int) -> StageMessage | None:
        """Return the next message that must come from this sender."""
        return next((message for message in self.receives if message.sender == sender), None)


class _Queue:
    """One rank's batches of one direction in flight.

    Attributes:
        open: batches in flight; the first is the current one.
        last_ends: end times of the last batches that were delivered.
    """

    def __init__(self) -> None:
        self.open: deque[_OpenBatch] = deque()
        self.last_ends = [0.0] * MAX_OPEN_BATCHES


class _SimulatedRank:
    """Next step of a rank, its batches in flight and its clock.

    Args:
        steps: batches, and actions with those that run together in one tuple.
    """

    def __init__(self, rank: int, steps: Sequence[tuple[Step, ...]], duration: Duration) -> None:
        self.rank = rank
        self.slots: list[TimelineSlot] = []
        self.queues: dict[str, _Queue] = {direction: _Queue() for direction in get_args(Direction)}
        self._steps = steps
        self._next = 0
        self._duration = duration
        self._clock = 0.0
        batches = (step for group in steps for step in group if isinstance(step, Batch))
        self._readers = {message.reader for batch in batches for message in batch.receives}
        self._arrived: dict[Action, float] = {}

    @property
    def is_done(self) -> bool:
        return self._next == len(self._steps) and not any(queue.open for queue in self.queues.values())

    def advance(self) -> bool:
        """Compute and start batches as far as possible; return whether any step ran."""
        first = self._next
        while self._next < len(self._steps) and self._run(self._steps[self._next]):
            self._next += 1
        return self._next > first

    def _run(self, group: tuple[Step, ...]) -> bool:
        if isinstance(group[0], Batch):
            return self._open(group[0])
        return self._compute([step for step in group if isinstance(step, Action)])

    def _open(self, batch: Batch) -> bool:
        queue = self.queues[batch.direction]
        if len(queue.open) == MAX_OPEN_BATCHES:
            return False
        self._clock = max(self._clock, queue.last_ends[len(queue.open)])
        queue.open.append(_OpenBatch(batch, max(self._clock, queue.last_ends[-1])))
        return True

    def _compute(self, actions: Sequence[Action]) -> bool:
        if any(action in self._readers and action not in self._arrived for action in actions):
            return False
        start = max(self._clock, *(self._arrived.get(action, 0.0) for action in actions))
        self._clock = start + sum(self._duration(self.rank, action) for action in actions)
        self.slots += [TimelineSlot(action, start, self._clock) for action in actions]
        return True

    def close_batch(self, queue: _Queue) -> None:
        """End the current batch of a direction if the whole batch has been delivered."""
        batch = queue.open[0]
        if batch.send is None and not batch.receives:
            queue.open.popleft()
            queue.last_ends = [*queue.last_ends[1:], batch.end]
            self._arrived.update(dict.fromkeys(batch.readers, batch.end))
            if queue.open:
                following = queue.open[0]
                following.started = following.end = max(following.started, batch.end)

    def status(self) -> str:
        if self.is_done:
            return f"rank {self.rank} is done"
        waits = []
        for batch in (queue.open[0] for queue in self.queues.values() if queue.open):
            if batch.send:
                waits.append(f"rank {batch.send.receiver} to receive the input of {batch.send.reader}")
            waits += [f"rank {m.sender} to send the input of {m.reader}" for m in batch.receives]
        if not waits:
            return f"rank {self.rank} waits to run {' and '.join(map(str, self._steps[self._next]))}"
        return f"rank {self.rank} waits for " + " and ".join(waits)


def _deliver(sender: _SimulatedRank, ranks: Sequence[_SimulatedRank], direction: Direction) -> bool:
    """Deliver the send of the sender's current batch if the receiver's current batch expects it."""
    outgoing = sender.queues[direction]
    message = outgoing.open[0].send if outgoing.open else None
    if message is None:
        return False
    receiver = ranks[message.receiver]
    incoming = receiver.queues[direction]
    expected = incoming.open[0].next_from(sender.rank) if incoming.open else None
    if expected is None:
        return False
    if expected != message:
        raise ScheduleError(
            f"messages cross: rank {sender.rank} sends rank {receiver.rank} the input of {message.reader}, "
            f"which expects the input of {expected.reader}"
        )
    outgoing.open[0].send = None
    incoming.open[0].receives.remove(message)
    time = max(queue.open[0].started for queue in (outgoing, incoming))
    for rank, queue in ((sender, outgoing), (receiver, incoming)):
        queue.open[0].end = max(queue.open[0].end, time)
        rank.close_batch(queue)
    return True
