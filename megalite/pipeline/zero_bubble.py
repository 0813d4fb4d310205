"""Zero-bubble schedules: a backward pass in two parts, the weights' gradients where a rank would wait."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.pipeline.action import Action, Kind
from megalite.pipeline.stages import StageMap

F, B, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def zb_h1(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """ZB-H1 (Qi et al. 2023, section 2.1): 1F1B whose weights' gradients come `rank` microbatches late.

    The later a rank's forward begins, the sooner it is done with its backward: putting `rank` of its weights'
    gradients off lets the last backwards come together at rank 0. Its bubble is (p - 1)(F + B - W), a third
    of 1F1B's where the three take the same time. Every rank keeps what the first one keeps in 1F1B: p
    microbatches.
    """
    num_warmup = min(stages.num_ranks - rank - 1, num_microbatches)
    actions = [Action(F, number) for number in range(num_warmup)]
    for number in range(num_microbatches):
        if number + num_warmup < num_microbatches:
            actions.append(Action(F, number + num_warmup))
        actions.append(Action(B, number))
        if number >= rank:
            actions.append(Action(W, number - rank))
    first_left = max(num_microbatches - rank, 0)
    return actions + [Action(W, number) for number in range(first_left, num_microbatches)]


def zb_v(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """Return ZB-V: two chunks a rank along a V, no bubble where F, B and W are as long.

    It is V-ZB of "Pipeline Parallelism with Controllable Memory" (Qi et al. 2024).

    Both ends of the pipeline are on rank 0, so that a microbatch's loss is known where its first forward ran,
    and every rank keeps the same: 2p microbatches of a half of its layers, no more than 1F1B's first rank.

    Args:
        rank: along the axis.
        stages: of two chunks, which turn.
        num_microbatches: from 2p - 1 on the pipeline is full; of fewer, the order is that of 2p - 1 without
            those that are not there.
    """
    full = max(num_microbatches, 2 * stages.num_ranks - 1)
    actions = _zb_v_full(rank, stages.num_ranks, full)
    return [action for action in actions if action.microbatch < num_microbatches]


def zb_v_forward(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """The forwards of a V alone: the first chunk is ahead by what is on its way to the turn and back."""
    ahead = min(2 * (stages.num_ranks - rank) - 1, num_microbatches)
    actions = [Action(F, number) for number in range(ahead)]
    for number in range(num_microbatches):
        actions.append(Action(F, number, chunk=1))
        if number + ahead < num_microbatches:
            actions.append(Action(F, number + ahead))
    return actions


def _zb_v_full(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """The order for m >= 2p - 1."""
    next_of = {(kind, chunk): 0 for kind in (F, B, W) for chunk in (0, 1)}

    def run(kind: Kind, chunk: int) -> Action:
        number = next_of[kind, chunk]
        next_of[kind, chunk] += 1
        return Action(kind, number, chunk)

    def left(kind: Kind, chunk: int) -> int:
        return num_microbatches - next_of[kind, chunk]

    # The pipeline fills up to the turn, and back from there to this rank.
    for _ in range(2 * (num_ranks - rank) - 1):
        yield run(F, 0)
    for _ in range(rank):
        yield run(F, 1)
        yield run(F, 0)
    for _ in range(num_ranks - rank):
        yield from (run(F, 1), run(B, 1), run(W, 1))
    # One microbatch in, one out.
    while left(F, 1):
        if left(F, 0):
            yield run(F, 0)
        yield from (run(B, 0), run(W, 0), run(F, 1), run(B, 1), run(W, 1))
    # It runs empty: what others wait for first.
    for _ in range(rank):
        yield from (run(B, 0), run(B, 1))
    for _ in range(num_ranks - rank):
        yield from (run(B, 0), run(W, 0))
    for chunk in (1, 0):
        for _ in range(left(W, chunk)):
            yield run(W, chunk)
