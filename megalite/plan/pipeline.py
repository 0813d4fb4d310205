"""The pipeline's step in seconds: the executor's own action lists, with the time of each action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megalite.pipeline.action import Action, Kind
from megalite.pipeline.check import peak_in_flight
from megalite.pipeline.schedule import SCHEDULES
from megalite.pipeline.stages import StageMap
from megalite.pipeline.timing import compute_times
from megalite.plan.communication import Group
from megalite.plan.job import Job
from megalite.plan.layer import embedding_passes, head_passes, layer_passes
from megalite.plan.recomputation import stage_recomputation
from megalite.plan.sharing import gathering
from megalite.plan.work import Passes, Work, total_work

MAX_ROUNDS = 3
"""Microbatches that are timed one by one, over the stages; each one more costs what those before it did."""

Stage = Mapping[Kind, Work]
"""A stage's work on one microbatch, by the kinds of action that its schedule has."""


@dataclass(frozen=True)
class Step:
    """Forward and backward of all microbatches.

    Attributes:
        seconds: from the first action to the last one's end.
        work: of the busiest rank, for all its microbatches.
        last_backward: of the busiest rank, for one microbatch.
        bubble: seconds that the average rank waits for others.
    """

    seconds: float
    work: Work
    last_backward: Work
    bubble: float


def time_step(job: Job) -> Step:
    """Runs the schedule on paper."""
    stages = _stages(job)
    by_rank = [[stages[stage] for stage in job.stages.stages_of(rank)] for rank in range(job.pp)]
    works = [total_work(work for chunk in chunks for work in chunk.values()) for chunks in by_rank]
    busiest = max(range(job.pp), key=lambda rank: works[rank].seconds)
    forward = total_work(chunk[Kind.FORWARD] for chunk in by_rank[busiest])
    seconds = makespan(job, stages)
    average = sum(work.seconds for work in works) / job.pp * job.num_microbatches
    return Step(
        seconds,
        works[busiest] * job.num_microbatches,
        works[busiest] + forward * -1.0,
        max(0.0, seconds - average),
    )


def _stages(job: Job) -> list[Stage]:
    """Of every global stage; those between the ends are alike if they have as many layers."""
    layer, last = layer_passes(job), job.stages.num_stages - 1
    known: dict[tuple[int, bool, bool], Stage] = {}
    for stage, num_layers in enumerate(job.layers):
        key = num_layers, stage == 0, stage == last
        if key not in known:
            known[key] = _stage(job, layer, *key)
    return [known[num_layers, stage == 0, stage == last] for stage, num_layers in enumerate(job.layers)]


def _stage(job: Job, layer: Passes, num_layers: int, is_first: bool, is_last: bool) -> Stage:
    passes = layer * num_layers
    if is_first:
        passes += embedding_passes(job)
    if is_last:
        passes += head_passes(job)
    message = _message(job)
    again = stage_recomputation(job, layer, num_layers)
    gather_forward, gather_backward = gathering(job, num_layers, passes.forward, passes.backward + again)
    forward = passes.forward + message + gather_forward
    backward_input = passes.backward_input + again + message + gather_backward
    if SCHEDULES[job.config.parallel.schedule].splits_backward:
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD_INPUT: backward_input,
            Kind.BACKWARD_WEIGHT: passes.backward_weight,
        }
    return {Kind.FORWARD: forward, Kind.BACKWARD: backward_input + passes.backward_weight}


def _message(job: Job) -> Work:
    """The hidden states, or their gradient, to a neighbour."""
    group = Group(job.cluster, job.pp, job.tp * job.num_sharing)
    num_bytes = job.tokens * job.config.model.hidden_size * job.element_bytes
    if job.pp > 1 and job.program.splits_messages and job.slices == 1:
        gathered = Group(job.cluster, job.tp, 1).gather_seconds(num_bytes)
        return Work(tp=gathered, pp=group.message_seconds(num_bytes / job.tp))
    return Work(pp=group.message_seconds(num_bytes / job.slices))


def makespan(job: Job, stages: Sequence[Stage], max_rounds: int = MAX_ROUNDS) -> float:
    """Seconds of all microbatches; of many, from the pace that a few come to."""
    seconds = [{kind: work.seconds for kind, work in stage.items()} for stage in stages]
    if job.pp == 1:
        return sum(seconds[0].values()) * job.num_microbatches
    few, many = (max_rounds - 1) * job.pp, max_rounds * job.pp
    if job.num_microbatches <= many:
        return _simulate(job, seconds, job.num_microbatches)
    short, long = _simulate(job, seconds, few), _simulate(job, seconds, many)
    return long + (long - short) / (many - few) * (job.num_microbatches - many)


def _simulate(job: Job, seconds: Sequence[Mapping[Kind, float]], num_microbatches: int) -> float:
    by_rank = [[seconds[stage] for stage in job.stages.stages_of(rank)] for rank in range(job.pp)]

    def duration(rank: int, action: Action) -> float:
        return by_rank[rank][action.chunk][action.kind]

    actions = _actions(job.config.parallel.schedule, job.stages, num_microbatches)
    return max(span.end for span in compute_times(actions, job.stages, duration).values())


@lru_cache(maxsize=64)
def _actions(schedule: str, stages: StageMap, num_microbatches: int) -> list[list[Action]]:
    return [SCHEDULES[schedule].train(rank, stages, num_microbatches) for rank in range(stages.num_ranks)]


@lru_cache(maxsize=256)
def _peaks(schedule: str, stages: StageMap, num_microbatches: int) -> tuple[int, ...]:
    return tuple(peak_in_flight(own) for own in _actions(schedule, stages, num_microbatches))


def peaks_in_flight(job: Job) -> tuple[int, ...]:
    """Of each pipeline rank, most microbatches whose activations it holds, each chunk's by itself."""
    schedule, rounds = job.config.parallel.schedule, MAX_ROUNDS * job.pp
    num_microbatches = job.num_microbatches if schedule == "gpipe" else min(job.num_microbatches, rounds)
    return _peaks(schedule, job.stages, num_microbatches)


def least_seconds(job: Job) -> float:
    """A bound from below on the time of a step: the busiest rank's own work."""
    stages = _stages(job)
    ranks = ([stages[stage] for stage in job.stages.stages_of(rank)] for rank in range(job.pp))
    busiest = max(sum(work.seconds for chunk in chunks for work in chunk.values()) for chunks in ranks)
    return busiest * job.num_microbatches
