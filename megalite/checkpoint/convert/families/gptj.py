"""transformers' GPT-J."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.family import OUTPUT, QKV, VOCABULARY, Family, Module
from megalite.checkpoint.convert.families.hf_settings import THEIR_ACTIVATIONS, HFSettings
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig
from megalite.errors import UserError


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require_equal("embd_pdrop", "resid_pdrop", default=0.0)
    hidden, heads = hf.first("n_embd", "hidden_size"), hf.first("n_head", "num_attention_heads")
    num_rotated, head_dim = hf.get("rotary_dim", 64), max(1, hidden // heads)
    if num_rotated is None or not 0 < num_rotated <= head_dim:
        raise UserError(f"gptj with rotary_dim {num_rotated} cannot be converted: 1 to {head_dim} can")
    return {
        "num_layers": hf.first("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": hf.get("n_inner"),
        "seq_length": hf.first("n_positions", "max_position_embeddings"),
        "vocab_size": hf["vocab_size"],
        "position_embedding_type": "rope",
        "rotary_percent": num_rotated / head_dim,
        "rotary_interleaved": True,
        "parallel_residual": True,
        "parallel_shared_norm": True,
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "activation": hf.activation("activation_function", "gelu_new"),
        "add_bias_linear": False,
        "add_mlp_bias": True,
        "add_output_bias": True,
        "untie_embeddings_and_output_weights": not hf.switch("tie_word_embeddings", False),
        "hidden_dropout": hf.get("resid_pdrop", 0.0),
        "attention_dropout": hf.get("attn_pdrop", 0.0),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": none_if_default(config.ffn_size, 4 * config.hidden_size),
        "n_positions": config.num_positions,
        "rotary_dim": max(1, min(config.rotary_dim, config.hidden_size // config.num_attention_heads)),
        "activation_function": THEIR_ACTIVATIONS.get(config.activation, "gelu_new"),
        "layer_norm_epsilon": config.norm_epsilon,
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
    }


_LAYER = "transformer.h.{}."
GPTJ = Family(
    "gptj",
    "GPTJForCausalLM",
    "transformer.",
    ("lm_head.",),
    _read,
    _write,
    (
        Module("table", "embedding.word", ("transformer.wte",), VOCABULARY),
        Module("norm", "final_norm", ("transformer.ln_f",)),
        OUTPUT,
        Module("vector", "output.bias", ("lm_head.bias",), VOCABULARY),
    ),
    (
        Module("norm", "layers.{}.attention_norm", (_LAYER + "ln_1",)),
        Module("qkv", "layers.{}.attention.qkv", tuple(_LAYER + f"attn.{part}_proj" for part in "qkv"), QKV),
        Module("linear", "layers.{}.attention.projection", (_LAYER + "attn.out_proj",)),
        Module("mlp", "layers.{}.mlp.up", (_LAYER + "mlp.fc_in",)),
        Module("mlp", "layers.{}.mlp.down", (_LAYER + "mlp.fc_out",)),
    ),
    (
        *("n_ctx", "rotary", "scale_attn_weights", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
)
