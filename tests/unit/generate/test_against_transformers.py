"""Greedy generation equals that of transformers for the same weights."""

import dataclasses

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from megalite.checkpoint.convert.hf_config import config_of
from megalite.checkpoint.convert.hf_tensors import from_hf
from megalite.generate.generator import Generator, Prompt
from megalite.generate.sampling import Sampler, Sampling
from megalite.model.kv_cache import CachedCore
from tests.stages import build_stage

VOCAB, EOD, NUM_NEW = 301, 0, 12
COMMON = {"vocab_size": VOCAB, "bos_token_id": EOD, "eos_token_id": EOD, "pad_token_id": EOD}
THEIRS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_layer=2, n_head=3, n_embd=24, n_positions=40, **COMMON)),
    "bloom": (BloomForCausalLM, BloomConfig(n_layer=2, n_head=3, hidden_size=24, **COMMON)),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=32,
            intermediate_size=37,
            max_position_embeddings=40,
            tie_word_embeddings=False,
            **COMMON,
        ),
    ),
}


@pytest.mark.parametrize("kind", THEIRS)
def test_greedy_text(kind, one_rank):
    build, hf_config = THEIRS[kind]
    torch.manual_seed(1)
    theirs = build(hf_config).double().eval()
    for name, parameter in theirs.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith(".weight")
        torch.nn.init.normal_(parameter, 1.0 if is_norm else 0.0, 0.3)
    prompts = [[5, 9, 2], [7], [44, 3, 250, 17, 8, 100, 31]]
    expected = []
    for ids in prompts:
        made = theirs.generate(torch.tensor([ids]), max_new_tokens=NUM_NEW, do_sample=False)
        expected.append(made[0, len(ids) :].tolist())

    config = dataclasses.replace(config_of(hf_config.to_dict()), params_dtype="fp64")
    ours = build_stage(config, one_rank, range(config.num_layers), seed=0, attention=CachedCore)
    ours.load_state_dict(from_hf(theirs.state_dict(), config))
    generator = Generator(ours, Sampler(Sampling(temperature=0.0), VOCAB, one_rank.tp), EOD)
    made = [[] for _ in prompts]
    for step in generator([Prompt(i, ids, NUM_NEW) for i, ids in enumerate(prompts)]):
        for row, token in step.items():
            made[row].append(token)
    assert made == expected
