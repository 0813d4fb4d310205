"""The options of a layout, and whether the program chooses them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from megalite.config.config import Config
from megalite.config.stage_layers import SPLITS

LAYOUT_FIELDS = {
    "tensor_model_parallel_size": "parallel",
    "pipeline_model_parallel_size": "parallel",
    "context_parallel_size": "parallel",
    "cp_comm_type": "parallel",
    "hierarchical_context_parallel_sizes": "parallel",
    "expert_model_parallel_size": "parallel",
    "expert_tensor_parallel_size": "parallel",
    "pipeline_schedule": "parallel",
    "num_virtual_stages_per_pipeline_rank": "parallel",
    "micro_batch_size": "training",
    "recompute_granularity": "recompute",
    "recompute_modules": "recompute",
    "cpu_offload_activations": "recompute",
    "zero_stage": "parallel",
    "data_parallel_shard_degree": "parallel",
    "sequence_parallel": "parallel",
    "pipeline_layers": "parallel",
    "optimizer_cpu_offload": "optimizer",
    "optimizer_nvme_offload": "optimizer",
}
"""The fields that a search or memory advice varies, each with its group in the config."""
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


def layout_source(config: Config, set_fields: Collection[str]) -> Literal["auto", "manual"]:
    """Return whether the program chooses the layout of a run: by --layout, or if no option of it is set.

    Args:
        set_fields: fields that a flag or a file sets.
    """
    if config.parallel.layout is not None:
        return config.parallel.layout
    # Rates of 8-bit GEMMs are not known, so such a run cannot be planned.
    can_be_planned = config.training.fp8_format is None
    return "auto" if can_be_planned and LAYOUT_OPTIONS.isdisjoint(set_fields) else "manual"


def unset_options(config: Config, set_fields: Collection[str]) -> frozenset[str]:
    """Return the options that the program chooses when the run starts; empty if it chooses no layout."""
    is_chosen = layout_source(config, set_fields) == "auto"
    return LAYOUT_OPTIONS.difference(set_fields) if is_chosen else frozenset()
