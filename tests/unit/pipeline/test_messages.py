import pytest

from megalite.pipeline.messages import Batch, StageMessage, plan_rank, plan_steps
from megalite.pipeline.schedules import SCHEDULES, Action, ActionKind, StageMap

F0, F1 = (Action(ActionKind.FORWARD, number) for number in range(2))
B0, B1 = (Action(ActionKind.BACKWARD, number) for number in range(2))


def steps_of(schedule, num_ranks, num_microbatches, num_chunks=None):
    stages = SCHEDULES[schedule].stage_map(num_ranks, num_chunks)
    orders = [SCHEDULES[schedule].train(rank, stages, num_microbatches) for rank in range(num_ranks)]
    return plan_steps(orders, stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_plans_for_itself_what_all_plan_together(schedule):
    stages = SCHEDULES[schedule].stage_map(3)
    orders = [SCHEDULES[schedule].train(rank, stages, 7) for rank in range(3)]
    assert [plan_rank(rank, orders, stages) for rank in range(3)] == plan_steps(orders, stages)


def test_one_rank_sends_nothing():
    assert steps_of("1f1b", 1, 2) == [[F0, B0, F1, B1]]


def test_each_direction_has_its_own_batches_and_what_is_sent_is_first():
    first, second = steps_of("1f1b", 2, 3)
    F2, B2 = Action(ActionKind.FORWARD, 2), Action(ActionKind.BACKWARD, 2)
    assert first == [
        F0,
        Batch(StageMessage(0, 1, F0)),
        F1,
        Batch(StageMessage(0, 1, F1)),
        Batch(None, (StageMessage(1, 0, B0),)),
        B0,
        F2,
        Batch(StageMessage(0, 1, F2)),
        Batch(None, (StageMessage(1, 0, B1),)),
        Batch(None, (StageMessage(1, 0, B2),)),  # comes while the backward runs, which sends nothing
        B1,
        B2,
    ]
    assert second == [
        Batch(None, (StageMessage(0, 1, F0),)),
        Batch(None, (StageMessage(0, 1, F1),)),
        F0,
        B0,
        Batch(StageMessage(1, 0, B0)),
        F1,
        B1,
        Batch(StageMessage(1, 0, B1)),
        Batch(None, (StageMessage(0, 1, F2),)),
        F2,
        B2,
        Batch(StageMessage(1, 0, B2)),
    ]


def test_messages_of_one_direction_meet_in_one_batch():
    """A rank in the middle passes microbatch 0 on as it takes microbatch 1."""
    steps = steps_of("gpipe", 3, 2)[1]
    assert Batch(StageMessage(1, 2, F0), (StageMessage(0, 1, F1),)) in steps


def test_weight_gradients_run_under_messages():
    """What the next forward reads is started before the weights' gradients in front of it."""
    steps = steps_of("zb-h1", 2, 4)[0]
    W0, F2 = Action(ActionKind.BACKWARD_WEIGHT, 0), Action(ActionKind.FORWARD, 2)
    I0, I1 = (Action(ActionKind.BACKWARD_INPUT, number) for number in range(2))
    start = steps.index(I0)
    assert steps[start : start + 4] == [I0, Batch(None, (StageMessage(1, 0, I1),)), W0, F2]


def test_nothing_is_sent_where_the_pipeline_turns():
    first, second = (Action(ActionKind.FORWARD, 0, chunk) for chunk in range(2))
    assert plan_steps([[first, second]] * 2, StageMap(2, 2, v_shaped=True)) == [
        [first, Batch(StageMessage(0, 1, first), (StageMessage(1, 0, second),)), second],
        [Batch(None, (StageMessage(0, 1, first),)), first, second, Batch(StageMessage(1, 0, second))],
    ]
