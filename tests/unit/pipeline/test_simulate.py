"""The simulator tells apart what can run and what can't: each wrong schedule is caught, and said why."""

import subprocess
import sys

import pytest

from megalite.pipeline.schedule import Action, Kind, one_f_one_b
from megalite.pipeline.simulate import ScheduleError, simulate

F0, F1, F2 = (Action(Kind.FORWARD, number) for number in range(3))
B0, B1 = (Action(Kind.BACKWARD, number) for number in range(2))


def run(*actions):
    return simulate(actions, lambda rank, action: 1)


def starts(timeline):
    return [[slot.start for slot in row] for row in timeline.slots]


def test_times_by_hand():
    timeline = run([F0, F1, B0, B1], [F0, B0, F1, B1])
    assert starts(timeline) == [[0, 1, 3, 5], [1, 2, 3, 4]]
    assert [slot.action for slot in timeline.slots[1]] == [F0, B0, F1, B1]
    assert timeline.makespan == 6
    assert timeline.bubble_fraction == pytest.approx(1 / 3)
    assert timeline.peaks_in_flight == (2, 1)


def test_a_send_without_a_receive_beside_it_does_not_stop_the_sender():
    timeline = simulate([[F0, F1, F2], [F0, F1, F2]], lambda rank, action: 1 if rank == 0 else 10)
    assert starts(timeline) == [[0, 1, 2], [1, 11, 21]]


def test_a_receive_waits_for_the_send_beside_it():
    """As on NCCL, where a batch is one operation: rank 1 gets microbatch 2 once rank 2 takes microbatch 1."""
    timeline = simulate([[F0, F1, F2]] * 3, lambda rank, action: 10 if rank == 2 else 1)
    assert starts(timeline) == [[0, 1, 2], [1, 2, 12], [2, 12, 22]]


def test_batches_to_different_ranks_keep_one_queue():
    """Rank 0 sends rank 2, which is long busy, a gradient, then rank 1, which is free, hidden states."""
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD}
    orders = [  # kind, microbatch, chunk
        "F00 F01 F10 B01 F20 F11 B00 F21 B11 B21 B10 B20",
        "F00 F01 F10 B01 F20 B00 F11 F21 B11 B21 B10 B20",
        "F00 F01 B01 F10 B00 F20 F11 B11 F21 B21 B10 B20",
    ]
    actions = [[Action(kinds[a[0]], int(a[1]), int(a[2])) for a in order.split()] for order in orders]
    timeline = simulate(actions, lambda rank, action: 100 if (rank, action) == (2, F1) else 1)
    when = [{slot.action: slot for slot in row} for row in timeline.slots]
    assert when[0][F2].end < when[1][F2].start == when[2][F1].end


def test_backward_before_forward():
    with pytest.raises(ScheduleError, match="rank 1 runs backward 0 before forward 0"):
        run([F0, B0], [B0, F0])


def test_twice():
    with pytest.raises(ScheduleError, match="rank 0 runs forward 0 twice"):
        run([F0, F0, B0])


def test_a_lost_backward():
    with pytest.raises(ScheduleError, match="rank 0 never runs the backward of forward 1"):
        run([F0, F1, B0])


def test_crossed_order():
    with pytest.raises(
        ScheduleError, match="sends rank 1 the input of forward 0, which expects that of forward 1"
    ):
        run([F0, F1, B0, B1], [F1, F0, B0, B1])


def test_everyone_waits():
    """Rank 0 wants the gradient of microbatch 0 before it gives microbatch 1, which rank 1 wants first."""
    with pytest.raises(ScheduleError) as error:
        run([F0, B0, F1, B1], [F0, F1, B0, B1])
    assert str(error.value) == (
        "no rank can go on: rank 0 waits for rank 1 to give the input of backward 0; "
        "rank 1 waits for rank 0 to give the input of forward 1"
    )


def test_a_rank_that_has_less_to_do():
    with pytest.raises(
        ScheduleError, match=r"rank 0 waits for rank 1 to take the input of forward 1.*rank 1 is done"
    ):
        run(one_f_one_b(0, 2, 2), one_f_one_b(1, 2, 1))


def test_nothing_here_needs_torch():
    program = "import sys, megalite.pipeline.draw; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
