"""Every schedule of SCHEDULES runs to its end on paper, with the bubble and memory that the papers give."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.pipeline.messages import Batch, compute_times, plan_steps
from megalite.pipeline.schedules import SCHEDULES, ActionKind, StageMap, actions_by_rank, peak_in_flight
from megalite.pipeline.simulator import run_steps, simulate

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 14), st.integers(2, 4))
"""Ranks, microbatches, chunks of a schedule that lets the user choose."""


def interleaved_peak(rank, num_ranks, num_microbatches, num_chunks):
    groups = max(num_microbatches // num_ranks, 1)
    ahead = (num_chunks - 1) * -(-num_microbatches // groups) + 2 * (num_ranks - rank - 1)
    return min(ahead + 1, num_microbatches * num_chunks)


PEAKS = {
    "1f1b": lambda rank, ranks, microbatches, chunks: min(ranks - rank, microbatches),
    "gpipe": lambda rank, ranks, microbatches, chunks: microbatches,
    "interleaved": interleaved_peak,
    "zb-h1": lambda rank, ranks, microbatches, chunks: min(ranks, microbatches),
    "zb-v": lambda rank, ranks, microbatches, chunks: min(2 * ranks, 2 * microbatches),
    "dualpipev": lambda rank, ranks, microbatches, chunks: min(2 * ranks + 1, 2 * microbatches),
}
FULL = {"zb-v": lambda ranks: 2 * ranks - 1, "dualpipev": lambda ranks: 2 * ranks}
"""Microbatches from which on a V is full, by the number of ranks."""


def stage_map(name, sizes):
    return SCHEDULES[name].stage_map(sizes[0], sizes[2])


def timeline_of(name, sizes, lengths):
    """Runs a training step whose actions take a time by kind."""
    stages = stage_map(name, sizes)
    actions = actions_by_rank(SCHEDULES[name].train, stages, sizes[1])
    return simulate(actions, stages, lambda rank, action: lengths[action.kind])


def usual(forward=1, backward=2):
    half = backward / 2
    return dict(zip(ActionKind, (forward, backward, half, half), strict=True))


def bubble_to_work(timeline):
    """Idle time over busy time, the papers' (p - 1) / m for 1F1B."""
    return 1 / (1 - timeline.bubble_fraction) - 1


FEW_SIZES = settings(max_examples=40)
"""For tests that run for each schedule."""


def test_every_schedule_is_tested():
    assert PEAKS.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@FEW_SIZES
@given(SIZES, st.integers(1, 5), st.integers(1, 5))
def test_time_and_bubble_are_the_papers(name, sizes, forward, backward):
    num_ranks, num_microbatches, _ = sizes
    timeline = timeline_of(name, sizes, usual(forward, backward))
    assert timeline.makespan == (num_microbatches + num_ranks - 1) * (forward + backward)
    assert timeline.bubble_fraction == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1))
    assert bubble_to_work(timeline) == pytest.approx((num_ranks - 1) / num_microbatches)


@given(SIZES, st.integers(1, 4), st.integers(1, 5), st.integers(1, 2))
def test_chunks_divide_the_bubble(sizes, num_groups, forward, ratio):
    """Narayanan et al. 2021, section 2.2.2, for a backward as long as a forward or two."""
    num_ranks, _, num_chunks = sizes
    sizes = (num_ranks, num_groups * num_ranks, num_chunks)
    timeline = timeline_of("interleaved", sizes, usual(forward, ratio * forward))
    assert bubble_to_work(timeline) == pytest.approx((num_ranks - 1) / (num_chunks * sizes[1]))


@given(SIZES)
def test_any_number_of_microbatches_that_feeds_all_ranks_will_do(sizes):
    num_ranks, num_microbatches, num_chunks = sizes
    num_microbatches += num_ranks
    timeline = timeline_of("interleaved", (num_ranks, num_microbatches, num_chunks), usual())
    assert bubble_to_work(timeline) == pytest.approx((num_ranks - 1) / (num_chunks * num_microbatches))


@given(SIZES)
def test_apart_weight_gradients_leave_a_third_of_the_bubble(sizes):
    """Qi et al. 2023, table 2: (p - 1)(F + B - W) where 1F1B has (p - 1)(F + B + W)."""
    num_ranks, num_microbatches, _ = sizes
    num_microbatches += num_ranks
    timeline = timeline_of("zb-h1", (num_ranks, num_microbatches, 1), usual())
    assert bubble_to_work(timeline) == pytest.approx((num_ranks - 1) / (3 * num_microbatches))


@given(SIZES)
def test_a_v_waits_only_for_the_first_microbatch(sizes):
    """Ranks wait until it reaches them at one end, and as long at the other: p - 1 forwards of a chunk."""
    num_ranks, num_microbatches, _ = sizes
    num_microbatches += 2 * num_ranks - 2
    timeline = timeline_of("zb-v", (num_ranks, num_microbatches, 2), usual())
    assert timeline.makespan == 6 * num_microbatches + num_ranks - 1


@given(SIZES, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_pairs_of_actions_have_at_most_the_bubble_of_dualpipe_v(sizes, forward, of_input, of_weight):
    """DeepSeek-AI 2025: (p - 1)(F&B + B - 3W), where both B have both parts, if W <= F <= B."""
    num_ranks, num_microbatches, _ = sizes
    num_microbatches += 2 * num_ranks - 1
    of_weight, forward, of_input = sorted((forward, of_input, of_weight))
    lengths = dict(zip(ActionKind, (forward, 0, of_input, of_weight), strict=True))
    stages = stage_map("dualpipev", (num_ranks, num_microbatches, 2))
    actions = actions_by_rank(SCHEDULES["dualpipev"].train, stages, num_microbatches)
    times = compute_times(actions, stages, lambda rank, action: lengths[action.kind])
    makespan = max(span.end for span in times.values())
    work = 2 * num_microbatches * (forward + of_input + of_weight)
    assert makespan <= work + (num_ranks - 1) * (forward + 2 * of_input - of_weight)
    if forward == of_input == of_weight:
        assert makespan == work + (num_ranks - 1) * forward


def test_a_pair_waits_for_both_inputs_and_sends_both_outputs_at_its_end():
    """Later ranks are faster, so that some wait for the input of a backward."""
    stages = stage_map("dualpipev", (3, 8, 2))
    actions = actions_by_rank(SCHEDULES["dualpipev"].train, stages, 8)
    times = compute_times(actions, stages, lambda rank, action: 9 - 4 * rank)
    pairs = [(rank, pair) for rank in range(3) for pair in stages.groups(actions[rank]) if len(pair) == 2]
    assert [rank for rank, _ in pairs] == [0] * 8 + [1] * 9 + [2] * 10
    for rank, pair in pairs:
        forward, backward = (times[rank, action] for action in pair)
        assert forward == backward
        assert forward.end - forward.start == 2 * (9 - 4 * rank)
        sources = [stages.source_of(rank, action) for action in pair]
        assert all(times[source].end <= forward.start for source in sources if source is not None)


@pytest.mark.parametrize("name", SCHEDULES)
@FEW_SIZES
@given(SIZES)
def test_peak_in_flight(name, sizes):
    timeline = timeline_of(name, sizes, usual())
    expected = [PEAKS[name](rank, *sizes) for rank in range(sizes[0])]
    if sizes[1] < FULL.get(name, lambda ranks: 1)(sizes[0]):
        assert all(peak <= most for peak, most in zip(timeline.peaks_in_flight, expected, strict=True))
    else:
        assert list(timeline.peaks_in_flight) == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_registry_agrees_with_the_actions(name):
    """On 4 ranks: whether the backward is split, and whether the peak in flight grows with microbatches."""
    schedule, stages = SCHEDULES[name], SCHEDULES[name].stage_map(4)
    few, many = (actions_by_rank(schedule.train, stages, number) for number in (16, 32))
    kinds = {action.kind for own in few for action in own}
    backwards = {ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT}
    assert kinds - {ActionKind.FORWARD} == (backwards if schedule.splits_backward else {ActionKind.BACKWARD})
    grows = [peak_in_flight(more) > peak_in_flight(less) for more, less in zip(many, few, strict=True)]
    assert grows == [schedule.keeps_all_microbatches] * 4


@pytest.mark.parametrize("name", SCHEDULES)
@FEW_SIZES
@given(SIZES)
def test_gradients_add_up_in_the_order_of_microbatches(name, sizes):
    stages = stage_map(name, sizes)
    for actions in actions_by_rank(SCHEDULES[name].train, stages, sizes[1]):
        kinds = {action.kind for action in actions}
        for kind in kinds:
            for chunk in range(stages.num_chunks):
                own = [a.microbatch for a in actions if (a.kind, a.chunk) == (kind, chunk)]
                assert own == list(range(sizes[1]))


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
@FEW_SIZES
@given(SIZES)
def test_messages_never_hold_a_schedule_up(name, evaluates, sizes):
    """A queue of rendezvous a direction takes no longer than messages that are never in each other's way."""
    stages = stage_map(name, sizes)
    order = SCHEDULES[name].evaluate if evaluates else SCHEDULES[name].train
    actions = actions_by_rank(order, stages, sizes[1])

    def duration(rank, action):
        return action.kind.units

    slots = run_steps(plan_steps(actions, stages), stages, duration)
    free = compute_times(actions, stages, duration)
    assert all(
        (slot.start, slot.end) == free[rank, slot.action] for rank, row in enumerate(slots) for slot in row
    )


@pytest.mark.parametrize("name", SCHEDULES)
@FEW_SIZES
@given(SIZES)
def test_receives_start_no_earlier_than_they_must(name, sizes):
    """A receive holds a buffer: it starts before the action in which its message is sent, never earlier.

    If that action sends nothing, the message may come until the next one begins.
    """
    stages = stage_map(name, sizes)
    actions = actions_by_rank(SCHEDULES[name].train, stages, sizes[1])
    times = compute_times(actions, stages, lambda rank, action: action.kind.units)
    for rank, steps in enumerate(plan_steps(actions, stages)):
        spans = [times[rank, action] for action in actions[rank]]
        unread, num_done = set(), 0
        for step in steps:
            if isinstance(step, Batch):
                unread.update(message.reader for message in step.receives)
                following = [span.start for span in spans[num_done + 1 : num_done + 2]]
                for message in step.receives:
                    source = stages.source_of(rank, message.reader)
                    assert times[source].end <= max(spans[num_done].end, *following, 0)
            else:
                unread.discard(step)
                num_done += 1
            assert len(unread) <= 2 or stages.num_chunks > 1


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
@FEW_SIZES
@given(st.data(), SIZES)
def test_no_speed_of_any_rank_makes_a_deadlock(name, evaluates, data, sizes):
    """Order and batches are those of the usual times, whatever they are; each channel keeps its order."""
    stages = stage_map(name, sizes)
    order = SCHEDULES[name].evaluate if evaluates else SCHEDULES[name].train
    random = data.draw(st.randoms(use_true_random=False))
    actions = actions_by_rank(order, stages, sizes[1])
    timeline = simulate(actions, stages, lambda rank, action: random.choice((0, 1, 5, 100)))
    assert [[slot.action for slot in row] for row in timeline.slots] == actions


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@given(st.data(), SIZES)
def test_a_slow_stage_sets_the_pace(name, data, sizes):
    """Between what no order could beat and what stages as slow as the slowest would take."""
    num_ranks, num_microbatches, _ = sizes
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=num_ranks, max_size=num_ranks))
    stages = stage_map(name, sizes)
    actions = actions_by_rank(SCHEDULES[name].train, stages, num_microbatches)
    timeline = simulate(actions, stages, lambda rank, action: lengths[rank])
    ways_in = [sum(lengths[:rank]) for rank in range(num_ranks)]
    least = [2 * (num_microbatches * own + way) for own, way in zip(lengths, ways_in, strict=True)]
    assert timeline.makespan >= max(least)
    assert timeline.makespan <= 2 * (num_microbatches + num_ranks - 1) * max(lengths)


@pytest.mark.parametrize("name", SCHEDULES)
@FEW_SIZES
@given(SIZES)
def test_an_evaluation_streams_through(name, sizes):
    """Ranks wait for nothing but the first microbatch's way to them and the last one's way on from them."""
    num_ranks, num_microbatches, _ = sizes
    if name == "interleaved" and num_microbatches < num_ranks:
        num_microbatches += num_ranks
    stages = stage_map(name, sizes)
    actions = actions_by_rank(SCHEDULES[name].evaluate, stages, num_microbatches)
    timeline = simulate(actions, stages, lambda rank, action: 1)
    work = num_microbatches * stages.num_chunks
    if stages.v_shaped:
        assert timeline.makespan <= work + 2 * num_ranks - 1
    else:
        assert timeline.makespan == work + num_ranks - 1


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
