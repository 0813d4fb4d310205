"""The layout of a config: its fields and flags, and pipeline stages that do not divide the layers."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from megalite.config import Config
from megalite.config.config import LAYOUT_FIELDS, SPLITS
from megalite.config.fields import fields_by_name, value_of, with_fields
from megalite.config.option import flag_tokens
from megalite.config.stage_layers import even_partition, num_stages
from megalite.pipeline.schedules import SCHEDULES
from megalite.plan.planned_run import PlannedRun

MIN_SLICE = 8192
"""Fewest tokens of a sample on each context-parallel rank, for which its GEMMs are large."""
_SHORT = {
    "tensor_model_parallel_size": "--tp",
    "pipeline_model_parallel_size": "--pp",
    "context_parallel_size": "--cp",
    "expert_model_parallel_size": "--ep",
    "expert_tensor_parallel_size": "--etp",
}
_ALWAYS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")
"""Fields whose flags name a layout even if they have their defaults."""


def changed_fields(config: Config) -> frozenset[str]:
    """Return the layout's fields that differ from their defaults."""
    return frozenset(
        name for name, value in layout_values(config).items() if value != fields_by_name()[name].default
    )


def layout_values(config: Config) -> dict[str, Any]:
    """Return the values of `LAYOUT_FIELDS`."""
    return {name: value_of(name, config) for name in LAYOUT_FIELDS}


def with_even_stages(config: Config) -> Config:
    """Return the config with --pipeline-layers as even as possible, if the stages do not divide the layers.

    The last stage, or the first and the last, get one layer less, because they also have the embedding and
    the loss. If that does not work out, some of the first stages get one layer more. A config with its own
    split is unchanged.
    """
    parallel, layers = config.parallel, config.model.num_layers
    stages = num_stages(config)
    is_split = parallel.pipeline_layers or any(getattr(parallel, name) for name in SPLITS)
    if is_split or stages == 1 or not 0 < stages <= layers or layers % stages == 0:
        return config
    counts = list(even_partition(layers, stages))
    if (layers + 2) % stages == 0:
        counts = [(layers + 2) // stages] * stages
        counts[0] -= 1
        counts[-1] -= 1
    elif (layers + 1) % stages == 0:
        counts = [(layers + 1) // stages] * stages
        counts[-1] -= 1
    return with_fields(config, pipeline_layers=tuple(counts)) if min(counts) > 0 else config


def routing_line(config: Config) -> str | None:
    """Return which use of the experts is assumed; None if all ranks have the same rows in any case."""
    parallel = config.parallel
    if not config.model.has_experts or parallel.ep == 1:
        return None
    return (
        f"--moe-imbalance {parallel.moe_imbalance:g}: the busiest rank's experts compute "
        f"{parallel.moe_imbalance:g} times the mean number of tokens"
    )


NAME_SIZES = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "v": "chunks per stage (interleaved)",
    "gpipe": "GPipe",
    "zb": "zero bubble",
    "zbv": "zero bubble in V shape",
    "dpv": "DualPipeV",
    "dp": "replicas",
    "cp": "context-parallel ranks",
    "ep": "expert-parallel ranks",
    "etp": "tensor-parallel ranks of experts",
    "shard": "ranks that ZeRO shards over",
    "mbs": "samples per microbatch",
}
"""Meanings of the parts of a layout's name, in their order: sizes, and schedules after pp."""
NAME_SWITCHES = {
    "sp": "sequence parallelism",
    "zero": "ZeRO stage",
    "kept": "gathered weights are kept",
    "gather": "gathers overlap with forward",
    "overlap": "tp messages overlap with GEMMs",
    "full": "whole layers are recomputed",
    "selective": "some modules are recomputed",
    "uneven": "uneven stages",
    "offload": "offloading to host memory",
    "a2a": "cp by all-to-all",
    "p2p": "cp by a ring",
    "dynamic": "documents assigned to cp ranks",
    "allgather": "experts' tokens by all-gather",
}
"""Meanings of what follows a plus sign."""
_NAME_PART = re.compile("|".join(sorted(NAME_SIZES, key=len, reverse=True)))


def legend_lines(names: Iterable[str]) -> list[str]:
    """Return lines that explain the parts of these layouts' names, at most 80 characters each."""
    sizes, switches = set[str](), set[str]()
    for name in names:
        size, *switched = name.split("+")
        sizes.update(_NAME_PART.findall(size))
        switches.update(switch.rstrip("0123456789") if "zero" in switch else switch for switch in switched)
    parts = [f"{part} {meaning}" for part, meaning in NAME_SIZES.items() if part in sizes]
    parts += [f"+{part} {meaning}" for part, meaning in NAME_SWITCHES.items() if part in switches]
    return textwrap.wrap(f"layout: {', '.join(parts)}", 80, subsequent_indent="  ", break_on_hyphens=False)


def layout_name(run: PlannedRun) -> str:
    """Return the layout as --verify-layouts names it, such as ``tp2pp4zbdp8mbs1+zero1``.

    The name does not contain a list of --cp-comm-type: a layout without one in its name keeps the config's.
    """
    parallel, recompute = run.config.parallel, run.config.recompute
    suffix = SCHEDULES[parallel.schedule].layout_suffix
    if parallel.schedule == "interleaved":
        suffix = f"v{run.stages.num_chunks}"
    shard = f"shard{run.num_shards}" if run.zero_stage and run.num_shards < run.num_sharing else ""
    suffixes = {"pp": suffix if run.pp > 1 else ""}
    sizes = "".join(f"{axis}{size}{suffixes.get(axis, '')}" for axis, size in run.sizes.items())
    if parallel.has_expert_axes:
        sizes += f"ep{parallel.ep}etp{parallel.etp}"
    comm_type = parallel.cp_comm_types[0]
    switches = {
        "sp": parallel.sequence_parallel,
        comm_type: run.cp > 1 and comm_type != "all_gather" and isinstance(parallel.cp_comm_type, str),
        "dynamic": parallel.mesh.assigns_documents,
        "allgather": parallel.has_expert_axes and parallel.moe_token_dispatcher_type == "allgather",
        f"zero{parallel.zero_stage}": parallel.zero_stage > 0,
        str(recompute.recompute_granularity): recompute.recompute_granularity is not None,
        "offload": recompute.cpu_offload_activations or run.config.optimizer.offloads_optimizer,
    }
    named = "".join(f"+{switch}" for switch, is_on in switches.items() if is_on)
    return f"{sizes}{shard}mbs{run.config.training.micro_batch_size}{named}"


def layout_flags(config: Config) -> list[str]:
    """Return the layout as command-line tokens: the sizes, and fields that differ from their defaults."""
    flags: list[str] = []
    for name, value in layout_values(config).items():
        if value != fields_by_name()[name].default or name in _ALWAYS:
            flag, *values = flag_tokens(name, value)
            flags += [_SHORT.get(name, flag), *values]
    return flags
