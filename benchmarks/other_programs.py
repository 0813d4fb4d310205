#!/usr/bin/env python
"""Plan runs of other programs, such as Megatron-LM, to compare the planner with published figures.

python benchmarks/other_programs.py megatron-2021 --preset gpt3-175b --gpu a100-80 …

The flags after the program's name are those of tools/plan.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from benchmarks.transformer_engine import (
    ExpertHost,
    ExpertPasses,
    Rounding,
    mean_holders,
    rounded,
    with_host,
    with_passes,
)
from megalite.config import Config, ModelConfig
from megalite.observe.unit_record import Phase, UnitKey, UnitRecord
from megalite.plan.communication import Cluster, Group
from megalite.plan.estimate import RunPlan
from megalite.plan.iteration_time import IterationTime, time_iteration
from megalite.plan.layer_time import WorkSeconds
from megalite.plan.plan_report import plan_lines
from megalite.plan.plan_request import Request, read_request
from megalite.plan.planned_run import Kernels, PlannedRun
from megalite.plan.units import ModelUnits, RankUnits, units_of
from megalite.utils.commands import run_main
from megalite.utils.errors import UserError

LAUNCH_SECONDS = 7e-6
"""Host time per kernel."""
OWN_LOSS_ACCESSES = (1, 2)
"""Reads and writes of each logit by megalite's own loss in forward and backward, which are in the record."""
SEPARATE_ACCESSES = 3
"""Reads and writes of the hidden states that a layer's forward needs besides megalite's if dropout, additions
and norms are separate kernels."""
COPIES_IN_BACKWARD = 1.5
"""Ratio of copies in backward to copies in forward."""
MEGATRON_LOSS_BYTES = (6 + 4 + 8 + 8 + 4 + 8, 8 + 6)
"""`loss_bytes` of Megatron-LM's loss, where each step is a kernel: conversion to fp32, maximum, subtraction,
exponentials, sum, division; and the multiplication and conversion of the gradient (its cross_entropy.py of
2020 to 2022). The default of `OtherProgram` are PyTorch's kernels: conversion and log-softmax; and zeros for
the gradient of the targets' logits, the gradient of log-softmax, and its conversion."""


_FLASH = Kernels("flash")


@dataclass(frozen=True)
class OtherProgram:
    """What another program than megalite does differently. The defaults describe plain PyTorch.

    Attributes:
        kernels: kernels of attention and recurrences.
        keeps_scores: the outputs of softmax and of its dropout are saved for backward.
        fused_elementwise: rotary embedding runs within another kernel, and saves nothing of its own.
        tp_share: share of the tensor-parallel communication that is not hidden under split GEMMs.
        tp_hidden_share: share of the tensor-parallel communication in backward that runs under the GEMM of
            the weight gradient. Megatron-LM has overlapped them since the end of 2021.
        stops_recomputing: the recomputed forward ends where nothing more is saved, before the last GEMM.
        fused_accumulation: the weight gradient's GEMM adds it to its fp32 sum, and hides the memory accesses.
            It has no effect with ZeRO 3, where each gradient is reduced at once.
        gradient_bytes: bytes per element of the gradient kept between microbatches, with 16-bit weights.
        shared_copy_bytes: bytes per element of a gradient copy that is sharded with the optimizer state.
        keeps_gate: SwiGLU saves the output of its gate besides both of its halves.
        logit_copy_bytes: bytes per logit that the loss needs at its peak besides the 16-bit logits: 4 for a
            copy in fp32, 8 for a copy and its softmax, 0 for a fused loss like megalite's.
        loss_bytes: bytes per logit that a loss that is not fused reads and writes in forward and backward.
        buffer_bytes: maximum size of the communication buffers: three buckets of gradients. A bucket is never
            larger than the rank's gradients. DeepSpeed's buckets have 5e8 elements.
        sum_buffer_bytes: maximum size of a bucket of fp32 sums, which is flattened while it is reduced.
        splits_messages: each tensor-parallel rank sends its part of the hidden states to the next stage,
            which gathers them inside its node (Narayanan et al. 2021, section 4.1).
        one_adapter: collectives over nodes have the bandwidth of one network adapter per node.
        copies_slices: with ZeRO 1, the host copies gathered weights into the parameters in slices, one per
            parameter and replica (nanotron, distributed.py, all_gather_coalesced).
        sends_tokens_once: messages of experts are DeepEP's: a token is sent once to each node and rank that
            has some of its experts, not once for each expert.
        expert_host: the host's time for layers with experts; None if it launches megalite's operators.
        expert_passes: reads and writes of the rows of experts outside of GEMMs; None if they are megalite's.
        rounding: how the GEMMs of layers round their operands; None if they are in 16 bits.
        gathers_rounded: with rounded operands, ZeRO gathers weights in 8 bits.
        consecutive_experts: instead of a router's choice, a token has the experts after those of the token
            before it.
    """

    kernels: Kernels = _FLASH
    keeps_scores: bool = False
    fused_elementwise: bool = False
    tp_share: float = 1.0
    tp_hidden_share: float = 0.5
    stops_recomputing: bool = False
    fused_accumulation: bool = False
    gradient_bytes: int = 4
    shared_copy_bytes: int = 0
    keeps_gate: bool = False
    logit_copy_bytes: int = 0
    loss_bytes: tuple[int, int] = (6 + 8, 4 + 12 + 6)
    buffer_bytes: float = 0.0
    sum_buffer_bytes: float = 0.0
    splits_messages: bool = False
    one_adapter: bool = False
    copies_slices: bool = False
    sends_tokens_once: bool = False
    expert_host: ExpertHost | None = None
    expert_passes: ExpertPasses | None = None
    rounding: Rounding | None = None
    gathers_rounded: bool = True
    consecutive_experts: bool = False


_MEGATRON = OtherProgram(
    kernels=Kernels("unfused"),
    keeps_scores=True,
    fused_elementwise=True,
    tp_hidden_share=0.0,
    logit_copy_bytes=8,
    loss_bytes=MEGATRON_LOSS_BYTES,
    splits_messages=True,
)
_MEGATRON_CORE = OtherProgram(
    kernels=Kernels("cudnn", triton_recurrence=True),
    fused_elementwise=True,
    tp_share=0.4,
    fused_accumulation=True,
    gradient_bytes=2,
    logit_copy_bytes=4,
)
PROGRAMS: Mapping[str, OtherProgram] = {
    "megatron-2021": _MEGATRON,
    "megatron-deepspeed": replace(_MEGATRON, gradient_bytes=2, shared_copy_bytes=4, buffer_bytes=3e9),
    "megatron-core": _MEGATRON_CORE,
    "megatron-core-deepep": replace(_MEGATRON_CORE, sends_tokens_once=True),
    "megatron-bridge": replace(_MEGATRON_CORE, logit_copy_bytes=2, loss_bytes=(2 + 4, 2 + 2)),
    "deepspeed-2021": replace(_MEGATRON, gradient_bytes=2, one_adapter=True),
    "plain-torch": OtherProgram(keeps_gate=True, logit_copy_bytes=4),
    "automodel-benchmark": OtherProgram(
        kernels=Kernels("cudnn", triton_recurrence=True),
        fused_elementwise=True,
        logit_copy_bytes=2,
        loss_bytes=(2 + 2, 2 + 6),
        sends_tokens_once=True,
        consecutive_experts=True,
    ),
}
"""Other programs: Megatron-LM before fused attention, BLOOM's fork of it on DeepSpeed, NVIDIA's version of
2024, the same with DeepEP, DeepSpeed of early 2021, programs that use torch's own attention and sharding, and
the benchmarks of NeMo AutoModel: layers of Transformer Engine, a loss in bf16, DeepEP, and a router that
selects experts in turn (`fake_balanced_gate`)."""


def in_dtype(program: OtherProgram, params_dtype: str) -> OtherProgram:
    """Return a program as it trains in a precision: DeepSpeed has fp32 sums only with bf16 gradients."""
    if program.shared_copy_bytes and params_dtype == "bf16":
        return replace(program, gradient_bytes=6, shared_copy_bytes=0, sum_buffer_bytes=2e9)
    return program


class OneAdapterCluster(Cluster):
    """Cluster in which a ring over nodes uses one network adapter of a node, however many ranks it has."""

    def ring_bandwidth(self, ranks_per_node: int) -> float:
        return super().ring_bandwidth(1)


@dataclass(frozen=True)
class OtherRun(PlannedRun):
    """Planned run of another program. It hides context-parallel communication, as ring attention does."""

    program: OtherProgram = OtherProgram()

    @property
    def stops_recomputing(self) -> bool:  # type: ignore[override]
        return self.program.stops_recomputing

    @cached_property
    def kernels(self) -> Kernels:
        return self.program.kernels

    @cached_property
    def units(self) -> ModelUnits:
        own, model = units_of(self.units_key._replace(exchanges=())), self.config.model
        key = self.units_key.any_unit
        return _adapted(own, key, self.cp, self.program, drops_weights=model.attention_dropout > 0.0)

    def exposed_tp_share(self, phase: Phase) -> float:
        is_hidden = phase == "backward" and not self.splits_backward
        return (1 - self.program.tp_hidden_share * is_hidden) * self.program.tp_share

    def expert_bytes(self, group: Group, num_bytes: float) -> tuple[float, float]:
        """Return the bytes of an all-to-all, or of DeepEP.

        An all-to-all sends a token once for each of its experts. DeepEP sends it once to each node that has
        some of them, to the GPU with the sender's number, which passes it on once to each rank of the node
        that has some (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.2). The outputs are added up on the same way
        back.
        """
        if not self.program.sends_tokens_once or self.config.parallel.etp > 1:
            return super().expert_bytes(group, num_bytes)
        token_bytes = num_bytes / self.config.model.moe_router_topk
        nodes, near = group.num_nodes, group.ranks_per_node
        outside = token_bytes * self.num_holders(nodes) * (nodes - 1) / nodes
        return token_bytes * self.num_holders(group.size) * (near - 1) / near, outside

    def num_holders(self, num_parts: int) -> float:
        """Return how many of equal parts of the experts have some of a token's, in the mean."""
        topk, num_experts = self.config.model.moe_router_topk, self.config.model.num_experts
        assert num_experts is not None
        if self.program.consecutive_experts:
            return max(1.0, topk * num_parts / num_experts)
        return mean_holders(self.config.model, num_parts)

    def message_seconds(self) -> tuple[float, float]:
        if self.pp == 1 or not self.program.splits_messages or self.num_sequence_shards > 1:
            return super().message_seconds()
        group = Group(self.cluster, self.pp, self.tp * self.num_sharing)
        gathered = Group(self.cluster, self.tp, 1).gather_seconds(self.message_bytes)
        return gathered, group.message_seconds(self.message_bytes / self.tp)

    def gathered_in_8_bits(self, kind: int) -> int:
        if self.program.rounding is None or self.zero_stage == 0 or not self.program.gathers_rounded:
            return super().gathered_in_8_bits(kind)
        return sum(each.size for each in self.units.layers[kind].weights if each.is_cut and each.matrices)

    @property
    def gradient_bytes(self) -> int:
        return self.program.gradient_bytes if self.element_bytes == 2 else self.element_bytes

    @property
    def optimizer_bytes(self) -> int:
        return super().optimizer_bytes + self.program.shared_copy_bytes

    def buffer_bytes(self, units: RankUnits) -> float:
        buckets = min(self.program.buffer_bytes, 3 * self.element_bytes * units.size)
        sums = min(self.program.sum_buffer_bytes, 4 * units.size) if self.num_sharing > 1 else 0.0
        return buckets + sums


def other_run(program: OtherProgram, config: Config, cluster: Cluster) -> OtherRun:
    """Return the run of a program, with options of the config for what it does not overlap or fuse."""
    parallel = config.parallel
    parallel = replace(
        parallel,
        tp_comm_overlap=False,
        overlap_param_gather=bool(parallel.overlap_param_gather),
        gradient_accumulation_fusion=parallel.gradient_accumulation_fusion and program.fused_accumulation,
        grad_communication_dtype="bf16" if program.gradient_bytes == 2 else parallel.grad_communication_dtype,
    )
    if program.one_adapter:
        cluster = OneAdapterCluster(**vars(cluster))
    return OtherRun(replace(config, parallel=parallel), cluster, program=program)


@lru_cache(maxsize=4096)
def _adapted(
    units: ModelUnits, key: UnitKey, cp: int, program: OtherProgram, *, drops_weights: bool
) -> ModelUnits:
    """Return the records of a run as a program executes them.

    Args:
        key: key of the units' records; its `unit` has no meaning.
        cp: context-parallel size: a rank's queries attend to the keys of all ranks.
        drops_weights: attention weights are dropped.
    """
    head = _with_all_keys(units.head, cp)
    if program.logit_copy_bytes:
        head = _with_fp32_loss(head, program)
    layers = {
        kind: _adapted_layer(_with_all_keys(layer, cp), key, program, drops_weights)
        for kind, layer in units.layers.items()
    }
    return ModelUnits(units.embedding, head, units.kinds, layers)


def _with_all_keys(unit: UnitRecord, cp: int) -> UnitRecord:
    forward, backward = (
        replace(phase, attention=tuple(call._replace(keys=call.keys * cp) for call in phase.attention))
        for phase in (unit.forward, unit.backward)
    )
    return replace(unit, forward=forward, backward=backward)


def _adapted_layer(layer: UnitRecord, key: UnitKey, program: OtherProgram, drops_weights: bool) -> UnitRecord:
    model, modules = key.model, key.recomputed_modules
    (call, *_) = layer.forward.attention or (None,)
    saved, moved = Counter[str](), 0.0
    element = layer.forward.gemms[0].element_bytes
    if call is not None:
        rotated = (call.heads * call.queries + call.kv_heads * call.queries) * call.size
        saves_rotated = model.position_embedding_type == "rope" and "core_attn" not in modules
        if program.fused_elementwise and saves_rotated:
            saved["core_attn"] -= element * rotated
        if program.keeps_scores and "core_attn" not in modules:
            scores = call.heads * call.queries * call.keys * (2 if drops_weights else 1)
            saved["core_attn"] += element * (scores + call.heads * call.queries * call.value_size)
        # Queries, keys, values and attention's output are copied into another layout.
        moved = 4 * element * (call.heads + call.kv_heads) * call.queries * call.size
    recomputes_gate = key.mlp_chunks > 1 or {"mlp", "mlp_act"} & set(modules)
    if program.keeps_gate and model.is_gated and not recomputes_gate:
        last = layer.forward.gemms[-1]
        saved["mlp_act"] += element * last.m * last.k * last.batch
    if not program.fused_elementwise:
        moved += SEPARATE_ACCESSES * layer.input_bytes
    forward, backward = (
        replace(phase, kernel_bytes=phase.kernel_bytes + copies * moved)
        for phase, copies in ((layer.forward, 1.0), (layer.backward, COPIES_IN_BACKWARD))
    )
    layer = replace(layer, forward=forward, backward=backward).saving(saved)
    if program.expert_passes is not None and key.model.num_experts:
        layer = with_passes(layer, key, program.expert_passes)
    if program.expert_host is not None:
        layer = with_host(layer, program.expert_host)
    return layer if program.rounding is None else rounded(layer, program.rounding)


def _with_fp32_loss(head: UnitRecord, program: OtherProgram) -> UnitRecord:
    """Return the record of a head whose loss converts the logits. The copies are saved at its peak."""
    gemm = head.forward.gemms[-1]
    logits = gemm.m * gemm.n
    phases = zip((head.forward, head.backward), program.loss_bytes, OWN_LOSS_ACCESSES, strict=True)
    forward, backward = (
        replace(phase, kernel_bytes=phase.kernel_bytes + logits * (size - own * gemm.element_bytes))
        for phase, size, own in phases
    )
    copies = {"loss": logits * program.logit_copy_bytes}
    return replace(head, forward=forward, backward=backward).saving(copies)


def time_of(run: OtherRun) -> IterationTime:
    """Return the time of one optimizer step, with the host's copies of gathered weights.

    Each slice costs the host a view and a copy. Meanwhile the GPU is idle.
    """
    time = time_iteration(run)
    if not run.program.copies_slices or run.zero_stage != 1 or run.num_sharing == 1:
        return time
    tensors = sum(len(run.units.layers[kind].weights) for kind in run.ranks[0].kinds)
    copying = WorkSeconds(launch=tensors * run.num_sharing * 2 * LAUNCH_SECONDS)
    works = time.work + copying, time.median_work + copying
    return IterationTime(time.seconds + copying.launch, *works, time.bubble)


class OtherPlan(RunPlan):
    """Plan of another program's run."""

    run: OtherRun

    @cached_property
    def time(self) -> IterationTime:
        return time_of(self.run)


def program_named(name: str) -> OtherProgram:
    """Return the program of this name.

    Raises:
        UserError: there is no such program.
    """
    if name not in PROGRAMS:
        raise UserError(f"{name!r} is none of {', '.join(PROGRAMS)}")
    return PROGRAMS[name]


def request_of(program: OtherProgram, flags: Sequence[str]) -> tuple[Request, OtherPlan]:
    """Return the request of a plan's flags, and the plan of a program.

    Raises:
        UserError: the flags are invalid.
    """
    # The planner assumes its absence where megalite's attention would be slow.
    if not {"--preset", "--config", "--attention-dropout"}.intersection(flags):
        flags = [*flags, "--attention-dropout", str(ModelConfig.attention_dropout)]
    request = read_request(flags)
    program = in_dtype(program, request.config.model.params_dtype)
    return request, OtherPlan(other_run(program, request.config, request.cluster))


def main(arguments: Sequence[str]) -> None:
    """Print the plan of a command line."""
    name, *flags = arguments or [""]
    request, plan = request_of(program_named(name), flags)
    print("\n".join(plan_lines(request, plan)))


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
