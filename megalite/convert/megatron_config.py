"""Our config of a model from the arguments that Megatron keeps in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config import ModelConfig
from megalite.convert.foreign_files import StandIn
from megalite.errors import UserError

Arguments = Mapping[str, Any]

_REFUSED = {
    "apply_residual_connection_post_layernorm": False,
    "apply_layernorm_1p": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "squared_relu": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "num_experts": None,
    "glu_activation": None,
}
"""Switches that our model does not have, with the only value that it can be; absent is that value."""

_POSITIONS = {
    "learned_absolute": "learned_absolute",
    "absolute": "learned_absolute",
    "rope": "rope",
    "rotary": "rope",
    "alibi": "alibi",
    "none": "none",
}
_POSITIONS_BY_NUMBER = {1: "rotary", 2: "absolute", 3: "alibi"}
"""Megatron-DeepSpeed's enum."""


def model_of(arguments: Arguments, base: ModelConfig) -> dict[str, Any]:
    """Fields of our config.

    Args:
        arguments: by name; those of an old version may be few.
        base: what an argument that is not there leaves as it is.

    Raises:
        UserError: an option that our model does not have.
    """
    _refuse_others(arguments)
    heads, hidden = arguments["num_attention_heads"], arguments["hidden_size"]
    group_query = arguments.get("group_query_attention", False)
    fields = {
        "num_layers": arguments.get("num_layers") or arguments.get("encoder_num_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": arguments.get("ffn_hidden_size"),
        "num_query_groups": arguments.get("num_query_groups") if group_query else None,
        "kv_channels": _unless(arguments.get("kv_channels"), hidden // heads),
        "seq_length": arguments.get("seq_length") or arguments.get("max_position_embeddings"),
        "max_position_embeddings": arguments.get("max_position_embeddings"),
        "make_vocab_size_divisible_by": arguments.get("make_vocab_size_divisible_by"),
        "position_embedding_type": _positions(arguments),
        "rotary_base": arguments.get("rotary_base"),
        "normalization": arguments.get("normalization"),
        "norm_epsilon": arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon"),
        "activation": _activation(arguments),
        "add_bias_linear": arguments.get("add_bias_linear"),
        "embed_layernorm": arguments.get("embed_layernorm"),
        "untie_embeddings_and_output_weights": arguments.get("untie_embeddings_and_output_weights"),
        "hidden_dropout": arguments.get("hidden_dropout"),
        "attention_dropout": arguments.get("attention_dropout"),
        "init_method_std": arguments.get("init_method_std"),
    }
    given = {name: value for name, value in fields.items() if value is not None}
    given["rotary_base"] = float(given.get("rotary_base", base.rotary_base))
    return given


def vocabulary_of(arguments: Arguments) -> int | None:
    """The number of tokens before padding, which only newer versions keep."""
    size = arguments.get("vocab_size")
    return size if isinstance(size, int) else None


def training_of(arguments: Arguments) -> dict[str, Any]:
    """What the order of the samples depends on, with which a run can go on."""
    fields: dict[str, Any] = {name: arguments.get(name) for name in ("seed", "global_batch_size")}
    if ramp_up := arguments.get("rampup_batch_size"):
        fields["rampup_batch_size"] = tuple(int(number) for number in ramp_up)
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_others(arguments: Arguments) -> None:
    for needed in ("num_attention_heads", "hidden_size"):
        if not isinstance(arguments.get(needed), int):
            raise UserError(f"the checkpoint's arguments have no {needed}: give the model's flags")
    others = [
        f"{name} {arguments[name]}"
        for name, only in _REFUSED.items()
        if arguments.get(name) is not None and arguments[name] != only
    ]
    if others:
        raise UserError(f"megalite has no model with {', '.join(others)}: it cannot be converted")


def _positions(arguments: Arguments) -> str:
    given = arguments.get("position_embedding_type", "learned_absolute")
    if isinstance(given, StandIn):
        (number,) = given.arguments or (None,)
        given = _POSITIONS_BY_NUMBER.get(number, "unknown") if isinstance(number, int) else "unknown"
    if arguments.get("use_rotary_position_embeddings"):
        given = "rope"
    if given not in _POSITIONS:
        raise UserError(f"position_embedding_type {given} cannot be converted: {', '.join(_POSITIONS)} can")
    return _POSITIONS[given]


def _activation(arguments: Arguments) -> str:
    """Megatron's fused GELU is the tanh form, which is the default; its unfused one is the erf form."""
    if arguments.get("swiglu"):
        return "swiglu"
    tanh = arguments.get("bias_gelu_fusion", True) or arguments.get("openai_gelu")
    return "gelu" if tanh else "gelu_exact"


def _unless(value: int | None, default: int) -> int | None:
    return None if value == default else value
