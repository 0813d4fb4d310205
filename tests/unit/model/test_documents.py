"""Documents that are packed into one sample are the documents alone: logits, loss and every gradient."""

import pytest
import torch

from megalite.config import ModelConfig
from megalite.data.microbatch import Microbatch
from tests.stages import build_stage

LENGTHS = ((5, 7, 1, 3), (16,), (1, 15))
"""Documents of each of three samples of 16 tokens."""
NUM_TOKENS, VOCABULARY = 16, 30
MODELS = {
    "learned": {"position_embedding_type": "learned_absolute"},
    "alibi": {"position_embedding_type": "alibi", "embed_layernorm": True},
    "rope": {"position_embedding_type": "rope", "num_query_groups": 2, "normalization": "RMSNorm"},
    "none": {"position_embedding_type": "none"},
    "mamba": {
        **{"position_embedding_type": "none", "hybrid_override_pattern": "MM", "mamba_head_dim": 6},
        **{"mamba_num_groups": 2, "mamba_state_dim": 5},
    },
    "both": {
        **{"position_embedding_type": "none", "hybrid_override_pattern": "BB", "mamba_head_dim": 6},
        **{"mamba_num_groups": 2, "mamba_state_dim": 5},
    },
    "recurrent": {
        **{"position_embedding_type": "none", "recurrent_mixer": "gated_delta_net"},
        **{"linear_attention_freq": (2,), "linear_key_head_dim": 6, "linear_value_head_dim": 5},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
    "olmo hybrid": {
        **{"position_embedding_type": "none", "recurrent_mixer": "gated_delta_net"},
        **{"linear_attention_freq": (2,), "linear_key_head_dim": 6, "linear_value_head_dim": 5},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_pre_norm": True},
        **{"linear_allow_neg_eigval": True, "linear_norm_epsilon": 1e-3, "norm_position": "output"},
    },
    "kimi": {
        **{"position_embedding_type": "none", "recurrent_mixer": "kimi_delta_attention"},
        **{"linear_attention_freq": (2,), "linear_key_head_dim": 6, "linear_num_key_heads": 2},
    },
    "convolution": {
        **{"position_embedding_type": "none", "recurrent_mixer": "gated_convolution"},
        "linear_attention_freq": (2,),
    },
}


def build(topology, core, **changes):
    """A stage in evaluation: dropout on attention weights, which chooses the core, is then without effect."""
    config = ModelConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=6,
        seq_length=NUM_TOKENS,
        vocab_size=VOCABULARY,
        init_method_std=0.4,
        params_dtype="fp64",
        hidden_dropout=0.0,
        attention_dropout={"fused": 0.0, "plain": 0.5}[core],
        **changes,
    )
    return build_stage(config, topology, range(2), seed=3).eval()


def ids():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (len(LENGTHS), NUM_TOKENS + 1), generator=generator)


def ids_of(values_of):
    """``[b, s]`` by what each document of each sample has for its tokens."""
    return torch.stack([torch.cat([values_of(i, n) for i, n in enumerate(row)]) for row in LENGTHS])


def documents(**changes):
    parts = {
        "position_ids": ids_of(lambda i, n: torch.arange(n)),
        "document_ids": ids_of(lambda i, n: torch.full((n,), i)),
    }
    return {**parts, **changes}


def run(stage, tokens, labels, **packing):
    """Logits ``[b, s, v]``, loss, and the gradients by name."""
    stage.zero_grad()
    microbatch = Microbatch(tokens, labels, torch.arange(len(tokens)), **packing)
    with torch.no_grad():
        hidden = stage.hidden_states(microbatch, None)
        logits = stage.logits(hidden)[..., :VOCABULARY].transpose(0, 1)
    loss = stage(microbatch, None)
    loss.backward()
    return logits, loss.detach(), {name: p.grad.clone() for name, p in stage.named_parameters()}


def run_alone(stage, tokens, labels):
    """The same with each document as a sample of its own."""
    rows, losses, sums = [], [], {}
    for row, lengths in enumerate(LENGTHS):
        parts = zip(tokens[row].split(lengths), labels[row].split(lengths), strict=True)
        alone = [run(stage, some[None], their_labels[None]) for some, their_labels in parts]
        rows.append(torch.cat([logits[0] for logits, _, _ in alone]))
        for _, loss, gradients in alone:
            losses.append(loss)
            for name, gradient in gradients.items():
                sums[name] = sums.get(name, 0) + gradient
    return torch.stack(rows), sum(losses), sums


@pytest.mark.parametrize("core", ["fused", "plain"])
@pytest.mark.parametrize("model", MODELS)
def test_packed_documents_are_the_documents_alone(model, core, one_rank):
    stage = build(one_rank, core, **MODELS[model])
    tokens, labels = ids()[:, :-1], ids()[:, 1:]
    logits, loss, gradients = run(stage, tokens, labels, **documents())
    expected_logits, expected_loss, expected = run_alone(stage, tokens, labels)
    torch.testing.assert_close(logits, expected_logits, rtol=0.0, atol=1e-13 * logits.abs().max().item())
    torch.testing.assert_close(loss, expected_loss, rtol=1e-14, atol=0.0)
    for name, gradient in gradients.items():
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0.0, atol=1e-13 * largest, msg=name)


@pytest.mark.parametrize("core", ["fused", "plain"])
@pytest.mark.parametrize("model", MODELS)
def test_each_part_has_its_effect_or_none(model, core, one_rank):
    """Positions that restart matter where attention goes on, but not to ALiBi's distances."""
    stage = build(one_rank, core, **MODELS[model])
    tokens, labels = ids()[:, :-1], ids()[:, 1:]
    plain, _, _ = run(stage, tokens, labels)
    unmasked, _, _ = run(stage, tokens, labels, **documents(document_ids=None))
    masked, _, _ = run(stage, tokens, labels, **documents(position_ids=None))
    has_positions = model in ("learned", "rope")
    assert torch.equal(unmasked, plain) != has_positions
    assert not torch.allclose(masked, plain)
    assert torch.allclose(masked[1], plain[1], rtol=1e-12)  # one document alone


def test_only_counted_tokens_have_a_loss(one_rank):
    stage = build(one_rank, "fused")
    tokens, labels = ids()[:, :-1], ids()[:, 1:]
    mask = ids_of(lambda i, n: torch.arange(n) < n - 1)
    _, loss, gradients = run(stage, tokens, labels, loss_mask=mask)
    logits, _, _ = run(stage, tokens, labels)
    expected = torch.nn.functional.cross_entropy(logits[mask], labels[mask], reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0.0)
    _, _, others = run(stage, tokens, labels, loss_mask=~mask)
    _, _, whole = run(stage, tokens, labels)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient + others[name], whole[name], rtol=0.0, atol=1e-12, msg=name)
