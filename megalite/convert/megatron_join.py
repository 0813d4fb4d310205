"""Tensor-parallel shards of a parameter, as Megatron cuts it, put together to our full tensor.

Shapes: n query heads, g key/value heads, r = n/g, d head size, t ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.errors import UserError
from megalite.log import log
from megalite.parallel.shard import ParameterSpec

_TABLES = ("embedding.word.weight", "output.weight")
"""Parameters with a row for each token, and for padding."""


def join(
    name: str, shards: Sequence[Tensor], spec: ParameterSpec, config: ModelConfig, version: float
) -> Tensor:
    """The full tensor without the vocabulary's padding.

    A shard of theirs is the same slice as a shard of ours, in another shape: [gate, up] of SwiGLU stand one
    behind the other in it.

    Args:
        version: of their checkpoint; before 2, queries, keys and values lay in other orders.

    Raises:
        UserError: the shards cannot be made into the parameter's shape.
    """
    if spec.shard is None:
        return _replicated(name, shards, spec)
    if ".attention.qkv." in name and version < 2:
        shards = [_by_head(shard, config, version, len(shards)) for shard in shards]
    shape = list(spec.full_shape)
    shape[spec.shard.dim] = -1  # a vocabulary may be padded otherwise than here
    try:
        full = torch.cat([shard.reshape(shape) for shard in shards], dim=spec.shard.dim)
    except RuntimeError:
        raise _misshapen(name, shards, spec) from None
    if name in _TABLES:
        full = full[: spec.used_shape[0]]
    if tuple(full.shape) != spec.used_shape:
        raise _misshapen(name, shards, spec)
    return full


def _replicated(name: str, shards: Sequence[Tensor], spec: ParameterSpec) -> Tensor:
    """What every rank has for itself. Where the copies have drifted apart, as BLOOM's norms, their mean."""
    first = shards[0]
    if any(shard.shape != first.shape for shard in shards) or first.numel() != math.prod(spec.used_shape):
        raise _misshapen(name, shards, spec)
    if all(torch.equal(first, other) for other in shards[1:]):
        return first.reshape(spec.used_shape)
    stacked = torch.stack(tuple(shards)).double()
    largest = (stacked - stacked[0]).abs().max().item()
    log.warning("%s differs by up to %.1e between tensor-parallel ranks: their mean is taken", name, largest)
    return stacked.mean(dim=0).to(first.dtype).reshape(spec.used_shape)


def _by_head(shard: Tensor, config: ModelConfig, version: float, num_ranks: int) -> Tensor:
    """Rows ordered [3, n/t, d] (version 0) or [n/t, d, 3] (version 1) -> [n/t, 3, d]."""
    heads, size = config.num_attention_heads // num_ranks, config.head_dim
    if shard.shape[0] != 3 * heads * size:
        return shard  # told as misshapen
    if version < 1:
        return shard.unflatten(0, (3, heads, size)).transpose(0, 1).flatten(0, 2)
    return shard.unflatten(0, (heads, size, 3)).transpose(1, 2).flatten(0, 2)


def _misshapen(name: str, shards: Sequence[Tensor], spec: ParameterSpec) -> UserError:
    shapes = " and ".join(str(list(shape)) for shape in dict.fromkeys(shard.shape for shard in shards))
    return UserError(
        f"{name} is {shapes} on {len(shards)} tensor-parallel ranks, which does not make "
        f"{list(spec.used_shape)}: is the config another model's?"
    )
