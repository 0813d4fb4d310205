"""Estimate what a pair of actions hides: messages of experts under the computation of another microbatch.

In a schedule that overlaps actions, a forward and an input gradient run in turns, which change while rows of
experts are in flight (`megalite.distributed.overlap_slots`). The first layer with messages of one action runs
beside the first one of the other, and so on. The messages of each hide under the computation of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megalite.config.stage_layers import hides_expert_messages
from megalite.pipeline.simulator import pairs_of_rank
from megalite.plan.communication import CONTENTION
from megalite.plan.layer_time import ModelWork, WorkSeconds, model_work, work_key
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import Kinds

Savings = Mapping[tuple[int, int], float]
"""Seconds by which a pair is shorter than its two actions, by pipeline rank and the forward's chunk."""


class LayerSeconds(NamedTuple):
    """Seconds of a layer in one of two actions that run together."""

    messages: float
    computation: float

    @staticmethod
    def of(work: WorkSeconds) -> LayerSeconds:
        """Divide a layer's work."""
        return LayerSeconds(work.ep, work.seconds - work.ep)


def pair_savings(run: PlannedRun) -> Savings:
    """Return what pairs of actions save; nothing if they hide no messages."""
    if not hides_expert_messages(run.config):
        return {}
    key = ("pair savings", run.stages, run.layers, run.config.recompute, *work_key(run))
    return run.units.shared(key, lambda: _find(run, model_work(run)))


def saved_by_ranks(run: PlannedRun) -> list[float]:
    """Return the seconds that the pairs of each pipeline rank save in a step."""
    savings = pair_savings(run)
    if not savings:
        return [0.0] * run.pp
    schedule, num_microbatches = run.config.parallel.schedule, run.num_microbatches
    return [
        sum(
            number * savings[rank, chunk]
            for chunk, number in pairs_of_rank(schedule, run.stages, num_microbatches, rank).items()
        )
        for rank in range(run.pp)
    ]


def _find(run: PlannedRun, work: ModelWork) -> Savings:
    return {
        (rank, chunk): (1 - CONTENTION)
        * hidden_seconds(
            _in_forward(run.stage_kinds[stages[chunk]], work),
            _in_backward(run, run.stage_kinds[stages[1 - chunk]], work),
        )
        for rank in range(run.pp)
        for stages in [run.stages.stages_of(rank)]
        for chunk in (0, 1)
    }


def hidden_seconds(forward: Iterable[LayerSeconds], backward: Iterable[LayerSeconds]) -> float:
    """Return the seconds of messages that two actions hide under each other's computation.

    Args:
        forward, backward: the layers of each that send messages, in the order in which they run.
    """
    return sum(
        min(one.messages, other.computation) + min(other.messages, one.computation)
        for one, other in zip(forward, backward, strict=False)
    )


def _in_forward(kinds: Kinds, work: ModelWork) -> Iterator[LayerSeconds]:
    return _sending(work.layers[kind].forward for kind in kinds)


def _in_backward(run: PlannedRun, kinds: Kinds, work: ModelWork) -> Iterator[LayerSeconds]:
    groups = run.config.recompute.groups(len(kinds))
    again = {layer for group, is_again in groups if is_again for layer in group}
    layers = [work.layers[kind] for kind in kinds]
    works = [each.backward_input + each.forward * (i in again) for i, each in enumerate(layers)]
    return _sending(reversed(works))


def _sending(works: Iterable[WorkSeconds]) -> Iterator[LayerSeconds]:
    """Yield the layers that send messages: in the others, the turns do not change."""
    return (LayerSeconds.of(work) for work in works if work.ep)
