"""A cache that is divided over context-parallel ranks gives the logits of the whole sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.attention.cache import CachedCore
from megalite.config import ModelConfig, ParallelConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from megalite.distributed.collectives import all_gather_from, start_all_gather
from megalite.distributed.topology import Topology
from tests.live_ranks import run_ranks
from tests.stages import build_stage

VOCAB, LENGTH, CAPACITY = 257, 27, 32
WINDOW = {"window_size": (5, 0), "window_attn_skip_freq": (3,)}
CAPS = {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 3.0, "final_logit_softcapping": 2.0}
QUERIES = {"rope_scaling": "yarn", "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.7}
RECURRENT = {
    **{"recurrent_mixer": "gated_delta_net", "linear_key_head_dim": 6, "linear_value_head_dim": 5},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
LATENT = {
    **{"multi_latent_attention": True, "num_query_groups": None, "kv_channels": None, "q_lora_rank": 12},
    **{"kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5},
}
MODELS = {
    "gpt": ("gpt-tiny", {}),
    "bloom": ("bloom-tiny", {}),
    "llama": ("llama-tiny", {}),
    "bloom, caps": ("bloom-tiny", {**WINDOW, **CAPS}),
    "sinks": ("llama-tiny", {**WINDOW, **QUERIES, "softmax_type": "learnable"}),
    "latent": ("llama-tiny", LATENT),
    "experts": (
        "llama-tiny",
        {
            **{"num_experts": 5, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16},
            **{"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"},
        },
    ),
    "recurrent": ("llama-tiny", {**RECURRENT, "linear_attention_freq": (2,)}),
    "mamba": (
        "llama-tiny",
        {
            **{"mamba_head_dim": 8, "mamba_num_groups": 4, "mamba_state_dim": 5, "mamba_num_heads": 8},
            **{"hybrid_override_pattern": "M*-M", "position_embedding_type": "none"},
        },
    ),
    "shared keys": (
        "llama-tiny",
        {
            **{**WINDOW, "window_attn_skip_freq": (2,), "num_kv_shared_layers": 2, "qk_layernorm": True},
            **{"full_attention_kv_channels": 8, "full_attention_query_groups": 1, "value_layernorm": True},
            **{"keys_as_values": "full_attention", "window_rotary_base": 100.0},
        },
    ),
}
PADDING = (0, 4, 11)


def config_of(name: str) -> ModelConfig:
    preset, changes = MODELS[name]
    changes = {"vocab_size": VOCAB, "params_dtype": "fp64", "init_method_std": 0.3, **changes}
    return replace(PRESETS[preset], **changes)  # type: ignore[arg-type]


def tokens_of() -> Tensor:
    return torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(5))


@torch.inference_mode()
def logits(topology: Topology, names: tuple[str, ...]) -> dict[str, tuple[list[Tensor], list[int]]]:
    """Logits of pieces ``[s, b, v]``, without and with padding, and numbers of cached elements a layer."""
    found = {}
    for name in names:
        config = config_of(name)
        stage = build_stage(
            config, topology, range(config.num_layers), seed=3, cp_comm_type="p2p", attention=CachedCore
        ).eval()
        core, results = stage.core, []
        for padding in (None, torch.tensor(PADDING)):
            first = core.max_sliced_tokens(19)
            core.begin(CAPACITY, padding, first)
            pieces = []
            for piece in tokens_of().split([n for n in (first, 19 - first, 1, 1, 6) if n], dim=1):
                numbers, positions = torch.zeros(3, dtype=torch.int64), core.positions(*piece.shape)
                microbatch = core.local_microbatch(Microbatch(piece, piece, numbers, positions))
                hidden = stage.hidden_states(microbatch, None)
                if hidden.shape[0] != piece.shape[1]:
                    hidden = core.own_positions.in_position_order(start_all_gather(hidden, core.ranks).wait())
                pieces.append(all_gather_from(stage.logits(hidden), topology.tp)[..., :VOCAB])
            results.append(torch.cat(pieces))
        caches = [x for each in core.layers.values() for x in (each.keys, each.values) if x is not None]
        states = [x for each in core.states.values() for x in (each.inputs, each.state) if x is not None]
        found[name] = results, [x.numel() for x in (*caches, *states)]
    return found


@pytest.mark.parametrize(
    ("tp", "cp", "names"),
    [
        (1, 2, tuple(MODELS)),
        pytest.param(1, 4, tuple(MODELS), marks=pytest.mark.slow),
        pytest.param(2, 2, tuple(MODELS), marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_logits_of_one(tp: int, cp: int, names: tuple[str, ...], one_rank: Topology) -> None:
    expected = logits(one_rank, names)
    mesh = ParallelConfig(tensor_model_parallel_size=tp, context_parallel_size=cp, cp_comm_type="p2p").mesh
    for found in run_ranks(logits, mesh, tp * cp, names):
        for name in names:
            (whole, padded), sizes = found[name]
            torch.testing.assert_close(whole, expected[name][0][0], rtol=1e-11, atol=1e-11, msg=name)
            for row, pad in enumerate(PADDING):
                wanted = expected[name][0][1][pad:, row]
                torch.testing.assert_close(padded[pad:, row], wanted, rtol=1e-11, atol=1e-11, msg=name)
            if tp == 1:
                assert [size * cp for size in sizes] == expected[name][1], name
