"""Multi-token prediction against plain PyTorch: losses and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import MtpModel

from megalite.config import Config, DataConfig, ModelConfig, TrainingConfig, check_config
from megalite.data.microbatch import Microbatch, Terms, WithTerms, later_token
from megalite.distributed.axis import HeldPositions
from megalite.distributed.topology import Topology
from megalite.frontends.huggingface.families import config_of, family_of, from_hf, to_hf
from tests.stages import build_stage
from tests.unit.model.test_against_transformers import InDoublePrecision

VOCABULARY, LENGTH, SAMPLES, DEPTH = 50, 12, 3, 2
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    ffn_hidden_size=32,
    seq_length=LENGTH,
    vocab_size=VOCABULARY,
    make_vocab_size_divisible_by=1,
    position_embedding_type="none",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    params_dtype="fp64",
    init_method_std=0.2,
    mtp_num_layers=DEPTH,
    mtp_loss_scaling_factor=0.3,
)
CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"untie_embeddings_and_output_weights": False},
    "with z-loss": {"z_loss_coeff": 0.1, "embedding_multiplier": 3.0},
}


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + MODEL.norm_epsilon).rsqrt() * weight


def _layer(x: Tensor, p: dict[str, Tensor], prefix: str, documents: Tensor) -> Tensor:
    """Compute a layer on ``[b, s, h]``; p has the parameters by name."""
    p = {name.removeprefix(prefix): each for name, each in p.items() if name.startswith(prefix)}
    b, s, h = x.shape
    qkv = _norm(x, p["attention_norm.weight"]) @ p["attention.qkv.weight"].t()
    q, k, v = qkv.view(b, s, -1, 3, MODEL.head_dim).permute(3, 0, 2, 1, 4)
    sees = (documents[:, :, None] == documents[:, None]).tril()[:, None]
    scores = (q @ k.transpose(-1, -2)) / MODEL.head_dim**0.5
    y = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v
    x = x + y.transpose(1, 2).reshape(b, s, h) @ p["attention.projection.weight"].t()
    gate, up = torch.einsum("bsh,cfh->cbsf", _norm(x, p["mlp_norm.weight"]), p["mlp.up.weight"])
    return x + (F.silu(gate) * up) @ p["mlp.down.weight"].t()


def _reference(
    model: ModelConfig, p: dict[str, Tensor], text: Tensor, has_loss: Tensor, documents: Tensor
) -> dict[str, Tensor]:
    """Return the mean of each loss over its own tokens.

    Args:
        text: ``[b, s + 1]`` tokens.
        has_loss: ``[b, s]``, of the token after each.
        documents: ``[b, s]``, the document of each token.
    """
    s, tokens = text.shape[1] - 1, text[:, :-1]
    word = p["embedding.word.weight"] * model.embedding_multiplier
    output = p.get("output.weight", p["embedding.word.weight"])
    h = word[tokens]
    for number in range(model.num_layers):
        h = _layer(h, p, f"layers.{number}.", documents)
    h = _norm(h, p["final_norm.weight"])
    losses, z = {}, (h @ output.t()).logsumexp(-1).square()[has_loss].mean()
    for ahead in range(model.mtp_num_layers + 1):
        if ahead:  # position i reads token i + ahead
            later = word[tokens[:, torch.arange(ahead, s + ahead).clamp(max=s - 1)]]
            joined = [_norm(later, p[f"mtp.{ahead - 1}.embedding_norm.weight"])]
            joined += [_norm(h, p[f"mtp.{ahead - 1}.hidden_norm.weight"])]
            x = torch.cat(joined, -1) @ p[f"mtp.{ahead - 1}.projection.weight"].t()
            x = _layer(x, p, f"mtp.{ahead - 1}.layer.", documents)
            h = _norm(x, p[f"mtp.{ahead - 1}.final_norm.weight"])
        of_tokens = F.cross_entropy((h @ output.t()).transpose(1, 2), text[:, 1:], reduction="none")
        if ahead:
            own, labels = h[:, :-ahead], text[:, 1 + ahead :]
            of_tokens = F.cross_entropy((own @ output.t()).transpose(1, 2), labels, reduction="none")
        counts = has_loss[:, ahead:] & (documents[:, ahead:] == documents[:, : s - ahead])
        losses[f"mtp_{ahead}_loss" if ahead else "lm_loss"] = of_tokens[counts].mean()
    return losses | ({"z_loss": z} if model.z_loss_coeff else {})


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return random tokens, which of them have a loss, and documents of random lengths."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    has_loss = torch.rand(SAMPLES, LENGTH, generator=generator) > 0.3
    documents = (torch.rand(SAMPLES, LENGTH, generator=generator) > 0.7).long().cumsum(1)
    return text, has_loss, documents


def _microbatch(text: Tensor, has_loss: Tensor | None, documents: Tensor | None) -> Microbatch:
    plain = Microbatch.of(text, torch.arange(len(text)))
    return replace(plain, loss_mask=has_loss, document_ids=documents).with_later_tokens(DEPTH)


def _means(terms: Terms, microbatch: Microbatch) -> dict[str, Tensor]:
    """Return the terms as the pipeline computes them from the microbatch's own counts."""
    mask = microbatch.loss_mask
    divisors = {"token": microbatch.labels.numel() if mask is None else mask.sum()}
    assert microbatch.later_mask is not None
    for ahead in range(1, DEPTH + 1):
        divisors[later_token(ahead)] = microbatch.later_mask[:, ahead - 1].sum()
    return {name: term.value(divisors[term.per]) for name, term in terms.items()}


@pytest.mark.parametrize("are_masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_plain_pytorch(
    case: str, are_masked: bool, one_rank: Topology
) -> None:
    model = replace(MODEL, **CASES[case])
    text, has_loss, documents = _inputs()
    if not are_masked:
        has_loss, documents = torch.ones_like(has_loss), torch.zeros_like(documents)
    stage = build_stage(model, one_rank, range(model.num_layers), has_documents=are_masked)
    microbatch = _microbatch(text, has_loss if are_masked else None, documents if are_masked else None)
    ours = _means(stage(microbatch, None).terms, microbatch)
    weights = dict(stage.named_parameters())
    theirs = _reference(model, weights, text, has_loss, documents)
    scales = {"lm_loss": 1.0, "z_loss": model.z_loss_coeff}
    theirs = {name: loss * scales.get(name, 0.3 / DEPTH) for name, loss in theirs.items()}
    assert set(stage.loss_names) == set(ours) == set(theirs)
    for name, loss in theirs.items():
        torch.testing.assert_close(ours[name], loss, rtol=1e-13, atol=0.0, msg=name)
    gradients = torch.autograd.grad(sum(ours.values()), [*weights.values()])
    expected = torch.autograd.grad(sum(theirs.values()), [*weights.values()])
    for name, gradient, want in zip(weights, gradients, expected, strict=True):
        assert (gradient - want).abs().max() < 1e-12 * want.abs().max(), name


class _Llama(LlamaForCausalLM):
    """A Llama whose files can have multi-token prediction, as transformers' DeepSeek-V3 has it."""

    _keys_to_ignore_on_load_unexpected = (r"model\.layers\.[23]\.",)


def _llama_with_modules() -> tuple[LlamaForCausalLM, MtpModel]:
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=32,
        vocab_size=VOCABULARY,
        num_mtp_layers=DEPTH,
        num_nextn_predict_layers=DEPTH,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = _Llama(config).double()
    modules = MtpModel(model, DEPTH).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in {*model.parameters(), *modules.parameters()}:
        mean = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + mean)
    return model, modules


def _named(model: LlamaForCausalLM, modules: MtpModel, *, gradients: bool = False) -> dict[str, Tensor]:
    """Return the parameters, or their gradients, under their names in files."""
    found = {name: each.grad if gradients else each.data for name, each in model.named_parameters()}
    for name, each in modules.layers.named_parameters():
        number, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.", 1)
        found[f"model.layers.{2 + int(number)}.{rest}"] = each.grad if gradients else each.data
    return found


def test_losses_and_gradients_are_those_of_transformers(one_rank: Topology) -> None:
    text, _, _ = _inputs()
    with InDoublePrecision():
        model, modules = _llama_with_modules()
        hidden = model.model(text[:, :-1]).last_hidden_state
        losses = [F.cross_entropy(model.lm_head(hidden).flatten(0, 1), text[:, 1:].flatten())]
        positions = torch.arange(LENGTH)[None]
        for number in range(DEPTH):
            later = F.pad(text[:, 1 + number : -1], (0, 1 + number))
            hidden = modules.forward_layer(number, hidden, positions, None, input_ids=later)
            logits, labels = model.lm_head(hidden)[:, : -1 - number], text[:, 2 + number :]
            losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * 0.1 / DEPTH)
        sum(losses).backward()
    config = replace(config_of(model.config.to_dict()), params_dtype="fp64", seq_length=LENGTH)
    assert config.mtp_num_layers == DEPTH
    stage = build_stage(config, one_rank, range(2))
    stage.load_state_dict(from_hf(_named(model, modules), config))
    microbatch = _microbatch(text, None, None)
    ours = _means(stage(microbatch, None).terms, microbatch)
    for loss, name in zip(losses, stage.loss_names, strict=True):
        torch.testing.assert_close(ours[name], loss, rtol=1e-12, atol=0.0, msg=name)
    sum(ours.values()).backward()
    expected = from_hf(_named(model, modules, gradients=True), config)
    for name, parameter in stage.named_parameters():
        want = expected[name]
        assert (parameter.grad - want).abs().max() < 1e-11 * want.abs().max(), name


def test_weights_return_to_transformers(one_rank: Topology) -> None:
    model, modules = _llama_with_modules()
    named = _named(model, modules)
    config = replace(config_of(model.config.to_dict()), params_dtype="fp64")
    returned = to_hf(from_hf(named, config), config)
    assert returned.keys() == named.keys()
    assert all(torch.equal(returned[name], each) for name, each in named.items())
    assert config_of(family_of(config).settings(config)) == replace(config, params_dtype="fp32")


def test_the_modules_do_not_change_the_next_token(one_rank: Topology) -> None:
    """Of a microbatch without later tokens, as in generation and in the evaluation of text."""
    text, _, _ = _inputs()
    microbatch = Microbatch.of(text, torch.arange(SAMPLES))
    results = []
    for depth in (0, DEPTH):
        stage = build_stage(replace(MODEL, mtp_num_layers=depth), one_rank, range(2), seed=1).eval()
        logits = stage.logits(stage.hidden_states(microbatch, None))
        results.append((logits, stage(microbatch, None)))
    assert all(one.equal(other) for one, other in zip(*results, strict=True))


RECURRENT = {
    **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (1, 0, 1), "linear_key_head_dim": 4},
    **{"linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
MAMBA = {"mamba_head_dim": 6, "mamba_num_groups": 2, "mamba_state_dim": 4}
LAST_LAYERS: dict[str, dict[str, Any]] = {
    "Gated DeltaNet": RECURRENT,
    "attention after Gated DeltaNet": {**RECURRENT, "linear_attention_freq": (3,)},
    "Mamba-2": {**MAMBA, "hybrid_override_pattern": "*-M"},
    "attention alone": {**MAMBA, "hybrid_override_pattern": "M-*"},
    "an MLP alone": {**MAMBA, "hybrid_override_pattern": "M*-"},
    "experts alone": {**MAMBA, "hybrid_override_pattern": "M*E", "num_experts": 4},
    "latent attention": {"multi_latent_attention": True, "position_embedding_type": "rope"},
}


@pytest.mark.parametrize("kind", LAST_LAYERS)
def test_a_module_has_a_layer_like_the_last_one(kind: str, one_rank: Topology) -> None:
    """With its weights, it computes the same of packed documents."""
    model = replace(MODEL, num_layers=3, **LAST_LAYERS[kind])
    check_config(Config(model=model, data=DataConfig(mock_data=True), training=TrainingConfig(train_iters=1)))
    stage = build_stage(model, one_rank, range(3), seed=1, has_documents=True).eval()
    last, layer = stage.layers["2"], stage.mtp[1].layer
    assert (type(layer), layer.spec) == (type(last), last.spec)
    layer.load_state_dict(last.state_dict())
    text, has_loss, documents = _inputs()
    inputs = stage.layer_inputs(_microbatch(text, has_loss, documents))
    x = torch.randn(LENGTH, SAMPLES, model.hidden_size, dtype=torch.float64)
    ours, expected = (WithTerms.of(each(x, *inputs))[0] for each in (layer, last))
    assert ours.equal(expected) and not ours.equal(x)


def test_a_slice_has_the_later_tokens_of_the_whole_sample() -> None:
    text, has_loss, documents = _inputs()
    whole = _microbatch(text, has_loss, documents)
    slices = [whole.cut(HeldPositions(index, 4).ranges(text.shape[1] // 4)) for index in range(4)]
    for name in ("later_tokens", "later_labels", "later_mask"):
        assert torch.cat([getattr(each, name) for each in slices], dim=-1).equal(getattr(whole, name))
    assert whole.later_tokens is not None and whole.later_labels is not None and whole.later_mask is not None
    assert whole.later_tokens[:, 1, :-2].equal(text[:, 2:-1])
    assert whole.later_labels[:, 1, :-2].equal(text[:, 3:])
    assert not whole.later_mask[:, 1, -2:].any() and not whole.later_mask[:, 0, -1:].any()
