"""The simulator tells apart what can run and what can't: each wrong schedule is caught, and said why."""

import subprocess
import sys

import pytest

from megalite.pipeline.messages import Batch, StageMessage
from megalite.pipeline.schedules import Action, ActionKind, StageMap, one_f_one_b, peak_in_flight
from megalite.pipeline.simulator import ScheduleError, run_steps, simulate

F0, F1, F2 = (Action(ActionKind.FORWARD, number) for number in range(3))
B0, B1 = (Action(ActionKind.BACKWARD, number) for number in range(2))
I0, I1 = (Action(ActionKind.BACKWARD_INPUT, number) for number in range(2))
W0, W1 = (Action(ActionKind.BACKWARD_WEIGHT, number) for number in range(2))
ALONE = StageMap(3)  # no actions run together


def run(*actions, duration=lambda rank, action: 1):
    return simulate(actions, StageMap(len(actions)), duration)


def starts(timeline):
    return [[slot.start for slot in row] for row in timeline.slots]


def test_times_by_hand():
    timeline = run([F0, F1, B0, B1], [F0, B0, F1, B1])
    assert starts(timeline) == [[0, 1, 3, 5], [1, 2, 3, 4]]
    assert [slot.action for slot in timeline.slots[1]] == [F0, B0, F1, B1]
    assert timeline.makespan == 6
    assert timeline.bubble_fraction == pytest.approx(1 / 3)
    assert timeline.peaks_in_flight == (2, 1)


def test_a_send_does_not_stop_the_sender_until_two_are_under_way():
    timeline = run([F0, F1, F2], [F0, F1, F2], duration=lambda rank, action: 1 if rank == 0 else 10)
    assert starts(timeline) == [[0, 1, 2], [1, 11, 21]]


def test_a_batch_is_over_when_all_of_it_has_moved():
    """As on NCCL, where a batch is one operation: rank 1 gets microbatch 1 once rank 2 takes microbatch 0."""
    first, second = StageMessage(1, 2, F0), StageMessage(0, 1, F1)
    steps = [
        [F0, Batch(StageMessage(0, 1, F0)), F1, Batch(second)],
        [Batch(None, (StageMessage(0, 1, F0),)), F0, Batch(first, (second,)), F1],
        [B0, Batch(None, (first,)), F0],
    ]
    slots = run_steps(steps, ALONE, lambda rank, action: 10 if action is B0 else 1)
    assert [slot.start for slot in slots[1]] == [1, 10]


def test_batches_keep_one_queue():
    """Rank 0 sends rank 2, which is long busy, then rank 1, which is free and waits all the same."""
    late, soon = StageMessage(0, 2, F1), StageMessage(0, 1, F0)
    steps = [[F2, Batch(late), Batch(soon)], [Batch(None, (soon,)), F0], [B0, Batch(None, (late,)), F1]]
    slots = run_steps(steps, ALONE, lambda rank, action: 10 if action is B0 else 1)
    assert slots[1][0].start == 10


def test_gradients_do_not_queue_behind_hidden_states():
    """Rank 1 gets its gradient while rank 2, which is long busy, does not take microbatch 0 of rank 0."""
    late, soon = StageMessage(0, 2, F0), StageMessage(0, 1, B1)
    steps = [[F0, Batch(late), Batch(soon)], [Batch(None, (soon,)), B1], [B0, Batch(None, (late,)), F0]]
    slots = run_steps(steps, ALONE, lambda rank, action: 10 if action is B0 else 1)
    assert slots[1][0].start == 1


def test_a_rank_waits_for_the_second_to_last_batch():
    """It computes its third action, but has to wait with the message behind that."""
    messages = [StageMessage(0, 1, action) for action in (F0, F1, F2)]
    steps = [
        [F0, Batch(messages[0]), F1, Batch(messages[1]), F2, Batch(messages[2]), B0],
        [B1, *(step for m in messages for step in (Batch(None, (m,)), m.reader))],
    ]
    slots = run_steps(steps, ALONE, lambda rank, action: 10 if action is B1 else 1)
    assert [slot.start for slot in slots[0]] == [0, 1, 2, 10]


def test_crossed_order():
    steps = [
        [F0, Batch(StageMessage(0, 1, F0)), F1, Batch(StageMessage(0, 1, F1))],
        [Batch(None, (StageMessage(0, 1, F1),)), F1, Batch(None, (StageMessage(0, 1, F0),)), F0],
    ]
    with pytest.raises(
        ScheduleError, match="sends rank 1 the input of forward 0, which expects the input of forward 1"
    ):
        run_steps(steps, ALONE, lambda rank, action: 1)


def test_a_receive_in_front_of_a_send_on_both_sides():
    steps = [
        [Batch(None, (StageMessage(1, 0, F0),)), F0, Batch(StageMessage(0, 1, F1))],
        [Batch(None, (StageMessage(0, 1, F1),)), F1, Batch(StageMessage(1, 0, F0))],
    ]
    with pytest.raises(ScheduleError) as error:
        run_steps(steps, ALONE, lambda rank, action: 1)
    assert str(error.value) == (
        "deadlock: rank 0 waits for rank 1 to send the input of forward 0; "
        "rank 1 waits for rank 0 to send the input of forward 1"
    )


def test_a_message_that_nobody_takes():
    with pytest.raises(
        ScheduleError, match="rank 0 waits for rank 1 to receive the input of forward 0; rank 1 is done"
    ):
        run_steps([[F0, Batch(StageMessage(0, 1, F0))], []], ALONE, lambda rank, action: 1)


def test_backward_before_forward():
    with pytest.raises(ScheduleError, match="rank 1 runs backward 0 before forward 0"):
        run([F0, B0], [B0, F0])


def test_twice():
    with pytest.raises(ScheduleError, match="rank 0 runs forward 0 twice"):
        run([F0, F0, B0])


def test_a_lost_backward():
    with pytest.raises(ScheduleError, match="rank 0 never runs the backward of forward 1"):
        run([F0, F1, B0])


def test_a_lost_weight_gradient():
    with pytest.raises(ScheduleError, match="rank 0 never runs backward weight 1"):
        run([F0, F1, I0, W0, I1])


def test_a_weight_gradient_before_its_input():
    with pytest.raises(ScheduleError, match="rank 0 runs backward weight 0 before backward input 0"):
        run([F0, W0, I0])


def test_what_weights_need_is_kept():
    assert peak_in_flight([F0, I0, F1, I1, W0, W1]) == 2
    assert peak_in_flight([F0, I0, W0, F1, I1, W1]) == 1


def test_an_order_that_another_rank_cannot_follow():
    """Rank 0 wants the gradient of microbatch 0 before it gives microbatch 1, which rank 1 wants first."""
    with pytest.raises(ScheduleError) as error:
        run([F0, B0, F1, B1], [F0, F1, B0, B1])
    assert str(error.value) == (
        "inputs never come: rank 0 for the input of backward 0; rank 1 for the input of forward 1"
    )


def test_a_rank_that_has_less_to_do():
    pair = StageMap(2)
    with pytest.raises(ScheduleError, match="inputs never come: rank 0 for the input of backward 1"):
        run(one_f_one_b(0, pair, 2), one_f_one_b(1, pair, 1))


def test_nothing_here_needs_torch():
    program = "import sys, megalite.pipeline.draw_schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
