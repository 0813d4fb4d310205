"""The layout of a config: its fields and flags, and pipeline stages that do not divide the layers."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from megalite.config import Config
from megalite.config.config import LAYOUT_FIELDS, LAYOUT_SWITCHES, SPLITS, even_partition, num_stages
from megalite.config.fields import fields_by_name, value_of, with_fields
from megalite.config.option import flag_tokens
from megalite.distributed.axes import EXPERTS, MODEL
from megalite.pipeline.schedules import SCHEDULES
from megalite.plan.planned_run import PlannedRun

MIN_SLICE = 8192
"""Fewest tokens of a sample on each context-parallel rank, for which its GEMMs are large."""
_SHORT = {axis.field: axis.flag for mesh in (MODEL, EXPERTS) for axis in mesh.axes}
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
    **{axis.name: f"{axis.meaning} ranks" for axis in MODEL.by_flag},
    "pp": "pipeline stages",
    "dp": "replicas",
    "v": "chunks per stage (interleaved)",
    "gpipe": "GPipe",
    "zb": "zero bubble",
    "zbv": "zero bubble in V shape",
    "dpv": "DualPipeV",
    "ep": "expert-parallel ranks",
    "etp": "tensor-parallel ranks of experts",
    "shard": "ranks that ZeRO shards over",
    "mbs": "samples per microbatch",
}
"""Meanings of the parts of a layout's name, in their order: sizes, and schedules after pp."""
_NAME_PART = re.compile("|".join(sorted(NAME_SIZES, key=len, reverse=True)))


def legend_lines(names: Iterable[str]) -> list[str]:
    """Return lines that explain the parts of these layouts' names, at most 80 characters each."""
    sizes, switches = set[str](), set[str]()
    for name in names:
        size, *switched = name.split("+")
        sizes.update(_NAME_PART.findall(size))
        switches.update(switched)
    parts = [f"{part} {meaning}" for part, meaning in NAME_SIZES.items() if part in sizes]
    used = (item for item in LAYOUT_SWITCHES.items() if item[0] in switches)
    parts += dict.fromkeys(f"+{name.rstrip('123')} {switch.meaning}" for name, switch in used)
    return textwrap.wrap(f"layout: {', '.join(parts)}", 80, subsequent_indent="  ", break_on_hyphens=False)


def layout_name(run: PlannedRun) -> str:
    """Return the layout as --verify-layouts names it, such as ``tp2pp4zbdp8mbs1+zero1``.

    The name contains no list of values, such as communication types: a layout without one keeps the config's.
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
    offloads = recompute.cpu_offload_activations or run.config.optimizer.offloads_optimizer
    values = {**run.config.values(), "cpu_offload_activations": int(bool(offloads))}
    switches = (
        name
        for name, switch in LAYOUT_SWITCHES.items()
        if switch.has_effect(parallel.mesh.sizes) and switch.options.items() <= values.items()
    )
    return "+".join((f"{sizes}{shard}mbs{run.config.training.micro_batch_size}", *switches))


def layout_flags(config: Config) -> list[str]:
    """Return the layout as command-line tokens: the sizes, and fields that differ from their defaults."""
    flags: list[str] = []
    for name, value in layout_values(config).items():
        if value != fields_by_name()[name].default or name in _ALWAYS:
            flag, *values = flag_tokens(name, value)
            flags += [_SHORT.get(name, flag), *values]
    return flags
