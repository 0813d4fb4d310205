"""Test model FLOPs against torch's counter on transformers' models."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megalite.config import ModelConfig
from megalite.config.model.model_config import (
    flops_per_token,
    flops_per_token_by_convention,
    layer_weights,
    mean_visible_keys,
)
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.plan.units import whole_model
from tests.stages import build_stage
from tests.unit.model.test_recurrent_mixer_chunked_recurrence import recurrence

GPT = ModelConfig(
    num_layers=3, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=96, pad_vocab_size_to=96
)
LLAMA = dataclasses.replace(
    GPT,
    num_query_groups=2,
    kv_channels=24,
    ffn_hidden_size=112,
    activation="swiglu",
    untie_embeddings_and_output_weights=True,
)


def _gpt2() -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=96, n_positions=32, n_embd=64, n_layer=3, n_head=4, attn_implementation="eager"
    )
    return GPT2LMHeadModel(config)


def _llama() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def _counted_per_token(model: torch.nn.Module, batch_size: int = 2, seq_length: int = 32) -> float:
    tokens = torch.arange(batch_size * seq_length).remainder(96).view(batch_size, seq_length)
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / tokens.numel()


@pytest.mark.parametrize(("model", "build"), [(GPT, _gpt2), (LLAMA, _llama)], ids=["gpt2", "llama"])
def test_flops_are_those_that_torch_counts(model: ModelConfig, build) -> None:
    # The counter sees attention's whole square, of which ours is half: ours at twice the length is the whole.
    whole_square = dataclasses.replace(model, seq_length=2 * model.seq_length)
    # Rotary angles are a small matrix product of their own there: 3 operations in 10^4.
    assert flops_per_token(whole_square, tp=1) == pytest.approx(_counted_per_token(build()), rel=1e-3)


OPTIONS = {
    "llama-tiny, gates": {"attention_output_gate": True},
    "llama-tiny, latent": {
        **{"multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16},
        **{"qk_pos_emb_head_dim": 8, "v_head_dim": 32, "num_query_groups": None},
    },
    "llama-tiny, latent of keys": {"multi_latent_attention": True, "num_query_groups": None},
    "llama-tiny, later tokens": {"mtp_num_layers": 2},
}


RECURRENT = [name for name, model in PRESETS.items() if model.recurrences]


@pytest.mark.parametrize("preset", [name for name in (*PRESETS, *OPTIONS) if name not in RECURRENT])
def test_formulas_agree_with_the_layers_that_run(preset: str) -> None:
    model = dataclasses.replace(PRESETS[preset.partition(", ")[0]], **OPTIONS.get(preset, {}))
    vocabulary = model.vocab_size or 30522
    model = dataclasses.replace(model, vocab_size=vocabulary, params_dtype="bf16")  # has fused attention
    units = whole_model(model, tp=1)
    weights = [weight for weight in units.layers[0].weights if not weight.name.endswith("bias")]
    matrices = [weight.shape for weight in weights if len(weight.shape) > 1]
    assert layer_weights(model, model.layer_specs[0]) == sum(map(math.prod, matrices))
    # BERT predicts a whole number of tokens, and has a small matrix for the order of its two segments.
    tolerance = 2 / model.seq_length if model.architecture == "bert" else 1e-9
    if model.has_experts:
        # Experts have equal whole numbers of rows, and products that add their biases are not model FLOPs.
        tolerance = 1e-3
    expected = 3 * units.forward_flops / model.seq_length
    assert flops_per_token(model, tp=1) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("preset", RECURRENT)
def test_formulas_agree_with_layers_of_each_kind(preset: str) -> None:
    model = dataclasses.replace(PRESETS[preset], vocab_size=256, seq_length=64, params_dtype="bf16")
    for number, layer in whole_model(model, tp=1).layers.items():
        spec = model.layer_specs[number]
        matrices = [each.shape for each in layer.weights if len(each.shape) > 1]
        convolution = [shape for shape in matrices if shape[1] == 4]
        assert len(convolution) == (spec.recurrence is not None)
        assert layer_weights(model, spec) == sum(map(math.prod, matrices)) - sum(map(math.prod, convolution))


def test_mamba_counts_its_recurrence() -> None:
    """Each token writes to the state and reads it, after a convolution of its x, B and C."""
    tiny = dataclasses.replace(PRESETS["nemotron-h-tiny"], vocab_size=256)
    mlp, mamba = (dataclasses.replace(tiny, hybrid_override_pattern=f"-*{each}-") for each in "-M")
    width, state, groups, heads = 128, 16, 4, 8
    linear = 64 * (2 * width + 2 * groups * state + heads) + width * 64
    products = linear + 2 * width * state + tiny.mamba_conv_kernel * (width + 2 * groups * state)
    of_mlp = 2 * 64 * tiny.ffn_size
    assert flops_per_token(mamba, 1) - flops_per_token(mlp, 1) == 6 * (products - of_mlp)


def test_attention_beside_mamba_counts_both() -> None:
    tiny = dataclasses.replace(PRESETS["nemotron-h-tiny"], vocab_size=256)
    both, mamba, attention, mlp = (
        flops_per_token(dataclasses.replace(tiny, hybrid_override_pattern=f"-{each}--"), 1) for each in "BM*-"
    )
    of_mlp = 6 * 2 * tiny.hidden_size * tiny.ffn_size
    assert both - (mlp - of_mlp) == mamba + attention - 2 * (mlp - of_mlp)


def test_a_recurrence_counts_its_products_token_by_token() -> None:
    hybrid = dataclasses.replace(
        PRESETS["llama-tiny"],
        vocab_size=256,
        recurrent_mixer="gated_delta_net",
        linear_attention_freq=(2,),
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    first, second, *_ = hybrid.layer_specs
    assert second.attention is not None
    assert [first.mixer, second.mixer] == [hybrid.delta_net, second.attention]
    stage = build_stage(hybrid, Topology.alone(), range(1), seed=1, has_weights=False)
    matrices = [p for name, p in stage.layers.named_parameters() if p.dim() > 1 and "convolution" not in name]
    assert layer_weights(hybrid, first) == sum(matrix.numel() for matrix in matrices)

    shapes = (1, 2, 1, 6), (1, 2, 1, 6), (1, 2, 2, 1, 5), (1, 2, 2, 1), (1, 2, 2, 1)
    with FlopCounterMode(display=False) as counter:
        recurrence(*map(torch.zeros, shapes))
    convolution = 4 * 2 * (6 + 6 + 2 * 5)
    assert hybrid.delta_net.multiply_adds == counter.get_total_flops() / 2 + convolution
    attention = dataclasses.replace(hybrid, recurrent_mixer="none")
    scores = 2 * hybrid.num_attention_heads * hybrid.head_dim * mean_visible_keys(hybrid, second.attention)
    per_layer = layer_weights(hybrid, first) - layer_weights(hybrid, second) + hybrid.delta_net.multiply_adds
    more = flops_per_token(hybrid, tp=1) - flops_per_token(attention, tp=1)
    assert more == pytest.approx(6 * hybrid.num_layers / 2 * (per_layer - scores), rel=1e-12)


def test_kimi_delta_attention_counts_its_matrices_and_products() -> None:
    model = dataclasses.replace(
        PRESETS["llama-tiny"],
        **{"vocab_size": 256, "recurrent_mixer": "kimi_delta_attention", "linear_attention_freq": (2,)},
        **{"linear_key_head_dim": 6, "linear_num_key_heads": 3},
    )
    first, *_ = model.layer_specs
    stage = build_stage(model, Topology.alone(), range(1), seed=1, has_weights=False)
    matrices = [p for name, p in stage.layers.named_parameters() if p.dim() > 1 and "convolution" not in name]
    assert layer_weights(model, first) == sum(matrix.numel() for matrix in matrices)
    assert first.recurrence is not None
    assert first.recurrence.multiply_adds == 3 * 3 * 6 * 6 + 4 * 3 * 3 * 6


def test_a_gated_convolution_counts_its_taps() -> None:
    model = dataclasses.replace(
        PRESETS["llama-tiny"],
        vocab_size=256,
        recurrent_mixer="gated_convolution",
        linear_conv_kernel_dim=3,
        linear_attention_freq=(2,),
    )
    first, second, *_ = model.layer_specs
    assert second.attention is not None
    h, scores = model.hidden_size, 2 * model.num_attention_heads * model.head_dim
    per_layer = layer_weights(model, first) - layer_weights(model, second) + 3 * h
    assert layer_weights(model, first) == 4 * h * h + 3 * h * model.ffn_size
    more = flops_per_token(model, 1) - flops_per_token(dataclasses.replace(model, recurrent_mixer="none"), 1)
    scores *= mean_visible_keys(model, second.attention)
    assert more == pytest.approx(6 * model.num_layers / 2 * (per_layer - scores), rel=1e-12)


def test_a_window_counts_the_scores_within_it() -> None:
    s, heads = GPT.seq_length, GPT.num_attention_heads * GPT.head_dim
    for window in (1, 9, s - 1):
        windowed = dataclasses.replace(GPT, window_size=(window, 0), window_attn_skip_freq=(2,))
        fewer = (flops_per_token(GPT, tp=1) - flops_per_token(windowed, tp=1)) / (12 * heads)
        seen, all_seen = (sum(min(i, most) + 1 for i in range(s)) / s for most in (window, s))
        assert fewer == pytest.approx(2 * (all_seen - seen), abs=2 * 0.5)  # layer 2 of 3 sees all
        by_convention = [flops_per_token_by_convention(model, tp=1) for model in (GPT, windowed)]
        assert len({flops["full_attention"] for flops in by_convention}) == 1
        assert (fewer == 0) == (window == s - 1)


def test_padded_rows_count() -> None:
    padded = dataclasses.replace(GPT, vocab_size=97, pad_vocab_size_to=None, make_vocab_size_divisible_by=64)
    assert flops_per_token(padded, tp=1) - flops_per_token(GPT, tp=1) == 6 * 64 * (128 - 96)
