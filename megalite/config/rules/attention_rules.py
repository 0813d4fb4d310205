"""Rules for attention heads: sizes by kind of layer, shared keys, and ranks that divide the heads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from megalite.config.config import Config
from megalite.config.flags import flag_of, flag_with_value
from megalite.config.layer_kind import LayerKind
from megalite.config.model import ModelConfig
from megalite.config.rules.patterns import groups_name, pattern_problems
from megalite.config.stage_layers import layers_per_stage, num_stages
from megalite.errors import Problem

_MLA = "--multi-latent-attention"
TP, CP = "tensor_model_parallel_size", "context_parallel_size"


def full_attention(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that options of layers without a window apply to some layers, but not to all."""
    model = config.model
    names = ("full_attention_kv_channels", "full_attention_query_groups")
    given = [name for name in names if getattr(model, name) is not None]
    given += ["keys_as_values"] if model.keys_as_values == "full_attention" else []
    for name in given:
        if model.window_size is None or model.window_attn_skip_freq is None:
            without = "--window-size" if model.window_size is None else "--window-attn-skip-freq"
            yield Problem(
                (name, "window_size", "window_attn_skip_freq"),
                f"{flag_with_value(name, getattr(model, name))} without {without}: it distinguishes layers "
                "with and without a window; pass both, or remove it",
            )


def shared_keys(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that layers that share keys and values have an earlier layer of their kind to share them with."""
    model, count = config.model, config.model.num_kv_shared_layers
    if count == 0:
        return
    given = f"--num-kv-shared-layers {count}"
    if count >= model.num_layers:
        yield Problem(
            ("num_kv_shared_layers", "num_layers"),
            f"{given} of --num-layers {model.num_layers}: pass at most {model.num_layers - 1}",
        )
    elif _has_patterns(config):
        first = model.num_layers - count
        lonely = [number for number in range(first, model.num_layers) if not _shares(model, number)]
        if lonely:
            yield Problem(
                ("num_kv_shared_layers", "window_attn_skip_freq", "no_rope_freq"),
                f"{given}: layer {lonely[0]} has no layer before layer {first} with the same window and "
                "rotation, whose keys it could share: pass fewer",
            )
    width, tp = model.kv_shared_ffn_hidden_size, config.parallel.tp
    if width is not None and width % tp:
        yield Problem(
            ("kv_shared_ffn_hidden_size", TP),
            f"--kv-shared-ffn-hidden-size {width} is not divisible by --tp {tp}: use a multiple of it, such "
            f"as {-(-width // tp) * tp}",
        )
    if model.qk_clip:
        yield Problem(
            ("num_kv_shared_layers", "qk_clip"),
            f"--qk-clip with {given}: the scores of several layers depend on the same keys; remove one",
        )


def _shares(model: ModelConfig, number: int) -> bool:
    return model.layer_kind(number).key_source is not None


def _has_patterns(config: Config) -> bool:
    """Return whether the patterns of layers with windows and rotation fit the model."""
    names = ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq")
    patterns = ((name, getattr(config.model, name)) for name in names)
    return not any(
        list(pattern_problems(config, name, pattern)) for name, pattern in patterns if pattern is not None
    )


def shared_norm(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a norm of two blocks is not recomputed: the output would be kept for the other block."""
    modules = [name for name in ("layernorm", "mlp") if name in config.recompute.modules]
    model = config.model
    if model.parallel_residual and model.parallel_shared_norm and modules:
        yield Problem(
            ("parallel_shared_norm", "recompute_modules"),
            f"--recompute-modules {' '.join(modules)} with --parallel-shared-norm, whose norm's output both "
            "blocks keep: pass core_attn or mlp_act, or --recompute-granularity full",
        )


def keys_within_stages(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that layers which share keys and values are in one pipeline stage with the layers that have them.

    Stages send each other hidden states, and no keys.
    """
    model = config.model
    if num_stages(config) == 1 or not 0 < model.num_kv_shared_layers < model.num_layers:
        return
    if not _has_patterns(config):
        return
    counts = layers_per_stage(config)
    sources = {kind.key_source for kind in model.layer_kinds} - {None}
    first = min(number for number in sources if number is not None)
    start = [0, *accumulate(counts)][len(counts) - 1]
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
    for kind in config.model.head_kinds:
        yield from _grouped_heads(config, kind)


def _grouped_heads(config: Config, kind: LayerKind) -> Iterator[Problem]:
    model, tp, name = config.model.for_kind(kind), config.parallel.tp, groups_name(kind)
    groups = model.num_kv_heads
    if model.num_attention_heads % tp or model.num_attention_heads % groups:
        return  # reported by other rules
    names = ("num_attention_heads", name, "kv_channels", "hidden_size", TP)
    given = f"{flag_of(name)} {groups} with --tp {tp}"
    if groups % tp and tp % groups:
        yield Problem(names, f"{given}: one must be divisible by the other, change one of them")
    elif tp > groups:
        # The ranks of a group divide its query heads, since tp divides all query heads.
        ranks, rows = tp // groups, sum(model.group_heads(kind)) * model.head_dim
        if rows % ranks:
            yield Problem(
                names,
                f"{given}: the {rows} rows of a group's query, key and value weight cannot be split over "
                f"{ranks} ranks: use a smaller --tp, or more groups",
            )


def exchanged_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that context-parallel ranks can divide the heads of a tensor-parallel rank among them."""
    for kind in config.model.head_kinds:
        yield from _exchanged_heads(config, kind)


def _exchanged_heads(config: Config, kind: LayerKind) -> Iterator[Problem]:
    parallel, model = config.parallel, config.model.for_kind(kind)
    tp, cp, heads = parallel.tp, parallel.cp, model.num_attention_heads
    if parallel.cp_comm_type != "a2a" or cp == 1 or heads % tp or heads % model.num_kv_heads:
        return
    heads, groups = heads // tp, max(1, model.num_kv_heads // tp)
    if heads % cp == 0 and (groups % cp == 0 or cp % groups == 0):
        return
    fitting = [n for n in range(1, cp) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    rank = f" of each of {tp} tensor-parallel ranks" if tp > 1 else ""
    yield Problem(
        ("cp_comm_type", CP, TP, "num_attention_heads", groups_name(kind)),
        f"--cp-comm-type a2a with --cp {cp}, over which the {heads} query and {groups} key/value heads{rank} "
        f"cannot be split: use --cp {fitting[-1]}, or --cp-comm-type all_gather",
    )


def latent_attention(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that multi-latent attention has rotary positions, and no options of other attention."""
    model = config.model
    if not model.multi_latent_attention:
        return
    if model.position_embedding_type != "rope":
        yield Problem(
            ("multi_latent_attention", "position_embedding_type"),
            f"{_MLA} with --position-embedding-type {model.position_embedding_type}: pass "
            "--position-embedding-type rope",
        )
    if model.qk_pos_emb_head_dim % 2:
        size = model.qk_pos_emb_head_dim
        yield Problem(
            ("qk_pos_emb_head_dim",),
            f"--qk-pos-emb-head-dim {size}: rotary positions rotate pairs, pass {size + 1}",
        )
    groups = model.num_query_groups
    if groups not in (None, model.num_attention_heads):
        yield Problem(
            ("multi_latent_attention", "num_query_groups"),
            f"--num-query-groups {groups} with {_MLA}, where each head has its own keys: remove it",
        )
    if model.qk_layernorm and model.qk_layernorm_width != "head":
        yield Problem(
            ("multi_latent_attention", "qk_layernorm_width"),
            f"--qk-layernorm-width {model.qk_layernorm_width} with {_MLA}, where --qk-layernorm normalizes "
            "the latents: remove it",
        )
    yield from _without_rule(config)


def _without_rule(config: Config) -> Iterator[Problem]:
    """Refuse options for which multi-latent attention has no rule."""
    model, training = config.model, config.training
    refused = (
        (
            "add_bias_linear",
            model.add_bias_linear,
            "its projections have no biases; pass --disable-bias-linear",
        ),
        ("add_qkv_bias", model.add_qkv_bias, "its projections have no biases; remove it"),
        ("attention_output_gate", model.attention_output_gate, "its queries have no gates; remove it"),
        ("rotary_percent", model.rotary_percent != 1.0, "pass --qk-pos-emb-head-dim instead"),
        ("full_attention_kv_channels", model.full_attention_kv_channels is not None, "remove it"),
        ("full_attention_query_groups", model.full_attention_query_groups is not None, "remove it"),
        ("keys_as_values", model.keys_as_values != "none", "whose values have a projection; remove it"),
        ("num_kv_shared_layers", model.num_kv_shared_layers > 0, "whose layers share no latents; remove it"),
        ("value_layernorm", model.value_layernorm, "its values have no norm; remove it"),
        ("qk_clip", model.qk_clip, "whose keys have a part that all heads share; remove it"),
        ("mup_base_width", model.mup_base_width is not None, "muP has no rule for latents; remove it"),
        ("fp8_format", training.fp8_format is not None, "latents have no 8-bit GEMMs; remove it"),
    )
    for name, is_set, why in refused:
        if is_set:
            value = getattr(training if name == "fp8_format" else model, name)
            given = "biases" if name == "add_bias_linear" else flag_with_value(name, value)
            yield Problem(("multi_latent_attention", name), f"{given} with {_MLA}: {why}")
