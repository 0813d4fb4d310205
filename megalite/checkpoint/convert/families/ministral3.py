"""transformers' Ministral 3, the text model alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.rotary import rotary_fields, scaling_of
from megalite.checkpoint.convert.families.windows import read_one_window, write_one_window
from megalite.config import ModelConfig
from megalite.errors import UserError

_BETA = "llama_4_scaling_beta"
_ROTARY = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}
"""Settings of a config without rotary positions."""


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("ministral3", attention_bias=False, mlp_bias=False)
    rotary = dict(hf.get("rope_parameters") or _ROTARY)
    beta = rotary.pop(_BETA, None)
    if beta is None:
        raise UserError(f"ministral3 without {_BETA} in rope_parameters cannot be converted")
    rotary.pop("max_position_embeddings", None)  # transformers does not read this copy
    fields = read_llama_like(
        hf, positions=262144, epsilon=1e-5, rotary=rotary_fields(rotary, 1000000.0, None)
    )
    if fields["rope_scaling"] != "yarn":
        raise UserError(f"ministral3 with rope_type {rotary.get('rope_type')!r}: only yarn can be converted")
    windows = read_one_window(hf.get("sliding_window"), fields)
    return {**fields, **windows, "llama_4_scaling_beta": float(beta)}


def _write(config: ModelConfig) -> dict[str, Any]:
    fields = write_llama_like(config)
    base = fields.pop("rope_theta")
    fields.pop("rope_scaling", None)
    # The family always has both: a model without them differs in what _read returns.
    scaling = scaling_of(replace(config, rope_scaling="yarn"))
    beta = _ROTARY[_BETA] if config.llama_4_scaling_beta is None else config.llama_4_scaling_beta
    return {
        **fields,
        **write_one_window(config),
        "rope_parameters": {**scaling, "rope_theta": base, _BETA: beta},
        "head_dim": config.head_dim,
    }


MINISTRAL3 = replace(
    LLAMA, model_type="ministral3", architecture="Ministral3ForCausalLM", read=_read, write=_write
)
