"""Messages on a GPU cannot deadlock where the host, or the GPU, has to keep the order of launches."""

from __future__ import annotations

import pytest

from megalite.pipeline.messages import MAX_OPEN_BATCHES, Batch, StageMessage, Step, plan_steps
from megalite.pipeline.schedules import SCHEDULES, Action, ActionKind, actions_by_rank

SIZES = [
    (name, num_ranks, num_microbatches, num_chunks)
    for name in SCHEDULES
    for num_ranks in (2, 3, 5)
    for num_microbatches in (1, 3, 4, 6, 11)
    for num_chunks in ((2, 3) if name == "interleaved" else (None,))
]


def steps_of(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None) -> list[list[Step]]:
    stages = SCHEDULES[name].stage_map(num_ranks, num_chunks)
    return plan_steps(actions_by_rank(SCHEDULES[name].train, stages, num_microbatches), stages)


def messages_of(step: Step) -> list[StageMessage]:
    if isinstance(step, Action):
        return []
    return [*([step.send] if step.send else []), *step.receives]


def are_both_launched(message: StageMessage, launched: list[set[StageMessage]]) -> bool:
    """Return whether both ends of a message are among those that its ranks have launched."""
    return message in launched[message.sender] and message in launched[message.receiver]


def connect(steps: list[list[Step]]) -> None:
    """Launch as NCCL's host does: it waits at the first message of two ranks until both have launched it."""
    launched: list[set[StageMessage]] = [set() for _ in steps]
    connected: set[tuple[int, int, str]] = set()
    left = [[messages_of(step) for step in own] for own in steps]
    while any(left):
        before = sum(map(len, left))
        for rank, own in enumerate(left):
            while own:
                launched[rank].update(own[0])
                first = {(m.sender, m.receiver, m.direction): m for m in reversed(own[0])}
                new = {key: m for key, m in first.items() if key not in connected}
                if not all(are_both_launched(m, launched) for m in new.values()):
                    break
                connected.update(new)
                del own[0]
        assert sum(map(len, left)) < before, "deadlock"


def prerequisites(steps: list[Step]) -> list[set[int]]:
    """Return the earlier steps of a rank that must be complete before each step starts on the GPU.

    An action waits for its input, and for sends that are too many to be open. A batch waits for the batch
    before it in its direction, and for what the compute stream has to do when it is launched.
    """
    found: list[set[int]] = []
    compute: set[int] = set()
    queue: dict[str, set[int]] = {"forward": set(), "backward": set()}
    sends: dict[str, list[int]] = {"forward": [], "backward": []}
    batch_of: dict[Action, int] = {}
    for number, step in enumerate(steps):
        if isinstance(step, Batch):
            open_sends = sends[step.direction]
            if step.send:
                compute |= set(open_sends[: len(open_sends) + 1 - MAX_OPEN_BATCHES])
                open_sends.append(number)
            batch_of |= {message.reader: number for message in step.receives}
            found.append(compute | queue[step.direction])
            queue[step.direction] = {number}
        else:
            compute |= {batch_of[step]} if step in batch_of else set()
            found.append(set(compute))
            compute = {number}
    return found


def run_in_order(steps: list[list[Step]]) -> None:
    """Start every rank's steps in the order of their launch, as with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    needs = [prerequisites(own) for own in steps]
    num_started = [0] * len(steps)
    running: list[set[int]] = [set() for _ in steps]
    done: list[set[int]] = [set() for _ in steps]
    launched: list[set[StageMessage]] = [set() for _ in steps]
    while any(len(finished) < len(own) for finished, own in zip(done, steps, strict=True)):
        before = sum(num_started) + sum(map(len, done))
        for rank, own in enumerate(steps):
            while num_started[rank] < len(own) and needs[rank][num_started[rank]] <= done[rank]:
                launched[rank].update(messages_of(own[num_started[rank]]))
                running[rank].add(num_started[rank])
                num_started[rank] += 1
            over = {
                number
                for number in running[rank]
                if all(are_both_launched(m, launched) for m in messages_of(own[number]))
            }
            running[rank] -= over
            done[rank] |= over
        assert sum(num_started) + sum(map(len, done)) > before, "deadlock"


@pytest.mark.parametrize("name", SCHEDULES)
def test_neither_the_host_nor_one_hardware_queue_deadlocks(name: str) -> None:
    for sizes in SIZES:
        if sizes[0] == name:
            connect(steps_of(*sizes))
            run_in_order(steps_of(*sizes))


def test_crossed_launches_are_found() -> None:
    """The host meets two directions in another order on each rank; the GPU two messages of one direction."""
    hidden, later = (StageMessage(0, 1, Action(ActionKind.FORWARD, number)) for number in range(2))
    gradient = StageMessage(1, 0, Action(ActionKind.BACKWARD, 0))
    with pytest.raises(AssertionError, match="deadlock"):
        connect([[Batch(hidden), Batch(None, (gradient,))], [Batch(gradient), Batch(None, (hidden,))]])
    with pytest.raises(AssertionError, match="deadlock"):
        run_in_order([[Batch(hidden), Batch(later)], [Batch(None, (later,)), Batch(None, (hidden,))]])
