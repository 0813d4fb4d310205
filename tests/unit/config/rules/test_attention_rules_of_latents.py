"""Options that multi-latent attention does not have are refused in one line each."""

from __future__ import annotations

import dataclasses

import pytest

from megalite.config import Config, ModelConfig
from megalite.config.presets import PRESETS
from megalite.config.rules.attention_rules import latent_attention
from megalite.config.validate import conflicts

LATENT = dataclasses.replace(PRESETS["llama-tiny"], multi_latent_attention=True, num_query_groups=None)


def problems(model: ModelConfig) -> list[str]:
    return [
        problem.text
        for problem in (*conflicts(Config(model=model), None), *latent_attention(Config(model=model), None))
    ]


def test_a_plain_model_is_allowed() -> None:
    assert problems(LATENT) == problems(dataclasses.replace(LATENT, num_query_groups=4)) == []
    assert problems(dataclasses.replace(LATENT, multi_latent_attention=False, add_bias_linear=True)) == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("position_embedding_type", "alibi", "pass --position-embedding-type rope"),
        ("num_query_groups", 2, "--num-query-groups 2 with --multi-latent-attention"),
        ("add_bias_linear", True, "pass --disable-bias-linear"),
        ("attention_output_gate", True, "--attention-output-gate with --multi-latent-attention"),
        ("rotary_percent", 0.5, "pass --qk-pos-emb-head-dim instead"),
        ("qk_clip", True, "--qk-clip with --multi-latent-attention"),
        ("clip_qkv", 8.0, "--clip-qkv 8.0 with --multi-latent-attention, whose keys and values are latents"),
        ("mup_base_width", 32, "muP has no rule"),
    ],
)
def test_another_option_is_refused(name: str, value: object, text: str) -> None:
    (found,) = problems(dataclasses.replace(LATENT, **{name: value}))
    assert text in found


def test_the_norm_of_all_heads_is_refused() -> None:
    model = dataclasses.replace(LATENT, qk_layernorm=True, qk_layernorm_width="all_heads")
    (found,) = problems(model)
    assert "--qk-layernorm-width all_heads with --multi-latent-attention" in found
