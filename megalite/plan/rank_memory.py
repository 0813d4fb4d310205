"""Estimate the memory of a rank, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megalite.plan.iteration_time import peaks_deferred, peaks_in_flight
from megalite.plan.model_parameters import (
    edge_parameters,
    layer_parameters_of_rank,
    rank_parameters,
    table_parameters,
)
from megalite.plan.offloaded_state import offloaded_state
from megalite.plan.planned_run import PlannedRun
from megalite.plan.saved_activations import (
    kept_elements,
    layer_elements,
    linear_input_elements,
    offloaded_elements,
    stage_elements,
)

FRAGMENTS = 0.06
"""Memory lost to fragmentation, as a share of the memory in tensors."""
TIGHT_SHARE = 0.94
"""Share of a GPU's memory above which a plan that fits may still run out of memory.

Plans of published runs are typically off by 4 to 8%."""


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank, by kind.

    Attributes:
        weights: parameters in the precision of the model.
        gradients: gradient sums.
        optimizer: main weights and moments that are not offloaded.
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
        # Written out for speed: a search adds up the memory of a hundred thousand ranks.
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.workspace
            + self.residual
        )


def rank_memories(run: PlannedRun) -> list[RankMemory]:
    """Return the memory of each pipeline rank. Ranks with the same stages only differ in activations."""
    stages, last = _stage_activations(run), run.stages.num_stages - 1
    known: dict[tuple[int, bool, bool], _LastingMemory] = {}
    found = []
    for rank, peak in enumerate(peaks_in_flight(run)):
        own = run.stages.stages_of(rank)
        key = sum(run.layers[stage] for stage in own), 0 in own, last in own
        if key not in known:
            known[key] = _lasting_memory(run, rank)
        found.append(_rank_memory(run, known[key], _activations(run, rank, peak, stages)))
    return found


def choose_gathering(run: PlannedRun) -> PlannedRun:
    """Return the run as `--fsdp-reshard-after-forward default` runs it.

    In a pipeline, ZeRO stage 3 gathers each weight only once per iteration if every stage's weights then fit,
    with the margin of `TIGHT_SHARE`.
    """
    once = replace(run, full_weights_fit=True)
    if once.gathers_once == run.gathers_once:
        return run
    largest = max(memory.total for memory in rank_memories(once))
    return once if largest <= TIGHT_SHARE * run.cluster.gpu.memory_bytes else run


def host_activations(run: PlannedRun) -> list[float]:
    """Return each pipeline rank's bytes of activations in host memory."""
    offloaded = [sum(offloaded_elements(run, num_layers)) for num_layers in run.layers]
    return [
        peak * _average(run, rank, offloaded) * run.element_bytes
        for rank, peak in enumerate(peaks_in_flight(run))
    ]


def node_host_bytes(run: PlannedRun) -> float:
    """Return a node's bytes of host memory, if all its ranks need as much as the largest rank."""
    states = [offloaded_state(run, rank) for rank in range(run.pp)]
    both = [
        activations + (state.host if state else 0.0)
        for activations, state in zip(host_activations(run), states, strict=True)
    ]
    return max(both) * min(run.cluster.world_size, run.cluster.gpus_per_node)


def _average(run: PlannedRun, rank: int, by_stage: Sequence[float]) -> float:
    """Return the mean over a rank's stages, since each chunk in flight counts with the average size."""
    stages = run.stages.stages_of(rank)
    return sum(by_stage[stage] for stage in stages) / len(stages)


class _StageActivations(NamedTuple):
    """Elements of one microbatch that a stage saves.

    Attributes:
        held: elements on the device until backward.
        moving: elements of the two largest offloaded groups, which are on the device at the same time.
        deferred: elements of offloaded groups that deferred weight gradients need.
    """

    held: float
    moving: float
    deferred: float


def _stage_activations(run: PlannedRun) -> list[_StageActivations]:
    of_size = {}
    for num_layers in set(run.layers):
        offloaded = offloaded_elements(run, num_layers)
        of_size[num_layers] = _StageActivations(
            stage_elements(run, num_layers) - sum(offloaded),
            sum(sorted(offloaded)[-2:]),
            min(sum(offloaded), linear_input_elements(run) * len(offloaded)),
        )
    return [of_size[num_layers] for num_layers in run.layers]


class _LastingMemory(NamedTuple):
    """The bytes of a rank that do not depend on the microbatches in flight; see `RankMemory`."""

    weights: float
    gradients: float
    optimizer: float
    logits: float
    workspace: float


def _lasting_memory(run: PlannedRun, rank: int) -> _LastingMemory:
    weights, gradients, optimizer = _state(run, rank)
    if (offloaded := offloaded_state(run, rank)) is not None:
        optimizer -= offloaded.state
    logits = _logits(run) if run.stages.num_stages - 1 in run.stages.stages_of(rank) else 0.0
    workspace = max(0.0, _workspace(run, rank) - logits)  # they never exist at the same time
    workspace += _buffers(run, rank)
    return _LastingMemory(weights, gradients, optimizer, logits, workspace)


def _rank_memory(run: PlannedRun, lasting: _LastingMemory, activations: float) -> RankMemory:
    weights, gradients, optimizer, logits, workspace = lasting
    held = weights + gradients + optimizer + activations + logits + workspace
    residual = run.cluster.gpu.residual_gb * 1e9 + FRAGMENTS * held
    return RankMemory(weights, gradients, optimizer, activations, logits, workspace, residual)


def _buffers(run: PlannedRun, rank: int) -> float:
    """Return the bytes of communication buffers."""
    program, count = run.program, rank_parameters(run, rank)
    buckets = min(program.buffer_bytes, 3 * run.element_bytes * count)
    return buckets + (min(program.sum_buffer_bytes, 4 * count) if run.num_sharing > 1 else 0.0)


def _state(run: PlannedRun, rank: int) -> tuple[float, float, float]:
    """Return weights, gradients and optimizer state, sharded by the ZeRO stage."""
    count, zero, shares = rank_parameters(run, rank), run.zero_stage, run.num_shards
    element = run.element_bytes
    main = 12 if element == 2 else 2 * element
    summed = run.program.gradient_bytes if element == 2 else element
    main += run.program.shared_copy_bytes
    full = _tied_parameters(run, rank) if zero == 2 else 0.0
    weights = element * count / (shares if zero == 3 else 1)
    if zero == 3:
        weights += element * (count if run.gathers_once else _kept_edge(run, rank))
    return (
        weights,
        summed * (full + (count - full) / (shares if zero >= 2 else 1)),
        main * count / (shares if zero >= 1 else 1),
    )


def _kept_edge(run: PlannedRun, rank: int) -> float:
    """Return the parameters outside layers, which a pipeline with ZeRO 3 keeps full during an iteration."""
    stages = run.stages.stages_of(rank)
    return edge_parameters(run, 0 in stages, run.stages.num_stages - 1 in stages) if run.pp > 1 else 0.0


def _tied_parameters(run: PlannedRun, rank: int) -> float:
    """Return the parameters of a tied embedding that a rank's stage shares with another stage.

    ZeRO stage 2 keeps their gradient full until both stages' parts are added.
    """
    model, stages = run.config.model, run.stages.stages_of(rank)
    is_first_or_last = 0 in stages or run.stages.num_stages - 1 in stages
    if model.untie_embeddings_and_output_weights or run.pp == 1 or not is_first_or_last:
        return 0.0
    return table_parameters(model, run.tp) / run.tp


def _activations(run: PlannedRun, rank: int, peak: int, stages: Sequence[_StageActivations]) -> float:
    """Return the activations on the device of all microbatches in flight.

    Of offloaded layers, they include two groups in transfer, and the linear layers' inputs of microbatches
    with deferred weight gradients.
    """
    elements = peak * _average(run, rank, [stage.held for stage in stages])
    elements += max(stages[stage].moving for stage in run.stages.stages_of(rank))
    if run.config.recompute.cpu_offload_activations > 0:
        elements += peaks_deferred(run)[rank] * _average(run, rank, [stage.deferred for stage in stages])
    return elements * run.element_bytes


def _logits(run: PlannedRun) -> float:
    """Return the bytes of this rank's logits, with fp32 copies; the gradient replaces the logits in place."""
    model, copy = run.config.model, run.program.logit_copy_bytes
    elements = run.tokens * model.predicted_share * (model.padded_vocab_size(run.tp) // run.tp)
    return elements * (run.element_bytes + copy) / run.config.recompute.cross_entropy_chunks


def _workspace(run: PlannedRun, rank: int) -> float:
    """Return the largest temporary memory: a recomputed group, and with ZeRO 3 the weights of two layers."""
    recompute = run.config.recompute
    work = 0.0
    parts = layer_elements(run)
    if recompute.recompute_granularity == "full":
        longest = max(
            (len(group) for group, is_again in recompute.groups(max(run.layers)) if is_again), default=0
        )
        work = longest * sum(parts.values())
    else:
        work = sum(parts.values()) - kept_elements(run)
    # Gradients of the running layer's activations.
    work += 2 * run.tokens * (run.config.model.ffn_size / run.tp + run.config.model.hidden_size)
    if run.zero_stage == 3:
        work += _gathered_parameters(run, rank)
    return work * run.element_bytes


def _gathered_parameters(run: PlannedRun, rank: int) -> float:
    """Return the elements of weights that ZeRO 3 gathers for two layers, and the elements of gradients."""
    layer = layer_parameters_of_rank(run)
    if run.gathers_once:
        return max(layer, _kept_edge(run, rank))  # only gradients: the weights stay gathered
    if run.pp > 1:
        return 2 * layer + max(layer, _kept_edge(run, rank))
    return 3 * layer + 2 * table_parameters(run.config.model, run.tp) / run.tp
