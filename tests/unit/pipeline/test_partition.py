import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.stage_layers import layers_of_stages


@given(st.lists(st.integers(0, 5), min_size=1))
def test_layers_are_consecutive(counts):
    stages = layers_of_stages(sum(counts), counts)
    assert [layer for stage in stages for layer in stage] == list(range(sum(counts)))
    assert [len(stage) for stage in stages] == counts


@pytest.mark.parametrize("counts", [(1, 1), (2, 2, 2)])
def test_a_layer_is_never_lost(counts):
    with pytest.raises(AssertionError):
        layers_of_stages(5, counts)
