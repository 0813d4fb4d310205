"""transformers' DeepSeek-V2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.deepseek_v3 import (
    DEEPSEEK_V3,
    read_latent_attention,
    write_latent_attention,
)
from megalite.checkpoint.convert.families.hf_settings import HFSettings


def _read(hf: HFSettings) -> dict[str, Any]:
    return {**read_latent_attention(hf, "deepseek_v2", first_dense=0), "rotary_interleaved": True}


DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    read=_read,
    write=write_latent_attention,
)
