"""Parts of rules for options of some layers: their patterns, and the fields that hold their sizes."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_with_value
from megalite.config.layer_kind import LayerKind
from megalite.errors import Problem


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


def groups_name(kind: LayerKind) -> str:
    """Return the field of the number of key/value heads in layers of a kind."""
    return "num_query_groups" if kind.num_kv_heads is None else "full_attention_query_groups"
