"""Rules for the model and its precision."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.data import WORD_PIECE_TOKENIZERS
from megalite.config.model.attention import AttentionSpec
from megalite.config.model.layers import windows_differ
from megalite.config.model.model_config import ModelConfig
from megalite.config.model.transformer import NUM_BERT_SPECIAL
from megalite.config.option import flag_of, flag_with_value
from megalite.config.rules.sizes import not_divisible
from megalite.utils.errors import Problem

MIN_BERT_LENGTH = 8
"""Minimum number of tokens of a sample: two short segments and the special tokens."""
MIN_BERT_VOCABULARY = 8
"""Minimum vocabulary for random samples: the special tokens, and some others."""


def pattern_problems(config: Config, name: str, pattern: tuple[int, ...]) -> Iterator[Problem]:
    """Check that a pattern of layers is one number, or a 0 or 1 for each layer."""
    num_layers, flag = config.model.num_layers, flag_with_value(name, pattern)
    if len(pattern) not in (1, num_layers):
        yield Problem(
            (name, "num_layers"),
            f"{flag} has {len(pattern)} numbers, not one for each of --num-layers {num_layers}: "
            "change one of them",
        )
    elif len(pattern) > 1 and max(pattern) > 1:
        yield Problem((name,), f"{flag} has numbers other than 0 and 1: change them")


def groups_name(model: ModelConfig, spec: AttentionSpec) -> str:
    """Return the field of the number of key/value heads of some layers."""
    return "num_query_groups" if spec.num_kv_heads == model.num_kv_heads else "full_attention_query_groups"


def _head_name(model: ModelConfig, spec: AttentionSpec) -> str:
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
    own, size = _head_name(model, spec), int(spec.head_dim * model.rotary_percent)
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


def no_rope(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the pattern of layers without rotary positions fits the model."""
    if config.model.no_rope_freq is not None:
        yield from pattern_problems(config, "no_rope_freq", config.model.no_rope_freq)


def query_groups(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that every key/value head serves the same number of query heads."""
    for spec in config.model.head_specs:
        name = groups_name(config.model, spec)
        fix = f"pass {flag_of(name)} {{divisors}}"
        yield from not_divisible(
            "num_attention_heads", spec.num_heads, flag_of(name), spec.num_kv_heads, fix, (name,)
        )


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
            ("tokenizer_type", "tokenizer_model", "vocab_file", "tokenizer_name_or_path", "architecture"),
            f"{current} with a bert: pass the WordPiece tokenizer of the corpus, --tokenizer-type "
            "BertWordPieceLowerCase (or BertWordPieceCase) and --vocab-file vocab.txt",
        )
    if data.mock_data and kind is None and (model.vocab_size or MIN_BERT_VOCABULARY) < MIN_BERT_VOCABULARY:
        yield Problem(
            ("vocab_size", "architecture"),
            f"--vocab-size {model.vocab_size} is too small for a bert: pass at least {MIN_BERT_VOCABULARY}",
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


def window(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that a window is shorter than the samples of a causal model, and that some layer has it."""
    model = config.model
    size, skipped = model.window_size, model.window_attn_skip_freq
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
    if skipped is None:
        return
    pattern = flag_with_value("window_attn_skip_freq", skipped)
    if problems := list(pattern_problems(config, "window_attn_skip_freq", skipped)):
        yield from problems
    elif not any(spec.attention and spec.attention.window for spec in model.layer_specs):
        yield Problem(
            ("window_attn_skip_freq", "window_size"),
            f"{pattern} leaves no layer with the window: remove both it and --window-size",
        )


def fp8(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that 8-bit GEMMs have dimensions that are multiples of 16, in a bf16 model."""
    model, tp, fp8_format = config.model, config.parallel.tp, config.training.fp8_format
    if fp8_format is None:
        return
    dimensions = [
        (("hidden_size",), f"--hidden-size {model.hidden_size}", model.hidden_size, 1),
        *(((name,), f"{flag_of(name)} {width}", width, tp) for name, width in model.mlp_widths.items()),
        *(each for spec in model.head_specs for each in _head_features(model, spec, tp)),
    ]
    for fields, what, size, ranks in dimensions:
        if size % (16 * ranks):
            over = f" over --tp {ranks}" if ranks > 1 else ""
            yield Problem(
                ("fp8_format", "tensor_model_parallel_size", *fields),
                f"--fp8-format {fp8_format} with {what}{over}: each rank's share must be a multiple of 16",
            )


def _head_features(
    model: ModelConfig, spec: AttentionSpec, tp: int
) -> Iterator[tuple[tuple[str, ...], str, int, int]]:
    """Yield the dimensions of the GEMMs of attention: fields, description, size, and ranks that divide it."""
    head, heads = _head_name(model, spec), spec.num_heads * spec.head_dim
    qkv = spec.num_groups * sum(spec.group_heads) * spec.head_dim
    names = ("num_attention_heads", groups_name(model, spec), head)
    flags = ", ".join(map(flag_of, names))
    yield names, f"the {qkv} features of queries, keys and values ({flags})", qkv, tp
    flags = f"--num-attention-heads, {flag_of(head)}"
    yield ("num_attention_heads", head), f"the {heads} features of all heads ({flags})", heads, tp
