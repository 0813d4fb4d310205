"""The point-to-point messages between a rank's actions: they follow from the schedule alone.

Between two actions there is one batch: the last action's output leaves and the next one's input arrives. Both
are in one batch because NCCL runs a communicator's operations one after another: where two neighbours send to
each other, a send in front of a receive on both sides would wait for ever, while the members of a batch move
together. It is one batch only, so that the messages of each pair of ranks keep one order, without tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.pipeline.schedule import Action, Kind

_DOWNSTREAM = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
"""Which way along the stages an action's output goes."""


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
    """Messages that a rank starts together; at least one of the two is there."""

    send: Message | None
    receive: Message | None


Step = Action | Batch
"""What a rank does next: it computes or it exchanges."""


def steps_of(actions: Sequence[Action], rank: int, num_ranks: int) -> list[Step]:
    """Puts the batches of messages between a rank's actions.

    A batch sends the output of the action in front of it and receives the input of the action behind it.
    """
    num_stages = num_ranks * (1 + max((action.chunk for action in actions), default=0))
    steps: list[Step] = []
    send: Message | None = None
    for action in actions:
        receive = _input(action, rank, num_ranks, num_stages)
        if send or receive:
            steps.append(Batch(send, receive))
        steps.append(action)
        send = _output(action, rank, num_ranks, num_stages)
    if send:
        steps.append(Batch(send, None))
    return steps


def _input(action: Action, rank: int, num_ranks: int, num_stages: int) -> Message | None:
    """The message that `action` on `rank` waits for; None where the pipeline begins (or turns round)."""
    source = action.chunk * num_ranks + rank - _DOWNSTREAM[action.kind]
    return Message(source % num_ranks, rank, action) if 0 <= source < num_stages else None


def _output(action: Action, rank: int, num_ranks: int, num_stages: int) -> Message | None:
    """The message that `action` on `rank` gives rise to; None where the pipeline ends."""
    target = action.chunk * num_ranks + rank + _DOWNSTREAM[action.kind]
    if not 0 <= target < num_stages:
        return None
    chunk, receiver = divmod(target, num_ranks)
    return Message(rank, receiver, Action(action.kind, action.microbatch, chunk))
