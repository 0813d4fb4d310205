"""Layers of different kinds: the pattern of windows, against Megatron-core's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from megatron.core.transformer.utils import is_layer_window_attention

from megalite.checkpoint.convert.megatron_model import model_of
from megalite.config import LayerKind, ModelConfig
from megalite.config.model_fields import resolved_fields


def test_layers_are_of_one_kind_by_default() -> None:
    assert ModelConfig(num_layers=3).layer_kinds == (LayerKind(),) * 3


@pytest.mark.parametrize("skipped", [None, 1, 2, 3, [1, 1, 0, 1, 0], [0] * 5], ids=str)
def test_the_pattern_is_megatrons(skipped: int | list[int] | None) -> None:
    listed = (skipped,) if isinstance(skipped, int) else skipped
    model = ModelConfig(
        num_layers=5, window_size=(8, 0), window_attn_skip_freq=None if listed is None else tuple(listed)
    )
    theirs = [is_layer_window_attention((8, 0), skipped, number + 1) for number in range(5)]
    assert [kind.window == 8 for kind in model.layer_kinds] == theirs
    assert all(kind.window in (8, None) for kind in model.layer_kinds)


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
    kinds = replace(WINDOWS, **changes).layer_kinds
    assert kinds == (LayerKind(8, own_rotary=differs), LayerKind())


def test_the_model_is_the_same_by_a_pattern_and_by_its_marks() -> None:
    listed = replace(WINDOWS, window_attn_skip_freq=(1, 0), window_rotary_base=10000.0)
    assert resolved_fields(listed) == resolved_fields(WINDOWS)
    assert resolved_fields(replace(WINDOWS, window_attn_skip_freq=(0, 1))) != resolved_fields(WINDOWS)


def test_zero_skips_no_layer() -> None:
    """Megatron-core divides by this number."""
    model = ModelConfig(num_layers=3, window_size=(8, 0), window_attn_skip_freq=(0,))
    assert model.layer_kinds == (LayerKind(8),) * 3


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
    window, full = GEMMA4.layer_kinds[:2]
    assert (window.head_dim, window.num_kv_heads, window.keys_as_values) == (None, None, False)
    assert (full.head_dim, full.num_kv_heads, full.keys_as_values) == (32, 2, True)
    assert (window.own_rotary, full.own_rotary) == (True, False)  # angles of 64 and 32 elements
    assert GEMMA4.for_kind(full).score_scale == pytest.approx(32**-0.5)
    assert (GEMMA4.group_heads(window), GEMMA4.for_kind(full).group_heads(full)) == ((3, 1, 1), (6, 1))


def test_the_last_layers_share_the_keys_of_the_last_layer_of_their_kind() -> None:
    assert [kind.key_source for kind in GEMMA4.layer_kinds] == [None, None, None, 1, 2, 1]
    assert [kind.gives_keys for kind in GEMMA4.layer_kinds] == [False, True, True, False, False, False]
    unrotated = replace(GEMMA4, no_rope_freq=(1, 0, 0, 0, 1, 0))
    assert [kind.key_source for kind in unrotated.layer_kinds] == [None, None, None, 1, 0, 1]


def test_sizes_of_layers_that_do_not_differ_are_no_other_model() -> None:
    plain = replace(GEMMA4, full_attention_kv_channels=None, full_attention_query_groups=None)
    named = replace(plain, full_attention_kv_channels=64, full_attention_query_groups=4)
    assert resolved_fields(named) == resolved_fields(plain)
    assert resolved_fields(plain) != resolved_fields(GEMMA4)
    wide = replace(GEMMA4, kv_shared_ffn_hidden_size=GEMMA4.ffn_size)
    assert resolved_fields(wide) == resolved_fields(GEMMA4)
