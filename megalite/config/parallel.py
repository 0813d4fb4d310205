"""The configuration of parallelism."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from megalite.config.option import (
    ABOVE_ONE,
    AT_LEAST_ONE,
    AT_LEAST_TWO,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    ZERO_STAGE,
    Conflicts,
    OnResume,
    Range,
    Setting,
    option,
)
from megalite.config.training import FP8_BLOCKS, SPLITS_GEMMS
from megalite.distributed.axes import AXES, CONTEXT, EXPERTS, MeshOptions, MeshSpec
from megalite.pipeline.schedules import ScheduleName

GradCommunicationDtype = Literal["fp32", "bf16", "fp16"]
Backend = Literal["auto", "gloo", "nccl"]
LayoutSource = Literal["auto", "manual"]
ReshardAfterForward = Literal["default", "always", "never"]
TokenDispatcherType = Literal["alltoall", "allgather"]
TpCommOverlapMethod = Literal["chunks", "symmetric_memory"]

OVERLAP_CHUNKS = ((32768, 4), (8192, 2))
"""Number of parts in which tensor-parallel collectives overlap with GEMMs by default, from a number of tokens
in a microbatch on. The planner expects no gain from more parts: smaller GEMMs fill fewer multiprocessors
(tests/unit/plan/test_tp_overlap.py)."""
_RANKS_PER_NODE = 8
"""GPUs of a usual node."""
LAYER_CLASS = "ParallelTransformerLayerPipe"
"""Class of a layer in Megatron-DeepSpeed, which type:REGEX of --pp-partition-method is matched against."""


def _balances_layers(method: str) -> bool:
    """Return whether a --pp-partition-method is known and gives layers a weight."""
    kind, _, pattern = method.partition(":")
    try:
        return method in ("uniform", "parameters") or (
            kind == "type" and re.search(pattern, LAYER_CLASS, re.IGNORECASE) is not None
        )
    except re.error:
        return False


_METHOD = Range(
    _balances_layers,
    f"uniform, parameters or type:REGEX, where REGEX matches {LAYER_CLASS}, as in type:transformer",
    "is not known: choose",
)
_CP = Setting("context_parallel_size", ABOVE_ONE)
_CP_LEVELS = Setting(
    "cp_comm_type",
    Range(lambda types: "a2a+p2p" in str(types), "with a2a+p2p"),
    "no layer has --cp-comm-type a2a+p2p",
)
_RING = Setting("cp_comm_type", Range(lambda types: "p2p" in str(types), "with p2p"))
_OTHER_THAN_RING = Setting(
    "cp_comm_type", Range(lambda types: types not in ("p2p", ("p2p",) * len(types)), "other than p2p")
)
_PP = Setting("pipeline_model_parallel_size", ABOVE_ONE)
_TP = Setting("tensor_model_parallel_size", ABOVE_ONE)
_TP_OVERLAP = (_TP, SPLITS_GEMMS)
_ON_GPUS = Setting(
    "distributed_backend", ("auto", "nccl"), "ranks run on CPU cores (--distributed-backend gloo)"
)
_BUCKETS = Setting("zero_stage", (0, 1, 2), "with --zero-stage 3 each layer reduces its own gradients")


@dataclass(frozen=True)
class ParallelConfig:
    """Layout of the ranks (world size = tp x pp x dp x cp) and their communication."""

    table: ClassVar[tuple[MeshSpec, ...]] = AXES
    """The axes whose sizes are fields."""

    default_on_resume: ClassVar[OnResume] = OnResume.FREE

    tensor_model_parallel_size: int = option(1, "--tp", allowed=SIZE)
    """Tensor-parallel size: number of ranks that the matrices of each layer are split over."""
    pipeline_model_parallel_size: int = option(1, "--pp", allowed=SIZE)
    """Pipeline-parallel size: number of ranks that the layers are split over."""
    data_parallel_size: int | None = option(None, "--dp", allowed=SIZE)
    """Data-parallel size: number of replicas of the model. It must equal the default,
    world size / (tp x pp x cp)."""
    context_parallel_size: int = option(1, "--cp", allowed=SIZE)
    """Context-parallel size: number of ranks that the tokens of each sample are split over."""
    cp_comm_type: CpCommTypes = option("all_gather", only_with=_CP)
    """How queries reach other ranks' keys, for all layers or for each: gather keys (all_gather), exchange
    heads for tokens (a2a), pass keys in a ring (p2p), or both (a2a+p2p)."""
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = option(
        None, allowed=SIZE, only_with=(_CP, _CP_LEVELS)
    )
    """With --cp-comm-type a2a+p2p: neighbouring ranks that exchange heads, and groups of them in a ring. By
    default, as many as a node of 8 GPUs holds, in 2 or more groups."""
    dynamic_context_parallel: bool = option(False, only_with=_CP)
    """Distribute the documents of packed samples over context-parallel ranks, with balanced attention: short
    ones to one rank, long ones to several. Needs --cp-comm-type p2p."""
    expert_model_parallel_size: int = option(1, "--ep", "--moe-expert-parallel-size", allowed=SIZE)
    """Expert-parallel size: number of ranks that the experts of a layer are divided among."""
    expert_tensor_parallel_size: int | None = option(None, "--etp", allowed=SIZE)
    """Number of ranks that the width of each expert is split over. By default --tp."""
    moe_imbalance: float = option(
        1.0, allowed=AT_LEAST_ONE, only_with=Setting("expert_model_parallel_size", ABOVE_ONE)
    )
    """With --ep, tokens for the experts of the busiest rank, relative to the mean over ranks, in plans,
    --layout auto and --dry-run. By default 1, which is even."""
    moe_token_dispatcher_type: TokenDispatcherType = option(
        "alltoall", choices={"alltoall_seq": "alltoall", "flex": "alltoall"}
    )
    """With --ep or --etp: send tokens to the ranks of their experts (alltoall), or gather the tokens of all
    these ranks on each (allgather), which is for few ranks."""
    layout: LayoutSource | None = None
    """Choose the options of the layout that are not set when the run starts (auto), or use their defaults
    (manual). By default auto if none is set (docs/layout.md)."""
    calibration: str | None = None
    """File with measured rates of this machine, for --layout auto and plans. With --calibrate, a plan writes
    it."""
    sequence_parallel: bool = option(False, only_with=_TP)
    """Shard norms, dropout and the residual stream along the sequence over the tensor-parallel ranks. This
    saves memory for the same communication."""
    tp_comm_overlap: bool | None = option(None, only_with=_TP_OVERLAP)
    """Overlap tensor-parallel collectives with the GEMMs next to them. On by default on GPUs only, for
    microbatches of 8192 tokens or more."""
    tp_comm_overlap_method: TpCommOverlapMethod = option(
        "chunks",
        only_with=(*_TP_OVERLAP, Setting("sequence_parallel"), Setting("tp_comm_overlap", (None, True))),
    )
    """How to overlap: by parts of the positions (chunks), or in torch's symmetric memory, which needs
    --sequence-parallel and a GPU's access to the others."""
    tp_comm_overlap_chunks: int | None = option(
        None, allowed=AT_LEAST_TWO, only_with=(*_TP_OVERLAP, Setting("tp_comm_overlap", (None, True)))
    )
    """Number of parts with --tp-comm-overlap-method chunks. By default 2, or 4 from 32768 tokens
    on. A number turns --tp-comm-overlap on."""
    pipeline_schedule: ScheduleName = option("1f1b", sets={"--enable-zbh1-pipeline": "zb-h1"}, only_with=_PP)
    """Order of forward and backward passes in the pipeline. zb-h1, zb-v and dualpipev defer weight
    gradients; dualpipev also computes under messages of experts."""
    num_virtual_stages_per_pipeline_rank: int | None = option(None, allowed=SIZE)
    """Number of model chunks per pipeline rank. With two or more, 1f1b becomes interleaved."""
    num_layers_per_virtual_pipeline_stage: int | None = option(None, allowed=SIZE)
    """Number of layers per model chunk, instead of the number of chunks; 1f1b becomes interleaved."""
    pipeline_layers: tuple[int, ...] | None = option(None, allowed=SIZE)
    """Number of layers of each pipeline stage, for example 3 5; with chunks, one number per chunk. By default
    all are equal."""
    decoder_first_pipeline_num_layers: int | None = option(None, allowed=SIZE, only_with=_PP)
    """Number of layers on the first pipeline rank; the rest is divided among the other ranks."""
    decoder_last_pipeline_num_layers: int | None = option(None, allowed=SIZE, only_with=_PP)
    """Number of layers on the last pipeline rank; the rest is divided among the other ranks."""
    account_for_embedding_in_pipeline_split: bool = option(False, only_with=_PP)
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = option(False, only_with=_PP)
    """Count the output layer and the loss as a layer of the last stage."""
    pp_partition_method: str | None = option(None, allowed=_METHOD, only_with=_PP)
    """Balance the stages by uniform (number of layers), parameters, or type:REGEX (layers whose DeepSpeed
    class name matches)."""
    ddp_bucket_size: int | None = option(None, allowed=POSITIVE, only_with=_BUCKETS)
    """Elements per gradient bucket. By default a sixth of the rank's parameters, between 1 and 40 million."""
    zero_stage: int = option(0, allowed=ZERO_STAGE, sets={"--use-distributed-optimizer": 1})
    """ZeRO stage, for sharding over data-parallel ranks. 0: shard nothing, 1: the optimizer state, 2: also
    gradients, 3: also weights."""
    data_parallel_shard_degree: int | None = option(
        None, allowed=NOT_NEGATIVE, sets={"--shard-within-node": 0}
    )
    """Shard (ZeRO) within groups of this many neighbouring replicas, and replicate across groups. 0: a group
    is the replicas on a node. By default one group of all replicas."""
    num_distributed_optimizer_instances: int | None = option(None, allowed=SIZE, only_with="zero_stage")
    """Number of groups of replicas within which ZeRO shards; an alternative to
    --data-parallel-shard-degree."""
    fsdp_reshard_after_forward: ReshardAfterForward = option("default", only_with=Setting("zero_stage", (3,)))
    """With --zero-stage 3: free gathered weights after each use (always), or gather them once per iteration
    (never). default: never in a pipeline if they fit, else always."""
    overlap_grad_reduce: bool = option(True, only_with=_BUCKETS)
    """Overlap the gradient reduction over replicas with the backward pass."""
    overlap_param_gather: bool | None = option(None, only_with=Setting("zero_stage", (1, 2)))
    """With --zero-stage 1 or 2: overlap the all-gather of updated weights with the next forward pass. On by
    default on GPUs only."""
    grad_communication_dtype: GradCommunicationDtype | None = option(
        None, on_resume=OnResume.SETTING, sets={"--grad-reduce-in-bf16": "bf16"}
    )
    """Precision of gradients in the data-parallel reduction. By default, and always for the exchange of tied
    embedding gradients between stages, the precision of the sums."""
    gradient_accumulation_fusion: bool = True
    """Accumulate weight gradients inside the GEMM that computes them."""
    distributed_backend: Backend = "auto"
    """Communication backend. auto is nccl on GPUs and gloo on CPUs."""
    ranks_share_gpus: bool = option(False, only_with=_ON_GPUS)
    """Let several ranks share a GPU over NCCL, to test a layout with few GPUs. It needs NCCL 2.30."""
    distributed_timeout_minutes: int = option(10, allowed=SIZE)
    """Minutes before a collective fails because a rank has not joined it."""
    num_threads: int | None = option(None, allowed=SIZE, differs_between_ranks=True)
    """CPU threads per rank. By default 1 if several ranks share the machine, otherwise torch's default."""
    numa_binding: bool = option(True, differs_between_ranks=True)
    """Bind a GPU rank to the CPU cores of its GPU's NUMA node, unless the launcher has already bound it."""
    keep_freed_memory: bool = option(True, differs_between_ranks=True)
    """Reuse freed memory on a CPU rank, instead of returning it to the operating system. Steps are faster,
    but need about a third more memory."""

    conflicts: ClassVar[Conflicts] = {
        Setting("layout", ("auto",)): {
            "emulate": ", which cannot be planned: pass the layout, or remove --emulate",
            "dry_run": (
                ", which has no hardware to choose for: pass the layout that `megalite plan --layout auto` "
                "prints"
            ),
            "verify_layouts": ", which names its layouts: remove --layout auto",
            Setting("global_batch_size", (None,)): (
                ", whose default depends on the layout: pass the samples of an optimizer step"
            ),
        },
        ("qk_clip", "compile"): {
            _RING: " is not supported: pass --cp-comm-type all_gather or a2a, or remove the other",
        },
        "dynamic_context_parallel": {
            _OTHER_THAN_RING: ", whose messages do not depend on documents: pass --cp-comm-type p2p",
        },
        Setting("fp8_recipe", tuple(FP8_BLOCKS)): {
            "dynamic_context_parallel": (
                ", which cuts a sample within blocks of its tokens: remove it, or pass --fp8-recipe "
                "tensorwise"
            ),
        },
        "grad_communication_dtype": {
            Setting("params_dtype", ("fp64",)): (
                ", which is meant to verify layouts: remove --grad-communication-dtype"
            ),
        },
        Setting("grad_communication_dtype", ("fp16",)): {
            Setting("params_dtype", ("fp32", "bf16")): (
                ": without fp16 weights, no loss scale keeps gradients within the range of fp16; pass "
                "--grad-communication-dtype bf16"
            ),
        },
    }

    @property
    def tp(self) -> int:
        """Return the tensor-parallel size."""
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        """Return the pipeline-parallel size."""
        return self.pipeline_model_parallel_size

    @property
    def cp(self) -> int:
        """Return the context-parallel size."""
        return self.context_parallel_size

    @property
    def ep(self) -> int:
        """Return the expert-parallel size."""
        return self.expert_model_parallel_size

    @property
    def etp(self) -> int:
        """Return the number of ranks that the width of each expert is split over, resolved."""
        return self.expert_tensor_parallel_size or self.tp

    @property
    def has_expert_axes(self) -> bool:
        """Return whether experts are cut over axes of their own; otherwise tp cuts them like an MLP."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def schedule(self) -> ScheduleName:
        """Return the schedule, resolved: model chunks make 1f1b interleaved, and a single rank uses 1f1b."""
        if self.pp == 1:
            return "1f1b"
        layers, chunks = self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank
        if self.pipeline_schedule == "1f1b" and (layers is not None or (chunks or 1) > 1):
            return "interleaved"
        return self.pipeline_schedule

    @property
    def cp_comm_types(self) -> tuple[CpCommType, ...]:
        """Return the values of `cp_comm_type`: one for all layers, or one for each."""
        return (self.cp_comm_type,) if isinstance(self.cp_comm_type, str) else self.cp_comm_type

    @property
    def properties_by_comm_type(self) -> Mapping[CpCommType, CpCommProperties]:
        """Return the properties of each communication type that some layers have."""
        return {name: CP_COMM_PROPERTIES[name] for name in self.cp_comm_types}

    @property
    def has_cp_levels(self) -> bool:
        """Return whether neighbouring cp ranks exchange heads, and groups of them form a ring."""
        return self.cp > 1 and any(each.has_levels for each in self.properties_by_comm_type.values())

    def cp_levels(self, comm_type: CpCommType) -> tuple[int, int]:
        """Return how many neighbouring cp ranks exchange heads, and how many groups of them form a ring.

        Args:
            comm_type: the communication type of a layer.
        """
        properties = CP_COMM_PROPERTIES[comm_type]
        if properties.has_levels:
            sizes = self.hierarchical_context_parallel_sizes
            heads = sizes[0] if sizes else num_neighbours(self.cp, _RANKS_PER_NODE // self.tp)
            return heads, self.cp // heads
        neighbours = self.cp if properties.exchanges_heads else 1
        return neighbours, self.cp if properties.passes_keys else 1

    @property
    def key_exchanges(self) -> tuple[KeyExchange, ...]:
        """Return how queries reach other ranks' keys, in all layers or in each; empty if there are none."""
        num_ranks = self.mesh.num_position_slices
        return tuple(
            KeyExchange(num_ranks, *self.cp_levels(name), CP_COMM_PROPERTIES[name].gathers_keys)
            for name in (self.cp_comm_types if num_ranks > 1 else ())
        )

    @property
    def planned_imbalance(self) -> float:
        """Return `moe_imbalance`, or 1 if each rank has a part of every expert."""
        return self.moe_imbalance if self.ep > 1 else 1.0

    @property
    def zigzag_text(self) -> str:
        """Return why ranks hold two slices of the positions each, for a message; empty if they hold one."""
        if not self.mesh.is_zigzag:
            return ""
        name = next(name for name, each in self.properties_by_comm_type.items() if each.is_zigzag)
        return f", in 2 slices for each of the --cp ranks (--cp-comm-type {name})"

    @property
    def num_hidden_slices(self) -> int:
        """Return the number of slices into which hidden states are cut along the sequence."""
        return self.mesh.num_position_slices * (self.tp if self.sequence_parallel else 1)

    def zero_stage_among(self, num_shards: int) -> int:
        """Return the ZeRO stage of a group of `num_shards` ranks; a single rank has nothing to shard."""
        return self.zero_stage if num_shards > 1 else 0

    @cached_property
    def mesh(self) -> MeshOptions:
        """Return the sizes of the axes and how the ranks communicate, as a `Topology` takes them."""
        table = (*self.table, *[EXPERTS] * self.has_expert_axes, *[CONTEXT] * self.has_cp_levels)
        axes = (axis for each in table for axis in each.axes if axis.field)
        sizes = {axis.name: getattr(self, axis.field) for axis in axes}
        if self.has_expert_axes:
            sizes["etp"] = self.etp
        if self.has_cp_levels:
            sizes["cp_heads"], sizes["cp_ring"] = self.cp_levels("a2a+p2p")
        return MeshOptions(
            sizes=sizes,
            table=table,
            shard_degree=self.data_parallel_shard_degree,
            num_shard_groups=self.num_distributed_optimizer_instances,
            zero_stage=self.zero_stage,
            backend=self.distributed_backend,
            ranks_share_gpus=self.ranks_share_gpus,
            timeout_minutes=self.distributed_timeout_minutes,
            num_threads=self.num_threads,
            keep_freed_memory=self.keep_freed_memory,
            requests_symmetric_memory=self.requests_symmetric_memory,
            is_zigzag=self.cp > 1 and any(each.is_zigzag for each in self.properties_by_comm_type.values()),
            assigns_documents=self.dynamic_context_parallel
            and any(self.cp_levels(name)[1] > 1 for name in self.cp_comm_types),
        )

    def with_sizes(self, sizes: Mapping[str, int]) -> ParallelConfig:
        """Return the config with these sizes of the axes; a missing axis has one rank."""
        fields: dict[str, Any] = {axis.field: sizes.get(axis.name, 1) for axis in self.mesh.model.axes}
        fields["expert_model_parallel_size"] = sizes.get("ep", 1)
        fields["expert_tensor_parallel_size"] = sizes.get("etp")
        if math.prod(self.hierarchical_context_parallel_sizes or ()) != sizes.get("cp", 1):
            fields["hierarchical_context_parallel_sizes"] = None
        return replace(self, **fields)

    def shard_degree_among(self, num_replicas: int, ranks_per_node: int) -> int:
        """Return the number of neighbouring replicas that ZeRO shards over; see `MeshOptions`."""
        return self.mesh.shard_degree_among(num_replicas, self.tp, ranks_per_node)

    def gathers_under_forward(self, device_type: str) -> bool:
        """Return whether the all-gather of updated weights, if there is one, overlaps the next forward."""
        return device_type == "cuda" if self.overlap_param_gather is None else self.overlap_param_gather

    @property
    def requests_symmetric_memory(self) -> bool:
        """Return whether tensor-parallel collectives use symmetric memory, where the GPUs can."""
        is_on = self.tp_comm_overlap is not False and self.sequence_parallel
        return is_on and self.tp_comm_overlap_method == "symmetric_memory"

    def tp_comm_chunks(self, num_tokens: int, device_type: str) -> int:
        """Return the number of parts in which tensor-parallel collectives overlap with GEMMs; 1: none do.

        Args:
            num_tokens: tokens of a microbatch.
        """
        if self.tp == 1 or self.why_tp_comm_is_not_split(num_tokens, device_type):
            return 1
        return self.tp_comm_overlap_chunks or next(
            (num_chunks for tokens, num_chunks in OVERLAP_CHUNKS if num_tokens >= tokens), 2
        )

    def why_tp_comm_is_not_split(self, num_tokens: int, device_type: str) -> str:
        """Return why tensor-parallel collectives do not overlap with GEMMs, or an empty string if they do."""
        if self.tp_comm_overlap is False:
            return "--no-tp-comm-overlap"
        is_requested = self.tp_comm_overlap or self.tp_comm_overlap_chunks is not None
        if is_requested or self.tp_comm_overlap_method == "symmetric_memory":
            return ""
        if device_type != "cuda":
            return "on CPUs only with --tp-comm-overlap"
        fewest, _ = OVERLAP_CHUNKS[-1]
        if num_tokens < fewest:
            return f"{num_tokens} tokens in a microbatch, fewer than {fewest}"
        return ""

    @property
    def has_fixed_ends(self) -> bool:
        """Return whether the number of layers of the first or the last rank is set."""
        ends = (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers)
        return any(end is not None for end in ends)


def num_neighbours(cp: int, most: int) -> int:
    """Return how many context-parallel ranks exchange heads if groups of them form a ring.

    Args:
        most: most ranks that exchange heads: those of a node that cut the same heads.
    """
    return max((n for n in range(2, cp // 2 + 1) if cp % n == 0 and n <= most), default=1)


CpCommType = Literal["all_gather", "a2a", "p2p", "a2a+p2p"]
CpCommTypes = CpCommType | tuple[CpCommType, ...]
"""One communication type for all layers, or one for each layer."""


class KeyExchange(NamedTuple):
    """Sizes of the exchange by which queries reach the keys of other ranks' positions, in a layer.

    Attributes:
        num_neighbours: neighbouring ranks, of the `num_ranks` that hold a sample, that exchange heads.
        ring_size: groups of these, which pass keys in a ring.
        gathers_keys: each rank gathers all keys instead.
    """

    num_ranks: int
    num_neighbours: int
    ring_size: int
    gathers_keys: bool


class CpCommProperties(NamedTuple):
    """Value of --cp-comm-type.

    Attributes:
        gathers_keys: a rank computes attention of its own queries with all keys, which it gathers.
        exchanges_heads: ranks exchange tokens for heads before attention, and back after it.
        passes_keys: attention receives keys and values from one rank of a ring after another.
    """

    gathers_keys: bool = False
    exchanges_heads: bool = False
    passes_keys: bool = False

    @property
    def has_levels(self) -> bool:
        """Return whether neighbouring ranks exchange heads, and groups of them form a ring."""
        return self.exchanges_heads and self.passes_keys

    @property
    def is_zigzag(self) -> bool:
        """Return whether ranks hold positions in zigzag order, because each attends with its own queries."""
        return self.gathers_keys or self.passes_keys


CP_COMM_PROPERTIES: Mapping[CpCommType, CpCommProperties] = {
    "all_gather": CpCommProperties(gathers_keys=True),
    "a2a": CpCommProperties(exchanges_heads=True),
    "p2p": CpCommProperties(passes_keys=True),
    "a2a+p2p": CpCommProperties(exchanges_heads=True, passes_keys=True),
}


def comm_type_of_layer(comm_types: CpCommTypes, layer: int) -> CpCommType:
    """Return the communication type of a layer; modules of multi-token prediction have the last layer's.

    Args:
        layer: number of the layer in the whole model.
    """
    return comm_types if isinstance(comm_types, str) else comm_types[min(layer, len(comm_types) - 1)]
