"""The elements of matrices by formula are those of the layers that run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalite.config.model.model_config import flops_per_token, mtp_weights, padded_vocab_size
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from tests.stages import build_stage

RECURRENT = {
    **{"recurrent_mixer": "gated_delta_net", "linear_key_head_dim": 6, "linear_value_head_dim": 5},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
GATED_EXPERTS = {
    **{"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 4},
    **{"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True},
}
LONGER: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "attention": ("llama-tiny", {"window_size": (9, 0)}, {}),
    "latent attention": ("llama-tiny", {"multi_latent_attention": True, "num_query_groups": None}, {}),
    "latent experts": (
        "llama-tiny",
        {"num_experts": 4, "moe_latent_size": 24, "moe_shared_expert_intermediate_size": 20},
        {},
    ),
    "experts beside an MLP": (
        "llama-tiny",
        {"num_experts": 4, "moe_ffn_hidden_size": 20, "moe_beside_mlp": True, "norm_position": "sandwich"},
        {},
    ),
    "Gated DeltaNet": ("llama-tiny", RECURRENT, {}),
    "a shared expert with a gate": ("llama-tiny", GATED_EXPERTS, {}),
    **{
        letter: (
            "nemotron-h-tiny",
            {"hybrid_override_pattern": f"M*-{letter}", "num_experts": num_experts},
            {"hybrid_override_pattern": f"M*-{2 * letter}"},
        )
        for letter, num_experts in (("M", None), ("*", None), ("-", None), ("E", 4))
    },
}
"""Preset, changes, and changes of a model with one more layer of the last layer's kind."""


@pytest.mark.parametrize("kind", LONGER)
def test_a_module_counts_as_one_more_layer_a_projection_and_logits(kind: str) -> None:
    preset, changes, more = LONGER[kind]
    model = replace(PRESETS[preset], **changes, vocab_size=256, mtp_num_layers=1)
    stage = build_stage(model, Topology.alone(), range(4), seed=1, has_weights=False)
    named = stage.mtp.named_parameters()
    matrices = [each for name, each in named if each.dim() > 1 and "convolution" not in name]
    assert mtp_weights(model) == sum(each.numel() for each in matrices)

    longer = replace(model, num_layers=5, mtp_num_layers=0, **more)
    added = 2 * model.hidden_size**2 + model.hidden_size * padded_vocab_size(model, 1)
    assert flops_per_token(model, 1) == pytest.approx(flops_per_token(longer, 1) + 6 * added, rel=1e-12)


def test_embeddings_for_layers_count_their_matrices() -> None:
    fields = {"norm_position": "sandwich", "activation": "geglu", "vocab_size": 256}
    without = replace(PRESETS["llama-tiny"], **fields)
    model = replace(without, hidden_size_per_layer_input=12)
    stage = build_stage(model, Topology.alone(), range(4), seed=1, has_weights=False)
    parts = ("embedding.layer_projection", "embedding_gate.gate", "embedding_gate.projection")
    matrices = [each for name, each in stage.named_parameters() if any(part in name for part in parts)]
    added = sum(each.numel() for each in matrices)
    assert flops_per_token(model, 1) == pytest.approx(flops_per_token(without, 1) + 6 * added, rel=1e-12)
