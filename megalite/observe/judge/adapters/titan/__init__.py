"""Parts of the adapter of torchtitan: what its models need, and a file for each configuration system."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megalite.config import Config
from megalite.frontends.huggingface.families import family_of
from megalite.utils.errors import UserError

Settings = Mapping[str, Any]
_FIXED = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), False),
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "rope_interleave": True,
}
"""Settings of transformers that torchtitan's models do not have, with the values that they need."""


def hf_settings(config: Config, models: Collection[str]) -> tuple[str, Settings]:
    """Return transformers' name and settings of a model that torchtitan has.

    Args:
        models: transformers' names of those that it has.

    Raises:
        UserError: it has no such model.
    """
    model, family = config.model, family_of(config.model)
    if family.model_type not in models:
        raise UserError(f"torchtitan has no {family.model_type}: describe one of {', '.join(models)}")
    if model.has_experts and model.moe_router_load_balancing_type != "none":
        raise UserError("torchtitan has no loss for balance: pass --moe-router-load-balancing-type none")
    hf = family.settings(model)
    require(hf, **_FIXED)
    return family.model_type, hf


def require(hf: Settings, **needed: Any) -> None:
    """Raise `UserError` if one of transformers' settings has another value than torchtitan's model needs."""
    for name, value in needed.items():
        if hf.get(name, value) != value:
            raise UserError(f"torchtitan's model cannot have {name} {hf[name]} (needs {value})")
