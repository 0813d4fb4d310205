import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.pipeline.partition import layers_of_stages


@given(st.integers(1, 20), st.integers(1, 10))
def test_layers_are_consecutive_and_even(num_stages, layers_each):
    stages = layers_of_stages(num_stages * layers_each, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_stages * layers_each))
    assert {len(stage) for stage in stages} == {layers_each}


def test_explicit_counts_are_taken_as_they_are():
    assert layers_of_stages(6, 3, (1, 4, 1)) == (range(0, 1), range(1, 5), range(5, 6))


@pytest.mark.parametrize("explicit", [None, (1, 1), (2, 2, 2)])
def test_a_layer_is_never_lost(explicit):
    with pytest.raises(AssertionError):
        layers_of_stages(5, 3, explicit)
