"""Write the ``config.json`` from which transformers builds our model; `hf_config` reads it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalite.checkpoint.convert.hf_config import HF_ACTIVATIONS, KEPT, TOKEN_IDS
from megalite.checkpoint.convert.hf_tensors import family_of
from megalite.checkpoint.manifest import dtype_name
from megalite.config import ModelConfig
from megalite.model.stage import DTYPES


def hf_config_of(
    config: ModelConfig, eod: int | None = None, recorded: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return transformers' config of a model.

    Args:
        eod: id of the token that ends a document.
        recorded: the settings of `KEPT` in the config.json that the model came from, if it came from one.

    Raises:
        UserError: transformers has no such model.
    """
    family = family_of(config)
    written = {
        **WRITERS[family.model_type](config),
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "bos_token_id": eod if family.model_type == "gpt2" else None,  # GPT-2 also begins texts with it
        "eos_token_id": eod,
        "torch_dtype": dtype_name(DTYPES[config.params_dtype]),
    }
    if recorded is None or recorded.get("model_type") != family.model_type:
        return written
    kept = {name: value for name, value in recorded.items() if name in KEPT}
    if HF_ACTIVATIONS.get(kept.get("activation_function", "")) != config.activation:
        kept.pop("activation_function", None)  # the activation has changed since, or has no other name
    # transformers has a default for a token that config.json does not name; null would change it.
    return {name: value for name, value in written.items() if name not in TOKEN_IDS} | kept


_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(HF_ACTIVATIONS.items())}


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_hidden_size,
        "n_positions": config.num_positions,
        "activation_function": _ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
    }


def _bloom(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"],
        "n_layer": config.num_layers,
        "hidden_size": config.hidden_size,
        "n_head": config.num_attention_heads,
        "seq_length": config.seq_length,
        "layer_norm_epsilon": config.norm_epsilon,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "apply_residual_connection_post_layernorm": False,
    }


def _llama(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.seq_length,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "attention_bias": config.add_bias_linear,
        "mlp_bias": config.add_bias_linear,
        "attention_dropout": config.attention_dropout,
    }


def _bert(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["BertForPreTraining" if config.bert_binary_head else "BertForMaskedLM"],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.num_positions,
        "type_vocab_size": config.num_token_types,
        "hidden_act": _ACTIVATIONS[config.activation],
        "layer_norm_eps": config.norm_epsilon,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
    }


WRITERS: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "bloom": _bloom,
    "llama": _llama,
    "bert": _bert,
}
"""For each `model_type`, a function that returns the settings under that type's own names."""
