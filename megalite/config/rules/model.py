"""Rules of the model by itself."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.problem import Problem


def head_size(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Heads share the hidden size equally, unless their size is given; rotary pairs up their elements."""
    model = config.model
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield Problem(
            ("hidden_size", "num_attention_heads"),
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads "
            f"{model.num_attention_heads}: change one of them, or give --kv-channels",
        )
    elif model.position_embedding_type == "rope" and model.head_dim % 2:
        yield Problem(
            ("hidden_size", "num_attention_heads", "kv_channels", "position_embedding_type"),
            f"--position-embedding-type rope needs an even head size, not {model.head_dim}: "
            "change --hidden-size, --num-attention-heads or --kv-channels",
        )


def query_groups(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Every key/value head serves the same number of query heads."""
    model = config.model
    if model.num_attention_heads % model.num_kv_heads:
        yield Problem(
            ("num_attention_heads", "num_query_groups"),
            f"--num-attention-heads {model.num_attention_heads} is not divisible by --num-query-groups "
            f"{model.num_kv_heads}: choose a number of groups that divides it",
        )


def attention_backend(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Dropout of attention weights is by counter, which no kernel but our own knows."""
    model = config.model
    if model.attention_dropout > 0.0 and model.attention_backend not in ("auto", "unfused", "local"):
        yield Problem(
            ("attention_backend", "attention_dropout"),
            f"--attention-backend {model.attention_backend} (or its flag) with --attention-dropout "
            f"{model.attention_dropout}: only unfused drops attention weights, the same ones in any layout; "
            "give --attention-backend auto, or --attention-dropout 0",
        )


def position_table(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A learned position table has a row for each position of a sample."""
    model = config.model
    if model.position_embedding_type == "learned_absolute" and model.seq_length > model.num_positions:
        yield Problem(
            ("seq_length", "max_position_embeddings", "position_embedding_type"),
            f"--seq-length {model.seq_length} is longer than --max-position-embeddings "
            f"{model.num_positions}: give --max-position-embeddings {model.seq_length}, or shorter samples",
        )
