"""Estimate the time of an iteration: the pipeline's actions, gradient reduction, and the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.distributed.axes import MODEL
from megalite.pipeline.schedules import Action, ActionKind
from megalite.pipeline.simulator import MAX_ROUNDS, step_makespan
from megalite.plan.communication import CONTENTION, Group
from megalite.plan.kernel_time import memory_seconds
from megalite.plan.layer_time import (
    MicrobatchWork,
    ModelWork,
    WorkSeconds,
    model_work,
    pair_savings,
    recomputation,
    saved_by_ranks,
    total_work,
    work_key,
)
from megalite.plan.optimizer_update import (
    largest_offloaded_state,
    muon_seconds,
    offload_seconds,
    updates_under_forward,
)
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import group_bytes
from megalite.plan.units import RankUnits, Sizes

Stage = Mapping[ActionKind, WorkSeconds]
"""A stage's work on one microbatch, by kind of action in its schedule."""


@dataclass(frozen=True)
class IterationTime:
    """Time of one optimizer step.

    Attributes:
        seconds: time of the step.
        work: work of the busiest rank. During the rest of `seconds`, it waits for other stages.
        median_work: work of the rank of median work along the pipeline; the lower of two.
        bubble: seconds that the average rank waits for other stages.
    """

    seconds: float
    work: WorkSeconds
    median_work: WorkSeconds
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
    return IterationTime(step.seconds + rest.seconds, step.work + rest, step.median_work + rest, step.bubble)


@dataclass(frozen=True)
class Step(IterationTime):
    """Time of forward and backward for all microbatches, without the exchange and the update.

    Attributes:
        last_backward: backward of the busiest rank for one microbatch.
        first_forward: forward of the busiest rank for one microbatch.
    """

    last_backward: WorkSeconds
    first_forward: WorkSeconds


def time_step(run: PlannedRun) -> Step:
    """Simulate the schedule of one step."""
    stages = _stages(run)
    by_rank = [[stages[stage] for stage in run.stages.stages_of(rank)] for rank in range(run.pp)]
    of_microbatch = [total_work(work for chunk in chunks for work in chunk.values()) for chunks in by_rank]
    works = [
        work * run.num_microbatches + WorkSeconds(ep=-saved)
        for work, saved in zip(of_microbatch, saved_by_ranks(run), strict=True)
    ]
    busiest = max(range(run.pp), key=lambda rank: works[rank].seconds)
    forward = total_work(chunk[ActionKind.FORWARD] for chunk in by_rank[busiest])
    seconds = max(makespan(run, stages), works[busiest].seconds)  # many microbatches are extrapolated
    return Step(
        seconds,
        works[busiest],
        sorted(works, key=lambda work: work.seconds)[(run.pp - 1) // 2],
        max(0.0, seconds - sum(work.seconds for work in works) / run.pp),
        of_microbatch[busiest] + forward * -1.0,
        forward,
    )


def least_seconds(run: PlannedRun) -> float:
    """Return a lower bound of a step's time: the work of the busiest rank."""
    stages = _stages(run)
    seconds = [sum(work.seconds for work in stage.values()) for stage in stages]
    return max(
        sum(seconds[stage] for stage in run.stages.stages_of(rank)) * run.num_microbatches - saved
        for rank, saved in enumerate(saved_by_ranks(run))
    )


def least_layer_seconds(run: PlannedRun) -> float:
    """Return a lower bound of `least_seconds` that takes less time: of the layers, without recomputation."""
    seconds = {kind: work.seconds for kind, work in model_work(run).layers.items()}
    longest = max(sum(seconds[kind] for kind in units.kinds) for units in dict.fromkeys(run.ranks))
    least = longest * run.num_microbatches - max(saved_by_ranks(run))
    return least * (1 - 1e-9)  # the other bound may be rounded down


class _StageKey(NamedTuple):
    """Key of stages with the same work: the kinds of their layers, and what is at their ends."""

    kinds: tuple[int, ...]
    is_first: bool
    is_last: bool


def _stages(run: PlannedRun) -> list[Stage]:
    """Return the work of every global stage. Stages with the same layers share theirs."""
    last = run.stages.num_stages - 1
    keys = [_StageKey(kinds, stage == 0, stage == last) for stage, kinds in enumerate(run.stage_kinds)]
    settings = (run.stages, run.layers, run.config.recompute, *work_key(run))

    def unsharded() -> dict[_StageKey, _UnshardedStage]:
        units = model_work(run)
        return {key: _unsharded_stage(run, units, key) for key in dict.fromkeys(keys)}

    def find() -> list[Stage]:
        known = {
            key: stage.with_sharding(zero3_communication(run, key.kinds, run.units.edge_sizes[key[1:]]))
            for key, stage in run.units.shared(("unsharded stages", *settings), unsharded).items()
        }
        return [known[key] for key in keys]

    if run.zero_stage == 3:  # its communication depends on more than `settings`
        return find()
    return run.units.shared(("stages", *settings), find)


class _UnshardedStage(NamedTuple):
    """Work of a stage without the communication of ZeRO stage 3.

    Attributes:
        computed: work that this communication can overlap with, by kind of action.
        waits: what each kind of action waits for after it.
    """

    computed: Stage
    waits: Stage

    def with_sharding(self, sharding: ShardedStageSeconds) -> Stage:
        """Return the work with the communication of ZeRO stage 3."""
        return {
            kind: work + sharding.exposed(kind, work) + self.waits[kind]
            for kind, work in self.computed.items()
        }


def _unsharded_stage(run: PlannedRun, units: ModelWork, key: _StageKey) -> _UnshardedStage:
    work = units.embedding * key.is_first + units.head * key.is_last
    for kind, count in Counter(key.kinds).items():
        work += units.layers[kind] * count
    tp, pp = run.message_seconds()
    message = WorkSeconds(tp=tp, pp=pp)  # to the next stage, or a gradient back
    again = recomputation(run, key.kinds, units)
    down, up = offload_work(run, key.kinds, units.layers)
    computed = {ActionKind.FORWARD: work.forward}
    if run.splits_backward:
        computed[ActionKind.BACKWARD_INPUT] = work.backward_input + again
        computed[ActionKind.BACKWARD_WEIGHT] = work.backward_weight
    else:
        computed[ActionKind.BACKWARD] = work.backward + again
    waits = {
        ActionKind.FORWARD: message + down,
        ActionKind.BACKWARD: message + up,
        ActionKind.BACKWARD_INPUT: message + up,
        ActionKind.BACKWARD_WEIGHT: WorkSeconds(),
    }
    return _UnshardedStage(computed, waits)


def offload_work(
    run: PlannedRun, kinds: Sequence[int], works: Mapping[int, MicrobatchWork]
) -> tuple[WorkSeconds, WorkSeconds]:
    """Return how long a stage's forward and backward of one microbatch wait for copies of activations.

    A group's copies overlap with the next group's computation, in the order of forward or backward. If all
    groups are offloaded, nothing overlaps with the last group's copies back to the GPU.

    Args:
        kinds: kinds of the stage's layers.
        works: work of each kind of layer.
    """
    recompute, gpu = run.config.recompute, run.cluster.gpu
    if recompute.cpu_offload_activations == 0:
        return WorkSeconds(), WorkSeconds()
    bandwidth = gpu.host_link_bandwidth * gpu.link_share
    groups = recompute.groups(len(kinds))
    down = up = 0.0
    for (group, is_again), size in zip(groups, group_bytes(run, kinds), strict=True):
        if group.start >= recompute.cpu_offload_activations:
            break
        seconds = size / bandwidth
        forward = sum(works[kinds[i]].forward.seconds for i in group)
        backward = sum(works[kinds[i]].backward.seconds for i in group) + (forward if is_again else 0.0)
        is_first_in_backward = group.stop == len(kinds)
        down += max(0.0, seconds - forward)
        up += max(0.0, seconds - (0.0 if is_first_in_backward else backward))
    return WorkSeconds(offload=down), WorkSeconds(offload=up)


def makespan(run: PlannedRun, stages: Sequence[Stage], max_rounds: int = MAX_ROUNDS) -> float:
    """Return the seconds of all microbatches."""
    seconds = [{kind: work.seconds for kind, work in stage.items()} for stage in stages]
    if run.pp == 1:
        return sum(seconds[0].values()) * run.num_microbatches
    by_rank = [[seconds[stage] for stage in run.stages.stages_of(rank)] for rank in range(run.pp)]

    def duration(rank: int, action: Action) -> float:
        return by_rank[rank][action.chunk][action.kind]

    savings = pair_savings(run)

    def saving(rank: int, forward: Action, backward: Action) -> float:
        return savings.get((rank, forward.chunk), 0.0)

    schedule = run.config.parallel.schedule
    return step_makespan(schedule, run.stages, run.num_microbatches, duration, max_rounds, saving)


USUAL_BUCKET = 40_000_000
"""Elements of a gradient bucket of a large model."""
CLIPPING_BYTES = 8
"""Bytes per parameter to divide its gradient, which is a separate kernel if state is offloaded."""
UPDATE_BYTES = 36
"""Bytes per parameter that an update reads and writes: gradient, main weight, moments, weight, norm. An
average of the weights adds itself twice, and the main weight."""


def replicas_of(run: PlannedRun, mesh: str = MODEL.name) -> Group:
    """Return the group of ranks that hold the same weights."""
    size, stride, _ = run.replicas[mesh]
    return Group(run.cluster, size, stride)


def sharing_of(run: PlannedRun, mesh: str = MODEL.name) -> tuple[Group, Group]:
    """Return the group of ranks that ZeRO shards over, and the group of ranks with the same shards."""
    size, stride, degree = run.replicas[mesh]
    return Group(run.cluster, degree, stride), Group(run.cluster, size // degree, stride * degree)


def gradient_bytes(run: PlannedRun) -> int:
    """Return the bytes per element of a gradient in communication."""
    dtype = run.config.parallel.grad_communication_dtype
    return 2 if dtype in ("bf16", "fp16") else 8 if run.config.model.params_dtype == "fp64" else 4


def exposed_seconds(compute: float, communication: float) -> float:
    """Return the seconds that communication costs when it overlaps with computation."""
    return CONTENTION * min(compute, communication) + max(0.0, communication - compute)


@dataclass(frozen=True)
class ShardedStageSeconds:
    """Seconds of a stage's communication with ZeRO stage 3, for one microbatch.

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

    def exposed(self, kind: ActionKind, work: WorkSeconds) -> WorkSeconds:
        """Return the communication that an action waits for; the work of a backward is with recomputation."""
        alone, overlapped = {
            ActionKind.FORWARD: (self.edge_weights, self.layer_weights),
            ActionKind.BACKWARD: (
                self.edge_gradients,
                self.edge_weights + self.layer_weights + self.layer_gradients,
            ),
            ActionKind.BACKWARD_INPUT: (0.0, self.layer_weights),
            ActionKind.BACKWARD_WEIGHT: (self.edge_gradients, self.layer_gradients),
        }[kind]
        return WorkSeconds(dp=alone + exposed_seconds(work.seconds, overlapped))


def zero3_communication(run: PlannedRun, kinds: Sequence[int], edges: Sizes) -> ShardedStageSeconds:
    """Return the seconds of a stage's communication with ZeRO stage 3; all are 0 with another stage.

    Args:
        kinds: kinds of the stage's layers.
        edges: its parameters outside the layers, which a pipeline gathers once per iteration.
    """
    if run.zero_stage != 3:
        return ShardedStageSeconds()
    sizes, of_weight, of_gradient = run.units.layer_sizes, run.element_bytes, gradient_bytes(run)
    gathers_edge = run.pp == 1 and not run.gathers_once

    layers = Counter(kinds).items()
    return ShardedStageSeconds(
        edge_weights=_sharded_seconds(run, edges, of_weight) if gathers_edge else 0.0,
        layer_weights=0.0
        if run.gathers_once
        else sum(count * _gather_seconds_of_layer(run, kind) for kind, count in layers),
        edge_gradients=_sharded_seconds(run, edges, of_gradient),
        layer_gradients=sum(
            count * _sharded_seconds(run, sizes[kind], of_gradient) for kind, count in layers
        ),
    )


def _gather_seconds_of_layer(run: PlannedRun, kind: int) -> float:
    """Return the seconds to all-gather the sharded weights of a layer."""
    sizes, in_8_bits = Counter(run.units.layer_sizes[kind]), run.gathered_in_8_bits(kind)
    sizes[MODEL.name] -= in_8_bits
    narrow = _sharded_seconds(run, Counter({MODEL.name: in_8_bits}), 1) if in_8_bits else 0.0
    return _sharded_seconds(run, sizes, run.element_bytes) + narrow


def _sharded_seconds(run: PlannedRun, sizes: Sizes, element_bytes: int) -> float:
    """Return the seconds to all-gather sharded weights, or to reduce-scatter their gradients."""
    return sum(
        sharing_of(run, name)[0].gather_seconds(count * element_bytes) for name, count in sizes.items()
    )


def _gathered_once_seconds(run: PlannedRun, forward_seconds: float) -> float:
    """Return the seconds of the all-gathers that ZeRO stage 3 runs once per iteration, under a forward."""

    def seconds(units: RankUnits) -> float:
        is_once = run.pp > 1 or run.gathers_once
        of_edge = _sharded_seconds(run, units.edges, run.element_bytes) if is_once else 0.0
        layers = units.kinds if run.gathers_once else ()
        return of_edge + sum(_gather_seconds_of_layer(run, kind) for kind in layers)

    return exposed_seconds(forward_seconds, max(seconds(run.ranks[rank]) for rank in (0, -1)))


class ReplicaExchange(NamedTuple):
    """Seconds of the exchange between the replicas of weights, if nothing hides it.

    Attributes:
        reduced: reductions of gradients, by collectives within the groups that ZeRO shards over and between
            them.
        last: the part of the last bucket.
        gathered: all-gathers of updated weights.
        between: the part of `reduced` that is between groups.
    """

    reduced: float = 0.0
    last: float = 0.0
    gathered: float = 0.0
    between: float = 0.0

    def __add__(self, other: ReplicaExchange) -> ReplicaExchange:  # type: ignore[override]
        return ReplicaExchange(*map(float.__add__, self, other))


def _exchange(run: PlannedRun, mesh: str, count: int) -> ReplicaExchange:
    """Return the exchange of `count` parameters with the same replicas."""
    (group, copies), zero = sharing_of(run, mesh), run.zero_stage
    buckets = count / (run.config.parallel.ddp_bucket_size or USUAL_BUCKET) + 1
    gradients, weights = count * gradient_bytes(run), count * run.element_bytes
    if mesh == MODEL.name:
        weights -= (run.element_bytes - 1) * sum(map(run.gathered_in_8_bits, run.largest_rank.kinds))
    if zero == 0:
        reduced = replicas_of(run, mesh).reduce_seconds(gradients, buckets)
        return ReplicaExchange(reduced, reduced / buckets)
    between = copies.reduce_seconds(gradients / group.size, buckets)
    within = group.gather_seconds(gradients, buckets)
    rounds = run.num_microbatches if zero == 2 else 1
    return ReplicaExchange(
        rounds * within + between,
        (within + between) / buckets,
        group.gather_seconds(weights, buckets),
        between,
    )


def exchange_seconds(run: PlannedRun, backward_seconds: float) -> WorkSeconds:
    """Return the time to reduce gradients and gather weights that backward passes do not hide.

    With ZeRO stage 3, communication for each microbatch is part of `zero3_communication` instead.
    """
    tied, zero = _tied_seconds(run), run.zero_stage
    counts = {name: count for name, count in run.largest_rank.sizes.items() if run.replicas[name].size > 1}
    if not counts:
        return WorkSeconds(dp=tied)
    each = sum((_exchange(run, name, count) for name, count in counts.items()), ReplicaExchange())
    if zero == 3:
        once = _gathered_once_seconds(run, backward_seconds / 2)
        buckets = sum(counts.values()) / (run.config.parallel.ddp_bucket_size or USUAL_BUCKET) + 1
        once += each.between / buckets + exposed_seconds(backward_seconds, each.between)
        return WorkSeconds(dp=tied + once)
    reduced, gathered = each.reduced, each.gathered
    if zero == 2:
        backward_seconds *= run.num_microbatches
    if run.config.parallel.overlap_grad_reduce:
        # Nothing overlaps with the last bucket.
        reduced = each.last + exposed_seconds(backward_seconds, reduced - each.last)
    if run.gathers_under_forward:
        gathered = exposed_seconds(backward_seconds / 2, gathered)
    return WorkSeconds(dp=reduced + gathered + tied)


def _tied_seconds(run: PlannedRun) -> float:
    """Return the seconds to reduce the gradient of a tied embedding over the first and the last stage."""
    table: float = run.units.tied_size
    if table == 0 or run.pp == 1 or run.stages.v_shaped:
        return 0.0
    ends = Group(run.cluster, 2, run.cluster.world_size // run.pp * (run.pp - 1))
    if run.zero_stage == 3:
        table /= run.num_shards  # the first and the last stage exchange each rank's shard
    return ends.reduce_seconds(table * gradient_bytes(run))


def update_seconds(run: PlannedRun, step: Step) -> WorkSeconds:
    """Return the time of the optimizer's update that does not overlap with the step's computation."""
    count = run.sharded(run.largest_rank.sizes, from_stage=1)
    update_bytes = UPDATE_BYTES + 3 * run.average_bytes
    state = largest_offloaded_state(run)
    if state is None:
        muon = muon_seconds(run)
        return muon._replace(memory_bound=memory_seconds(run, count * update_bytes))
    resident = (count - state.elements) * update_bytes + count * CLIPPING_BYTES
    forward = step.first_forward.seconds if updates_under_forward(run) else 0.0
    exposed = offload_seconds(run, state).exposed(step.last_backward.seconds, forward)
    return WorkSeconds(memory_bound=memory_seconds(run, resident), offload=exposed)
