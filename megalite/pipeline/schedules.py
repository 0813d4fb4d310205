"""Define pipeline schedules as data: pure functions that return the actions of each rank in order.

`SCHEDULES` at the end holds all facts about the schedules. Configuration, planner, simulator, executor and
drawing read it, so this module is at the lowest level and imports nothing from megalite.

p is the number of ranks along the pipeline axis, m the number of microbatches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate, count, pairwise
from typing import Literal, NamedTuple, TypeVar, get_args


class ActionKind(Enum):
    """Kind of work that a rank does for one microbatch.

    A schedule uses whole backward passes, or splits each of them in two (Qi et al. 2023): the gradient of the
    input, for which the previous stage waits, and the gradients of the weights, which can wait until the
    update.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    BACKWARD_WEIGHT = "backward weight"

    __hash__ = object.__hash__  # actions are looked up often, and Enum's own hash is slow

    @property
    def downstream(self) -> int:
        """Return by how many stages the output moves: 1, -1, or 0 if there is no output to send."""
        return _DOWNSTREAM[self]

    @property
    def units(self) -> int:
        """Return the usual duration: a backward pass runs two GEMMs for each GEMM of the forward."""
        return 2 if self is ActionKind.BACKWARD else 1


_DOWNSTREAM = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: -1,
    ActionKind.BACKWARD_INPUT: -1,
    ActionKind.BACKWARD_WEIGHT: 0,
}

Direction = Literal["forward", "backward"]

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


class Action(NamedTuple):
    """One step of a rank's work.

    Attributes:
        microbatch: number of the microbatch within the step, in [0, m).
        chunk: index among the rank's model chunks; `StageMap` maps it to a global stage.
    """

    kind: ActionKind
    microbatch: int
    chunk: int = 0

    @property
    def direction(self) -> Direction:
        """Return the direction of the action's input and output."""
        return "forward" if self.kind is ActionKind.FORWARD else "backward"

    def __str__(self) -> str:
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind.value} {self.microbatch}{chunk}"


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Return the largest number of microbatches whose activations a rank holds at once.

    A microbatch is in flight from its forward to its backward, or to the weight part of a split backward,
    which still needs the activations. Microbatches of different chunks count separately. The result has no
    meaning for an evaluation, which keeps no activations.

    Args:
        actions: actions of one rank, in order.
    """
    return _peak(actions, ActionKind.FORWARD, (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT))


def peak_deferred(actions: Sequence[Action]) -> int:
    """Return the largest number of microbatches whose weight gradients a rank has deferred at once.

    Args:
        actions: actions of one rank, in order.
    """
    return _peak(actions, ActionKind.BACKWARD_INPUT, (ActionKind.BACKWARD_WEIGHT,))


def _peak(actions: Sequence[Action], begins: ActionKind, ends: Sequence[ActionKind]) -> int:
    changes = ((action.kind is begins) - (action.kind in ends) for action in actions)
    return max(accumulate(changes), default=0)


Step = TypeVar("Step")


@dataclass(frozen=True)
class StageMap:
    """Map between global stages and the chunks of ranks. A microbatch passes each rank once per chunk.

    Attributes:
        v_shaped: odd chunks run over the ranks in reverse order (ZB-V, Qi et al. 2024), so the last
            rank holds two consecutive stages. Otherwise every chunk starts at rank 0 (interleaved stages,
            Narayanan et al. 2021).
        overlaps: a forward and the input gradient of another chunk right after it run together; see `groups`.
    """

    num_ranks: int
    num_chunks: int = 1
    v_shaped: bool = False
    overlaps: bool = False

    @property
    def num_stages(self) -> int:
        """Return the number of global stages, over all ranks."""
        return self.num_ranks * self.num_chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the global stage of a rank's chunk."""
        return chunk * self.num_ranks + self._mirrored(rank, chunk)

    def holder_of(self, stage: int) -> tuple[int, int]:
        """Return the rank that holds a global stage, and its chunk on this rank."""
        chunk, position = divmod(stage, self.num_ranks)
        return self._mirrored(position, chunk), chunk

    def source_of(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """Return the rank and action that produce an action's input; None if it has none of another stage."""
        return self._neighbour(rank, action, -action.kind.downstream)

    def reader_of(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """Return the rank and action that read an action's output; None if no action reads it."""
        return self._neighbour(rank, action, action.kind.downstream)

    def _neighbour(self, rank: int, action: Action, step: int) -> tuple[int, Action] | None:
        stage = self.stage_of(rank, action.chunk) + step
        if step == 0 or not 0 <= stage < self.num_stages:
            return None
        holder, chunk = self.holder_of(stage)
        return holder, Action(action.kind, action.microbatch, chunk)

    def _mirrored(self, rank: int, chunk: int) -> int:
        """Map a rank to its position along a chunk, or back (the map is its own inverse)."""
        return self.num_ranks - 1 - rank if self.v_shaped and chunk % 2 else rank

    def stages_of(self, rank: int) -> list[int]:
        """Return the global stages of a rank's chunks, in order."""
        return [self.stage_of(rank, chunk) for chunk in range(self.num_chunks)]

    def groups(self, steps: Iterable[Step]) -> Iterator[tuple[Step, ...]]:
        """Split a rank's steps into pairs of actions that run together, and single ones.

        A pair starts when both inputs have arrived, and both outputs leave when it ends.

        Args:
            steps: actions in order; there can be other steps between them.
        """
        first: Step | None = None
        for step in steps:
            if first is not None and self._run_together(first, step):
                yield first, step
                first = None
                continue
            if first is not None:
                yield (first,)
            first = step
        if first is not None:
            yield (first,)

    def _run_together(self, first: object, second: object) -> bool:
        if not (self.overlaps and isinstance(first, Action) and isinstance(second, Action)):
            return False
        return (first.kind, second.kind) == (F, B) and first.chunk != second.chunk


ScheduleFunction = Callable[[int, StageMap, int], list[Action]]
"""Maps (rank along the axis, stages, number of microbatches) to the rank's actions in order."""


def actions_by_rank(order: ScheduleFunction, stages: StageMap, num_microbatches: int) -> list[list[Action]]:
    """Return the actions of every rank."""
    return [order(rank, stages, num_microbatches) for rank in range(stages.num_ranks)]


@lru_cache(maxsize=64)
def training_actions(schedule: ScheduleName, stages: StageMap, num_microbatches: int) -> list[list[Action]]:
    """Return the actions of all ranks in a training step of a schedule."""
    return actions_by_rank(SCHEDULES[schedule].train, stages, num_microbatches)


def forward_only(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """Return the forwards of an evaluation with one chunk per rank; they are the same on every rank."""
    return [Action(F, number) for number in range(num_microbatches)]


def gpipe(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """Run all forwards, then all backwards (Huang et al. 2019); m microbatches are in flight.

    Backwards run in the order of the forwards, so gradients are summed in the order of microbatches.
    """
    backwards = [Action(ActionKind.BACKWARD, number) for number in range(num_microbatches)]
    return forward_only(rank, stages, num_microbatches) + backwards


def one_f_one_b(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """Alternate one forward and one backward after warm-up (PipeDream-Flush, Narayanan et al. 2021).

    The bubble is the same as in GPipe, but at most ``p - rank`` microbatches are in flight for any m.
    """
    num_warmup = min(stages.num_ranks - rank - 1, num_microbatches)
    forwards = forward_only(rank, stages, num_microbatches)
    backwards = [Action(ActionKind.BACKWARD, number) for number in range(num_microbatches)]
    return _alternate(forwards, backwards, num_warmup)


def _alternate(forwards: list[Action], backwards: list[Action], num_warmup: int) -> list[Action]:
    """Run `num_warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    actions = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - num_warmup :]


def interleaved(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """Run 1F1B over groups of microbatches; each group passes all chunks in turn (Narayanan et al. 2021).

    With v chunks the bubble is (p - 1) / (v m) of the work if m is a multiple of p. With m < p, ranks wait
    between two chunks of a group.

    Args:
        rank: rank along the axis.
        stages: stages with two or more chunks per rank.
        num_microbatches: m; if it is not a multiple of p, groups have p microbatches or a few more.
    """
    groups = _microbatch_groups(num_microbatches, stages.num_ranks)
    backwards = [
        Action(ActionKind.BACKWARD, number, chunk)
        for group in groups
        for chunk in reversed(range(stages.num_chunks))
        for number in group
    ]
    forwards = interleaved_forward(rank, stages, num_microbatches)
    # After these, the first group has reached the last chunk, and its first gradient has returned to this
    # rank.
    num_warmup = (stages.num_chunks - 1) * len(groups[0]) + 2 * (stages.num_ranks - rank - 1)
    return _alternate(forwards, backwards, min(num_warmup, len(forwards)))


def interleaved_forward(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """Return the forwards of `interleaved`; they are the same on every rank."""
    return [
        Action(F, number, chunk)
        for group in _microbatch_groups(num_microbatches, stages.num_ranks)
        for chunk in range(stages.num_chunks)
        for number in group
    ]


def _microbatch_groups(num_microbatches: int, num_ranks: int) -> list[range]:
    """Split the microbatches into groups of p or a few more, the larger groups first.

    The first microbatch of a group of p returns to rank 0 just after rank 0 has started the last one.
    """
    num_groups = max(num_microbatches // num_ranks, 1)
    size, remainder = divmod(num_microbatches, num_groups)
    starts = [group * size + min(group, remainder) for group in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def zb_h1(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """Run ZB-H1 (Qi et al. 2023, section 2.1): 1F1B with weight gradients deferred by `rank` microbatches.

    Later ranks start their forwards later and finish their backwards sooner. Because they defer `rank` weight
    gradients, the last input gradients reach rank 0 without a gap. The bubble is (p - 1)(F + B - W), a
    third of 1F1B's if the three take equal time. Every rank holds p microbatches, like the first rank of
    1F1B.
    """
    num_warmup = min(stages.num_ranks - rank - 1, num_microbatches)
    actions = [Action(F, number) for number in range(num_warmup)]
    for number in range(num_microbatches):
        if number + num_warmup < num_microbatches:
            actions.append(Action(F, number + num_warmup))
        actions.append(Action(B, number))
        if number >= rank:
            actions.append(Action(W, number - rank))
    first_deferred = max(num_microbatches - rank, 0)
    return actions + [Action(W, number) for number in range(first_deferred, num_microbatches)]


def zb_v(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """Run ZB-V (V-ZB of Qi et al. 2024): two chunks per rank along a V, no bubble if F, B and W are equal.

    Rank 0 holds the first and the last stage, so it computes the loss of the microbatches that it starts.
    Every rank holds 2p microbatches of half its layers, no more than the first rank of 1F1B.

    Args:
        rank: rank along the axis.
        stages: V-shaped stages with two chunks per rank.
        num_microbatches: m. The pipeline is full from m = 2p - 1 on. For smaller m, the order is the one for
            2p - 1 without the missing microbatches.
    """
    full = max(num_microbatches, 2 * stages.num_ranks - 1)
    actions = _zb_v_full(rank, stages.num_ranks, full)
    return [action for action in actions if action.microbatch < num_microbatches]


def _zb_v_full(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield the order of ZB-V for m >= 2p - 1."""
    next_of = {(kind, chunk): 0 for kind in (F, B, W) for chunk in (0, 1)}

    def run(kind: ActionKind, chunk: int) -> Action:
        number = next_of[kind, chunk]
        next_of[kind, chunk] += 1
        return Action(kind, number, chunk)

    def remaining(kind: ActionKind, chunk: int) -> int:
        return num_microbatches - next_of[kind, chunk]

    # Warm-up: fill the pipeline down to the last rank and back up to this one.
    for _ in range(2 * (num_ranks - rank) - 1):
        yield run(F, 0)
    for _ in range(rank):
        yield run(F, 1)
        yield run(F, 0)
    for _ in range(num_ranks - rank):
        yield from (run(F, 1), run(B, 1), run(W, 1))
    # Steady state: one microbatch in, one out.
    while remaining(F, 1):
        if remaining(F, 0):
            yield run(F, 0)
        yield from (run(B, 0), run(W, 0), run(F, 1), run(B, 1), run(W, 1))
    # Cool-down: first the input gradients that other ranks wait for.
    for _ in range(rank):
        yield from (run(B, 0), run(B, 1))
    for _ in range(num_ranks - rank):
        yield from (run(B, 0), run(W, 0))
    for chunk in (1, 0):
        for _ in range(remaining(W, chunk)):
            yield run(W, chunk)


def zb_v_forward(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """Return the forwards of an evaluation along a V.

    The first chunk is ahead of the second by the number of microbatches on their way to the last rank and
    back.
    """
    ahead = min(2 * (stages.num_ranks - rank) - 1, num_microbatches)
    actions = [Action(F, number) for number in range(ahead)]
    for number in range(num_microbatches):
        actions.append(Action(F, number, chunk=1))
        if number + ahead < num_microbatches:
            actions.append(Action(F, number + ahead))
    return actions


def dualpipe_v(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """Run DualPipeV (DeepSeek-AI 2025): a forward beside an input gradient of the rank's other chunk.

    Each of the two computes while messages of the other are in flight, such as tokens on their way to
    experts. The paper's backwards have both parts here: its bubble is (p - 1)(F + 2 B - W) if nothing is
    hidden. Here, weight gradients are actions of their own, and input gradients leave before them. If the
    three take equal time, the bubble is p - 1 forwards. Every rank holds up to 2p + 1 microbatches of half
    its layers.

    Args:
        rank: rank along the axis.
        stages: V-shaped stages with two chunks per rank, whose actions overlap.
        num_microbatches: m. The pipeline is full from m = 2p on. For smaller m, the order is the one for 2p
            without the missing microbatches.
    """
    full = max(num_microbatches, 2 * stages.num_ranks)
    actions = _dualpipe_v_full(rank, stages.num_ranks, full)
    return [action for action in actions if action.microbatch < num_microbatches]


def _dualpipe_v_full(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield the order of DualPipeV for m >= 2p."""
    numbers = {(kind, chunk): count() for kind in (F, B, W) for chunk in (0, 1)}

    def run(kind: ActionKind, chunk: int) -> Action:
        return Action(kind, next(numbers[kind, chunk]), chunk)

    later = num_ranks - rank - 1  # ranks between this one and the tip of the V
    # Warm-up: fill the pipeline down to the last rank and back up to this one.
    for _ in range(2 * later):
        yield run(F, 0)
    for _ in range(rank + 1):
        yield from (run(F, 0), run(F, 1))
    for _ in range(later):
        yield from (run(B, 1), run(W, 1), run(F, 1))
    # Steady state: pairs of a forward and an input gradient.
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        yield from (run(F, 0), run(B, 1), run(W, 1), run(F, 1), run(B, 0), run(W, 0))
    for _ in range(later):
        yield from (run(B, 1), run(W, 1), run(F, 1), run(B, 0), run(W, 0))
    # Cool-down: from its middle on, first the input gradients that other ranks wait for.
    backwards = [1, 0] * (rank + 1) + [0] * later  # by chunk
    deferred = backwards[rank + 1 :]
    for number, chunk in enumerate(backwards):
        if number >= 2 * (rank + 1):
            yield run(W, deferred.pop(0))
        yield run(B, chunk)
        if number <= rank:
            yield run(W, chunk)
    for chunk in deferred:
        yield run(W, chunk)


DEFAULT_NUM_CHUNKS = 2
"""Number of chunks per rank if the user can choose it and has not."""


@dataclass(frozen=True)
class PipelineSchedule:
    """All facts about one schedule.

    Attributes:
        train: returns the actions of a training step. Every schedule sums the gradients of a stage in the
            order of microbatches.
        evaluate: returns the forwards of an evaluation.
        num_chunks: model chunks per rank; None if the user chooses the number, two or more.
        v_shaped: whether the chunks of a rank lie along a V; see `StageMap`.
        overlaps: whether pairs of actions run together; see `StageMap`.
        splits_backward: whether input gradients and weight gradients are separate actions.
        keeps_all_microbatches: whether the number of microbatches in flight grows with m; otherwise p and the
            number of chunks bound it.
        needs_microbatch_per_rank: whether m must be at least p.
        layout_suffix: follows the pipeline size in the name of a layout, as in ``pp4zb``. It is empty for
            1f1b and for interleaved, whose name has the number of chunks, as in ``pp4v2``.
    """

    train: ScheduleFunction
    evaluate: ScheduleFunction
    num_chunks: int | None = 1
    v_shaped: bool = False
    overlaps: bool = False
    splits_backward: bool = False
    keeps_all_microbatches: bool = False
    needs_microbatch_per_rank: bool = False
    layout_suffix: str = ""

    def stage_map(self, num_ranks: int, num_chunks: int | None = None) -> StageMap:
        """Return the stages of `num_ranks` ranks.

        Args:
            num_chunks: used if the user can choose it; by default `DEFAULT_NUM_CHUNKS`.
        """
        chosen = self.num_chunks or num_chunks or DEFAULT_NUM_CHUNKS
        return StageMap(num_ranks, chosen, self.v_shaped, self.overlaps)


ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipev"]
"""Values of ``--pipeline-schedule``: the keys of `SCHEDULES`, written out for the type checker."""

SCHEDULES: dict[ScheduleName, PipelineSchedule] = {
    "1f1b": PipelineSchedule(one_f_one_b, forward_only),
    "gpipe": PipelineSchedule(gpipe, forward_only, keeps_all_microbatches=True, layout_suffix="gpipe"),
    "interleaved": PipelineSchedule(
        interleaved, interleaved_forward, num_chunks=None, needs_microbatch_per_rank=True
    ),
    "zb-h1": PipelineSchedule(zb_h1, forward_only, splits_backward=True, layout_suffix="zb"),
    "zb-v": PipelineSchedule(
        zb_v, zb_v_forward, num_chunks=2, v_shaped=True, splits_backward=True, layout_suffix="zbv"
    ),
    "dualpipev": PipelineSchedule(
        dualpipe_v,
        zb_v_forward,
        num_chunks=2,
        v_shaped=True,
        overlaps=True,
        splits_backward=True,
        layout_suffix="dpv",
    ),
}
assert tuple(SCHEDULES) == get_args(ScheduleName)
