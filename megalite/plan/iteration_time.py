"""Estimate the time of an iteration: the pipeline's actions, gradient reduction, and the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megalite.pipeline.messages import compute_times
from megalite.pipeline.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    ScheduleName,
    StageMap,
    actions_by_rank,
    peak_deferred,
    peak_in_flight,
)
from megalite.plan.communication import Group
from megalite.plan.layer_time import (
    LAUNCH_SECONDS,
    MicrobatchWork,
    WorkSeconds,
    embedding_work,
    head_work,
    layer_work,
    memory_seconds,
    offload_work,
    recomputation,
    total_work,
)
from megalite.plan.model_parameters import (
    edge_parameters,
    layer_parameters_of_rank,
    rank_parameters,
    table_parameters,
)
from megalite.plan.offloaded_state import largest_offloaded_state, offload_seconds, updates_under_forward
from megalite.plan.planned_run import PlannedRun

MAX_ROUNDS = 3
"""Microbatches per stage to simulate. Each further microbatch takes as long as the last simulated ones."""

Stage = Mapping[ActionKind, WorkSeconds]
"""A stage's work on one microbatch, by kind of action in its schedule."""


@dataclass(frozen=True)
class IterationTime:
    """The time of one optimizer step.

    Attributes:
        seconds: time of the step.
        work: work of the busiest rank. During the rest of `seconds`, it waits for other stages.
        bubble: seconds that the average rank waits for other stages.
    """

    seconds: float
    work: WorkSeconds
    bubble: float

    @property
    def bubble_fraction(self) -> float:
        """Return the share of the time that the average rank waits for other stages."""
        return self.bubble / self.seconds

    @property
    def waiting(self) -> float:
        """Return the seconds that the busiest rank waits for other stages."""
        return max(0.0, self.seconds - self.work.seconds)


def time_iteration(run: PlannedRun) -> IterationTime:
    """Return the time of a step: all microbatches, the exchange between replicas, and the update."""
    step = time_step(run)
    rest = exchange_seconds(run, step.last_backward.seconds) + update_seconds(run, step)
    return IterationTime(step.seconds + rest.seconds, step.work + rest, step.bubble)


@dataclass(frozen=True)
class Step:
    """The time of forward and backward for all microbatches.

    Attributes:
        seconds: time from the start of the first action to the end of the last one.
        work: work of the busiest rank on all its microbatches.
        last_backward: backward of the busiest rank for one microbatch.
        first_forward: forward of the busiest rank for one microbatch.
        bubble: seconds that the average rank waits for other stages.
    """

    seconds: float
    work: WorkSeconds
    last_backward: WorkSeconds
    first_forward: WorkSeconds
    bubble: float


def time_step(run: PlannedRun) -> Step:
    """Simulate the schedule of one step."""
    stages = _stages(run)
    by_rank = [[stages[stage] for stage in run.stages.stages_of(rank)] for rank in range(run.pp)]
    works = [total_work(work for chunk in chunks for work in chunk.values()) for chunks in by_rank]
    busiest = max(range(run.pp), key=lambda rank: works[rank].seconds)
    forward = total_work(chunk[ActionKind.FORWARD] for chunk in by_rank[busiest])
    seconds = makespan(run, stages)
    average = sum(work.seconds for work in works) / run.pp * run.num_microbatches
    return Step(
        seconds,
        works[busiest] * run.num_microbatches,
        works[busiest] + forward * -1.0,
        forward,
        max(0.0, seconds - average),
    )


def least_seconds(run: PlannedRun) -> float:
    """Return a lower bound of a step's time: the work of the busiest rank."""
    stages = _stages(run)
    ranks = ([stages[stage] for stage in run.stages.stages_of(rank)] for rank in range(run.pp))
    busiest = max(sum(work.seconds for chunk in chunks for work in chunk.values()) for chunks in ranks)
    return busiest * run.num_microbatches


def _stages(run: PlannedRun) -> list[Stage]:
    """Return the work of every global stage. Inner stages with the same number of layers share theirs."""
    layer, last = layer_work(run), run.stages.num_stages - 1
    known: dict[tuple[int, bool, bool], Stage] = {}
    for stage, num_layers in enumerate(run.layers):
        key = num_layers, stage == 0, stage == last
        if key not in known:
            known[key] = _stage(run, layer, *key)
    return [known[num_layers, stage == 0, stage == last] for stage, num_layers in enumerate(run.layers)]


def _stage(run: PlannedRun, layer: MicrobatchWork, num_layers: int, is_first: bool, is_last: bool) -> Stage:
    work = layer * num_layers
    if is_first:
        work += embedding_work(run)
    if is_last:
        work += head_work(run)
    message = _message(run)
    again = recomputation(run, layer, num_layers)
    down, up = offload_work(run, layer, num_layers)
    sharding = zero3_communication(run, num_layers, edge_parameters(run, is_first, is_last))
    forward = work.forward + message + sharding.in_forward(work.forward) + down
    if SCHEDULES[run.config.parallel.schedule].splits_backward:
        backward_input = work.backward_input + again
        backward_weight = work.backward_weight
        return {
            ActionKind.FORWARD: forward,
            ActionKind.BACKWARD_INPUT: backward_input
            + message
            + sharding.in_backward_input(backward_input)
            + up,
            ActionKind.BACKWARD_WEIGHT: backward_weight + sharding.in_backward_weight(backward_weight),
        }
    backward = work.backward + again
    return {
        ActionKind.FORWARD: forward,
        ActionKind.BACKWARD: backward + message + sharding.in_backward(backward) + up,
    }


def _message(run: PlannedRun) -> WorkSeconds:
    """Return the time to send the hidden states, or their gradient, to the next stage."""
    group = Group(run.cluster, run.pp, run.tp * run.num_sharing)
    if run.pp > 1 and run.program.splits_messages and run.num_sequence_shards == 1:
        gathered = Group(run.cluster, run.tp, 1).gather_seconds(run.hidden_bytes)
        return WorkSeconds(tp=gathered, pp=group.message_seconds(run.hidden_bytes / run.tp))
    return WorkSeconds(pp=group.message_seconds(run.hidden_bytes / run.num_sequence_shards))


def makespan(run: PlannedRun, stages: Sequence[Stage], max_rounds: int = MAX_ROUNDS) -> float:
    """Return the seconds of all microbatches. For many, extrapolate from the steady state of a few."""
    seconds = [{kind: work.seconds for kind, work in stage.items()} for stage in stages]
    if run.pp == 1:
        return sum(seconds[0].values()) * run.num_microbatches
    few, many = (max_rounds - 1) * run.pp, max_rounds * run.pp
    if run.num_microbatches <= many:
        return _simulate(run, seconds, run.num_microbatches)
    short, long = _simulate(run, seconds, few), _simulate(run, seconds, many)
    return long + (long - short) / (many - few) * (run.num_microbatches - many)


def _simulate(run: PlannedRun, seconds: Sequence[Mapping[ActionKind, float]], num_microbatches: int) -> float:
    by_rank = [[seconds[stage] for stage in run.stages.stages_of(rank)] for rank in range(run.pp)]

    def duration(rank: int, action: Action) -> float:
        return by_rank[rank][action.chunk][action.kind]

    actions = _actions(run.config.parallel.schedule, run.stages, num_microbatches)
    return max(span.end for span in compute_times(actions, run.stages, duration).values())


@lru_cache(maxsize=64)
def _actions(schedule: ScheduleName, stages: StageMap, num_microbatches: int) -> list[list[Action]]:
    return actions_by_rank(SCHEDULES[schedule].train, stages, num_microbatches)


@lru_cache(maxsize=256)
def _peaks(
    schedule: ScheduleName, stages: StageMap, num_microbatches: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return, for each rank, the microbatches in flight, and those with deferred weight gradients."""
    actions = _actions(schedule, stages, num_microbatches)
    return tuple(map(peak_in_flight, actions)), tuple(map(peak_deferred, actions))


def peaks_in_flight(run: PlannedRun) -> tuple[int, ...]:
    """Return, per pipeline rank, the peak number of microbatches in flight, summed over its chunks."""
    return _peaks_of(run)[0]


def peaks_deferred(run: PlannedRun) -> tuple[int, ...]:
    """Return, per pipeline rank, the peak number of deferred weight gradients, summed over its chunks."""
    return _peaks_of(run)[1]


def _peaks_of(run: PlannedRun) -> tuple[tuple[int, ...], tuple[int, ...]]:
    schedule, rounds = run.config.parallel.schedule, MAX_ROUNDS * run.pp
    num_microbatches = run.num_microbatches
    if not SCHEDULES[schedule].keeps_all_microbatches:
        num_microbatches = min(num_microbatches, rounds)
    return _peaks(schedule, run.stages, num_microbatches)


USUAL_BUCKET = 40_000_000
"""Elements of a gradient bucket of a large model."""
CONTENTION = 0.25
"""Seconds of computation that a second of overlapped communication costs, since they share the GPU."""
TENSORS = 6
"""Parameter tensors of a Llama layer: four matrices and two norms."""
CLIPPING_BYTES = 8
"""Bytes per parameter to divide its gradient, which is a separate kernel if state is offloaded."""
UPDATE_BYTES = 36
"""Bytes per parameter that an update reads and writes: gradient, main weight, moments, weight, norm."""


def replicas_of(run: PlannedRun) -> Group:
    """Return the group of ranks that hold the same weights."""
    return Group(run.cluster, run.num_sharing, run.tp, run.program.one_adapter)


def sharing_of(run: PlannedRun) -> tuple[Group, Group]:
    """Return the group of ranks that ZeRO shards over, and the group of ranks with the same shards."""
    degree = run.num_shards
    return (
        Group(run.cluster, degree, run.tp, run.program.one_adapter),
        Group(run.cluster, run.num_sharing // degree, run.tp * degree, run.program.one_adapter),
    )


def gradient_bytes(run: PlannedRun) -> int:
    """Return the bytes per element of a gradient in communication."""
    dtype = run.config.parallel.grad_communication_dtype
    if run.program.gradient_bytes == 2:
        return 2
    return 2 if dtype in ("bf16", "fp16") else 8 if run.config.model.params_dtype == "fp64" else 4


def exposed_seconds(compute: float, communication: float) -> float:
    """Return the seconds that communication costs when it overlaps with computation."""
    return CONTENTION * min(compute, communication) + max(0.0, communication - compute)


@dataclass(frozen=True)
class ShardedStageSeconds:
    """The seconds of a stage's communication with ZeRO stage 3, for one microbatch.

    Attributes:
        edge_weights: all-gather of the weights outside the layers. In forward, nothing overlaps with it.
        layer_weights: all-gathers of the layers' weights, which are gathered again for backward.
        edge_gradients: reduction of the gradients outside the layers. In backward, nothing overlaps with it.
        layer_gradients: reductions of the layers' gradients.
    """

    edge_weights: float = 0.0
    layer_weights: float = 0.0
    edge_gradients: float = 0.0
    layer_gradients: float = 0.0

    def in_forward(self, work: WorkSeconds) -> WorkSeconds:
        """Return the communication that a forward waits for."""
        return WorkSeconds(dp=self.edge_weights + exposed_seconds(work.seconds, self.layer_weights))

    def in_backward(self, work: WorkSeconds) -> WorkSeconds:
        """Return the communication that a backward, with the recomputed forward, waits for."""
        overlapped = self.edge_weights + self.layer_weights + self.layer_gradients
        return WorkSeconds(dp=self.edge_gradients + exposed_seconds(work.seconds, overlapped))

    def in_backward_input(self, work: WorkSeconds) -> WorkSeconds:
        """Return the communication that the input gradients of a split backward wait for."""
        return WorkSeconds(dp=exposed_seconds(work.seconds, self.layer_weights))

    def in_backward_weight(self, work: WorkSeconds) -> WorkSeconds:
        """Return the communication that the weight gradients of a split backward wait for."""
        return WorkSeconds(dp=self.edge_gradients + exposed_seconds(work.seconds, self.layer_gradients))


def zero3_communication(run: PlannedRun, num_layers: int, edge: float) -> ShardedStageSeconds:
    """Return the seconds of a stage's communication with ZeRO stage 3; all are 0 with another stage.

    Args:
        num_layers: number of layers in the stage.
        edge: number of its parameters outside the layers, which a pipeline gathers once per iteration.
    """
    if run.zero_stage != 3:
        return ShardedStageSeconds()
    (group, copies), layer = sharing_of(run), layer_parameters_of_rank(run)

    def gather(count: float) -> float:
        return group.gather_seconds(count * run.element_bytes)

    def reduce(count: float) -> float:
        size = count * gradient_bytes(run)
        between = 0.0 if run.all_reduces_once else copies.reduce_seconds(size / group.size)
        return group.gather_seconds(size) + between

    return ShardedStageSeconds(
        edge_weights=0.0 if run.pp > 1 or run.gathers_once else gather(edge),
        layer_weights=0.0 if run.gathers_once else num_layers * gather(layer),
        edge_gradients=reduce(edge),
        layer_gradients=num_layers * reduce(layer),
    )


def _gathered_once_seconds(run: PlannedRun, forward_seconds: float) -> float:
    """Return the seconds of the all-gathers that ZeRO stage 3 runs once per iteration, under a forward."""
    (group, _), last = sharing_of(run), run.stages.num_stages - 1

    def seconds(rank: int) -> float:
        stages = run.stages.stages_of(rank)
        edge = edge_parameters(run, 0 in stages, last in stages)
        of_edge = group.gather_seconds(edge * run.element_bytes) if run.pp > 1 or run.gathers_once else 0.0
        num_layers = sum(run.layers[stage] for stage in stages) if run.gathers_once else 0
        return of_edge + num_layers * group.gather_seconds(layer_parameters_of_rank(run) * run.element_bytes)

    return exposed_seconds(forward_seconds, max(seconds(rank) for rank in {0, run.pp - 1}))


def exchange_seconds(run: PlannedRun, backward_seconds: float) -> WorkSeconds:
    """Return the time to reduce gradients and gather weights that backward passes do not hide.

    With ZeRO stage 3, communication for each microbatch is part of `zero3_communication` instead.
    """
    count = max(rank_parameters(run, rank) for rank in {0, run.pp - 1})
    (group, copies), zero = sharing_of(run), run.zero_stage
    buckets = count / (run.config.parallel.ddp_bucket_size or USUAL_BUCKET) + 1
    gradients, weights = count * gradient_bytes(run), count * run.element_bytes
    tied, rounds = _tied_seconds(run), run.num_microbatches if zero == 2 else 1
    between = copies.reduce_seconds(gradients / group.size, buckets)
    if run.num_sharing == 1:
        return WorkSeconds(dp=tied)
    if zero == 3:
        once = _gathered_once_seconds(run, backward_seconds / 2)
        if run.all_reduces_once:
            once += between / buckets + exposed_seconds(backward_seconds, between)
        return WorkSeconds(dp=tied + once)
    if zero == 0:
        reduced, gathered = replicas_of(run).reduce_seconds(gradients, buckets), 0.0
        last = reduced / buckets
    else:
        within = group.gather_seconds(gradients, buckets)
        reduced, last = rounds * within + between, (within + between) / buckets
        gathered = group.gather_seconds(weights, buckets)
        backward_seconds *= rounds
    if run.config.parallel.overlap_grad_reduce:
        # Nothing overlaps with the last bucket.
        reduced = last + exposed_seconds(backward_seconds, reduced - last)
    if run.gathers_under_forward:
        gathered = exposed_seconds(backward_seconds / 2, gathered)
    return WorkSeconds(dp=reduced + gathered + tied, launch=_slicing_seconds(run))


def _slicing_seconds(run: PlannedRun) -> float:
    """Return the host's seconds to copy gathered weights into parameters, one slice per replica.

    Each slice costs the host a view and a copy. Meanwhile the GPU is idle.
    """
    if not run.program.copies_slices or run.zero_stage != 1 or run.num_sharing == 1:
        return 0.0
    layers = sum(run.layers[stage] for stage in run.stages.stages_of(0))
    return TENSORS * layers * run.num_sharing * 2 * LAUNCH_SECONDS


def _tied_seconds(run: PlannedRun) -> float:
    """Return the seconds to reduce the gradient of a tied embedding over the first and the last stage."""
    model = run.config.model
    if model.untie_embeddings_and_output_weights or run.pp == 1 or run.stages.v_shaped:
        return 0.0
    ends = Group(run.cluster, 2, run.cluster.world_size // run.pp * (run.pp - 1))
    table = table_parameters(model, run.tp) / run.tp
    if run.zero_stage == 3:
        table /= run.num_shards  # the first and the last stage exchange each rank's shard
    return ends.reduce_seconds(table * gradient_bytes(run))


def update_seconds(run: PlannedRun, step: Step) -> WorkSeconds:
    """Return the time of the optimizer's update that does not overlap with the step's computation."""
    count = max(rank_parameters(run, rank) for rank in {0, run.pp - 1})
    count /= run.num_shards if run.zero_stage else 1
    state = largest_offloaded_state(run)
    if state is None:
        return WorkSeconds(memory_bound=memory_seconds(run, count * UPDATE_BYTES))
    resident = (count - state.elements) * UPDATE_BYTES + count * CLIPPING_BYTES
    forward = step.first_forward.seconds if updates_under_forward(run) else 0.0
    exposed = offload_seconds(run, state).exposed(step.last_backward.seconds, forward)
    return WorkSeconds(memory_bound=memory_seconds(run, resident), offload=exposed)
