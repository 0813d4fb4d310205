"""transformers builds the same model from the config that we write as from its own."""

import dataclasses
import random

import pytest
import torch
from transformers import AutoConfig

from megalite.config.presets import PRESETS
from megalite.frontends.huggingface.families import FAMILIES, KEPT, config_of, family_of, hf_config_of
from megalite.utils.errors import UserError
from tests.unit.model.test_against_transformers import (
    CONFIGS,
    MODELS,
    NUM_POSITIONS,
    build_theirs,
    can_have_experts,
    random_ids,
)

WITH_LAYER_TYPES = (
    "olmo3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "ministral",
    "exaone4",
    "dots1",
    "cohere2",
    "granite_swa",
)


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def assert_same_model(kind, hf_config):
    """Compare a model of the written config with one of its own; the family stays, if several can be it."""
    settings = hf_config.to_dict()
    recorded = {name: settings[name] for name in KEPT if name in settings}
    written = hf_config_of(config_of(settings), eod=0, recorded=recorded)
    theirs = build_theirs(kind, hf_config, seed=0)
    assert written.pop("model_type") == hf_config.model_type
    assert written.pop("architectures") == [MODELS[kind].__name__]
    other_config = type(hf_config)(**written)
    more = {"experts_implementation": "eager"} if can_have_experts(other_config) else {}
    other = MODELS[kind]._from_config(other_config, attn_implementation="eager", **more)
    other.load_state_dict(theirs.state_dict())
    if kind == "gemma4":  # as in build_theirs
        other.model._maybe_slice_kv_shared_inputs = lambda *values, **_: values[:4]
    ids = random_ids(hf_config, 2, 17, seed=0)
    expected = logits_of(theirs, ids)
    assert (logits_of(other, ids) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_written_config_is_the_same_model(kind):
    assert_same_model(kind, CONFIGS[kind](random.Random(f"written {kind}0").choice))


DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "smollm3", "gemma", "gemma2", "gemma3_text"),
    *("qwen3_5_text", "arcee", "phi3", "glm", "glm4", "ernie4_5", "helium", "ministral", "exaone4"),
    *("starcoder2", "stablelm", "phi", "nemotron", "granite", "cohere", "cohere2"),
    *("hunyuan_v1_dense", "apertus", "granite_swa"),
)
"""Families whose model is determined by its sizes."""


@pytest.mark.parametrize("model_type", DENSE)
def test_settings_that_are_absent_have_their_default(model_type):
    sizes = {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 80}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 97, "initializer_range": 0.02}
    complete = AutoConfig.for_model(model_type, **sizes).to_dict()
    assert config_of({"model_type": model_type, **sizes}) == config_of(complete)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_setting_that_transformers_does_not_have_is_refused(kind):
    settings = CONFIGS[kind](lambda values: values[0]).to_dict()
    with pytest.raises(UserError, match=f"{settings['model_type']} with mixing_rank 7 cannot be converted"):
        config_of({**settings, "mixing_rank": 7})


def changed(kind, **changes):
    first = CONFIGS[kind](lambda values: values[0])
    fields = {**first.to_dict(), **changes}
    fields.pop("per_layer_config", None)  # it follows from the other sizes
    return type(first)(**fields)


@pytest.mark.parametrize("kind", WITH_LAYER_TYPES)
def test_a_model_without_windows(kind):
    layers = CONFIGS[kind](lambda values: values[0]).num_hidden_layers
    windows = {"sliding_window": NUM_POSITIONS, "layer_types": ["full_attention"] * layers}
    assert_same_model(kind, changed(kind, **windows))


def test_heads_of_one_size_in_all_layers():
    hf_config = changed("gemma4", head_dim=4, global_head_dim=4)
    assert hf_config.to_dict()["per_layer_config"] == {}
    assert_same_model("gemma4", hf_config)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "bloom"])
def test_the_longest_context_outlives_shorter_samples(kind):
    """A server caps the context at this number."""
    config = config_of(CONFIGS[kind](lambda values: values[0]).to_dict())
    shorter = dataclasses.replace(config, seq_length=8, max_position_embeddings=config.seq_length)
    written = hf_config_of(shorter, eod=0)
    assert AutoConfig.for_model(**written).max_position_embeddings == NUM_POSITIONS


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "smollm3"])
def test_no_window_has_no_size(kind):
    config = config_of(changed(kind, sliding_window=None, use_sliding_window=False).to_dict())
    assert hf_config_of(config, eod=0)["sliding_window"] is None
    assert_same_model(kind, changed(kind, sliding_window=None, use_sliding_window=False, layer_types=None))


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen2_moe", "qwen3_next_experts", "mixtral", "olmoe"])
def test_one_expert_a_token_has_a_family(kind):
    """Families that come before refuse to read it: their only expert has weight 1."""
    hf_config = changed(kind, num_experts_per_tok=1)
    assert hf_config_of(config_of(hf_config.to_dict()), eod=0)["model_type"] == hf_config.model_type
    assert_same_model(kind, hf_config)


@pytest.mark.parametrize("changes", [{}, {"moe_router_topk": 1, "attn_logit_softcapping": 50.0}])
def test_a_family_names_its_problems_and_never_raises(changes):
    for preset in PRESETS.values():
        config = dataclasses.replace(preset, **changes)
        assert all(isinstance(family.problems(config), dict) for family in FAMILIES.values())


def test_the_nearest_family_is_one_that_reads_the_model():
    model = dataclasses.replace(PRESETS["mixtral-8x7b"], moe_router_topk=1, attn_logit_softcapping=50.0)
    with pytest.raises(
        UserError, match=r"transformers' mixtral cannot be this model: attn_logit_softcapping"
    ):
        family_of(model)


@pytest.mark.parametrize("divisor", [None, 7.0, 96.0])
def test_granite_may_have_any_scale_of_scores(divisor):
    """Also the usual one, whose root is no decimal number."""
    model = config_of(changed("granite", attention_multiplier=0.3).to_dict())
    scaled = dataclasses.replace(model, query_pre_attn_scalar=divisor)
    assert family_of(scaled).model_type == "granite"
    assert config_of(hf_config_of(scaled, eod=0)).query_pre_attn_scalar == divisor


def test_a_small_vocabulary_has_no_token_for_padding():
    """By default SmolLM 3's is number 128004."""
    config = config_of(CONFIGS["smollm3"](lambda values: values[0]).to_dict())
    assert hf_config_of(config, eod=0)["pad_token_id"] is None
