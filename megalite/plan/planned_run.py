"""A planned run: config and cluster, from which everything else is estimated."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

from megalite.config import Config, ModelConfig, TrainingConfig
from megalite.config.config import layers_of_stages, layers_per_stage, stage_map
from megalite.config.validate import RULES, Rule, problems_of
from megalite.distributed.axes import MODEL, MeshSpec
from megalite.observe.unit_record import CastCall, Phase, UnitKey, WeightRecord
from megalite.pipeline.schedules import SCHEDULES, StageMap
from megalite.plan.communication import Cluster, Group
from megalite.plan.units import ModelUnits, RankUnits, Sizes, UnitsKey, units_of
from megalite.utils.errors import Problem
from megalite.utils.hardware.gpus import Gpu


class Replicas(NamedTuple):
    """Ranks with the same weights, which sum gradients and can shard the optimizer's state.

    Attributes:
        stride: distance from one to the next.
        num_shards: number of them that ZeRO shards over. Groups of that size replicate the shards.
    """

    size: int
    stride: int
    num_shards: int


FusedKernel = Literal["flash", "cudnn", "triton"]
"""Kernels of fused attention: FlashAttention-2, cuDNN, and megalite's own in Triton."""
MAX_TRITON_HEAD = 256
"""Largest head size of megalite's Triton kernels, and of FlashAttention and cuDNN."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of a run's attention and recurrences on its GPU.

    Attributes:
        attention: kernel of attention over whole samples. Unfused attention stores the scores.
        attention_in_blocks: kernel of blocks of context-parallel ranks' queries and keys.
        has_triton: with dropout, ALiBi or documents, fused attention is Triton's.
        triton_recurrence: recurrences are computed by Triton's kernels, not in plain PyTorch.
        slowdown: time of fused attention, relative to the published rate of its kernel.
    """

    attention: FusedKernel | Literal["unfused"]
    attention_in_blocks: FusedKernel = "flash"
    has_triton: bool = False
    triton_recurrence: bool = False
    slowdown: float = 1.0


def kernels_of(config: Config, gpu: Gpu) -> Kernels:
    """Return the kernels that a GPU runs for a model."""
    model = config.model
    is_large = model.max_head_dim > MAX_TRITON_HEAD
    has_triton = gpu.has_triton and model.params_dtype != "fp64" and not is_large
    is_unfused = model.attention_backend in ("unfused", "local") or is_large
    is_unfused |= model.attention_dropout > 0.0 and not has_triton
    if config.parallel.mesh.is_zigzag and not has_triton:
        is_unfused |= config.masks_documents or not _has_flash_blocks(model)
    fused: FusedKernel = "flash" if model.attention_backend in ("flash", "efficient") else "cudnn"
    return Kernels(
        attention="unfused" if is_unfused else fused,
        attention_in_blocks="triton" if has_triton and not _has_flash_blocks(model) else "flash",
        has_triton=has_triton,
        triton_recurrence=gpu.has_triton and _fits_recurrence_kernels(model),
    )


def _fits_recurrence_kernels(model: ModelConfig) -> bool:
    """Return whether Triton's kernels compute the recurrences of a model that has some."""
    sizes = [size for spec in model.recurrences for size in spec.kernel_sizes]
    return bool(sizes) and model.params_dtype != "fp64" and max(sizes) <= MAX_TRITON_HEAD


def _has_flash_blocks(model: ModelConfig) -> bool:
    """Return whether FlashAttention computes the blocks, for whole samples as documents."""
    has_bias = model.position_embedding_type == "alibi" or model.attn_logit_softcapping is not None
    attention = (spec.attention for spec in model.layer_specs)
    has_bias |= any(spec is not None and spec.window is not None for spec in attention)
    sizes = {spec.head_dim for spec in model.head_specs}
    return not has_bias and sizes == {model.value_dim} and model.value_dim % 8 == 0


WEIGHT_CASTS = tuple(CastCall(0.0, measures, of_weight=True) for measures in (False, True))
"""The casts that not every microbatch needs."""


@dataclass(frozen=True)
class PlannedRun:
    """Run of megalite on a cluster. A subclass describes what another program does differently.

    Attributes:
        full_weights_fit: in a pipeline with ZeRO stage 3, whether a stage's full weights fit. Set by
            `choose_gathering`.
        provider: builds the stages of the program's own model; None for the model of the architecture.
        stops_recomputing: a recomputed forward ends where backward reads nothing more, before its last GEMM.
    """

    config: Config
    cluster: Cluster
    full_weights_fit: bool = False
    provider: Callable[..., Any] | None = None
    stops_recomputing: ClassVar[bool] = True

    def with_sharding(self, sharded: PlannedRun, *, full_weights_fit: bool = False) -> PlannedRun:
        """Return the run with ZeRO's options of another one, and all that has been found about both.

        Args:
            sharded: has the same sizes of all axes.
        """
        config = replace(self.config, parallel=sharded.config.parallel)
        run = replace(self, config=config, full_weights_fit=full_weights_fit)
        vars(run).update({name: getattr(self, name) for name in _UNSHARDED})
        vars(run).update({name: getattr(sharded, name) for name in _SHARDED})
        return run

    @property
    def tp(self) -> int:
        return self.config.parallel.tp

    @property
    def pp(self) -> int:
        return self.config.parallel.pp

    @property
    def cp(self) -> int:
        """Return the number of ranks that share the tokens of a sample."""
        return self.config.parallel.mesh.num_position_slices

    @property
    def positions(self) -> int:
        """Return the number of tokens of a sample on one rank."""
        return self.config.model.seq_length // self.cp

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Return the size of each named axis, in the order of layout names; dp has the other ranks."""
        model = self.config.parallel.mesh.model
        sizes = self.sizes_in(model)
        return {axis.name: sizes[axis.name] for axis in model.by_flag if axis.is_named(sizes[axis.name])}

    def sizes_in(self, mesh_spec: MeshSpec) -> dict[str, int]:
        """Return the size of each axis of a mesh of the ranks."""
        sizes = self.config.parallel.mesh.sizes
        fixed = {axis.name: sizes[axis.name] or 1 for axis in mesh_spec.axes if not axis.takes_rest}
        rest = self.cluster.world_size // math.prod(fixed.values())
        return {name: fixed.get(name, rest) for name in mesh_spec.names}

    @cached_property
    def dp(self) -> int:
        """Return the number of ranks that read different samples."""
        model = self.config.parallel.mesh.model
        return math.prod(self.sizes_in(model)[name] for name in model.with_role("samples"))

    @cached_property
    def replicas(self) -> dict[str, Replicas]:
        """Return the ranks that hold the same weights, by the mesh whose axes cut the weights."""
        mesh = self.config.parallel.mesh
        return {each.name: self._replicas_in(each) for each in mesh.table}

    def _replicas_in(self, mesh_spec: MeshSpec) -> Replicas:
        sizes, names = self.sizes_in(mesh_spec), mesh_spec.with_role("replicas")
        inside = mesh_spec.names[1 + max(map(mesh_spec.names.index, names), default=-1) :]
        size, stride = (math.prod(sizes[name] for name in some) for some in (names, inside))
        parallel = self.config.parallel
        is_model = mesh_spec is parallel.mesh.model
        degree = parallel.shard_degree_among(size, self.cluster.gpus_per_node) if is_model else size
        return Replicas(size, stride, degree)

    @property
    def num_sharing(self) -> int:
        """Return the number of replicas of the model: of all weights but those on axes of experts."""
        return self.replicas[MODEL.name].size

    @property
    def num_shards(self) -> int:
        """Return the number of ranks that ZeRO shards the model over."""
        return self.replicas[MODEL.name].num_shards

    def sharded(self, sizes: Sizes, from_stage: int) -> float:
        """Return the elements on a rank of something that ZeRO shards from this stage on.

        Args:
            sizes: number of elements without ZeRO.
        """
        if self.zero_stage < from_stage:
            return sizes.total()
        return sum(count / self.replicas[name].num_shards for name, count in sizes.items())

    @cached_property
    def num_microbatches(self) -> int:
        return max(1, self.config.num_microbatches(self.dp))

    @cached_property
    def global_batch(self) -> int:
        return self.config.global_batch(self.dp)

    @property
    def tokens(self) -> int:
        """Return the tokens of a microbatch on one rank."""
        return self.config.microbatch_tokens

    @property
    def tp_comm_chunks(self) -> int:
        """Return the number of parts in which tensor-parallel collectives overlap with GEMMs."""
        if not self.config.training.splits_gemms:
            return 1
        return self.config.parallel.tp_comm_chunks(self.tokens, "cuda")

    @cached_property
    def zero_stage(self) -> int:
        return self.config.parallel.zero_stage_among(self.num_shards)

    @cached_property
    def sharded_memory(self) -> dict[Hashable, Any]:
        """Return what `rank_memory` has found about layouts with these options of ZeRO; empty at first."""
        return {}

    @cached_property
    def gathers_once(self) -> bool:
        """Return whether ZeRO stage 3 gathers each weight once per iteration, not for each microbatch."""
        choice = self.config.parallel.fsdp_reshard_after_forward
        fits = choice == "default" and self.pp > 1 and self.full_weights_fit
        return self.zero_stage == 3 and (choice == "never" or fits)

    @property
    def gathers_under_forward(self) -> bool:
        """Return whether updated weights, if they are gathered, are gathered under the next forward."""
        return self.config.parallel.gathers_under_forward("cuda")

    @property
    def num_sequence_shards(self) -> int:
        """Return how many tensor-parallel ranks norms and the residual stream are sharded over."""
        return self.tp if self.config.parallel.sequence_parallel else 1

    @cached_property
    def stages(self) -> StageMap:
        return stage_map(self.config)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Return the layers of each global stage."""
        return layers_per_stage(self.config)

    @cached_property
    def kernels(self) -> Kernels:
        return kernels_of(self.config, self.cluster.gpu)

    @property
    def keeps_rounded_weights(self) -> bool:
        """Return whether an iteration's microbatches share copies of weights in 8 bits."""
        training = self.config.training
        if training.fp8_format is None or not training.fp8_weight_cache or self.zero_stage == 3:
            return False
        return self.num_microbatches > 1 and not self.compiles_gemms

    def gathered_in_8_bits(self, kind: int) -> int:
        """Return the elements of a layer of this kind on a rank that ZeRO gathers in 8 bits."""
        is_in_fp8 = self.config.training.is_layer_in_fp8(kind, self.config.model.num_layers)
        if not (is_in_fp8 and self.config.gathers_in_8_bits(self.num_shards)):
            return 0
        weights = self.units.layers[kind].weights
        with_experts = {
            each.name.removesuffix(".router.weight") for each in weights
        }  # experts are in 16 bits
        linear = (each for each in weights if each.is_cut and each.matrices)
        return sum(each.size for each in linear if each.name.rsplit(".", 2)[0] not in with_experts)

    @property
    def compiles_gemms(self) -> bool:
        """Return whether graphs of torch.compile contain the GEMMs of layers, which keep nothing."""
        return self.config.training.compile and self.tp == 1 and not self.splits_backward

    def cast_share(self, cast: CastCall) -> float:
        """Return the share of an iteration's microbatches that round or measure an operand of a GEMM."""
        is_kept = (cast.measures and not self.compiles_gemms) or self.keeps_rounded_weights
        return 1 / self.num_microbatches if cast.of_weight and is_kept else 1.0

    def exposed_tp_share(self, phase: Phase) -> float:
        """Return the share of tensor-parallel collectives that a phase of a layer waits for.

        Unless the weight gradients are computed later, their GEMMs hide half of the collectives in backward.
        """
        return 0.5 if phase == "backward" and not self.splits_backward else 1.0

    def expert_bytes(self, group: Group, num_bytes: float) -> tuple[float, float]:
        """Return the bytes that a rank sends inside its node and to other nodes for the rows of its experts.

        Args:
            group: the ranks that hold the experts.
            num_bytes: size of the rows, one for each expert of a token.
        """
        part, near = num_bytes / group.size, group.ranks_per_node
        return (near - 1) * part, (group.size - near) * part

    def message_seconds(self) -> tuple[float, float]:
        """Return the tensor-parallel and pipeline communication of a message between stages, in seconds."""
        group = Group(self.cluster, self.pp, self.tp * self.num_sharing)
        return 0.0, group.message_seconds(self.message_bytes / self.num_sequence_shards)

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes per element of the gradient sums."""
        return max(4, self.element_bytes)

    @property
    def optimizer_bytes(self) -> int:
        """Return the bytes per parameter of main weights, two moments, and an average of the weights."""
        return (4 if self.element_bytes == 2 else 0) + self.moment_bytes + self.average_bytes

    @property
    def moment_bytes(self) -> int:
        """Return the bytes per parameter of AdamW's two moments."""
        optimizer, widest = self.config.optimizer, max(4, self.element_bytes)
        dtypes = optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype
        return sum({"fp8": 1, "bf16": 2}.get(dtype, widest) for dtype in dtypes)

    def buffer_bytes(self, units: RankUnits) -> float:
        """Return the bytes of a pipeline rank's communication buffers besides its gradient sums."""
        return 0.0

    @cached_property
    def units(self) -> ModelUnits:
        """Return the records of the model's units."""
        return units_of(self.units_key)

    @property
    def units_key(self) -> UnitsKey:
        """Return what the records depend on."""
        config, model = self.config, self.config.model
        # Attention is one call in the record, whichever kernel computes it. It is unfused if a head is too
        # large for the kernel with dropout.
        recorded = 0.0 if model.max_head_dim > MAX_TRITON_HEAD else model.attention_dropout
        key = UnitKey(
            _recorded_model(model, recorded),
            0,
            self.tp,
            positions=self.positions,
            micro_batch_size=config.training.micro_batch_size,
            sequence_parallel=config.parallel.sequence_parallel and self.tp > 1,
            has_documents=config.masks_documents,
            splits_backward=self.splits_backward,
            recomputed_modules=tuple(sorted(config.recompute.modules)),
            recomputes_head=model.mtp_num_layers > 0 and config.recompute.recompute_granularity == "full",
            cross_entropy_chunks=config.recompute.cross_entropy_chunks,
            **self._expert_axes,
            mlp_chunks=config.recompute.mlp_chunks,
            triton_recurrence=self.kernels.triton_recurrence,
            fp8=config.training.fp8_options,
            provider=self.provider,
        )
        return UnitsKey(key, config.parallel.key_exchanges)

    @property
    def _expert_axes(self) -> dict[str, Any]:
        """Return the fields of a unit's key that describe axes of experts."""
        parallel = self.config.parallel
        if not parallel.has_expert_axes:
            return {}
        return {
            "ep": parallel.ep,
            "etp": parallel.etp,
            "moe_imbalance": parallel.planned_imbalance,
            "moe_token_dispatcher_type": parallel.moe_token_dispatcher_type,
        }

    @cached_property
    def stage_kinds(self) -> tuple[tuple[int, ...], ...]:
        """Return the kinds of the layers of each global stage, in order."""

        def find() -> tuple[tuple[int, ...], ...]:
            kinds = self.units.kinds
            return tuple(kinds[part.start : part.stop] for part in layers_of_stages(len(kinds), self.layers))

        return self.units.shared(("stage kinds", self.layers), find)

    @cached_property
    def ranks(self) -> list[RankUnits]:
        """Return the units of each pipeline rank. Ranks with the same units have the same object."""
        return self.units.shared(("ranks", self.stages, self.layers), self._units_of_ranks)

    @property
    def largest_rank(self) -> RankUnits:
        """Return the units of the pipeline rank with the most parameters."""
        return max(self.ranks, key=lambda units: units.size)

    def matrices_of(self, units: RankUnits) -> list[WeightRecord]:
        """Return the matrices of a pipeline rank that are updated as a whole; none with AdamW."""
        if not self.config.optimizer.updates_whole_matrices:
            return []
        held = [self.units.layers[kind] for kind in units.kinds] + [self.units.head] * units.is_last
        return [weight for unit in held for weight in unit.weights if weight.matrices]

    def _units_of_ranks(self) -> list[RankUnits]:
        units, found = self.units, dict[Hashable, RankUnits]()
        ranks = []
        for rank in range(self.pp):
            stages = self.stages.stages_of(rank)
            ends = 0 in stages, self.stages.num_stages - 1 in stages
            kinds = tuple(kind for stage in stages for kind in self.stage_kinds[stage])
            edges = units.edge_sizes[ends]
            sizes = sum((units.layer_sizes[kind] for kind in kinds), edges)
            ranks.append(found.setdefault((kinds, ends), RankUnits(kinds, *ends, edges, sizes)))
        return ranks

    @property
    def splits_backward(self) -> bool:
        """Return whether the schedule computes weight gradients after the rest of backward."""
        return SCHEDULES[self.config.parallel.schedule].splits_backward

    @property
    def average_bytes(self) -> int:
        """Return the bytes per parameter of the average of the weights; 0 without --ema-decay."""
        return 0 if self.config.optimizer.ema_decay is None else max(4, self.element_bytes)

    @property
    def element_bytes(self) -> int:
        """Return the bytes per element of weights and activations."""
        return {"fp64": 8, "fp32": 4}.get(self.config.model.params_dtype, 2)

    @property
    def message_bytes(self) -> int:
        """Return the bytes that a stage sends for a microbatch, before sequence parallelism."""
        return self.tokens * self.config.model.stage_output_size * self.element_bytes


_UNSHARDED = (
    "dp",
    "num_microbatches",
    "global_batch",
    "stages",
    "layers",
    "units",
    "stage_kinds",
    "ranks",
)
"""Cached properties of a run that do not depend on how ZeRO shards it."""
_SHARDED = ("replicas", "zero_stage", "sharded_memory")
"""Cached properties that depend only on the sizes of the axes and on how ZeRO shards."""


@lru_cache(maxsize=256)
def _recorded_model(model: ModelConfig, attention_dropout: float) -> ModelConfig:
    """Return the model as its units are recorded."""
    return replace(model, attention_backend="auto", attention_dropout=attention_dropout)


_ANY_LENGTH = 1
"""Iterations of a run without a length. A plan does not need one, and no layout rule depends on it."""


def run_problems(config: Config, cluster: Cluster) -> list[str]:
    """Return the problems because of which training would reject the run."""
    return problems_of(with_any_length(config), cluster.world_size)


def first_problem(config: Config, cluster: Cluster, rules: Sequence[Rule] = RULES) -> Problem | None:
    """Return the first rule between fields that the layout breaks; the fields themselves are valid."""
    config = with_any_length(config)
    for rule in rules:
        for problem in rule(config, cluster.world_size):
            return problem
    return None


def with_any_length(config: Config) -> Config:
    """Return the config with a length of the run, if it has none, since training refuses such a config."""
    training = config.training
    if training.train_iters is not None or training.train_samples is not None:
        return config
    return replace(config, training=_of_any_length(training))


@lru_cache(maxsize=256)
def _of_any_length(training: TrainingConfig) -> TrainingConfig:
    return replace(training, train_iters=_ANY_LENGTH)
