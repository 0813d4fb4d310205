"""transformers' Qwen3.5 for text, with dense MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.delta_net import FOUR_PROJECTIONS, delta_net_modules, is_recurrent
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.qwen3_next import QWEN3_NEXT, read_hybrid, write_hybrid
from megalite.checkpoint.convert.families.rotary import rotary_fields

_OF_IMAGES = {"mrope_section", "mrope_interleaved"}
"""Settings of the positions in images: the three positions of a token of text are equal."""


def read_text_rotary(hf: HFSettings) -> dict[str, Any]:
    """Return our fields of rotary positions in text."""
    share, theta = hf.get("partial_rotary_factor", 0.25), hf.get("rope_theta", 10000.0)
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    of_text = {name: value for name, value in settings.items() if name not in _OF_IMAGES}
    return rotary_fields(of_text, theta, share)


def _read(hf: HFSettings) -> dict[str, Any]:
    return read_hybrid(hf, "qwen3_5_text", read_text_rotary(hf))


QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    read=_read,
    write=write_hybrid,
    layer=(
        *(module for module in QWEN3_NEXT.layer if module.only_in is not is_recurrent),
        *delta_net_modules(
            "model.layers.{}.linear_attn",
            ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            FOUR_PROJECTIONS,
        ),
    ),
    without_effect=(),
)
