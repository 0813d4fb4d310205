"""transformers' OLMo 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.olmo2 import OLMO2, read_olmo_like, write_olmo_like
from megalite.checkpoint.convert.families.rotary import read_rotary_by_layer, write_rotary_by_layer
from megalite.checkpoint.convert.families.windows import read_layer_types, write_layer_types
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    fields = read_olmo_like(hf, rotary=read_rotary_by_layer(hf, 500000.0))
    return {**fields, **read_layer_types(hf, fields, full_every=4)}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_olmo_like(config), **write_layer_types(config), **write_rotary_by_layer(config)}


OLMO3 = replace(OLMO2, model_type="olmo3", architecture="Olmo3ForCausalLM", read=_read, write=_write)
