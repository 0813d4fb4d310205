"""What layers are made of: the pattern of windows, against Megatron-core's, and sizes by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from megatron.core.transformer.utils import is_layer_window_attention

from megalite.checkpoint.convert.megatron_model import model_of
from megalite.config import AttentionSpec, LayerSpec, ModelConfig
from megalite.config.fields import resolved_fields
from megalite.config.model.attention import RotarySpec
from megalite.config.model.layers import windows_differ


def attention_of(model: ModelConfig) -> list[AttentionSpec]:
    """Return the attention of each layer; all have it."""
    found = [spec.attention for spec in model.layer_specs]
    return [spec for spec in found if spec is not None]


def test_layers_are_equal_by_default() -> None:
    attention = AttentionSpec(12, 12, 64, 64, 1 / 8)
    assert ModelConfig(num_layers=3).layer_specs == (LayerSpec(attention, 3072),) * 3


@pytest.mark.parametrize("skipped", [None, 1, 2, 3, [1, 1, 0, 1, 0], [0] * 5], ids=str)
def test_the_pattern_is_megatrons(skipped: int | list[int] | None) -> None:
    listed = (skipped,) if isinstance(skipped, int) else skipped
    model = ModelConfig(
        num_layers=5, window_size=(8, 0), window_attn_skip_freq=None if listed is None else tuple(listed)
    )
    theirs = [is_layer_window_attention((8, 0), skipped, number + 1) for number in range(5)]
    assert [spec.window == 8 for spec in attention_of(model)] == theirs
    assert all(spec.window in (8, None) for spec in attention_of(model))


@pytest.mark.parametrize(("skipped", "expected"), [(None, None), (3, (3,)), ([1, 0], (1, 0))], ids=str)
def test_a_checkpoint_of_megatron_has_its_window(skipped: object, expected: object) -> None:
    arguments = {"hidden_size": 8, "num_attention_heads": 2, "window_attn_skip_freq": skipped}
    found = model_of({**arguments, "window_size": [8, 0]}, ModelConfig())
    assert (found["window_size"], found.get("window_attn_skip_freq")) == ((8, 0), expected)
    assert not {"window_size", "window_attn_skip_freq"} & model_of(arguments, ModelConfig()).keys()


WINDOWS = ModelConfig(
    num_layers=2, position_embedding_type="rope", window_size=(8, 0), window_attn_skip_freq=(2,)
)


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, False),
        ({"window_rotary_base": 10000.0}, False),
        ({"window_rotary_base": 100.0}, True),
        ({"rope_scaling": "linear"}, False),
        ({"window_rope_scaling": False}, False),
        ({"rope_scaling": "linear", "window_rope_scaling": False}, True),
        ({"position_embedding_type": "alibi", "window_rotary_base": 100.0}, False),
    ],
)
def test_layers_with_a_window_may_rotate_differently(changes: dict[str, Any], differs: bool) -> None:
    model = replace(WINDOWS, **changes)
    window, full = attention_of(model)
    assert (window.window, full.window) == (8, None)
    assert (window.rotary != full.rotary) is windows_differ(model) is differs
    assert replace(window, window=None, rotary=full.rotary) == full


def test_the_model_is_the_same_by_a_pattern_and_by_its_marks() -> None:
    listed = replace(WINDOWS, window_attn_skip_freq=(1, 0), window_rotary_base=10000.0)
    assert resolved_fields(listed) == resolved_fields(WINDOWS)
    assert resolved_fields(replace(WINDOWS, window_attn_skip_freq=(0, 1))) != resolved_fields(WINDOWS)


def test_zero_skips_no_layer() -> None:
    """Megatron-core divides by this number."""
    model = ModelConfig(num_layers=3, window_size=(8, 0), window_attn_skip_freq=(0,))
    assert [spec.window for spec in attention_of(model)] == [8] * 3


GEMMA4 = ModelConfig(
    num_layers=6,
    position_embedding_type="rope",
    num_query_groups=4,
    window_size=(8, 0),
    window_attn_skip_freq=(2,),
    full_attention_kv_channels=32,
    full_attention_query_groups=2,
    keys_as_values="full_attention",
    num_kv_shared_layers=3,
)


def test_layers_without_a_window_have_their_own_heads() -> None:
    window, full = attention_of(GEMMA4)[:2]
    assert (window.head_dim, window.num_kv_heads, window.keys_as_values) == (64, 4, False)
    assert (full.head_dim, full.num_kv_heads, full.keys_as_values) == (32, 2, True)
    rotations = RotarySpec(64, 10000.0, "none"), RotarySpec(32, 10000.0, "none")
    assert (window.rotary, full.rotary) == rotations
    assert full.score_scale == pytest.approx(32**-0.5)
    assert (window.group_heads, full.group_heads) == ((3, 1, 1), (6, 1))
    assert GEMMA4.head_specs == (window, replace(full, gives_keys=True))


def test_the_last_layers_share_the_keys_of_the_last_layer_of_their_kind() -> None:
    attention = attention_of(GEMMA4)
    assert [spec.key_source for spec in attention] == [None, None, None, 1, 2, 1]
    assert [spec.gives_keys for spec in attention] == [False, True, True, False, False, False]
    assert attention[3].group_heads == (1,) and attention[3].num_groups == 12
    unrotated = replace(GEMMA4, no_rope_freq=(1, 0, 0, 0, 1, 0))
    assert [spec.key_source for spec in attention_of(unrotated)] == [None, None, None, 1, 0, 1]


def test_sizes_of_layers_that_do_not_differ_are_no_other_model() -> None:
    plain = replace(GEMMA4, full_attention_kv_channels=None, full_attention_query_groups=None)
    named = replace(plain, full_attention_kv_channels=64, full_attention_query_groups=4)
    assert resolved_fields(named) == resolved_fields(plain)
    assert resolved_fields(plain) != resolved_fields(GEMMA4)
    wide = replace(GEMMA4, kv_shared_ffn_hidden_size=GEMMA4.ffn_size)
    assert resolved_fields(wide) == resolved_fields(GEMMA4)
