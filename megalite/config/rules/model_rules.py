"""Rules for a BERT's samples, experts, recurrent layers, and 8-bit GEMMs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.data import TOKENIZER_FIELDS, WORD_PIECE_TOKENIZERS
from megalite.config.model.attention import LatentSpec
from megalite.config.model.recurrence import MambaSpec
from megalite.config.model.transformer import NUM_BERT_SPECIAL
from megalite.config.option import flag_of, flag_with_value
from megalite.config.rules import divisors_near, not_divisible
from megalite.config.rules.attention_rules import groups_name, head_name
from megalite.config.training import FP8_BLOCKS
from megalite.utils.errors import Problem

MIN_BERT_LENGTH = 8
"""Minimum number of tokens of a sample: two short segments and the special tokens."""
MIN_BERT_VOCABULARY = 8
"""Minimum vocabulary for random samples: the special tokens, and some others."""
_TP = "tensor_model_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_PATTERN = "hybrid_override_pattern"


def bert(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the samples of a BERT are possible."""
    model, data = config.model, config.data
    if model.architecture != "bert":
        return
    if model.seq_length < MIN_BERT_LENGTH:
        yield Problem(
            ("seq_length", "architecture"),
            f"--seq-length {model.seq_length} is too short for a bert, whose samples have two segments and "
            f"{NUM_BERT_SPECIAL} special tokens: pass at least {MIN_BERT_LENGTH}",
        )
    elif 0 < model.mask_prob * (num_tokens := model.seq_length - NUM_BERT_SPECIAL) < 1:
        shortest = math.ceil(1 / model.mask_prob) + NUM_BERT_SPECIAL
        yield Problem(
            ("mask_prob", "seq_length", "architecture"),
            f"--mask-prob {model.mask_prob:g} masks less than one of the {num_tokens} tokens of a sample "
            f"(--seq-length {model.seq_length} without {NUM_BERT_SPECIAL} special tokens), so there is "
            f"nothing to predict: pass at least --seq-length {shortest} or --mask-prob "
            f"{math.ceil(1000 / num_tokens) / 1000:g}",
        )
    kind = data.resolved_tokenizer_type
    if not data.mock_data and kind not in WORD_PIECE_TOKENIZERS:
        current = f"--tokenizer-type {kind}" if kind else "no tokenizer"
        yield Problem(
            (*TOKENIZER_FIELDS, "architecture"),
            f"{current} with a bert: pass the WordPiece tokenizer of the corpus, --tokenizer-type "
            "BertWordPieceLowerCase (or BertWordPieceCase) and --vocab-file vocab.txt",
        )
    if data.mock_data and kind is None and (model.vocab_size or MIN_BERT_VOCABULARY) < MIN_BERT_VOCABULARY:
        yield Problem(
            ("vocab_size", "architecture"),
            f"--vocab-size {model.vocab_size} is too small for a bert: pass at least {MIN_BERT_VOCABULARY}",
        )


def fp8(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that 8-bit GEMMs are in a bf16 model, have the sizes of a GPU, and that no cut is in a block."""
    model, training, parallel = config.model, config.training, config.parallel
    if training.fp8_format is None:
        return
    dtypes = ("bf16", "fp32", "fp64") if training.emulate else ("bf16",)
    if model.params_dtype not in dtypes:
        yield Problem(
            ("fp8_format", "params_dtype"),
            f"{training.fp8_flag} with --params-dtype {model.params_dtype}: everything but these GEMMs is in "
            f"bf16; pass --bf16{'' if training.emulate else ', or --emulate'}",
        )
    if not any(training.is_layer_in_fp8(number, model.num_layers) for number in range(model.num_layers)):
        yield Problem(
            ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
            f"--first-last-layers-bf16 leaves none of --num-layers {model.num_layers} in {training.gemm_bits}"
            " bits: pass smaller --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16",
        )
    unit, setting, sizes = 16, training.fp8_flag, list(_gemm_sizes(config))
    blocks = FP8_BLOCKS.get(training.fp8_recipe)
    if blocks is not None:
        unit, setting = (
            blocks.size,
            f"--fp8-recipe {training.fp8_recipe}, whose blocks have {blocks.size} elements,",
        )
        length = f"--seq-length {model.seq_length}"
        sizes.append((("seq_length",), length, model.seq_length, "cp", parallel.mesh.num_token_ranges))
    for fields, what, size, axis, parts in sizes:
        is_any_size_taken = training.emulate and (blocks is None or parts == 1)
        if size % (unit * parts) and not is_any_size_taken:
            over = f" over --{axis} {getattr(parallel, axis)}" if parts > 1 else ""
            yield Problem(
                ("fp8_format", *fields),
                f"{setting} with {what}{over}: each rank's share must be a multiple of {unit}",
            )


def _gemm_sizes(config: Config) -> Iterator[tuple[tuple[str, ...], str, int, str, int]]:
    """Yield the features of linear layers: fields, description, size, and the axis that cuts it in parts."""
    model, tp, etp = config.model, config.parallel.tp, config.parallel.etp
    widths = [("hidden_size", model.hidden_size, "tp", 1)]
    widths += [(name, width, "tp", tp) for name, width in model.mlp_widths.items()]
    if model.has_experts:
        shared = model.experts.shared_width or 0
        widths.append(("moe_shared_expert_intermediate_size", shared, "tp", tp))
        widths.append(("moe_ffn_hidden_size", model.experts.width, "etp", etp))
    for name, width, axis, parts in widths:
        yield (name, "tensor_model_parallel_size"), f"{flag_of(name)} {width}", width, axis, parts
    for spec in model.head_specs:
        heads, head = "num_attention_heads", head_name(model, spec)
        inputs: tuple[str, ...] = heads, groups_name(model, spec), head
        outputs = heads, head
        if isinstance(spec, LatentSpec):
            inputs = heads, "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"
            outputs = heads, "v_head_dim"
        features = [(inputs, "queries, keys and values", size) for size in spec.projected_features]
        for fields, what, size in (*features, (outputs, "all heads", spec.num_heads * spec.value_dim)):
            text = f"the {size} features of {what} ({', '.join(map(flag_of, fields))})"
            yield (*fields, "tensor_model_parallel_size"), text, size, "tp", tp


def expert_groups(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a token's experts fit into its groups of experts."""
    model, fields = config.model, ("moe_router_num_groups", "moe_router_group_topk", "num_experts")
    groups, selected = model.moe_router_num_groups, model.moe_router_group_topk
    if not model.has_experts or groups is None or selected is None:
        return
    num_experts = model.experts.count
    each = num_experts // groups
    if num_experts % groups:
        fix = "pass --moe-router-num-groups {divisors}"
        yield from not_divisible("num_experts", num_experts, flag_of(fields[0]), groups, fix, fields)
    elif model.moe_router_topk > selected * each:
        yield Problem(
            (*fields, "moe_router_topk"),
            f"--moe-router-group-topk {selected} of --moe-router-num-groups {groups} has {selected * each} "
            f"experts, for --moe-router-topk {model.moe_router_topk}: pass more groups of a token, but at "
            f"most {groups}",
        )
    elif model.moe_router_group_scores > max(2, each):
        yield Problem(
            ("moe_router_group_scores", *fields),
            f"--moe-router-group-scores {model.moe_router_group_scores} is more than the {each} experts of a "
            f"group: pass at most {each}",
        )


def imbalance(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that no plan assumes busier experts than there can be."""
    factor, capacity = config.parallel.moe_imbalance, config.model.moe_expert_capacity_factor
    if config.model.has_experts and capacity is not None and factor > max(1.0, capacity):
        yield Problem(
            ("moe_imbalance", "moe_expert_capacity_factor"),
            f"--moe-imbalance {factor:g} is above --moe-expert-capacity-factor {capacity:g}, which limits "
            f"every expert: pass at most --moe-imbalance {max(1.0, capacity):g}",
        )


def audited_experts(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that an audit can run a microbatch on another replica: experts must not sum tokens of both."""
    interval, parallel = config.training.audit_interval, config.parallel
    spans_replicas = parallel.ep * parallel.etp > parallel.tp * parallel.mesh.num_position_slices
    if interval is not None and config.model.has_experts and spans_replicas:
        yield Problem(
            ("audit_interval", _EP),
            f"--audit-interval {interval} with --ep {parallel.ep}: experts sum tokens in the order of the "
            "ranks that read them, so a microbatch has other bits on another replica; remove one",
        )


def expert_parallel(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the axes of experts divide the experts and their width, and that ranks have own tokens."""
    model, parallel = config.model, config.parallel
    tp, ep, etp = parallel.tp, parallel.ep, parallel.etp
    if not model.has_experts:
        if parallel.has_expert_axes:
            sizes = {_EP: None if ep == 1 else ep, _ETP: parallel.expert_tensor_parallel_size}
            flag = " and ".join(flag_with_value(name, size) for name, size in sizes.items() if size)
            yield Problem(
                (_EP, _ETP, "num_experts"), f"{flag} without experts: pass --num-experts, or remove it"
            )
        return
    fix = "pass --ep {divisors}; each rank takes whole experts"
    yield from not_divisible("num_experts", model.num_experts or 0, "--ep", ep, fix, (_EP,))
    if parallel.has_expert_axes and tp > 1 and not parallel.sequence_parallel:
        yield Problem(
            (_EP, _ETP, _TP, "sequence_parallel"),
            f"--ep {ep} and --etp {etp} with --tp {tp} need --sequence-parallel: without it, tensor-parallel "
            "ranks would all send the same tokens",
        )


def delta_net_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that key heads serve equal numbers of value heads."""
    model = config.model
    if model.recurrent_mixer != "gated_delta_net":
        return
    fix = "pass --linear-num-value-heads {multiple}, or --linear-num-key-heads {divisors}"
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    yield from not_divisible(
        "linear_num_value_heads", values, "--linear-num-key-heads", keys, fix, ("linear_num_key_heads",)
    )


def hybrid_pattern(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the pattern has one letter for each layer."""
    model, pattern = config.model, config.model.hybrid_override_pattern
    if pattern is None:
        return
    setting = flag_with_value(_PATTERN, pattern)
    if len(pattern) != model.num_layers:
        yield Problem(
            (_PATTERN, "num_layers"),
            f"{setting} has {len(pattern)} letters, not one for each of --num-layers {model.num_layers}: "
            f"pass --num-layers {len(pattern)}, or another pattern",
        )
    if ("E" in pattern) != model.has_experts:
        yield Problem(
            (_PATTERN, "num_experts"),
            f"{setting} has layers with experts: pass --num-experts"
            if "E" in pattern
            else f"{setting} leaves no layer with experts: remove --num-experts {model.num_experts}",
        )


def numbers_of_multipliers(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that lists of factors have as many as there are parts."""
    for name, number in {"mamba_multipliers": 5, "mixer_multipliers": 2, "mlp_multipliers": 2}.items():
        factors = getattr(config.model, name)
        if factors is not None and len(factors) != number:
            flag = flag_with_value(name, factors)
            yield Problem((name,), f"{flag} has {len(factors)} factors: pass {number}, or remove it")


def mamba_heads(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that groups have equal numbers of heads."""
    model = config.model
    if not any(isinstance(spec, MambaSpec) for spec in model.recurrences):
        return
    sizes = model.mamba
    if model.mamba_num_heads is None and 2 * model.hidden_size % sizes.head_dim:
        yield Problem(
            ("mamba_head_dim", "hidden_size", _PATTERN),
            f"--mamba-head-dim {sizes.head_dim} does not divide twice --hidden-size {model.hidden_size}: "
            f"pass --mamba-head-dim {divisors_near(2 * model.hidden_size, sizes.head_dim)}, or "
            "--mamba-num-heads",
        )
    elif sizes.num_heads % sizes.num_groups:
        yield Problem(
            (
                "mamba_num_groups",
                "mamba_num_heads",
                "mamba_head_dim",
                "hidden_size",
                _PATTERN,
            ),
            f"--mamba-num-groups {sizes.num_groups} does not divide the {sizes.num_heads} heads of Mamba-2: "
            f"pass --mamba-num-groups {divisors_near(sizes.num_heads, sizes.num_groups)}",
        )
