"""Scores, losses and every gradient of BERT are those of transformers' BertForPreTraining."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForPreTraining

from megalite.config import RecomputeConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from megalite.distributed.topology import Topology
from megalite.frontends.huggingface.families import from_hf, to_hf
from megalite.model.stage import DTYPES
from tests.stages import build_stage
from tests.unit.model.test_against_transformers import InDoublePrecision, build_ours

TOLERANCES = {"fp32": 1e-5, "fp64": 1e-12}
NUM_POSITIONS = 40


def hf_config_of(seed: int) -> BertConfig:
    choose = random.Random(seed).choice
    heads = choose((1, 2, 3))
    return BertConfig(
        num_hidden_layers=choose((1, 2)),
        num_attention_heads=heads,
        hidden_size=heads * choose((4, 8)),
        intermediate_size=choose((30, 37)),
        vocab_size=choose((97, 301)),
        max_position_embeddings=NUM_POSITIONS,
        hidden_act=choose(("gelu", "relu")),
        layer_norm_eps=choose((1e-12, 1e-3)),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def build_theirs(hf_config: BertConfig, seed: int) -> Any:
    """Their model with weights large enough that every part of it matters."""
    model = BertForPreTraining._from_config(hf_config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = 0.2 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise + (1.0 if name.endswith("LayerNorm.weight") else 0.0))
    return model


def samples_of(vocab_size: int, num_samples: int = 3, length: int = 21, seed: int = 0) -> Microbatch:
    """Random samples with masked tokens, two segments and, but for the first sample, padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocab_size, (num_samples, length), generator=generator)
    labels = torch.randint(1, vocab_size, (num_samples, length), generator=generator)
    positions = torch.arange(length)
    lengths = torch.tensor([length, *range(length - 3, length - 3 * num_samples, -3)])
    is_padding = positions >= lengths[:, None]
    return Microbatch(
        tokens.masked_fill(is_padding, 0),
        labels,
        torch.arange(num_samples),
        document_ids=is_padding.long(),
        loss_mask=(torch.rand(num_samples, length, generator=generator) < 0.3) & ~is_padding,
        token_types=((positions >= lengths[:, None] // 2) & ~is_padding).long(),
        order_labels=torch.arange(num_samples) % 2,
    )


def run_theirs(model: Any, batch: Microbatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    assert batch.document_ids is not None and batch.loss_mask is not None
    result = model(
        input_ids=batch.tokens,
        attention_mask=1 - batch.document_ids,
        token_type_ids=batch.token_types,
        labels=batch.labels.masked_fill(~batch.loss_mask, -100),
        next_sentence_label=batch.order_labels,
    )
    result.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [result.prediction_logits, result.seq_relationship_logits, result.loss], gradients


def run_ours(stage: Any, batch: Microbatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    assert batch.loss_mask is not None
    normed = stage.final_norm(stage.hidden_states(batch, None))
    logits = stage.logits_of(normed).transpose(0, 1)[..., : stage.vocab_size]
    terms = stage(batch, None).terms
    loss = terms["lm_loss"].value(batch.loss_mask.sum()) + terms["sop_loss"].value(len(batch.tokens))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    return [logits, stage.order_scores(normed), loss], gradients


def assert_close(ours, theirs, tolerance, name):
    largest = theirs.abs().max()
    difference = (ours - theirs).abs().max()
    assert difference <= tolerance * largest, f"{name}: {difference / largest:.1e} of the largest magnitude"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("attention_dropout", [0.0, 0.1], ids=["fused", "unfused"])
@pytest.mark.parametrize("seed", range(4))
def test_agrees(seed: int, attention_dropout: float, dtype: str, one_rank: Topology) -> None:
    hf_config = hf_config_of(seed)
    batch = samples_of(hf_config.vocab_size)
    with InDoublePrecision() if dtype == "fp64" else contextlib.nullcontext():
        theirs = build_theirs(hf_config, seed).to(DTYPES[dtype])
        expected, gradients_of = run_theirs(theirs, batch)
    ours = build_ours(theirs, one_rank, params_dtype=dtype, attention_dropout=attention_dropout).eval()
    results, gradients = run_ours(ours, batch)

    is_real = batch.document_ids == 0  # padding is computed with, and nothing uses it
    results[0], expected[0] = results[0][is_real], expected[0][is_real]
    for name, result, reference in zip(("logits", "order", "loss"), results, expected, strict=True):
        assert_close(result, reference, TOLERANCES[dtype], name)
    expected_gradients = from_hf(gradients_of, ours.config)
    assert set(gradients) == set(expected_gradients)
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], TOLERANCES[dtype], name)


def test_tokens_without_a_label_need_no_logits(one_rank: Topology) -> None:
    """With the positions of labels, losses and gradients are those of a mask over all tokens."""
    config = PRESETS["bert-tiny"]
    stage = build_stage(_tiny(config), one_rank, range(2), has_documents=True, seed=1).eval()
    whole = samples_of(97)
    assert whole.loss_mask is not None
    positions = (~whole.loss_mask).char().argsort(dim=1, stable=True)[:, : int(whole.loss_mask.sum(1).max())]
    selected = dataclasses.replace(
        whole,
        labels=whole.labels.gather(1, positions),
        loss_mask=whole.loss_mask.gather(1, positions),
        label_positions=positions,
    )
    assert positions.shape[1] < whole.labels.shape[1] / 2
    losses, gradients = [], []
    for batch in (whole, selected):
        stage.zero_grad(set_to_none=True)
        (_, _, loss), of_batch = run_ours(stage, batch)
        losses.append(loss)
        gradients.append(of_batch)
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0.0)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-13, msg=name)


def test_weights_return_to_transformers(one_rank: Topology) -> None:
    theirs = build_theirs(hf_config_of(0), 0)
    ours = build_ours(theirs, one_rank)
    returned = to_hf(dict(ours.named_parameters()), ours.config)
    assert set(returned) == {name for name, _ in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters():
        assert torch.equal(returned[name], parameter), name


def test_padding_changes_nothing(one_rank: Topology) -> None:
    """The losses of samples are those of the same samples without their padding."""
    config = PRESETS["bert-tiny"]
    stage = build_stage(_tiny(config), one_rank, range(config.num_layers), has_documents=True, seed=1).eval()
    batch = samples_of(97, length=21)
    whole = totals_of(stage, batch)
    parts = torch.zeros_like(whole)
    assert batch.document_ids is not None
    for i in range(len(batch.tokens)):
        n = int((batch.document_ids[i] == 0).sum())
        cut = {
            name: None if x is None else x[i : i + 1, :n] if x.dim() == 2 else x[i : i + 1]
            for name, x in vars(batch).items()
        }
        parts += totals_of(stage, Microbatch(**cut))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0.0)


def totals_of(stage: Any, batch: Microbatch) -> Tensor:
    return torch.stack([term.total for term in stage(batch, None).terms.values()])


@pytest.mark.parametrize("modules", ["core_attn", "core_attn mlp_act", "full"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_recomputation_changes_no_bit(norm_position: str, modules: str, one_rank: Topology) -> None:
    config = _tiny(
        PRESETS["bert-tiny"], hidden_dropout=0.1, attention_dropout=0.1, norm_position=norm_position
    )
    if modules == "full":
        recompute = RecomputeConfig(recompute_granularity="full", recompute_method="uniform")
    else:
        recompute = RecomputeConfig(
            recompute_granularity="selective", recompute_modules=tuple(modules.split())
        )
    batch, results = samples_of(97), []
    for how in (RecomputeConfig(), recompute):
        stage = build_stage(config, one_rank, range(2), recompute=how, has_documents=True, seed=1)
        results.append(run_ours(stage, batch))
    (plain, gradients), (again, gradients_again) = results
    assert all(map(torch.equal, plain, again))
    assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)


def _tiny(config: Any, **changes: Any) -> Any:
    values = {"num_layers": 2, "vocab_size": 97, "params_dtype": "fp64", **changes}
    return dataclasses.replace(config, **values)


def test_the_z_loss_is_of_the_masked_tokens(one_rank: Topology) -> None:
    config = dataclasses.replace(
        PRESETS["bert-tiny"],
        num_layers=1,
        seq_length=16,
        vocab_size=50,
        params_dtype="fp64",
        z_loss_coeff=0.1,
    )
    stage = build_stage(config, one_rank, range(1), seed=3).eval()
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(1))
    places = torch.tensor([[2, 5, 0], [1, 7, 9]])  # the first sample has two masked tokens
    mask = torch.tensor([[True, True, False], [True, True, True]])
    microbatch = Microbatch(
        tokens, tokens.gather(1, places), torch.arange(2), loss_mask=mask, label_positions=places,
        order_labels=torch.zeros(2, dtype=torch.int64), document_ids=torch.zeros_like(tokens),
        token_types=torch.zeros_like(tokens),
    )  # fmt: skip
    logits = stage.logits(stage.hidden_states(microbatch, None))[..., :50].detach()  # [s, b, v]
    sums = logits.logsumexp(-1).t().gather(1, places)
    terms = stage(microbatch, None).terms
    assert set(terms) == set(stage.loss_names) == {"lm_loss", "z_loss", "sop_loss"}
    torch.testing.assert_close(terms["z_loss"].total, (sums.square() * mask).sum())
    assert terms["z_loss"].scale == 0.1
