"""Every schedule of SCHEDULES runs to its end on paper, with the bubble and memory that the papers give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.pipeline.schedule import SCHEDULES, Kind, forward_only
from megalite.pipeline.simulate import simulate

SIZES = (st.integers(1, 12), st.integers(1, 40))
PEAKS = {
    "1f1b": lambda rank, num_ranks, num_microbatches: min(num_ranks - rank, num_microbatches),
    "gpipe": lambda rank, num_ranks, num_microbatches: num_microbatches,
}


def timeline_of(schedule, num_ranks, num_microbatches, duration):
    return simulate([schedule(rank, num_ranks, num_microbatches) for rank in range(num_ranks)], duration)


def test_every_schedule_is_tested():
    assert PEAKS.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("name", SCHEDULES)
@given(*SIZES, st.integers(1, 5), st.integers(1, 5))
def test_time_and_bubble_are_the_papers(name, num_ranks, num_microbatches, forward, backward):
    lengths = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    timeline = timeline_of(
        SCHEDULES[name], num_ranks, num_microbatches, lambda rank, action: lengths[action.kind]
    )
    assert timeline.makespan == (num_microbatches + num_ranks - 1) * (forward + backward)
    assert timeline.bubble_fraction == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1))
    ideal = num_microbatches * (forward + backward)
    assert (timeline.makespan - ideal) / ideal == pytest.approx((num_ranks - 1) / num_microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
@given(*SIZES)
def test_peak_in_flight(name, num_ranks, num_microbatches):
    timeline = timeline_of(SCHEDULES[name], num_ranks, num_microbatches, lambda rank, action: 1)
    expected = [PEAKS[name](rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    assert list(timeline.peaks_in_flight) == expected


@pytest.mark.parametrize("name", SCHEDULES)
@given(*SIZES)
def test_gradients_add_up_in_the_order_of_microbatches(name, num_ranks, num_microbatches):
    for rank in range(num_ranks):
        actions = SCHEDULES[name](rank, num_ranks, num_microbatches)
        for kind in Kind:
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(num_microbatches))


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.data(), *SIZES)
def test_a_slow_stage_sets_the_pace(name, data, num_ranks, num_microbatches):
    """Between what no order could beat and what stages as slow as the slowest would take."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=num_ranks, max_size=num_ranks))
    timeline = timeline_of(SCHEDULES[name], num_ranks, num_microbatches, lambda rank, action: lengths[rank])
    ways_in = [sum(lengths[:rank]) for rank in range(num_ranks)]
    least = [2 * (num_microbatches * own + way) for own, way in zip(lengths, ways_in, strict=True)]
    assert timeline.makespan >= max(least)
    assert timeline.makespan <= 2 * (num_microbatches + num_ranks - 1) * max(lengths)


@given(*SIZES)
def test_an_evaluation_streams_through(num_ranks, num_microbatches):
    timeline = timeline_of(forward_only, num_ranks, num_microbatches, lambda rank, action: 1)
    assert timeline.makespan == num_microbatches + num_ranks - 1
