"""Read our config for a model from the ``config.json`` of transformers' GPT-2, BLOOM, Llama and BERT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalite.checkpoint.convert.model_settings import Settings, none_if_default
from megalite.config import Config, ModelConfig
from megalite.config.fields import config_fields
from megalite.config.ranges import range_problems
from megalite.errors import UserError, shortened

HFConfig = Mapping[str, Any]

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
KEPT = ("model_type", "activation_function", *TOKEN_IDS, "pretraining_tp", "slow_but_exact")
"""Settings without a field in megalite's config. A conversion records them, to write them back later."""
RECORDED = "hugging_face"
"""Key of these settings in a checkpoint's run.json."""

HF_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}
"""Our activation for each of transformers' names for ungated activations. ``silu`` is missing: in Llama it is
the gate of SwiGLU, and megalite has no ungated MLP with SiLU."""


def config_of(hf: HFConfig) -> ModelConfig:
    """Return our config of the same model.

    Args:
        hf: ``config.json`` read as JSON, or a config's ``to_dict()``.

    Raises:
        UserError: megalite does not have the architecture, or one of its options.
    """
    kind = hf.get("model_type")
    if kind not in READERS:
        raise UserError(f"model_type {kind!r} cannot be converted: {', '.join(READERS)} can")
    model = ModelConfig(**READERS[kind](hf))
    _check_types(model)
    return model


def _check_types(model: ModelConfig) -> None:
    """Check that fields have their type, and numbers their range.

    Raises:
        UserError: the first field that is invalid.
    """
    kinds = {int: ((int,), "a number"), float: ((int, float), "a number"), bool: ((bool,), "true or false")}
    for field in config_fields():
        if field.group == "model" and field.kind.item in kinds:
            value, (types, name) = getattr(model, field.name), kinds[field.kind.item]
            has_type = isinstance(value, types) and isinstance(value, bool) == (field.kind.item is bool)
            if not (has_type or (value is None and field.kind.is_optional)):
                shown = shortened(repr(value))
                raise UserError(f"transformers' config has {field.name} {shown}, which is not {name}")
    if problem := next(range_problems(Config(model=model)), None):
        raise UserError(f"transformers' config cannot be converted: {problem.text}")


def recorded_of(hf: Any, settings: Settings) -> dict[str, Any] | None:
    """Return the settings of `KEPT` that are present, to be written back; None if there are none.

    Args:
        hf: ``config.json``, or the settings that an earlier conversion recorded.
        settings: the user's settings; if they name another tokenizer, it has its own token ids.
    """
    if not isinstance(hf, Mapping) or settings.change_tokenizer:
        return None
    return {name: hf[name] for name in KEPT if name in hf}


def rounding_note(hf: HFConfig) -> str | None:
    """Return a note on sums that a model computes in a different order than here; None if there are none.

    BLOOM's `slow_but_exact`, and Llama in older versions of transformers, sum the GEMMs of `pretraining_tp`
    slices one after another, as the tensor-parallel ranks of the pretraining did.
    """
    slices, kind = hf.get("pretraining_tp") or 1, hf.get("model_type")
    if slices == 1 or (kind == "bloom" and not hf.get("slow_but_exact", False)):
        return None
    exact = "slow_but_exact with " if kind == "bloom" else ""
    return (
        f"{exact}pretraining_tp {slices}: transformers adds up {slices} slices of each matrix product, "
        "megalite computes it at once; results differ only by rounding"
    )


def _gpt2(hf: HFConfig) -> dict[str, Any]:
    _require(
        hf, "gpt2", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    _require_equal(hf, "embd_pdrop", "resid_pdrop", default=0.1)
    return {
        "num_layers": _first(hf, "n_layer", "num_hidden_layers"),
        "hidden_size": _first(hf, "n_embd", "hidden_size"),
        "num_attention_heads": _first(hf, "n_head", "num_attention_heads"),
        "ffn_hidden_size": hf.get("n_inner"),
        "seq_length": _first(hf, "n_positions", "max_position_embeddings"),
        "vocab_size": hf["vocab_size"],
        "position_embedding_type": "learned_absolute",
        "activation": _activation(hf.get("activation_function", "gelu_new")),
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "untie_embeddings_and_output_weights": not _switch(hf, "tie_word_embeddings", True),
        "hidden_dropout": hf.get("resid_pdrop", 0.1),
        "attention_dropout": hf.get("attn_pdrop", 0.1),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _bloom(hf: HFConfig) -> dict[str, Any]:
    _require(hf, "bloom", apply_residual_connection_post_layernorm=False)
    return {
        "num_layers": _first(hf, "n_layer", "num_hidden_layers"),
        "hidden_size": _first(hf, "n_embed", "hidden_size"),  # the old name wins, as in transformers
        "num_attention_heads": _first(hf, "n_head", "num_attention_heads"),
        "seq_length": hf.get("seq_length", 2048),
        "vocab_size": hf["vocab_size"],
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "untie_embeddings_and_output_weights": not _switch(hf, "tie_word_embeddings", True),
        "hidden_dropout": hf.get("hidden_dropout", 0.0),
        "attention_dropout": hf.get("attention_dropout", 0.0),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _llama(hf: HFConfig) -> dict[str, Any]:
    _require_equal(hf, "attention_bias", "mlp_bias", default=False)
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"llama's hidden_act {activation!r} cannot be converted: silu can")
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": none_if_default(hf.get("num_key_value_heads"), hf["num_attention_heads"]),
        "kv_channels": none_if_default(hf.get("head_dim"), hf["hidden_size"] // hf["num_attention_heads"]),
        "seq_length": hf.get("max_position_embeddings", 2048),
        "vocab_size": hf["vocab_size"],
        "position_embedding_type": "rope",
        "rotary_base": _rotary_base(hf),
        "normalization": "RMSNorm",
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "add_bias_linear": hf.get("attention_bias", False),
        "untie_embeddings_and_output_weights": not _switch(hf, "tie_word_embeddings", False),
        "hidden_dropout": 0.0,
        "attention_dropout": hf.get("attention_dropout", 0.0),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _bert(hf: HFConfig) -> dict[str, Any]:
    _require(hf, "bert", is_decoder=False, add_cross_attention=False, tie_word_embeddings=True)
    if hf.get("position_embedding_type", "absolute") != "absolute" or hf.get("type_vocab_size", 2) != 2:
        raise UserError("a bert can only be converted with absolute positions and 2 token types")
    architectures = hf.get("architectures") or ["BertForPreTraining"]
    return {
        "architecture": "bert",
        "bert_binary_head": "BertForMaskedLM" not in architectures,
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": none_if_default(hf["intermediate_size"], 4 * hf["hidden_size"]),
        "num_attention_heads": hf["num_attention_heads"],
        "seq_length": hf.get("max_position_embeddings", 512),
        "vocab_size": hf["vocab_size"],
        "norm_position": "post",
        "embed_layernorm": True,
        "activation": _activation(hf.get("hidden_act", "gelu")),
        "norm_epsilon": hf.get("layer_norm_eps", 1e-12),
        "hidden_dropout": hf.get("hidden_dropout_prob", 0.1),
        "attention_dropout": hf.get("attention_probs_dropout_prob", 0.1),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


READERS: dict[str, Callable[[HFConfig], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "bloom": _bloom,
    "llama": _llama,
    "bert": _bert,
}
"""For each `model_type`, a function that returns our fields."""


def _first(hf: HFConfig, *names: str) -> Any:
    """Return the value under the first of these names that is present, since attributes have been renamed."""
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    raise UserError(f"transformers' config has no {' or '.join(names)}")


def _switch(hf: HFConfig, name: str, default: bool) -> bool:
    value = hf.get(name, default)
    if not isinstance(value, bool):
        raise UserError(f"transformers' config has {name} {value!r}, which is not true or false")
    return value


def _activation(name: str) -> str:
    if name not in HF_ACTIVATIONS:
        raise UserError(f"activation {name!r} cannot be converted: {', '.join(HF_ACTIVATIONS)} can")
    return HF_ACTIVATIONS[name]


def _rotary_base(hf: HFConfig) -> float:
    """Return the base of the angles. Since version 5 of transformers it is in `rope_parameters`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"rope_type {kind!r} cannot be converted: plain rotary embeddings (default) can")
    return float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)


def _require(hf: HFConfig, kind: str, **needed: bool) -> None:
    for name, value in needed.items():
        if hf.get(name, value) != value:
            raise UserError(f"{kind} with {name} {hf[name]} cannot be converted: only {value} can")


def _require_equal(hf: HFConfig, first: str, second: str, default: object) -> None:
    values = hf.get(first, default), hf.get(second, default)
    if values[0] != values[1]:
        raise UserError(f"{first} {values[0]} and {second} {values[1]} must be equal to be converted")
