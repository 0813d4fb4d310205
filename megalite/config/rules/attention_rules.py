"""Rules for attention and patterns of layers: sizes of heads, shared keys, ranks that divide heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from megalite.config.config import Config, layers_per_stage, num_stages
from megalite.config.model.attention import AttentionSpec
from megalite.config.model.layers import LayerSpec, windows_differ
from megalite.config.model.model_config import ModelConfig
from megalite.config.option import ABOVE_ONE, Setting, flag_of, flag_with_value, other_than
from megalite.config.parallel import CpCommType, comm_type_of_layer
from megalite.config.rules import divisors_near, not_divisible
from megalite.utils.errors import Problem

TP, CP = "tensor_model_parallel_size", "context_parallel_size"
LEVELS = "hierarchical_context_parallel_sizes"
_ASSIGNS = "dynamic_context_parallel"


_Blocks = Callable[[LayerSpec], object]
_PATTERNS: Mapping[str, tuple[Setting, _Blocks]] = {
    "window_attn_skip_freq": (Setting("window_size"), lambda spec: spec.attention and spec.attention.window),
    "no_rope_freq": (Setting("position_embedding_type", ("rope",)), lambda spec: True),
    "moe_layer_freq": (Setting("num_experts", ABOVE_ONE), lambda spec: spec.experts),
    "linear_attention_freq": (Setting("recurrent_mixer", other_than("none")), lambda spec: spec.recurrence),
}
"""Patterns of layers, each with the setting that it needs, and what a layer has because of both."""


def layer_patterns(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that patterns of layers fit the model, and that some layer has what they place."""
    model = config.model
    for name, (setting, has_part) in _PATTERNS.items():
        pattern, other = getattr(model, name), getattr(model, setting.field)
        if pattern is None or not setting.is_met(other):
            continue
        flag = flag_with_value(name, pattern)
        if len(pattern) not in (1, model.num_layers):
            yield Problem(
                (name, "num_layers"),
                f"{flag} has {len(pattern)} numbers, not one for each of --num-layers {model.num_layers}: "
                "change one of them",
            )
        elif len(pattern) > 1 and max(pattern) > 1:
            yield Problem((name,), f"{flag} has numbers other than 0 and 1: change them")
        elif not any(map(has_part, model.layer_specs)):
            yield Problem(
                (name, setting.field),
                f"{flag} leaves no layer with {flag_with_value(setting.field, other)}: remove both",
            )


def groups_name(model: ModelConfig, spec: AttentionSpec) -> str:
    """Return the field of the number of key/value heads of some layers."""
    return "num_query_groups" if spec.num_kv_heads == model.num_kv_heads else "full_attention_query_groups"


def head_name(model: ModelConfig, spec: AttentionSpec) -> str:
    """Return the field of the size of heads of some layers."""
    return "kv_channels" if spec.head_dim == model.head_dim else "full_attention_kv_channels"


def head_size(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the heads divide the hidden size, unless their size is set; rope needs an even size."""
    model = config.model
    if model.multi_latent_attention:
        return  # it has sizes of its own
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield from not_divisible(
            "hidden_size",
            model.hidden_size,
            "--num-attention-heads",
            model.num_attention_heads,
            "pass --num-attention-heads {divisors}, or --kv-channels",
            ("num_attention_heads",),
        )
    elif model.position_embedding_type == "rope":
        for spec in model.head_specs:
            yield from _rotary_size(model, spec)


def _rotary_size(model: ModelConfig, spec: AttentionSpec) -> Iterator[Problem]:
    """Check that rotary positions rotate an even number of elements of a head."""
    own, size = head_name(model, spec), int(spec.head_dim * model.rotary_percent)
    names = (own, "hidden_size", "num_attention_heads", "position_embedding_type")
    if model.rotary_percent < 1 and (size % 2 or size == 0):
        yield Problem(
            ("rotary_percent", *names),
            f"--rotary-percent {model.rotary_percent:g} of a head of {spec.head_dim} is {size} elements: "
            "pass a share that is an even number of elements",
        )
    elif model.rotary_percent == 1 and size % 2:
        yield Problem(
            names,
            f"--position-embedding-type rope needs an even head size, not {size}: "
            f"pass {flag_of(own)} {size + 1}, or change --hidden-size or --num-attention-heads",
        )


def query_groups(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that every key/value head serves the same number of query heads."""
    for spec in config.model.head_specs:
        name = groups_name(config.model, spec)
        fix = f"pass {flag_of(name)} {{divisors}}"
        yield from not_divisible(
            "num_attention_heads", spec.num_heads, flag_of(name), spec.num_kv_heads, fix, (name,)
        )


def window(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a window is shorter than the samples of a causal model."""
    model, size = config.model, config.model.window_size
    if size is None:
        return
    flag = flag_with_value("window_size", size)
    if size[1:] != (0,):
        yield Problem(
            ("window_size",),
            f"{flag} must be a number of tokens before a token, and 0 for the tokens after it: pass "
            f"--window-size {size[0]},0",
        )
    elif not size[0] > 0 or (size[0] >= model.seq_length and not windows_differ(model)):
        yield Problem(
            ("window_size", "seq_length"),
            f"{flag} with --seq-length {model.seq_length}: pass --window-size W,0 with 1 <= W < "
            f"{model.seq_length}, or remove it",
        )


def qk_clip(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that all layers whose scores bound the update have heads of one size."""
    model = config.model
    if model.qk_clip and len({(spec.head_dim, spec.num_kv_heads) for spec in model.head_specs}) > 1:
        yield Problem(
            ("qk_clip", "full_attention_kv_channels", "full_attention_query_groups"),
            "--qk-clip with --full-attention-kv-channels or --full-attention-query-groups: it scales layers "
            "of one size; remove one of them",
        )


def shared_keys(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that layers that share keys and values have an earlier layer of their kind to share them with."""
    model, count = config.model, config.model.num_kv_shared_layers
    first = model.num_layers - count
    if first <= 0 or any(layer_patterns(config, world_size)):
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


def keys_within_stages(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that layers which share keys and values are in one pipeline stage with the layers that have them.

    Stages send each other no keys.
    """
    model = config.model
    if num_stages(config) == 1 or not 0 < model.num_kv_shared_layers < model.num_layers:
        return
    if any(layer_patterns(config, world_size)):
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
    if len(parallel.properties_by_comm_type) == 1 or any(layer_patterns(config, None)):
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


def exchanged_recurrent_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that context-parallel ranks can divide the recurrent heads of a tensor-parallel rank."""
    tp, cp = config.parallel.tp, config.parallel.cp
    for spec in config.model.recurrences if cp > 1 else ():
        number = spec.num_parts // tp
        if spec.num_parts % tp == 0 and number % cp:
            rank = f" of each of {tp} tensor-parallel ranks" if tp > 1 else ""
            yield Problem(
                (spec.cut_by, CP, TP),
                f"{flag_of(spec.cut_by)} {spec.num_parts} with --cp {cp}, over which the {number}{rank} "
                f"cannot be split: pass --cp {divisors_near(number, cp)}; each rank computes whole "
                f"{spec.part} for all tokens",
            )


def context_levels(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that cp ranks divide into groups that exchange heads, and that several groups form a ring."""
    parallel, name = config.parallel, LEVELS
    cp, levels = parallel.cp, parallel.hierarchical_context_parallel_sizes
    if not parallel.has_cp_levels:
        return
    if levels is None and min(parallel.cp_levels("a2a+p2p")) > 1:
        return
    if levels is not None and len(levels) == 2 and min(levels) > 1 and math.prod(levels) == cp:
        return
    fitting = [f"{n} {cp // n}" for n in range(2, cp) if cp % n == 0]
    fix = f"pass {flag_of(name)} {' or '.join(fitting)}" if fitting else "pass --cp-comm-type a2a or p2p"
    sizes = "" if levels is None else f" and {flag_with_value(name, levels)}"
    yield Problem(
        ("cp_comm_type", CP, name, TP),
        f"--cp-comm-type a2a+p2p with --cp {cp}{sizes}: it needs two sizes above 1, of product {cp}; {fix}",
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
