"""Layers of different kinds: the pattern of windows, against Megatron-core's."""

from __future__ import annotations

import pytest
from megatron.core.transformer.utils import is_layer_window_attention

from megalite.checkpoint.convert.megatron_model import model_of
from megalite.config import LayerKind, ModelConfig


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


def test_zero_skips_no_layer() -> None:
    """Megatron-core divides by this number."""
    model = ModelConfig(num_layers=3, window_size=(8, 0), window_attn_skip_freq=(0,))
    assert model.layer_kinds == (LayerKind(8),) * 3
