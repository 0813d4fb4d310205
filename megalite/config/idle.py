"""Options that were set and that something else keeps from having an effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from megalite.config.data import CORPUS_FIELDS
from megalite.config.flags import flag_of

if TYPE_CHECKING:
    from megalite.config.config import Config


def idle_options(config: Config) -> list[str]:
    """A line for each option that differs from its default and does nothing, with the reason."""
    parts = [getattr(config, group.name) for group in fields(config)]
    changed = {
        field.name: value
        for part in parts
        for field in fields(part)
        if (value := getattr(part, field.name)) != field.default
    }
    return [
        f"{flag_of(name)} {changed[name]} is without effect: {why}"
        for name, why in _reasons(config)
        if name in changed
    ]


def _reasons(config: Config) -> Iterator[tuple[str, str]]:
    """Names that have no effect in this config, each with its reason."""
    model, optimizer, logging = config.model, config.optimizer, config.logging
    if model.position_embedding_type != "learned_absolute":
        yield "max_position_embeddings", f"{model.position_embedding_type} positions need no table"
    if model.position_embedding_type != "rope":
        yield "rotary_base", f"positions are {model.position_embedding_type}, not rope"
    if model.pad_vocab_size_to is not None:
        yield "make_vocab_size_divisible_by", "--pad-vocab-size-to gives the padded size itself"
    if optimizer.lr_decay_style != "WSD":
        for name in ("lr_wsd_decay_style", "lr_wsd_decay_iters"):
            yield name, f"the decay is {optimizer.lr_decay_style}, not WSD"
    if optimizer.lr_decay_style == "constant":
        yield "min_lr", "a constant learning rate never comes down to it"
    if config.data.mock_data:
        for name in (*CORPUS_FIELDS, "split", "blend_by", "data_cache_path", "fim_rate"):
            yield name, "--mock-data reads no corpus"
    elif not config.data.data_path and config.data.data_args_path is None:
        yield "split", "each split's data is given apart"
    if config.data.fim_rate == 0:
        for name in ("fim_spm_rate", "fim_prefix_token", "fim_middle_token", "fim_suffix_token"):
            yield name, "--fim-rate is 0"
    if config.checkpoint.save is None:
        yield "save_interval", "there is no --save folder"
    if not logging.profile_execution:
        yield "profile_name", "--profile-execution is off"
    if logging.tensorboard_dir is None:
        for field in fields(logging):
            if "tensorboard" in field.name:
                yield field.name, "there is no --tensorboard-dir"
    if config.parallel.distributed_backend == "nccl":
        yield "distributed_backend", "ranks on GPUs talk through nccl, and ranks without one through gloo"
    if config.parallel.pp == 1:
        yield "pipeline_schedule", "with one pipeline stage (--pp 1) there is nothing to order"
