"""Test model FLOPs against torch's counter on transformers' models, and the table of peaks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megalite.config import ModelConfig
from megalite.hardware.gpus import peak_tflops, peak_tflops_of
from megalite.plan.model_flops import flops_per_token

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


def test_padded_rows_count() -> None:
    padded = dataclasses.replace(GPT, vocab_size=97, pad_vocab_size_to=None, make_vocab_size_divisible_by=64)
    assert flops_per_token(padded, tp=1) - flops_per_token(GPT, tp=1) == 6 * 64 * (128 - 96)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA A10", 125),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_goes_by_whole_words_of_the_name(name: str, peak: float | None) -> None:
    assert peak_tflops_of(name) == peak


def test_a_cpu_has_no_peak() -> None:
    assert peak_tflops(torch.device("cpu")) is None
