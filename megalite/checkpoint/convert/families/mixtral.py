"""transformers' Mixtral."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.experts import expert_modules, read_experts, write_experts
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.windows import read_one_window, write_one_window
from megalite.config import ModelConfig

_COUNT, _WIDTH = "num_local_experts", "intermediate_size"


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("mixtral", router_jitter_noise=0.0, output_router_logits=False)
    fields = read_llama_like(hf, positions=131072, base=1000000.0, epsilon=1e-5)
    windows = read_one_window(hf.get("sliding_window"), fields)
    return {**fields, **windows, **read_experts(hf, (_COUNT,), _WIDTH)}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_like(config),
        **write_one_window(config),
        **write_experts(config, _COUNT, _WIDTH),
        "head_dim": config.head_dim,
    }


MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *(module for module in LLAMA.layer if ".mlp." not in module.ours),
        *expert_modules("model.layers.{}.block_sparse_moe", "w1", "w3", "w2"),
    ),
    other_names={".mlp.": ".block_sparse_moe."},
    experts={"experts.gate_up_proj": ("w1", "w3"), "experts.down_proj": ("w2",)},
)
