"""transformers' SmolLM 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.windows import read_windows, write_windows
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    fields = read_llama_like(hf, positions=32768, base=2000000.0)
    every, layers = hf.get("no_rope_layer_interval", 4), range(fields["num_layers"])
    rotated = hf.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in layers]
    unrotated = tuple(int(not rotated[layer]) for layer in layers)
    return {
        **fields,
        **read_windows(hf, fields),
        **read_biases(hf, mlp=hf.switch("mlp_bias", False)),
        "no_rope_freq": unrotated if any(unrotated) else None,
        "untie_embeddings_and_output_weights": not hf.switch("tie_word_embeddings", True),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_like(config),
        **write_windows(config),
        **write_biases(config),
        "mlp_bias": config.has_mlp_bias,
        "no_rope_layers": [int(kind.rotary) for kind in config.layer_kinds],
    }


SMOLLM3 = replace(LLAMA, model_type="smollm3", architecture="SmolLM3ForCausalLM", read=_read, write=_write)
