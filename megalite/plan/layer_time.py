"""Estimate the time of one microbatch on one rank: units of the model by record, and their communication."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from megalite.config.config import hides_expert_messages
from megalite.distributed.axes import EXPERTS
from megalite.observe.unit_record import (
    AttentionCall,
    CollectiveCall,
    GemmCall,
    Phase,
    PhaseRecord,
    UnitRecord,
)
from megalite.pipeline.simulator import pairs_of_rank
from megalite.plan.communication import CONTENTION, Group
from megalite.plan.kernel_time import (
    WHOLE_LINES,
    attention_seconds,
    cast_seconds,
    gemm_seconds,
    memory_seconds,
    recurrence_seconds,
)
from megalite.plan.planned_run import WEIGHT_CASTS, PlannedRun

OPERATOR_SECONDS = 4.7e-6
"""Host time per operator, with operators that launch no kernel, such as views. The host runs ahead of the
GPU, so only shorter kernels wait for it."""
CAST_OPERATOR_SECONDS = 330e-6
"""Host time to round an operand of GEMMs or to find its largest magnitude: a call of a function that
torch.compile has compiled, and what is computed from the magnitude. Chosen with the run of GPT-1.3B with
`--fp8` in docs/plan.md, in which the host is too slow."""


class WorkSeconds(NamedTuple):
    """Seconds of a piece of work on one rank, by kind. The kinds do not overlap.

    Attributes:
        gemms: GEMMs outside of attention.
        attention: core attention, including softmax.
        memory_bound: memory-bound kernels: norms, activations, additions, the optimizer; and recurrences.
        tp: waiting for tensor-parallel communication.
        dp: waiting for data-parallel communication.
        pp: waiting for messages between stages.
        launch: waiting for the host, which launches the kernels.
        offload: waiting for offloaded activations, or for the host's update of offloaded optimizer state.
        cp: waiting for context-parallel communication.
        ep: waiting for the messages of expert parallelism.
    """

    gemms: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    tp: float = 0.0
    dp: float = 0.0
    pp: float = 0.0
    launch: float = 0.0
    offload: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    def __add__(self, other: WorkSeconds) -> WorkSeconds:  # type: ignore[override]
        return WorkSeconds(*map(add, self, other))

    def __mul__(self, factor: float) -> WorkSeconds:  # type: ignore[override]
        return WorkSeconds(*(value * factor for value in self))


NO_WORK = WorkSeconds()


def total_work(works: Iterable[WorkSeconds]) -> WorkSeconds:
    """Return the sum of several pieces of work, one after the other."""
    return sum(works, NO_WORK)


@dataclass(frozen=True)
class MicrobatchWork:
    """Work of one microbatch: forward, input gradient, and weight gradients."""

    forward: WorkSeconds = NO_WORK
    backward_input: WorkSeconds = NO_WORK
    backward_weight: WorkSeconds = NO_WORK

    def __add__(self, other: MicrobatchWork) -> MicrobatchWork:
        return MicrobatchWork(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def __mul__(self, factor: float) -> MicrobatchWork:
        return MicrobatchWork(
            self.forward * factor, self.backward_input * factor, self.backward_weight * factor
        )

    @property
    def backward(self) -> WorkSeconds:
        return self.backward_input + self.backward_weight

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward_input.seconds + self.backward_weight.seconds


def unit_work(run: PlannedRun, unit: UnitRecord) -> MicrobatchWork:
    """Return the work of a unit, without full recomputation."""
    forward = phase_work(run, unit.forward, "forward")
    backward = phase_work(run, unit.backward, "backward")
    weight = phase_work(run, unit.weight, "weight")
    return MicrobatchWork(forward, backward, weight + WorkSeconds(memory_bound=_accumulation(run, unit)))


def phase_work(run: PlannedRun, phase: PhaseRecord, name: Phase) -> WorkSeconds:
    """Return the work of one phase of a unit, in the mean over the microbatches of an iteration."""
    casts = [(cast, run.cast_share(cast)) for cast in phase.casts]
    attention = [attention_seconds(run, call) for call in phase.attention]
    work = WorkSeconds(
        gemms=sum(_gemm(run, gemm) for gemm in phase.gemms),
        attention=sum(attention),
        memory_bound=memory_seconds(run, phase.kernel_bytes)
        + sum(share * cast_seconds(run.cluster.gpu, cast) for cast, share in casts)
        + sum(recurrence_seconds(run.cluster.gpu, call) for call in phase.recurrences),
        tp=sum(tp_seconds(run, phase, name)),
        cp=sum(attention_messages(run, *each) for each in zip(phase.attention, attention, strict=True))
        + recurrence_messages(run, phase),
        ep=ep_seconds(run, phase),
    )
    host = phase.num_operators * OPERATOR_SECONDS
    if not run.compiles_gemms:
        host += sum(share * CAST_OPERATOR_SECONDS for _, share in casts)
    return work._replace(launch=max(0.0, host - work.seconds))


def _gemm(run: PlannedRun, gemm: GemmCall) -> float:
    # Any number of rows is summed at the full rate: the rows of features lie one after the other in memory.
    k = WHOLE_LINES * math.ceil(gemm.k / WHOLE_LINES) if gemm.sums_rows else gemm.k
    return gemm_seconds(run.cluster.gpu, gemm.m, gemm.n, k, gemm.batch, gemm.element_bytes)


def _accumulation(run: PlannedRun, unit: UnitRecord) -> float:
    """Return the seconds to add gradients to their sums, except for weights whose GEMMs do that."""
    count = sum(weight.size for weight in unit.weights)
    if run.config.parallel.gradient_accumulation_fusion:
        gemms = (*unit.backward.gemms, *unit.weight.gemms)
        added = sum(gemm.m * gemm.n * gemm.batch for gemm in gemms if gemm.adds)
        count = max(0, count - added)  # a loss in chunks adds several times to the same sum
    return memory_seconds(run, (run.element_bytes + _sum_bytes(run)) * count)


def _sum_bytes(run: PlannedRun) -> int:
    """Return the bytes per element to read and write the sum that a microbatch's gradient is added to.

    With one microbatch, or with a reduction after each one (ZeRO 2 and 3), the gradient is only copied.
    """
    size = min(run.gradient_bytes, max(run.element_bytes, 4))
    is_copied = run.num_microbatches == 1 or run.zero_stage >= 2
    return size if is_copied else 2 * size


def tp_seconds(run: PlannedRun, phase: PhaseRecord, name: Phase) -> list[float]:
    """Return the seconds by which each tensor-parallel collective of a phase lengthens it.

    An all-gather that has another GEMM before the one that reads its result costs nothing.
    """
    return [
        0.0
        if each.is_hidden or each.call.kind == "all-to-all" or each.call.is_over_experts  # other axes
        else _overlapped_collective(run, phase.gemms[each.gemm], each.call, name)
        if each.gemm is not None and run.tp_comm_chunks > 1
        else run.exposed_tp_share(name) * _collective_seconds(run, each.call)
        for each in phase.collectives
    ]


def _overlapped_collective(run: PlannedRun, gemm: GemmCall, call: CollectiveCall, name: Phase) -> float:
    """Return the seconds of a collective that overlaps in parts with its GEMM, if it does in this phase."""
    sums, is_symmetric = call.kind != "all-gather", run.config.parallel.requests_symmetric_memory
    if name == "backward" and sums and is_symmetric and not run.splits_backward:
        return 0.0  # the GEMM of the weight's gradient hides it
    in_parts = name == "forward" or (name == "backward" and (run.splits_backward if sums else is_symmetric))
    if in_parts:
        return _overlapped_seconds(run, gemm, call)
    return run.exposed_tp_share(name) * _collective_seconds(run, call)


def _collective_seconds(run: PlannedRun, call: CollectiveCall, num_calls: int = 1) -> float:
    group = Group(run.cluster, run.tp, 1)
    if call.kind == "all-reduce":
        return group.reduce_seconds(call.num_bytes, num_calls)
    return group.gather_seconds(call.num_bytes, num_calls)


def _overlapped_seconds(run: PlannedRun, gemm: GemmCall, call: CollectiveCall) -> float:
    """Return how much longer a GEMM and its collective take than the GEMM alone if they overlap in parts."""
    alone = _gemm(run, gemm)
    if run.config.parallel.requests_symmetric_memory:
        # torch multiplies the slices of all ranks on two streams, so they fill the multiprocessors like one
        # GEMM. Copies take none, and a rank need not copy its own slice.
        message = Group(run.cluster, run.tp, 1).message_seconds(call.num_bytes / run.tp)
        return (run.tp - 1) * max(0.0, message - alone / run.tp)
    num_chunks = run.tp_comm_chunks
    batch = run.tp if run.config.parallel.sequence_parallel else 1
    part = _gemm(run, gemm._replace(m=math.ceil(gemm.m / (num_chunks * batch)), batch=batch))
    return overlapped_seconds(
        alone, part, _collective_seconds(run, call, num_chunks) / num_chunks, num_chunks
    )


def overlapped_seconds(gemm: float, part: float, communication: float, num_parts: int) -> float:
    """Return the seconds by which communication lengthens a GEMM if both overlap in equal parts.

    Each part takes two steps on two machines, the GPU and the link. The steps of equal parts take the first
    step of one part, the longer step of all others, and the last step (Johnson 1954). Overlapped parts share
    the GPU.

    Args:
        gemm: seconds of the whole GEMM.
        part: seconds of the GEMM of a part.
        communication: seconds of the communication of a part.
    """
    seconds = part + communication + (num_parts - 1) * max(part, communication)
    hidden = num_parts * (part + communication) - seconds
    return seconds - gemm + CONTENTION * hidden


def ep_seconds(run: PlannedRun, phase: PhaseRecord) -> float:
    """Return the seconds of the messages between the ranks that hold the experts of a group of tokens.

    The busiest rank's messages count, for which the others wait.
    """
    sizes = run.sizes_in(EXPERTS) if run.config.parallel.has_expert_axes else {"ep": 1, "etp": 1}
    group = Group(run.cluster, sizes["ep"] * sizes["etp"], 1)
    if group.size == 1:
        return 0.0
    calls = [each.call for each in phase.collectives if each.call.is_over_experts and each.call.num_bytes]
    return sum(
        group.exchange_seconds(*run.expert_bytes(group, call.num_bytes))
        if call.kind == "all-to-all"
        else group.gather_seconds(call.num_bytes)
        for call in calls
    )


def recurrence_messages(run: PlannedRun, phase: PhaseRecord) -> float:
    """Return the seconds in which recurrent layers exchange tokens for heads, and heads for tokens."""
    group = Group(run.cluster, run.cp, run.tp)
    calls = (each.call for each in phase.collectives)
    return sum(
        group.all_to_all_seconds(call.num_bytes)
        for call in calls
        if call.kind == "all-to-all" and call.axis == "cp"
    )


def attention_messages(run: PlannedRun, call: AttentionCall, attention_seconds: float) -> float:
    """Return the seconds that a call of attention waits for the keys and values of other ranks' positions.

    Either all ranks gather keys and values before a forward, and reduce-scatter their gradients after a
    backward. Or neighbours exchange queries, keys and values for the part of the heads that the call has, and
    the output back; and their groups pass keys and values around a ring. Backward sends them again, and as
    many gradients back. A ring's messages run under the computation with keys that have arrived; the first
    computation is with a rank's own keys.

    Args:
        attention_seconds: seconds of the computation.
    """
    exchange = call.exchange
    if exchange is None:
        return 0.0
    element = run.element_bytes
    token_bytes = call.kv_heads * (call.size + call.value_size) * element  # keys and values
    num_ranks, num_neighbours, ring_size, gathers_keys = exchange
    if gathers_keys:
        return Group(run.cluster, num_ranks, run.tp).gather_seconds(token_bytes * call.keys)
    neighbours = Group(run.cluster, num_neighbours, run.tp)
    seconds = neighbours.all_to_all_seconds((call.heads * call.size * element + token_bytes) * call.queries)
    seconds += neighbours.all_to_all_seconds(call.heads * call.value_size * call.queries * element)
    if ring_size == 1:
        return seconds
    sent = ring_slices(call, ring_size) * (token_bytes * call.keys / (2 * ring_size))
    sent *= 2 if call.is_backward else 1
    # An all-gather of n bytes sends n (size - 1) / size.
    ring = Group(run.cluster, ring_size, num_neighbours * run.tp)
    messages = ring.gather_seconds(sent * ring_size / (ring_size - 1))
    return seconds + max(0.0, messages - attention_seconds)


def ring_slices(call: AttentionCall, num_ranks: int) -> float:
    """Return how many slices of keys and values a rank sends, in the mean over the ranks.

    There are two slices for each rank. In causal attention, all ranks need the first slice of a rank, and
    half of them the last one. A window reaches into few slices before a query's own.
    """
    if not call.is_causal:
        return 2.0 * (num_ranks - 1)
    slices = 1.5 * (num_ranks - 1)
    if call.window is None:
        return slices
    length = call.keys / (2 * num_ranks)
    return min(slices, 2.0 * -(-call.window // length) * (num_ranks - 1) / num_ranks)


class ModelWork(NamedTuple):
    """Work of a model's units.

    Attributes:
        layers: of each kind of layer.
        last_gemms: a layer's last GEMM and its collective, of each kind of layer.
    """

    embedding: MicrobatchWork
    head: MicrobatchWork
    layers: Mapping[int, MicrobatchWork]
    last_gemms: Mapping[int, WorkSeconds]


def model_work(run: PlannedRun) -> ModelWork:
    """Return the work of a run's units. Runs with the same records and settings of communication share it."""
    units = run.units
    return units.shared(
        ("work", *work_key(run)),
        lambda: ModelWork(
            unit_work(run, units.embedding),
            unit_work(run, units.head),
            {kind: unit_work(run, layer) for kind, layer in units.layers.items()},
            {kind: _last_gemm(run, layer) for kind, layer in units.layers.items()},
        ),
    )


def work_key(run: PlannedRun) -> tuple[Hashable, ...]:
    """Return the settings of a run on which the work of its units depends, besides their records."""
    parallel = run.config.parallel
    return (
        run.cluster,
        run.tp_comm_chunks,
        parallel.requests_symmetric_memory,
        parallel.gradient_accumulation_fusion,
        _sum_bytes(run),
        run.kernels,
        run.stops_recomputing,
        run.compiles_gemms,
        *map(run.cast_share, WEIGHT_CASTS),
    )


def recomputation(run: PlannedRun, kinds: Sequence[int], work: ModelWork) -> WorkSeconds:
    """Return the work of whole layers that a stage recomputes for one microbatch.

    Args:
        kinds: kinds of the stage's layers.
    """
    groups = [group for group, is_again in run.config.recompute.groups(len(kinds)) if is_again]
    again = Counter(kinds[i] for group in groups for i in group)
    seconds = total_work(work.layers[kind].forward * count for kind, count in again.items())
    if run.stops_recomputing:
        last = Counter(kinds[group.stop - 1] for group in groups)
        seconds += total_work(work.last_gemms[kind] * -count for kind, count in last.items())
    return seconds


def _last_gemm(run: PlannedRun, layer: UnitRecord) -> WorkSeconds:
    phase, last = layer.forward, len(layer.forward.gemms) - 1
    tp = zip(phase.collectives, tp_seconds(run, phase, "forward"), strict=True)
    return WorkSeconds(
        _gemm(run, phase.gemms[last]),
        tp=sum(seconds for each, seconds in tp if each.gemm == last),
    )


PairSavings = Mapping[tuple[int, int], float]
"""Seconds by which a pair of actions is shorter than both, by pipeline rank and the forward's chunk."""


class LayerSeconds(NamedTuple):
    """Seconds of a layer in one of two actions that run together."""

    messages: float
    computation: float

    @staticmethod
    def of(work: WorkSeconds) -> LayerSeconds:
        """Divide a layer's work."""
        return LayerSeconds(work.ep, work.seconds - work.ep)


def pair_savings(run: PlannedRun) -> PairSavings:
    """Return what pairs of actions save: messages of experts under the computation of another microbatch.

    In a schedule that overlaps actions, a forward and an input gradient run in turns, which change while rows
    of experts are in flight (`megalite.distributed.collectives`). The first layer with messages of one
    action runs beside the first one of the other, and so on. In other layers, the turns do not change.
    """
    if not hides_expert_messages(run.config):
        return {}

    def forward(stage: int) -> list[WorkSeconds]:
        return [work.layers[kind].forward for kind in run.stage_kinds[stage]]

    def backward(stage: int) -> list[WorkSeconds]:
        kinds = run.stage_kinds[stage]
        groups = run.config.recompute.groups(len(kinds))
        again = {layer for group, is_again in groups if is_again for layer in group}
        layers = [work.layers[kind] for kind in kinds]
        return [each.backward_input + each.forward * (i in again) for i, each in enumerate(layers)][::-1]

    def find() -> PairSavings:
        return {
            (rank, chunk): (1 - CONTENTION)
            * hidden_seconds(
                *(
                    [LayerSeconds.of(each) for each in works if each.ep]
                    for works in (forward(stages[chunk]), backward(stages[1 - chunk]))
                )
            )
            for rank in range(run.pp)
            for stages in [run.stages.stages_of(rank)]
            for chunk in (0, 1)
        }

    work = model_work(run)
    key = ("pair savings", run.stages, run.layers, run.config.recompute, *work_key(run))
    return run.units.shared(key, find)


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


def hidden_seconds(forward: Iterable[LayerSeconds], backward: Iterable[LayerSeconds]) -> float:
    """Return the seconds of messages that two actions hide under each other's computation.

    Args:
        forward, backward: the layers of each that send messages, in the order in which they run.
    """
    return sum(
        min(one.messages, other.computation) + min(other.messages, one.computation)
        for one, other in zip(forward, backward, strict=False)
    )
