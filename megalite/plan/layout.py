"""A config's layout: the fields that make it up, and stages for layers that do not divide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.config import Config
from megalite.config.flags import flag_of
from megalite.config.partition import even_partition
from megalite.config.stages import SPLITS, num_stages, words

LAYOUT_FIELDS = {
    "tensor_model_parallel_size": "parallel",
    "pipeline_model_parallel_size": "parallel",
    "pipeline_schedule": "parallel",
    "num_virtual_stages_per_pipeline_rank": "parallel",
    "micro_batch_size": "training",
    "recompute_granularity": "recompute",
    "recompute_modules": "recompute",
    "zero_stage": "parallel",
    "sequence_parallel": "parallel",
    "pipeline_layers": "parallel",
}
"""What a search varies, each with its group in the config."""
_SHORT = {"tensor_model_parallel_size": "--tp", "pipeline_model_parallel_size": "--pp"}


def with_layout(config: Config, **values: Any) -> Config:
    """The config with some of `LAYOUT_FIELDS` changed."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        changes.setdefault(LAYOUT_FIELDS[name], {})[name] = value
    return replace(
        config, **{group: replace(getattr(config, group), **own) for group, own in changes.items()}
    )


def changed_fields(config: Config) -> frozenset[str]:
    """Fields of the layout that are not at their defaults."""
    parts = {name: getattr(config, group) for name, group in LAYOUT_FIELDS.items()}
    return frozenset(name for name, part in parts.items() if getattr(part, name) != getattr(type(part), name))


def with_even_stages(config: Config) -> Config:
    """With layers that the stages do not divide shared out as evenly as can be, where nothing says how.

    A layer less on the last stage, or on the first and the last, which have the loss and the embedding;
    where that does not come out even, a layer more on some of the first.
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
    return with_layout(config, pipeline_layers=tuple(counts)) if min(counts) > 0 else config


def layout_flags(config: Config) -> list[str]:
    """The layout as words of a command line; what is at its default is left out, but for the sizes."""
    flags: list[str] = []
    for name, group in LAYOUT_FIELDS.items():
        part = getattr(config, group)
        value, default = getattr(part, name), getattr(type(part), name)
        always = name in _SHORT or name == "micro_batch_size"
        if value != default or always:
            flags += [_SHORT.get(name, flag_of(name)), *_shown(value)]
    return flags


def _shown(value: Any) -> list[str]:
    if value is True:
        return []
    return words(value).split() if isinstance(value, tuple) else [str(value)]
