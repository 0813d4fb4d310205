"""The whole configuration of a run, and the options of its layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.logging import LoggingConfig
from megalite.config.model.model_config import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.recompute import RecomputeConfig
from megalite.config.training import BatchSize, DryRunConfig, TrainingConfig, schedule_steps, value_at
from megalite.distributed.axes import MeshOptions

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
        steps = schedule_steps(self.training.seq_length_schedule, full) or [(0, full)]
        return lambda consumed_samples: full // value_at(steps, consumed_samples)

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
