"""Test model FLOPs against torch's counter on transformers' models."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megalite.config import ModelConfig
from megalite.config.model_flops import flops_per_token, flops_per_token_by_convention
from megalite.config.presets import PRESETS
from megalite.plan.units import whole_model

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
    "llama-tiny, later tokens": {"mtp_num_layers": 2},
    "llama-tiny, gates": {"attention_output_gate": True},
    "llama-tiny, latent": {
        **{"multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16},
        **{"qk_pos_emb_head_dim": 8, "v_head_dim": 32, "num_query_groups": None},
    },
    "llama-tiny, latent of keys": {"multi_latent_attention": True, "num_query_groups": None},
}


@pytest.mark.parametrize("preset", [*PRESETS, *OPTIONS])
def test_formulas_agree_with_the_layers_that_run(preset: str) -> None:
    model = dataclasses.replace(PRESETS[preset.partition(", ")[0]], **OPTIONS.get(preset, {}))
    vocabulary = model.vocab_size or 30522
    model = dataclasses.replace(model, vocab_size=vocabulary, params_dtype="bf16")  # has fused attention
    units = whole_model(model, tp=1)
    matrices = [weight.shape for weight in units.layers[0].weights if len(weight.shape) > 1]
    assert model.layer_weights(model.layer_kinds[0]) == sum(map(math.prod, matrices))
    # BERT predicts a whole number of tokens, and has a small matrix for the order of its two segments.
    tolerance = 2 / model.seq_length if model.architecture == "bert" else 1e-9
    expected = 3 * units.forward_flops / model.seq_length
    assert flops_per_token(model, tp=1) == pytest.approx(expected, rel=tolerance)


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
