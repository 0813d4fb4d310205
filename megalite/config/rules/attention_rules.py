"""Rules for attention: sizes of heads by kind of layer, shared keys, ranks that divide heads or positions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from megalite.config.config import Config
from megalite.config.model.attention import AttentionSpec
from megalite.config.model.model_config import ModelConfig
from megalite.config.option import flag_of
from megalite.config.parallel import CpCommType, comm_type_of_layer
from megalite.config.rules.model_rules import groups_name, pattern_problems
from megalite.config.stage_layers import layers_per_stage, num_stages
from megalite.utils.errors import Problem

TP, CP = "tensor_model_parallel_size", "context_parallel_size"
LEVELS = "hierarchical_context_parallel_sizes"
_ASSIGNS = "dynamic_context_parallel"


def shared_keys(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that layers that share keys and values have an earlier layer of their kind to share them with."""
    model, count = config.model, config.model.num_kv_shared_layers
    first = model.num_layers - count
    if first <= 0 or not _has_patterns(config):
        return
    lonely = [number for number in range(first, model.num_layers) if not _shares(model, number)]
    if lonely:
        yield Problem(
            ("num_kv_shared_layers", "window_attn_skip_freq", "no_rope_freq"),
            f"--num-kv-shared-layers {count}: layer {lonely[0]} has no layer before layer {first} with the "
            "same window and rotation, whose keys it could share: pass fewer",
        )


def _shares(model: ModelConfig, number: int) -> bool:
    spec = model.layer_spec(number).attention
    return spec is not None and spec.key_source is not None


def _has_patterns(config: Config) -> bool:
    """Return whether the patterns of layers fit the model."""
    names = ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq", "linear_attention_freq")
    patterns = ((name, getattr(config.model, name)) for name in names)
    return not any(
        list(pattern_problems(config, name, pattern)) for name, pattern in patterns if pattern is not None
    )


def keys_within_stages(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that layers which share keys and values are in one pipeline stage with the layers that have them.

    Stages send each other no keys.
    """
    model = config.model
    if num_stages(config) == 1 or not 0 < model.num_kv_shared_layers < model.num_layers:
        return
    if not _has_patterns(config):
        return
    counts = layers_per_stage(config)
    attention = (spec.attention for spec in model.layer_specs)
    sources = [spec.key_source for spec in attention if spec is not None and spec.key_source is not None]
    start = [0, *accumulate(counts)][len(counts) - 1]
    first = min(sources, default=start)  # without any, another rule refuses the option
    if first >= start:
        return
    others = num_stages(config) - 1
    whole, more = divmod(first, others)
    split = [*(whole + (number < more) for number in range(others)), model.num_layers - first]
    fix = f"pass --pipeline-layers {' '.join(map(str, split))}" if min(split) else "use a smaller --pp"
    yield Problem(
        ("num_kv_shared_layers", "pipeline_model_parallel_size", "pipeline_layers"),
        f"--num-kv-shared-layers {model.num_kv_shared_layers}: layers {first} to {model.num_layers - 1} "
        f"share keys and values, and the last pipeline stage begins with layer {start}: {fix}",
    )


def grouped_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that key/value heads can be split over tp ranks, or that each can be split over several ranks."""
    for spec in config.model.head_specs:
        yield from _grouped_heads(config, spec)


def _grouped_heads(config: Config, spec: AttentionSpec) -> Iterator[Problem]:
    tp, groups, name = config.parallel.tp, spec.num_kv_heads, groups_name(config.model, spec)
    if spec.num_heads % tp or spec.num_heads % groups:
        return  # reported by other rules
    names = ("num_attention_heads", name, "kv_channels", "hidden_size", TP)
    sizes = f"{flag_of(name)} {groups} with --tp {tp}"
    if groups % tp and tp % groups:
        yield Problem(names, f"{sizes}: one must be divisible by the other, change one of them")
    elif tp > groups:
        # The ranks of a group divide its query heads, since tp divides all query heads.
        ranks, rows = tp // groups, sum(spec.group_heads) * spec.head_dim
        if rows % ranks:
            yield Problem(
                names,
                f"{sizes}: the {rows} rows of a group's query, key and value weight cannot be split over "
                f"{ranks} ranks: use a smaller --tp, or more groups",
            )


def assigned_documents(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that there are documents to assign to ranks."""
    parallel, model, data = config.parallel, config.model, config.data
    if not parallel.dynamic_context_parallel or parallel.cp == 1:
        return
    flag = flag_of(_ASSIGNS)
    if not (model.is_causal and data.masks_attention):
        yield Problem(
            (_ASSIGNS, "reset_attention_mask", "document_packing", "sft_packing", "architecture"),
            f"{flag} without documents that a causal model attends within: pass "
            f"--reset-attention-mask or --document-packing best_fit, or remove {flag}",
        )


def comm_types_of_layers(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a list of communication types has one for each layer."""
    comm_types, num_layers = config.parallel.cp_comm_types, config.model.num_layers
    if len(comm_types) not in (1, num_layers):
        yield Problem(
            ("cp_comm_type", "num_layers"),
            f"--cp-comm-type has {len(comm_types)} values, not one for each of --num-layers {num_layers}: "
            "pass one for all layers, or one for each",
        )


def exchanged_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that context-parallel ranks can divide the heads of a tensor-parallel rank among them."""
    for comm_type, exchange in config.parallel.properties_by_comm_type.items():
        for spec in config.model.head_specs if exchange.exchanges_heads else ():
            if _has_layers(config, comm_type, spec):
                yield from _exchanged_heads(config, comm_type, spec)


def _has_layers(config: Config, comm_type: CpCommType, spec: AttentionSpec) -> bool:
    """Return whether some layers of this type have this number of key/value heads."""
    model, parallel = config.model, config.parallel
    if len(parallel.properties_by_comm_type) == 1 or not _has_patterns(config):
        return True
    return any(
        comm_type_of_layer(parallel.cp_comm_type, number) == comm_type
        and each.attention.num_kv_heads == spec.num_kv_heads
        for number, each in enumerate(model.layer_specs)
        if each.attention is not None
    )


def _exchanged_heads(config: Config, comm_type: CpCommType, spec: AttentionSpec) -> Iterator[Problem]:
    parallel, tp, heads = config.parallel, config.parallel.tp, spec.num_heads
    ranks, groups_of_ranks = parallel.cp_levels(comm_type)
    if ranks == 1 or ranks * groups_of_ranks != parallel.cp or heads % tp or heads % spec.num_kv_heads:
        return  # or reported by other rules
    heads, groups = heads // tp, max(1, spec.num_kv_heads // tp)
    fitting = [n for n in range(1, ranks + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    if ranks in fitting:
        return
    flag, fix = f"--cp {ranks}", f"--cp {fitting[-1]}, or --cp-comm-type all_gather"
    if groups_of_ranks > 1:
        sizes = [f"{n} {parallel.cp // n}" for n in fitting[1:] if parallel.cp % n == 0]
        flag = f"{flag_of(LEVELS)} {ranks} {groups_of_ranks}"
        fix = " or ".join([*(f"{flag_of(LEVELS)} {each}" for each in sizes[-1:]), "--cp-comm-type p2p"])
    rank = f" of each of {tp} tensor-parallel ranks" if tp > 1 else ""
    yield Problem(
        ("cp_comm_type", CP, LEVELS, TP, "num_attention_heads", groups_name(config.model, spec)),
        f"--cp-comm-type {comm_type} with {flag}, over which the {heads} query and {groups} "
        f"key/value heads{rank} cannot be split: use {fix}",
    )


def latent_attention(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that each head has its own keys in multi-latent attention."""
    model, groups = config.model, config.model.num_query_groups
    if model.multi_latent_attention and groups not in (None, model.num_attention_heads):
        yield Problem(
            ("multi_latent_attention", "num_query_groups"),
            f"--num-query-groups {groups} with --multi-latent-attention, where each head has its own keys: "
            "remove it",
        )
