"""Settings that torchtitan's models need, in any of its versions."""

from __future__ import annotations

from collections.abc import Mapping
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
MODELS = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")


def hf_settings(config: Config) -> tuple[str, Settings]:
    """Return transformers' name and settings of a model that torchtitan has.

    Raises:
        UserError: it has no such model.
    """
    model, family = config.model, family_of(config.model)
    if family.model_type not in MODELS:
        raise UserError(f"torchtitan has no {family.model_type}: describe one of {', '.join(MODELS)}")
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
