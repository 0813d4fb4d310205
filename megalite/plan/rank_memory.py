"""Estimate the memory of a rank, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from megalite.config.config import hides_expert_messages
from megalite.observe.unit_record import INPUT
from megalite.pipeline.schedules import (
    SCHEDULES,
    ScheduleName,
    StageMap,
    peak_deferred,
    peak_in_flight,
    training_actions,
)
from megalite.pipeline.simulator import MAX_ROUNDS
from megalite.plan.optimizer_update import offloaded_state
from megalite.plan.planned_run import PlannedRun
from megalite.plan.units import RankUnits, sizes_of

Kinds = Sequence[int]
"""The kinds of a stage's layers, in order."""
OF_LOGITS = ("head", "loss")
"""Parts of the head that are not modules of multi-token prediction."""
FRAGMENTS = 0.06
"""Memory lost to fragmentation, as a share of the memory in tensors."""
TIGHT_SHARE = 0.94
"""Share of a GPU's memory above which a plan that fits may still run out of memory.

Plans of published runs are typically off by 4 to 8%."""


class RankMemory(NamedTuple):
    """Bytes of one rank, by kind.

    Attributes:
        weights: parameters in the precision of the model, and their copies in FP8.
        gradients: gradient sums.
        optimizer: main weights, moments and averages of weights that are not offloaded.
        activations: activations saved for backward, at the peak.
        logits: logits and their gradients, on the last stage.
        workspace: temporary memory of a layer or a collective.
        residual: memory outside of tensors: the process, and fragmentation.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspace: float
    residual: float

    @property
    def total(self) -> float:
        return sum(self)


def rank_memories(run: PlannedRun) -> list[RankMemory]:
    """Return the memory of each pipeline rank. Ranks with the same units only differ in activations."""
    work = _microbatch_memory(run)
    lasting = {units: _lasting_memory(run, units, work) for units in dict.fromkeys(run.ranks)}
    return [
        _rank_memory(run, lasting[units], size)
        for units, size in zip(run.ranks, work.activations, strict=True)
    ]


def largest_memory(run: PlannedRun) -> RankMemory:
    """Return the memory of the rank that needs most."""
    work = _microbatch_memory(run)
    memories = [(_lasting_memory(run, units, work), size) for units, size in work.largest_activations.items()]
    return _rank_memory(run, *max(memories, key=lambda each: sum(each[0]) + each[1]))


def activation_parts(run: PlannedRun, rank: int, activations: float) -> dict[str, float]:
    """Divide the activations of a pipeline rank among the parts of a layer, as its layers save them.

    Offloaded layers are assumed to have the same parts as those that stay on the device.
    """
    saved = dict[str, float]()
    for stage in run.stages.stages_of(rank):
        for part, size in part_bytes(run, run.stage_kinds[stage]).items():
            saved[part] = saved.get(part, 0.0) + size
    total = sum(saved.values())
    return {part: activations * size / total for part, size in saved.items()}


def logit_parts(run: PlannedRun) -> dict[str, float]:
    """Divide the bytes of the head at the loss' peak among its parts, and what else exists then."""
    head = run.units.head
    return {**{each.part: each.num_bytes for each in head.saved}, "workspace": head.workspace_bytes}


def choose_gathering(run: PlannedRun) -> PlannedRun:
    """Return the run as `--fsdp-reshard-after-forward default` runs it.

    In a pipeline, ZeRO stage 3 gathers each weight only once per iteration if every stage's weights then fit,
    with the margin of `TIGHT_SHARE`.
    """
    if run.zero_stage != 3:
        return run
    once = run.with_sharding(run, full_weights_fit=True)
    if once.gathers_once == run.gathers_once:
        return run
    return once if largest_memory(once).total <= TIGHT_SHARE * run.cluster.gpu.memory_bytes else run


def host_activations(run: PlannedRun) -> list[float]:
    """Return each pipeline rank's bytes of activations in host memory."""
    if run.config.recompute.cpu_offload_activations == 0:
        return [0.0] * run.pp
    offloaded = [sum(offloaded_bytes(run, kinds)) for kinds in run.stage_kinds]
    return [peak * _average(run, rank, offloaded) for rank, peak in enumerate(peaks(run)[0])]


def node_host_bytes(run: PlannedRun) -> float:
    """Return a node's bytes of host memory, if all its ranks need as much as the largest rank."""
    states = [offloaded_state(run, units) for units in run.ranks]
    both = [
        activations + (state.host if state else 0.0)
        for activations, state in zip(host_activations(run), states, strict=True)
    ]
    return max(both) * run.cluster.ranks_per_node


def _average(run: PlannedRun, rank: int, by_stage: Sequence[float]) -> float:
    """Return the mean over a rank's stages, since each chunk in flight counts with the average size."""
    stages = _stages_of_ranks(run.stages)[rank]
    return sum([by_stage[stage] for stage in stages]) / len(stages)


@lru_cache(maxsize=1024)
def _stages_of_ranks(stages: StageMap) -> list[list[int]]:
    return [list(stages.stages_of(rank)) for rank in range(stages.num_ranks)]


class _MicrobatchMemory(NamedTuple):
    """Memory that the microbatches of a run need, however ZeRO shards its state.

    Attributes:
        activations: bytes of each pipeline rank.
        largest_activations: of the ranks with the same units, the bytes of the one that needs most.
        logits: bytes of the head at the loss' peak.
        workspace: temporary memory of a layer or of a recomputed group.
    """

    activations: list[float]
    largest_activations: dict[RankUnits, float]
    logits: float
    workspace: float


def _microbatch_memory(run: PlannedRun) -> _MicrobatchMemory:
    def find() -> _MicrobatchMemory:
        activations, largest = _activations(run), dict[RankUnits, float]()
        for units, size in zip(run.ranks, activations, strict=True):
            largest[units] = max(size, largest.get(units, 0.0))
        return _MicrobatchMemory(activations, largest, sum(logit_parts(run).values()), _layer_workspace(run))

    recompute, schedule = run.config.recompute, run.config.parallel.schedule
    key = ("microbatch memory", run.stages, run.layers, recompute, schedule, run.num_microbatches)
    return run.units.shared(key, find)


@lru_cache(maxsize=8192)
def _peaks(
    schedule: ScheduleName, stages: StageMap, num_microbatches: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    actions = training_actions(schedule, stages, num_microbatches)
    return tuple(map(peak_in_flight, actions)), tuple(map(peak_deferred, actions))


def peaks(run: PlannedRun) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return, per pipeline rank, the peak numbers of microbatches in flight and of deferred weight gradients.

    Both are sums over a rank's chunks.
    """
    return _peaks(run.config.parallel.schedule, run.stages, _num_counted(run))


def peak_of_last_stage(run: PlannedRun) -> int:
    """Return the peak number of microbatches in flight in the last stage alone."""
    rank, chunk = next(
        (rank, chunk)
        for rank in range(run.pp)
        for chunk, stage in enumerate(run.stages.stages_of(rank))
        if stage == run.stages.num_stages - 1
    )
    actions = training_actions(run.config.parallel.schedule, run.stages, _num_counted(run))[rank]
    return peak_in_flight([action for action in actions if action.chunk == chunk])


def _num_counted(run: PlannedRun) -> int:
    """Return a number of microbatches after which no more of them are in flight."""
    keeps_all = SCHEDULES[run.config.parallel.schedule].keeps_all_microbatches
    return run.num_microbatches if keeps_all else min(run.num_microbatches, MAX_ROUNDS * run.pp)


def _activations(run: PlannedRun) -> list[float]:
    """Return the activations on the device of all microbatches in flight, of each pipeline rank.

    Of offloaded layers, they include the two largest groups, which are in transfer at the same time, and the
    linear layers' inputs of microbatches with deferred weight gradients.
    """
    found = {}
    for kinds in dict.fromkeys(run.stage_kinds):
        offloaded = offloaded_bytes(run, kinds)
        inputs = sum(deferred_input_bytes(run, kind) for kind in kinds) if offloaded else 0.0
        found[kinds] = (
            stage_bytes(run, kinds) - sum(offloaded),
            sum(sorted(offloaded)[-2:]),
            min(sum(offloaded), inputs * len(offloaded) / max(len(kinds), 1)),
        )
    later = later_token_bytes(run)
    later *= peak_of_last_stage(run) - 1 if later else 0  # those of one microbatch count as logits
    held, moving, deferred = zip(*(found[kinds] for kinds in run.stage_kinds), strict=True)
    kept = [size + embedding_bytes(run, stage) for stage, size in enumerate(held)]
    return [
        in_flight * _average(run, rank, kept)
        + max([moving[stage] for stage in _stages_of_ranks(run.stages)[rank]])
        + num_deferred * _average(run, rank, deferred)
        + (later if run.ranks[rank].is_last else 0.0)
        for rank, (in_flight, num_deferred) in enumerate(zip(*peaks(run), strict=True))
    ]


class _ShardedMemory(NamedTuple):
    """Memory of a rank that does not depend on the microbatches: the state, and weights that ZeRO 3 gathers.

    Attributes:
        at_loss, in_layers: gathered bytes beside the logits, and beside the work of a layer.
    """

    weights: float
    gradients: float
    optimizer: float
    at_loss: float
    in_layers: float


def _lasting_memory(run: PlannedRun, units: RankUnits, work: _MicrobatchMemory) -> RankMemory:
    """Return what does not depend on the microbatches in flight: neither activations nor the residual."""
    key = (units.kinds, units.is_first, units.is_last, run.gathers_once, run.keeps_rounded_weights)
    held = run.sharded_memory.get(key)
    if held is None:
        held = run.sharded_memory[key] = _sharded_memory(run, units)
    logits = work.logits if units.is_last else 0.0
    # They never exist at the same time, except for gathered weights of multi-token prediction.
    workspace = max(held.at_loss, work.workspace + held.in_layers - logits) + run.buffer_bytes(units)
    return RankMemory(held.weights, held.gradients, held.optimizer, 0.0, logits, workspace, 0.0)


def _sharded_memory(run: PlannedRun, units: RankUnits) -> _ShardedMemory:
    weights, gradients, optimizer = _state(run, units)
    if (offloaded := offloaded_state(run, units)) is not None:
        optimizer -= offloaded.state
    at_loss, in_layers = _gathered_at_loss(run, units), _gathered_bytes(run, units)
    return _ShardedMemory(weights, gradients, optimizer, at_loss, in_layers)


def _gathered_at_loss(run: PlannedRun, units: RankUnits) -> float:
    """Return the bytes of the head's weights and gradients that ZeRO 3 gathers, if it has many of them."""
    if run.zero_stage != 3 or not units.is_last or run.config.model.mtp_num_layers == 0:
        return 0.0
    return run.units.head_size * run.element_bytes * (2.0 if run.pp == 1 else 1.0)


def _rank_memory(run: PlannedRun, lasting: RankMemory, activations: float) -> RankMemory:
    held = lasting._replace(activations=activations)
    return held._replace(residual=run.cluster.gpu.residual_gb * 1e9 + FRAGMENTS * held.total)


def _state(run: PlannedRun, units: RankUnits) -> tuple[float, float, float]:
    """Return weights, gradients and optimizer state, sharded by the ZeRO stage."""
    zero, element = run.zero_stage, run.element_bytes
    # ZeRO stage 2 keeps the gradient of a tied embedding full until both stages' parts are added.
    is_shared = zero == 2 and run.pp > 1 and (units.is_first or units.is_last)
    full = run.units.tied_size if is_shared else 0
    # Muon has one moment, in the dtype of the main weights.
    matrices = run.sharded(sizes_of(run.matrices_of(units)), from_stage=1)
    weights = element * run.sharded(units.sizes, from_stage=3)
    if zero == 3:
        weights += element * (units.size if run.gathers_once else _kept_edge(run, units))
    if zero < 3 or run.gathers_once:
        weights -= (element - 1) * sum(map(run.gathered_in_8_bits, units.kinds))
    return (
        weights + _fp8_copies(run, units),
        run.gradient_bytes * (run.sharded(units.sizes, from_stage=2) + full * (1 - 1 / run.num_shards)),
        run.optimizer_bytes * run.sharded(units.sizes, from_stage=1)
        - (run.moment_bytes - max(element, 4)) * matrices,
    )


def _fp8_copies(run: PlannedRun, units: RankUnits) -> float:
    """Return the bytes of the 8-bit copies of each linear layer's weight, if the run keeps them.

    Of weights that are gathered in 8 bits, it only keeps the transposed copy.
    """
    if not run.keeps_rounded_weights:
        return 0.0
    training, num_layers = run.config.training, run.config.model.num_layers
    kinds = (kind for kind in units.kinds if training.is_layer_in_fp8(kind, num_layers))
    weights = [weight for kind in kinds for weight in run.units.layers[kind].weights]
    return training.fp8_copies * sum(
        weight.size for weight in weights if weight.is_cut and len(weight.shape) > 1
    ) - sum(map(run.gathered_in_8_bits, units.kinds))


def _kept_edge(run: PlannedRun, units: RankUnits) -> float:
    """Return the parameters outside layers, which a pipeline with ZeRO 3 keeps full during an iteration."""
    return units.edges.total() if run.pp > 1 else 0.0


def _layer_workspace(run: PlannedRun) -> float:
    """Return the largest temporary memory of a layer and of a recomputed group."""
    layers = run.units.layers
    # Two actions that run in turns hold theirs at the same time.
    work = max(layer.workspace_bytes for layer in layers.values()) * (
        2 if hides_expert_messages(run.config) else 1
    )
    longest = max(
        (len(group) for group, is_again in run.config.recompute.groups(max(run.layers)) if is_again),
        default=0,
    )
    return work + longest * max(layer.saved_bytes for layer in layers.values())


def _gathered_bytes(run: PlannedRun, units: RankUnits) -> float:
    """Return the bytes of weights that ZeRO 3 gathers for two layers, and of gradients."""
    if run.zero_stage != 3:
        return 0.0
    layer, gradients = run.units.largest_layer, max(run.units.largest_layer, _kept_edge(run, units))
    if run.gathers_once:
        return gradients * run.element_bytes  # the weights stay gathered
    saved = 2 * (run.element_bytes - 1) * min(map(run.gathered_in_8_bits, units.kinds))
    if run.pp > 1:
        return (2 * layer + gradients) * run.element_bytes - saved
    return (3 * layer + 2 * run.units.head_size) * run.element_bytes - saved


def group_bytes(run: PlannedRun, kinds: Kinds) -> list[float]:
    """Return the bytes that each group of a stage's layers saves per microbatch."""
    recompute, layers, spec_of = run.config.recompute, run.units.layers, run.config.model.layer_spec
    is_sliced = recompute.distribute_saved_activations and run.num_sequence_shards == 1
    element = run.positions * run.config.training.micro_batch_size * run.element_bytes  # of all tokens
    return [
        layers[kinds[group.start]].input_bytes / (run.tp if is_sliced else 1)
        + sum(element * spec_of(kinds[i]).given_elements(run.tp) for i in group)  # which later layers keep
        if is_again
        else sum(layers[kinds[i]].saved_bytes for i in group)
        for group, is_again in recompute.groups(len(kinds))
    ]


def part_bytes(run: PlannedRun, kinds: Kinds) -> dict[str, float]:
    """Return the bytes that a stage's layers save per microbatch, by the part of a layer that makes them.

    Of a group that is recomputed in full, this is its input, and what it gives to later layers.
    """
    found = dict[str, float]()
    groups = zip(run.config.recompute.groups(len(kinds)), group_bytes(run, kinds), strict=True)
    for (group, is_again), size in groups:
        saved = [run.units.layers[kinds[i]].saved for i in group]
        for part, num_bytes in [(INPUT, size)] if is_again else chain(*saved):
            found[part] = found.get(part, 0.0) + num_bytes
    return found


def stage_bytes(run: PlannedRun, kinds: Kinds) -> float:
    """Return the bytes that a stage's layers save per microbatch."""
    return sum(group_bytes(run, kinds))


def offloaded_bytes(run: PlannedRun, kinds: Kinds) -> list[float]:
    """Return the bytes that each offloaded group of a stage's layers saves per microbatch."""
    recompute = run.config.recompute
    if recompute.cpu_offload_activations == 0:
        return []
    groups = zip(recompute.groups(len(kinds)), group_bytes(run, kinds), strict=True)
    return [size for (group, _), size in groups if group.start < recompute.cpu_offload_activations]


def later_token_bytes(run: PlannedRun) -> float:
    """Return the bytes that the modules of multi-token prediction save per microbatch."""
    if run.config.model.mtp_num_layers == 0:
        return 0.0
    return sum(each.num_bytes for each in run.units.head.saved if each.part not in (INPUT, *OF_LOGITS))


def embedding_bytes(run: PlannedRun, stage: int) -> float:
    """Return the bytes of embeddings for each layer that a stage keeps per microbatch.

    The first stage keeps what their backward reads, and each other one what it has received.
    """
    model = run.config.model
    if model.hidden_size_per_layer_input is None:
        return 0.0
    if stage > 0:
        of_token = model.num_layers * model.hidden_size_per_layer_input * run.element_bytes
        return run.tokens * of_token / run.num_sequence_shards
    return sum(each.num_bytes for each in run.units.embedding.saved if each.part != INPUT)


def deferred_input_bytes(run: PlannedRun, kind: int) -> float:
    """Return the bytes of a layer's activations that its deferred weight gradients read."""
    phase = run.units.layers[kind].weight
    gathered = {each.gemm for each in phase.collectives if each.call.kind == "all-gather"}
    return sum(
        gemm.k * gemm.n * gemm.element_bytes / (run.tp if number in gathered else 1)
        for number, gemm in enumerate(phase.gemms)
    )
