"""Every switch of the model combines with every other."""

import itertools
from typing import get_args

import pytest
import torch

from megalite.config import ModelConfig
from megalite.config.model.feed_forward import Activation
from megalite.data.microbatch import Microbatch
from megalite.tensor_parallel.counter_random import Dropout
from tests.covering import by_new_pairs
from tests.stages import build_stage

SWITCHES = {
    "position_embedding_type": ("learned_absolute", "rope", "alibi", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation": get_args(Activation),
    "add_bias_linear": (True, False),
    "embed_layernorm": (True, False),
    "untie_embeddings_and_output_weights": (True, False),
    "num_query_groups": (None, 2, 1),
    "attention_dropout": (0.0, 0.1),
}
COMBINATIONS = [dict(zip(SWITCHES, values, strict=True)) for values in itertools.product(*SWITCHES.values())]
EVERY_PAIR = [each for each, num_new in by_new_pairs(COMBINATIONS, dict) if num_new]
LENGTH = 6
IDS = torch.randint(30, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
NUMBERS = torch.tensor([0, 1])


def build(topology, **changes):
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "kv_channels": 6, "vocab_size": 30}
    config = ModelConfig(**shape, seq_length=LENGTH, init_method_std=0.5, **changes)
    return build_stage(config, topology, range(1), seed=1)


def logits(stage, tokens):
    return stage.logits(stage.hidden_states(Microbatch(tokens, tokens, NUMBERS), None))[..., :30]  # [s, b, v]


@pytest.mark.parametrize(
    "combinations",
    [
        pytest.param(EVERY_PAIR, id="every pair"),
        pytest.param(COMBINATIONS, id="all", marks=pytest.mark.slow),
    ],
)
def test_every_combination_trains(combinations, one_rank):
    for changes in combinations:
        stage = build(one_rank, **changes, hidden_dropout=changes["attention_dropout"])
        loss = stage(Microbatch(IDS[:, :-1], IDS[:, 1:], NUMBERS), None)
        loss.backward()
        assert torch.isfinite(loss), changes
        for name, parameter in stage.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, (changes, name)
            assert torch.isfinite(gradient).all(), (changes, name)
            assert torch.count_nonzero(gradient), (changes, name)


CHANGES = {
    **{
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.3,
        "logit_multiplier": 0.5,
        "query_pre_attn_scalar": 9.0,
    },
    **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "softmax_type": "learnable"},
    **{"attention_output_gate": True, "value_layernorm": True, "keys_as_values": "all"},
}


@pytest.mark.parametrize("position", SWITCHES["position_embedding_type"])
@pytest.mark.parametrize("name", CHANGES)
def test_an_option_changes_what_the_model_computes(name, position, one_rank):
    usual, changed = (
        logits(build(one_rank, position_embedding_type=position, **fields).eval(), IDS[:, :-1])
        for fields in ({}, {name: CHANGES[name]})
    )
    assert (usual - changed).abs().max() > 1e-3
    if name == "logit_multiplier":
        torch.testing.assert_close(changed, 0.5 * usual)
    if name == "final_logit_softcapping":
        torch.testing.assert_close(changed, 3.0 * torch.tanh(usual / 3.0))


def test_mup_scales_initial_weights_scores_and_logits(one_rank):
    usual, mup = (
        build(one_rank, mup_base_width=base, mup_base_head_dim=head) for base, head in ((None, None), (2, 1))
    )
    ratio, head_dim = usual.config.hidden_size / 2, usual.config.head_dim
    assert mup.config.head_specs[0].score_scale == pytest.approx(1 / head_dim)
    for name, weight in mup.named_parameters():
        is_matrix = ".qkv.w" in name or ".projection.w" in name or ".up.w" in name or ".down.w" in name
        torch.testing.assert_close(
            weight * ratio**0.5 if is_matrix else weight, usual.get_parameter(name), msg=name
        )
        assert weight.spec.width_ratio == (ratio if is_matrix else 1.0), name
    hidden = torch.randn(3, 2, usual.config.hidden_size)
    torch.testing.assert_close(mup.logits(hidden) * ratio, usual.logits(hidden))


@pytest.mark.parametrize("position", SWITCHES["position_embedding_type"])
@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["fused", "plain"])
def test_no_token_sees_a_later_one(position, dropout, one_rank):
    stage = build(one_rank, position_embedding_type=position, attention_dropout=dropout).eval()
    tokens = IDS[:, :-1].clone()
    before = logits(stage, tokens)
    tokens[:, 4] = (tokens[:, 4] + 1) % 30
    after = logits(stage, tokens)
    assert torch.equal(before[:4], after[:4])
    assert (before[4:] != after[4:]).any(dim=-1).all()


@pytest.mark.parametrize("position", SWITCHES["position_embedding_type"])
def test_order_counts_where_positions_do(position, one_rank):
    stage = build(one_rank, position_embedding_type=position).eval()
    tokens = IDS[:, :-1]
    swapped = tokens[:, [1, 0, *range(2, LENGTH)]]
    same = torch.allclose(logits(stage, tokens)[-1], logits(stage, swapped)[-1], rtol=1e-4, atol=1e-4)
    assert same == (position == "none")


def test_embeddings_may_have_another_dropout(one_rank):
    usual, own = (build(one_rank, hidden_dropout=0.25, embedding_dropout=p) for p in (None, 0.5))
    assert usual.embedding.dropout.p == 0.25 and own.embedding.dropout.p == 0.5
    of_blocks = [each.p for name, each in own.named_modules() if name.endswith("_output_dropout")]
    assert of_blocks == [0.25, 0.25]


def test_every_dropout_draws_numbers_of_its_own(one_rank):
    config = ModelConfig(num_layers=3, hidden_size=8, num_attention_heads=2, vocab_size=30)
    keys = [
        module.key
        for seed in (1, 2)
        for module in build_stage(config, one_rank, range(3), seed=seed).modules()
        if isinstance(module, Dropout)
    ]
    assert len(set(keys)) == len(keys) == 2 * (1 + 3 * 3)
