"""Read the setting of attention's biases, which many families share."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import ModelConfig


def read_biases(hf: HFSettings, *, default: bool = False, mlp: bool = False) -> dict[str, Any]:
    """Return our fields of biases for `attention_bias`, which adds them to all projections of attention.

    Args:
        default: default of `attention_bias`.
        mlp: whether the MLPs have biases.
    """
    attention = hf.switch("attention_bias", default)
    if attention and mlp:
        return {"add_bias_linear": True}
    return {
        "add_bias_linear": False,
        "add_qkv_bias": attention,
        "add_attention_output_bias": attention,
        "add_mlp_bias": mlp,
    }


def write_biases(config: ModelConfig) -> dict[str, Any]:
    """Return the setting of attention's biases."""
    return {"attention_bias": config.has_attention_output_bias}
