"""Check embeddings for each layer."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_with_value
from megalite.errors import Problem

_NAME = "hidden_size_per_layer_input"


def per_layer_embedding(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that layers can add embeddings of their own."""
    model = config.model
    if model.hidden_size_per_layer_input is None:
        return
    flag = flag_with_value(_NAME, model.hidden_size_per_layer_input)
    needs = {"architecture": "gpt", "norm_position": "sandwich", "mtp_num_layers": 0, "mup_base_width": None}
    for name, needed in needs.items():
        if (value := getattr(model, name)) != needed:
            fix = f"pass {flag_with_value(name, needed)}" if isinstance(needed, str) else "remove one"
            yield Problem(
                (_NAME, name), f"{flag} with {flag_with_value(name, value)} is not supported: {fix}"
            )
    if not model.is_gated:
        yield Problem(
            (_NAME, "activation"),
            f"{flag} with --activation {model.activation}: its gate has the function of a gated activation; "
            "pass a gated one, such as geglu or swiglu",
        )
