"""Pipeline schedules by name, and those with one chunk and whole backward passes.

A schedule is a pure function from a rank to the actions that it runs, in order. It says nothing of messages:
they follow from it (`messages`). The simulator proves it, the executor runs it, and both read the same list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megalite.pipeline.action import Action, Kind
from megalite.pipeline.interleaved import interleaved, interleaved_forward
from megalite.pipeline.stages import StageMap
from megalite.pipeline.zero_bubble import zb_h1, zb_v, zb_v_forward

Order = Callable[[int, StageMap, int], list[Action]]
"""From (rank along the axis, stages, number of microbatches) to that rank's actions in order."""


@dataclass(frozen=True)
class Schedule:
    """How a step's microbatches pass through the pipeline.

    Attributes:
        train: forwards and backwards of a training step; gradients of a stage add up in the order of
            microbatches, whatever the schedule.
        evaluate: forwards alone.
        num_chunks: parts of the model that a rank holds; None where the user chooses, two or more.
        turns: see `StageMap`.
        splits_backward: backward passes come as input's and weights' gradients apart.
    """

    train: Order
    evaluate: Order
    num_chunks: int | None = 1
    turns: bool = False
    splits_backward: bool = False

    def stage_map(self, num_ranks: int, num_chunks: int | None = None) -> StageMap:
        """The stages of `num_ranks` ranks; `num_chunks` is read where the user chooses it, 2 by default."""
        return StageMap(num_ranks, self.num_chunks or num_chunks or 2, self.turns)


def gpipe(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019): every microbatch is in flight at the turn.

    Backwards run in the order of the forwards, so that gradients are summed in the order of microbatches.
    """
    return forward_only(rank, stages, num_microbatches) + _actions(Kind.BACKWARD, num_microbatches)


def one_f_one_b(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """A backward as soon as there is one, then one forward, in turn (PipeDream-Flush, Narayanan et al. 2021).

    The bubble is GPipe's; at most ``num_ranks - rank`` microbatches are in flight, however many there are.
    """
    forwards = _actions(Kind.FORWARD, num_microbatches)
    backwards = _actions(Kind.BACKWARD, num_microbatches)
    num_warmup = min(stages.num_ranks - rank - 1, num_microbatches)
    actions = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[num_microbatches - num_warmup :]


def forward_only(rank: int, stages: StageMap, num_microbatches: int) -> list[Action]:
    """What an evaluation runs with one chunk a rank, on every rank alike."""
    return _actions(Kind.FORWARD, num_microbatches)


def _actions(kind: Kind, num_microbatches: int) -> list[Action]:
    return [Action(kind, microbatch) for microbatch in range(num_microbatches)]


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(one_f_one_b, forward_only),
    "gpipe": Schedule(gpipe, forward_only),
    "interleaved": Schedule(interleaved, interleaved_forward, num_chunks=None),
    "zb-h1": Schedule(zb_h1, forward_only, splits_backward=True),
    "zb-v": Schedule(zb_v, zb_v_forward, num_chunks=2, turns=True, splits_backward=True),
}
"""By the name that ``--pipeline-schedule`` gives them."""
