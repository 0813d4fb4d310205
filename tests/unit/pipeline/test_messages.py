from megalite.pipeline.messages import Batch, Message, steps_of
from megalite.pipeline.schedule import Action, Kind, gpipe, one_f_one_b

F0, F1 = (Action(Kind.FORWARD, number) for number in range(2))
B0, B1 = (Action(Kind.BACKWARD, number) for number in range(2))


def test_one_rank_sends_nothing():
    assert steps_of(one_f_one_b(0, 1, 2), 0, 1) == [F0, B0, F1, B1]


def test_both_directions_meet_in_one_batch():
    assert steps_of(one_f_one_b(0, 2, 2), 0, 2) == [
        F0,
        Batch(Message(0, 1, F0), None),
        F1,
        Batch(Message(0, 1, F1), Message(1, 0, B0)),
        B0,
        Batch(None, Message(1, 0, B1)),
        B1,
    ]
    assert steps_of(one_f_one_b(1, 2, 2), 1, 2) == [
        Batch(None, Message(0, 1, F0)),
        F0,
        B0,
        Batch(Message(1, 0, B0), Message(0, 1, F1)),
        F1,
        B1,
        Batch(Message(1, 0, B1), None),
    ]


def test_a_middle_rank_passes_on_what_it_gets():
    assert steps_of(gpipe(1, 3, 2), 1, 3) == [
        Batch(None, Message(0, 1, F0)),
        F0,
        Batch(Message(1, 2, F0), Message(0, 1, F1)),
        F1,
        Batch(Message(1, 2, F1), Message(2, 1, B0)),
        B0,
        Batch(Message(1, 0, B0), Message(2, 1, B1)),
        B1,
        Batch(Message(1, 0, B1), None),
    ]


def test_the_last_rank_hands_a_chunk_to_the_first_ones_next():
    first, second = (Action(Kind.FORWARD, 0, chunk) for chunk in range(2))
    assert steps_of([first, second], 1, 2) == [
        Batch(None, Message(0, 1, first)),
        first,
        Batch(Message(1, 0, second), Message(0, 1, second)),
        second,
    ]
