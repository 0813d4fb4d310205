"""A model that keeps keys and values gives what it gives for the whole sequence, at every position."""

import dataclasses

import pytest
import torch

from megalite.attention.cache import CachedCore
from megalite.config import ModelConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from tests.stages import build_stage

LENGTH, CAPACITY = 18, 24
WINDOW = {"window_size": (5, 0), "window_attn_skip_freq": (3,)}
CAPS = {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 3.0, "final_logit_softcapping": 2.0}
QUERIES = {
    **{"rope_scaling": "yarn", "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.7},
}
RECURRENT = {
    **{"recurrent_mixer": "gated_delta_net", "linear_key_head_dim": 6, "linear_value_head_dim": 5},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
MAMBA = {"mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 5, "mamba_min_time_step": 0.7}
OTHERS = {
    "window": WINDOW,
    "caps": {**WINDOW, **CAPS, "window_rotary_base": 100.0},
    "sinks": {**WINDOW, "softmax_type": "learnable", **QUERIES},
    "caps and sinks": {**CAPS, "softmax_type": "off-by-one", "attention_output_gate": True},
    "shared keys": {
        **{**WINDOW, "window_attn_skip_freq": (2,), "num_kv_shared_layers": 2, "qk_layernorm": True},
        **{"full_attention_kv_channels": 8, "full_attention_query_groups": 1, "value_layernorm": True},
        **{"keys_as_values": "full_attention", "layer_output_scale": True, "window_rotary_base": 100.0},
    },
    "recurrent": {**RECURRENT, "linear_attention_freq": (2,), "attention_output_gate": True},
    "mamba": {**MAMBA, "hybrid_override_pattern": "M*-M", "position_embedding_type": "none", "clip_qkv": 0.5},
    "mamba alone": {**MAMBA, "hybrid_override_pattern": "MMMM", "mamba_num_heads": 6, "mamba_conv_kernel": 1},
    "recurrent alone": {**RECURRENT, "linear_conv_kernel_dim": 3},
    "experts": {
        **{"num_experts": 5, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16},
        "moe_shared_expert_gate": True,
    },
    "later tokens": {"mtp_num_layers": 1},
    "later tokens of a recurrence": {**RECURRENT, "mtp_num_layers": 1},
}
TINY = (
    "gpt-tiny",
    "bloom-tiny",
    "llama-tiny",
    "bloom-tiny, window",
    "llama-tiny, window",
    "llama-tiny, caps",
    "bloom-tiny, caps",
    "llama-tiny, experts",
    "llama-tiny, sinks",
    "llama-tiny, recurrent",
    "gpt-tiny, recurrent alone",
    "llama-tiny, mamba",
    "gpt-tiny, mamba alone",
    "bloom-tiny, caps and sinks",
    "llama-tiny, shared keys",
)
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


def config_of(preset: str, **changes) -> ModelConfig:
    preset, _, name = preset.partition(", ")
    changes = {**OTHERS.get(name, {}), **changes}
    return dataclasses.replace(
        PRESETS[preset], vocab_size=301, params_dtype="fp64", init_method_std=0.3, **changes
    )


def both(config, topology):
    """The same model as it trains, and as it generates."""
    layers = range(config.num_layers)
    whole = build_stage(config, topology, layers, seed=3).eval()
    return whole, build_stage(config, topology, layers, seed=3, attention=CachedCore).eval()


def tokens_of(num_sequences: int):
    return torch.randint(301, (num_sequences, LENGTH), generator=torch.Generator().manual_seed(5))


def microbatch_of(tokens, positions=None):
    numbers = torch.zeros(len(tokens), dtype=torch.int64)
    return Microbatch(tokens, tokens, numbers, position_ids=positions)


def run(stage, tokens, positions=None):
    """Return the logits, [s, b, v]."""
    return stage.logits(stage.hidden_states(microbatch_of(tokens, positions), None))


def run_pieces(stage, tokens, sizes):
    pieces = []
    for piece in tokens.split(sizes, dim=1):
        pieces.append(run(stage, piece, stage.core.positions(*piece.shape)))
    return torch.cat(pieces)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[LENGTH], [1] * LENGTH, [7, *[1] * 11], [5, 1, 4, 8]], ids=str)
@pytest.mark.parametrize("preset", TINY)
def test_pieces_of_a_sequence_give_the_whole(preset, sizes, one_rank):
    whole, cached = both(config_of(preset), one_rank)
    tokens = tokens_of(3)
    cached.core.begin(CAPACITY)
    torch.testing.assert_close(run_pieces(cached, tokens, sizes), run(whole, tokens), **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("preset", TINY)
def test_padding_changes_nothing(preset, one_rank):
    whole, cached = both(config_of(preset), one_rank)
    tokens, padding = tokens_of(3), torch.tensor([0, 4, 9])
    expected = run(whole, tokens)
    padded = torch.stack([row.roll(int(pad)) for row, pad in zip(tokens, padding, strict=True)])
    cached.core.begin(CAPACITY, padding)
    logits = run_pieces(cached, padded, [11, 1, 1, 5])
    for row, pad in enumerate(padding.tolist()):
        torch.testing.assert_close(logits[pad:, row], expected[: LENGTH - pad, row], **TOLERANCE)
    assert logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize(
    "preset",
    [
        *("llama-tiny", "llama-tiny, recurrent", "gpt-tiny, recurrent alone", "llama-tiny, mamba"),
        *("llama-tiny, later tokens", "llama-tiny, later tokens of a recurrence"),
    ],
)
def test_chosen_sequences_go_on(preset, one_rank):
    whole, cached = both(config_of(preset), one_rank)
    tokens = tokens_of(3)
    cached.core.begin(CAPACITY, torch.zeros(3, dtype=torch.int64))
    run_pieces(cached, tokens[:, :10], [10])
    rows = torch.tensor([2, 0, 0])
    cached.core.select(rows)
    other = tokens_of(3).flip(1)[:, :4]
    logits = run_pieces(cached, other, [1, 1, 2])
    expected = run(whole, torch.cat((tokens[rows, :10], other), dim=1))[10:]
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@torch.no_grad()
def test_positions_may_go_beyond_the_trained_length(one_rank):
    config = config_of("llama-tiny", seq_length=8)
    whole, cached = both(config, one_rank)
    tokens = tokens_of(1)
    cached.core.begin(LENGTH)
    torch.testing.assert_close(run_pieces(cached, tokens, [3] * 6), run(whole, tokens), **TOLERANCE)


@pytest.mark.parametrize("preset", TINY)
def test_no_token_sees_nothing(preset, one_rank):
    """A row of which all is masked is NaN in some kernels, and what is padding would be so for good."""
    _, cached = both(config_of(preset), one_rank)
    cached.core.begin(CAPACITY, torch.tensor([0, 4]))
    for num_tokens in (9, 1, 3):
        positions = cached.core.positions(2, num_tokens)
        info = cached.core.position_info(microbatch_of(tokens_of(2)[:, :num_tokens], positions))
        for bias in (each.bias for window, each in info.visible.items() if window is None):
            assert not bias.isneginf().all(-1).any()
            assert bias[1, :, -1, :4].isneginf().all()


def test_layers_that_share_keys_have_one_cache(one_rank):
    _, cached = both(config_of("llama-tiny, shared keys"), one_rank)
    assert cached.core.layers.keys() == {0, 1}  # of 4 layers
