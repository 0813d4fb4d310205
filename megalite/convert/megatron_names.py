"""What Megatron-LM and Megatron-DeepSpeed, over the years, called the parameters of our model.

Old: ``language_model.encoder.layers.3.self_attention.query_key_value.weight``, its levels dicts in dicts.
Megatron Core: ``decoder.layers.3.self_attention.linear_qkv.weight``, flat; with Transformer Engine a norm is
part of the linear layer behind it. DeepSpeed's pipeline: a file a layer, ``self_attention.dense.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

_MODULES = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "attention.query_key_value": "attention.qkv",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.linear_qkv": "attention.qkv",
    "attention.dense": "attention.projection",
    "self_attention.dense": "attention.projection",
    "self_attention.linear_proj": "attention.projection",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.linear_fc1": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "mlp.linear_fc2": "mlp.down",
}
"""Modules of a layer."""

_ENDS = {
    "embedding.word_embeddings": "embedding.word",
    "embedding.position_embeddings": "embedding.position",
    "embedding.word_embeddings.norm": "embedding.norm",
    "word_embeddings": "embedding.word",
    "position_embeddings": "embedding.position",
    "word_embeddings.norm": "embedding.norm",
    "final_layernorm": "final_norm",
    "final_norm": "final_norm",
    "output_layer": "output",
}
"""Modules outside the layers."""

_NORMS_INSIDE = {
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
}
"""Norms that Transformer Engine keeps in a linear layer, as ``layer_norm_weight``."""

_FRAME = re.compile(r"(module\.|model\.|language_model\.|encoder\.|transformer\.|decoder\.)*")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_NO_WEIGHTS = re.compile(r".*(_extra_state|rotary_pos_emb\.inv_freq|rotary_emb\.inv_freq|core_attention\..*)")
_TIED_COPY = "word_embeddings_for_head"


def flattened(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in dicts in dicts, with the keys on the way joined by dots; what is no tensor is left out."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


def our_name(theirs: str) -> tuple[str, int | None] | None:
    """A parameter's name here, with ``{}`` for the layer's number, and that number among its stage's layers.

    None for what is no parameter: buffers, and the copy of a tied table on the last stage.

    Raises:
        KeyError: our model has no such parameter.
    """
    name = theirs[_FRAME.match(theirs).end() :]  # type: ignore[union-attr]  # matches the empty string too
    if name.startswith(_TIED_COPY) or _NO_WEIGHTS.fullmatch(name):
        return None
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        module, kind = _split(name)
        return f"{_ENDS[module]}.{kind}", None
    module, kind = _split(in_layer[2])
    ours = _NORMS_INSIDE.get(module) or _MODULES[module]
    return f"layers.{{}}.{ours}.{kind}", int(in_layer[1])


def _split(name: str) -> tuple[str, str]:
    """A parameter's module, and whether it is the weight or the bias.

    Raises:
        KeyError: it is neither.
    """
    found = re.fullmatch(r"(.+?)[._](weight|bias)", name)
    if found is None:
        raise KeyError(name)
    return found[1], found[2]
