"""Map parameter names of all Megatron versions to ours, and join its tensor-parallel shards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.errors import UserError
from megalite.log import log
from megalite.tensor_parallel.parameter_spec import ParameterSpec

_MODULES = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "attention.query_key_value": "attention.qkv",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
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
"""Norms that Transformer Engine stores in a linear layer, as ``layer_norm_weight``."""

_WHOLE_NAMES = {"self_attention.core_attention.softmax_offset": "attention.sinks"}
"""Parameters of a layer that are neither a weight nor a bias."""

_FRAME = re.compile(r"(module\.|model\.|language_model\.|encoder\.|transformer\.|decoder\.)*")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_NO_WEIGHTS = re.compile(
    r".*(_extra_state|rotary_pos_emb\.inv_freq|rotary_emb\.inv_freq|core_attention\.(?!softmax_offset$).*)"
)
_TIED_COPY = "word_embeddings_for_head"


def flattened(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, with their keys joined by dots, and skip everything else."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


def our_name(theirs: str) -> tuple[str, int | None] | None:
    """Return our name of a parameter, with ``{}`` for the layer's number, and that number within its stage.

    Return None for buffers, and for the copy of a tied table on the last stage.

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
    if in_layer[2] in _WHOLE_NAMES:
        return f"layers.{{}}.{_WHOLE_NAMES[in_layer[2]]}", int(in_layer[1])
    module, kind = _split(in_layer[2])
    ours = _NORMS_INSIDE.get(module) or _MODULES[module]
    return f"layers.{{}}.{ours}.{kind}", int(in_layer[1])


def _split(name: str) -> tuple[str, str]:
    """Return a parameter's module, and "weight" or "bias".

    Raises:
        KeyError: it is neither.
    """
    found = re.fullmatch(r"(.+?)[._](weight|bias)", name)
    if found is None:
        raise KeyError(name)
    return found[1], found[2]


_TABLES = ("embedding.word.weight", "output.weight")
"""Parameters with one row per token, and rows for padding."""


def join(
    name: str, shards: Sequence[Tensor], spec: ParameterSpec, config: ModelConfig, version: float
) -> Tensor:
    """Return the full tensor without the vocabulary's padding.

    Their shards are the same slices as ours, but in another shape: SwiGLU's gate and up projections are
    concatenated.

    Args:
        version: version of their checkpoint; before 2, queries, keys and values had other orders.

    Raises:
        UserError: the shards do not add up to the parameter's shape.
    """
    dim = spec.dim_cut_over("tp")
    if dim is None:
        return _replicated(name, shards, spec)
    if ".attention.qkv." in name and version < 2:
        shards = [_by_head(shard, config, version, len(shards)) for shard in shards]
    shape = list(spec.full_shape)
    shape[dim] = -1  # the vocabulary may be padded to another size
    try:
        full = torch.cat([shard.reshape(shape) for shard in shards], dim=dim)
    except RuntimeError:
        raise _misshapen(name, shards, spec) from None
    if name in _TABLES:
        full = full[: spec.used_shape[0]]
    if tuple(full.shape) != spec.used_shape:
        raise _misshapen(name, shards, spec)
    return full


def _replicated(name: str, shards: Sequence[Tensor], spec: ParameterSpec) -> Tensor:
    """Return a tensor that every rank has. Copies that differ, as BLOOM's norms do, are averaged."""
    first = shards[0]
    if any(shard.shape != first.shape for shard in shards) or first.numel() != math.prod(spec.used_shape):
        raise _misshapen(name, shards, spec)
    if all(torch.equal(first, other) for other in shards[1:]):
        return first.reshape(spec.used_shape)
    stacked = torch.stack(tuple(shards)).double()
    largest = (stacked - stacked[0]).abs().max().item()
    log.warning("%s differs by up to %.1e between tensor-parallel ranks: their mean is used", name, largest)
    return stacked.mean(dim=0).to(first.dtype).reshape(spec.used_shape)


def _by_head(shard: Tensor, config: ModelConfig, version: float, num_ranks: int) -> Tensor:
    """Reorder rows from [3, n/t, d] (version 0) or [n/t, d, 3] (version 1) to [n/t, 3, d]."""
    heads, size = config.num_attention_heads // num_ranks, config.head_dim
    if shard.shape[0] != 3 * heads * size:
        return shard  # `join` refuses its shape
    if version < 1:
        return shard.unflatten(0, (3, heads, size)).transpose(0, 1).flatten(0, 2)
    return shard.unflatten(0, (heads, size, 3)).transpose(1, 2).flatten(0, 2)


def _misshapen(name: str, shards: Sequence[Tensor], spec: ParameterSpec) -> UserError:
    shapes = " and ".join(str(list(shape)) for shape in dict.fromkeys(shard.shape for shard in shards))
    return UserError(
        f"{name} is {shapes} on {len(shards)} tensor-parallel ranks, which does not make "
        f"{list(spec.used_shape)}: does the config belong to another model?"
    )
