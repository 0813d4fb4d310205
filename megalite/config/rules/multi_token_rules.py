"""Rules for multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_with_value
from megalite.errors import Problem


def multi_token_prediction(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that modules of multi-token prediction can continue the model."""
    model = config.model
    if model.mtp_num_layers == 0:
        return
    flag = flag_with_value("mtp_num_layers", model.mtp_num_layers)
    if model.architecture == "bert":
        yield Problem(
            ("mtp_num_layers", "architecture"),
            f"{flag} is an option of GPT, and the model is a bert: remove it",
        )
    elif model.position_embedding_type == "learned_absolute":
        yield Problem(
            ("mtp_num_layers", "position_embedding_type"),
            f"{flag} with --position-embedding-type learned_absolute, whose positions are in the embedding: "
            "pass rope, alibi or none",
        )
    if model.embed_layernorm:
        yield Problem(
            ("mtp_num_layers", "embed_layernorm"),
            f"{flag} with --embed-layernorm: its modules normalize the embedding; remove one of them",
        )
    if model.mtp_num_layers >= model.seq_length:
        yield Problem(
            ("mtp_num_layers", "seq_length"),
            f"{flag} needs more tokens in a sample than --seq-length {model.seq_length}: change one of them",
        )
