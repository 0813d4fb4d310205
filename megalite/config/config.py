"""The whole configuration of a run, the options of its layout, and the layers of each pipeline stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.logging import LoggingConfig
from megalite.config.model.model_config import ModelConfig, layer_weights, mtp_weights, padded_vocab_size
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import LAYER_CLASS, ParallelConfig
from megalite.config.recompute import RecomputeConfig
from megalite.config.training import BatchSize, DryRunConfig, TrainingConfig, schedule_steps, value_at
from megalite.distributed.axes import MeshOptions
from megalite.pipeline.schedules import DEFAULT_NUM_CHUNKS, SCHEDULES, StageMap

_MAX_DEFAULT_EVAL_ITERS = 100
"""Megatron-LM's default of --eval-iters."""


@dataclass(frozen=True)
class Config:
    """All settings of a run. A part of megalite takes only the sub-config that it needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)

    def values(self) -> dict[str, Any]:
        """Return the value of every field of every group, by field name; names are unique over groups."""
        groups = [getattr(self, group.name) for group in fields(self)]
        return {field.name: getattr(group, field.name) for group in groups for field in fields(group)}

    @property
    def mesh(self) -> MeshOptions:
        """Return `ParallelConfig.mesh` with the groups of ranks that the optimizer needs.

        Updates of whole matrices exchange them over the axes that cut them and the axes of their replicas.
        """
        mesh = self.parallel.mesh
        if not self.optimizer.updates_whole_matrices:
            return mesh
        table = tuple(replace(each, groups=(*each.groups, each.holders)) for each in mesh.table)
        return replace(mesh, table=table)

    @property
    def masks_documents(self) -> bool:
        """Return whether attention hides keys of other documents or padding, which its kernels must know.

        Documents that are assigned to ranks do not meet in a block of attention.
        """
        has_mask = self.data.masks_attention and not self.parallel.mesh.assigns_documents
        return has_mask or not self.model.is_causal

    @property
    def microbatch_tokens(self) -> int:
        """Return the number of tokens of a microbatch that each rank holds."""
        return (
            self.training.micro_batch_size * self.model.seq_length // self.parallel.mesh.num_position_slices
        )

    def global_batch(self, dp: int) -> int:
        """Return the samples per optimizer step over `dp` replicas, after any ramp-up."""
        batch = self.training.global_batch_size
        return self.training.micro_batch_size * dp if batch is None else batch

    def num_microbatches(self, dp: int) -> int:
        """Return the microbatches per optimizer step on each of `dp` replicas, after any ramp-up."""
        return self.global_batch(dp) // (self.training.micro_batch_size * dp)

    def batch_size(self, dp: int) -> BatchSize:
        """Return the global batch size of every iteration over `dp` replicas."""
        steps = schedule_steps(self.training.step_batch_size_schedule, self.model.seq_length)
        return BatchSize(self.global_batch(dp), self.training.rampup_batch_size, steps)

    @property
    def seq_lengths(self) -> list[int]:
        """Return the tokens of the run's sequences, in the order in which it trains on them."""
        steps = schedule_steps(self.training.seq_length_schedule, self.model.seq_length)
        return [length for _, length in steps] or [self.model.seq_length]

    @property
    def sequences_per_sample(self) -> Callable[[int], int]:
        """Return a function: into how many sequences each sample after some consumed samples is cut."""
        full = self.model.seq_length
        lengths = schedule_steps(self.training.seq_length_schedule, full) or [(0, full)]
        return partial(value_at, [(consumed, full // length) for consumed, length in lengths])

    @property
    def hang_timeout(self) -> float:
        """Return the seconds without progress after which the watchdog ends the run; 0 for never."""
        seconds = self.training.hang_timeout
        return self.parallel.distributed_timeout_minutes * 60 / 2 if seconds is None else seconds

    def gathers_in_8_bits(self, num_shards: int) -> bool:
        """Return whether ZeRO gathers weights of linear layers in 8 bits.

        Args:
            num_shards: ranks that it shards over.
        """
        stage = self.parallel.zero_stage_among(num_shards)
        is_in_place = stage < 3 and self.optimizer.offloads_optimizer
        return self.training.fp8_param_gather and stage > 0 and not is_in_place

    @property
    def depends_on_micro_batch(self) -> bool:
        """Return whether another micro-batch size trains another run."""
        return self.model.depends_on_micro_batch or self.training.depends_on_micro_batch

    def num_iterations(self, dp: int) -> int:
        """Return the optimizer steps of the whole run over `dp` replicas."""
        if self.training.train_samples is not None:
            return self.batch_size(dp).num_iterations(self.training.train_samples)
        return self.training.length

    def num_eval_iters(self, dp: int) -> int:
        """Return the global batches per evaluation; by default a tenth of the iterations in a short run."""
        if self.training.eval_iters is not None:
            return self.training.eval_iters
        return min(_MAX_DEFAULT_EVAL_ITERS, max(1, self.num_iterations(dp) // 10))

    def num_samples(self, dp: int) -> int:
        """Return the samples that the whole run trains on, over `dp` replicas."""
        if self.training.train_samples is not None:
            return self.training.train_samples
        return self.batch_size(dp).consumed_before(self.training.length + 1)


SPLITS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pp_partition_method",
)
"""Options other than --pipeline-layers that make stages uneven."""
LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "micro_batch_size",
    "recompute_granularity",
    "recompute_modules",
    "cpu_offload_activations",
    "zero_stage",
    "data_parallel_shard_degree",
    "sequence_parallel",
    "pipeline_layers",
    "optimizer_cpu_offload",
    "optimizer_nvme_offload",
)
"""The fields that a search or memory advice varies."""
LAYOUT_OPTIONS = frozenset(
    {
        *LAYOUT_FIELDS,
        *SPLITS,
        "data_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_distributed_optimizer_instances",
        "fsdp_reshard_after_forward",
        "recompute_method",
        "recompute_num_layers",
        "distribute_saved_activations",
    }
)
"""All options that describe a layout. If one of them is set, the program chooses none by default."""


class LayoutSwitch(NamedTuple):
    """Part of a layout's name after a plus sign.

    Attributes:
        options: what it sets.
        axes: axes of which one must have several ranks for it to have an effect; empty if none need to.
    """

    meaning: str
    options: Mapping[str, Any]
    axes: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """Return the option that no other switch of the same layout may set."""
        return next(iter(self.options))

    def has_effect(self, sizes: Mapping[str, int | None]) -> bool:
        """Return whether it has an effect with axes of these sizes; 1 is the default."""
        return not self.axes or any((sizes.get(axis) or 1) > 1 for axis in self.axes)


LAYOUT_SWITCHES = {
    "sp": LayoutSwitch("sequence parallelism", {"sequence_parallel": True}, ("tp",)),
    **{f"zero{stage}": LayoutSwitch("ZeRO stage", {"zero_stage": stage}) for stage in (1, 2, 3)},
    "kept": LayoutSwitch("gathered weights are kept", {"fsdp_reshard_after_forward": "never"}),
    "gather": LayoutSwitch("gathers overlap with forward", {"overlap_param_gather": True}),
    "overlap": LayoutSwitch(
        "tp messages overlap with GEMMs",
        {"tp_comm_overlap": True, "tp_comm_overlap_chunks": 3},  # which does not divide usual sizes
        ("tp",),
    ),
    "full": LayoutSwitch("whole layers are recomputed", {"recompute_granularity": "full"}),
    "selective": LayoutSwitch("some modules are recomputed", {"recompute_granularity": "selective"}),
    "uneven": LayoutSwitch("uneven stages", {"decoder_first_pipeline_num_layers": 1}),
    "offload": LayoutSwitch("offloading to host memory", {"cpu_offload_activations": 1}),
    "a2a": LayoutSwitch("cp by all-to-all", {"cp_comm_type": "a2a"}, ("cp",)),
    "p2p": LayoutSwitch("cp by a ring", {"cp_comm_type": "p2p"}, ("cp",)),
    "a2a+p2p": LayoutSwitch("cp by both", {"cp_comm_type": "a2a+p2p"}, ("cp",)),
    "dynamic": LayoutSwitch("documents assigned to cp ranks", {"dynamic_context_parallel": True}, ("cp",)),
    "allgather": LayoutSwitch(
        "experts' tokens by all-gather", {"moe_token_dispatcher_type": "allgather"}, ("ep", "etp")
    ),
}
"""Parts of layouts' names after plus signs, in their order."""


def layout_source(config: Config, set_fields: Collection[str]) -> Literal["auto", "manual"]:
    """Return whether the program chooses the layout of a run: by --layout, or if no option of it is set.

    Args:
        set_fields: fields that a flag or a file sets.
    """
    if config.parallel.layout is not None:
        return config.parallel.layout
    # Emulated GEMMs are for studies, and are not planned.
    return "auto" if not config.training.emulate and LAYOUT_OPTIONS.isdisjoint(set_fields) else "manual"


def unset_options(config: Config, set_fields: Collection[str]) -> frozenset[str]:
    """Return the options that the program chooses when the run starts; empty if it chooses no layout."""
    is_chosen = layout_source(config, set_fields) == "auto"
    return LAYOUT_OPTIONS.difference(set_fields) if is_chosen else frozenset()


EMBEDDING_CLASS = "EmbeddingPipe"
HEAD_CLASS = "LMHeadPipe"
"""Megatron-DeepSpeed's class names, which the REGEX of --pp-partition-method is matched against."""


def num_chunks(config: Config) -> int:
    """Return the number of model chunks on each pipeline rank, at least one."""
    parallel = config.parallel
    fixed = SCHEDULES[parallel.schedule].num_chunks
    if fixed is not None:
        return fixed
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        return config.model.num_layers // parallel.pp // parallel.num_layers_per_virtual_pipeline_stage or 1
    if parallel.pipeline_layers is not None:
        return len(parallel.pipeline_layers) // parallel.pp or 1
    return DEFAULT_NUM_CHUNKS


def num_stages(config: Config) -> int:
    """Return the number of global stages, over all ranks."""
    return config.parallel.pp * num_chunks(config)


def stage_map(config: Config) -> StageMap:
    """Return the map between global stages and the chunks of the pipeline ranks."""
    return SCHEDULES[config.parallel.schedule].stage_map(config.parallel.pp, num_chunks(config))


def hides_expert_messages(config: Config) -> bool:
    """Return whether pairs of actions run in turns, which change while rows of experts are in flight.

    Offloaded activations follow the order of whole actions.
    """
    is_offloaded = config.recompute.cpu_offload_activations > 0
    overlaps = SCHEDULES[config.parallel.schedule].overlaps
    return overlaps and config.parallel.has_expert_axes and not is_offloaded


def layers_per_stage(config: Config) -> tuple[int, ...]:
    """Return the number of layers of each global stage.

    In a valid config, no number is negative and the numbers sum to the model's layers.
    """
    parallel, layers = config.parallel, config.model.num_layers
    stages = num_stages(config)
    if parallel.pp == 1:
        return (layers,)
    if parallel.pipeline_layers is not None:
        return parallel.pipeline_layers
    if parallel.pp_partition_method is not None:
        return _partition_by_method(config.model, parallel.tp, stages, parallel.pp_partition_method)
    if parallel.has_fixed_ends:
        by_rank = layers_per_rank_with_ends(config)
        return tuple(count // num_chunks(config) for count in by_rank) * num_chunks(config)
    embedding = parallel.account_for_embedding_in_pipeline_split
    loss = parallel.account_for_loss_in_pipeline_split
    counts = [(layers + embedding + loss) // stages] * stages
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def layers_per_rank_with_ends(config: Config) -> tuple[int, ...]:
    """Return the layers of each rank if the first's or last's number is set; other ranks share the rest."""
    parallel = config.parallel
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    num_others = parallel.pp - (first is not None) - (last is not None)
    rest = config.model.num_layers - (first or 0) - (last or 0)
    others = [rest // num_others] * num_others if num_others > 0 else []
    return (*([] if first is None else [first]), *others, *([] if last is None else [last]))


def layers_of_stages(num_layers: int, counts: Sequence[int]) -> tuple[range, ...]:
    """Return the consecutive layers of each stage.

    Args:
        num_layers: layers of the whole model.
        counts: layers of each global stage; the config's rules ensure that they sum to `num_layers`.
    """
    assert sum(counts) == num_layers, (num_layers, counts)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def even_partition(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Split layers evenly, or with one more on the first stages, because the last stage computes the loss."""
    fewest, more = divmod(num_layers, num_stages)
    return tuple(fewest + (stage < more) for stage in range(num_stages))


def balanced_partition(
    weights: Sequence[int], num_stages: int, before: int = 0, after: int = 0
) -> tuple[int, ...]:
    """Split layers to minimize the heaviest stage's weight, and then the sum of squared weights.

    Args:
        weights: weight of each layer; there are at least as many layers as stages.
        num_stages: number of stages; each gets at least one layer.
        before: weight of the first stage besides its layers.
        after: weight of the last stage besides its layers.
    """
    assert len(weights) >= num_stages > 0
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    @cache
    def best(stage: int, start: int) -> tuple[tuple[int, int], int]:
        """Return ((heaviest, sum of squares), end of this stage) for the stages from `stage` on."""
        extra = before if stage == 0 else 0
        if stage == num_stages - 1:
            own = sums[-1] - sums[start] + after + extra
            return (own, own * own), len(weights)
        choices = []
        for end in range(start + 1, len(weights) - (num_stages - stage - 1) + 1):
            own = sums[end] - sums[start] + extra
            (heaviest, squares), _ = best(stage + 1, end)
            choices.append(((max(own, heaviest), own * own + squares), -end))
        cost, end = min(choices)  # of equal costs, the one with more layers in front
        return cost, -end

    counts, start = [], 0
    for stage in range(num_stages):
        _, end = best(stage, start)
        counts.append(end - start)
        start = end
    return tuple(counts)


def _partition_by_method(model: ModelConfig, tp: int, stages: int, method: str) -> tuple[int, ...]:
    """Split layers by DeepSpeed's method, which gives the embedding and the output layer weights too.

    Modules of multi-token prediction are a part of the last stage.
    """
    if method == "uniform":
        return even_partition(model.num_layers, stages)
    if method == "parameters":
        table = padded_vocab_size(model, tp) * model.hidden_size
        weights = [layer_weights(model, spec) for spec in model.layer_specs]
        return balanced_partition(weights, stages, table, table + mtp_weights(model))
    before, each, after = _weights_by_name(model, method)
    return balanced_partition([each] * model.num_layers, stages, before, after)


def _weights_by_name(model: ModelConfig, method: str) -> tuple[int, int, int]:
    """Return the weight, 0 or 1, of the embedding, of each layer and of the output under ``type:REGEX``.

    The output of a tied model has the embedding's class, as in BLOOM's ``type:transformer|embedding``: 70
    layers and two embeddings make 12 stages of 6.
    """
    pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
    head = HEAD_CLASS if model.untie_embeddings_and_output_weights else EMBEDDING_CLASS
    before, each, after = (int(bool(pattern.search(name))) for name in (EMBEDDING_CLASS, LAYER_CLASS, head))
    return before, each, after
