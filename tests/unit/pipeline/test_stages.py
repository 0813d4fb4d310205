from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.pipeline.schedules import StageMap

MAPS = st.builds(StageMap, st.integers(1, 9), st.integers(1, 5), st.booleans())


@given(MAPS)
def test_each_stage_is_one_chunk_of_one_rank(stages):
    places = [stages.holder_of(stage) for stage in range(stages.num_stages)]
    assert sorted(places) == [(r, c) for r in range(stages.num_ranks) for c in range(stages.num_chunks)]
    assert [stages.stage_of(*place) for place in places] == list(range(stages.num_stages))


@given(MAPS)
def test_neighbouring_stages_are_on_neighbouring_ranks(stages):
    ranks = [stages.holder_of(stage)[0] for stage in range(stages.num_stages)]
    steps = [after - before for before, after in pairwise(ranks)]
    if stages.v_shaped:
        assert all(abs(step) <= 1 for step in steps)
    else:
        assert all(step % stages.num_ranks == 1 % stages.num_ranks for step in steps)


@pytest.mark.parametrize(
    ("stages", "of_ranks"),
    [
        (StageMap(3), [[0], [1], [2]]),
        (StageMap(2, 3), [[0, 2, 4], [1, 3, 5]]),
        (StageMap(3, 2, v_shaped=True), [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_stages_of_ranks(stages, of_ranks):
    assert [stages.stages_of(rank) for rank in range(stages.num_ranks)] == of_ranks
