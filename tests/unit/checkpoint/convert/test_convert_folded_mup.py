"""A model of muP is exported as a model without muP that computes the same."""

import dataclasses
import json

import pytest
import torch

from megalite.config.presets import PRESETS
from megalite.utils.errors import UserError
from tests.stages import build_stage
from tests.unit.checkpoint.convert.foreign_models import VOCABULARY, tensors_of
from tests.unit.checkpoint.convert.test_convert import convert, save_stage


def stage_of(preset, topology, **changes):
    config = dataclasses.replace(PRESETS[preset], num_layers=2, vocab_size=VOCABULARY, **changes)
    stage = build_stage(config, topology, range(2), seed=3).eval()
    for parameter in stage.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    return stage


@pytest.mark.parametrize("preset", ["gpt-tiny", "llama-tiny"])  # tied and with a norm's bias, and neither
def test_transformers_computes_the_same(preset, tmp_path, one_rank):
    """The conversion compares the logits of the model of muP with those of transformers' model."""
    stage = stage_of(preset, one_rank, mup_base_width=24)
    tensors = tensors_of(convert(save_stage(stage, tmp_path / "ours"), tmp_path / "hf"))
    name = "transformer.ln_f" if preset == "gpt-tiny" else "model.norm"
    expected = stage.get_parameter("final_norm.weight").data / stage.config.width_ratio
    torch.testing.assert_close(tensors[f"{name}.weight"], expected)
    word = "transformer.wte" if preset == "gpt-tiny" else "model.embed_tokens"
    same = stage.get_parameter("embedding.word.weight")[:VOCABULARY]
    assert torch.equal(tensors[f"{word}.weight"], same)


def test_other_scores_are_granites_or_refused_by_name(tmp_path, one_rank):
    """Granite multiplies scores by any number; no model with norms of queries and keys does."""
    stage = stage_of("llama-tiny", one_rank, mup_base_width=24, mup_base_head_dim=4)
    divisor = stage.config.head_dim**2 / 4
    written = json.loads(
        (convert(save_stage(stage, tmp_path / "ours"), tmp_path / "hf") / "config.json").read_text()
    )
    assert written["model_type"] == "granite"
    assert written["attention_multiplier"] == pytest.approx(divisor**-0.5)
    normed = stage_of("llama-tiny", one_rank, mup_base_width=24, mup_base_head_dim=4, qk_layernorm=True)
    with pytest.raises(UserError, match=f"cannot be this model: query_pre_attn_scalar {divisor}"):
        convert(save_stage(normed, tmp_path / "normed"), tmp_path / "hf2")
