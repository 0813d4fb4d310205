"""Who is named for a hang, and in what words."""

import json
from dataclasses import asdict, replace

from megalite.train.health.hang_report import find_absence, numbers, report
from megalite.train.health.standing import Place, Standing

DP, TP = (0, 2), (0, 1)


def waits(rank: int, over: tuple[int, ...], *counts: tuple[tuple[int, ...], int]) -> Standing:
    place = Place("all_reduce over dp in total_loss", "megalite/train/step.py:124", "", over)
    return Standing(rank, "node", 9, 11, 60.0, True, place=place, collectives=counts, stack="its stack")


def works(rank: int) -> Standing:
    place = Place("take", "megalite/train/batches.py:131", "forward of microbatch 3")
    return replace(waits(rank, ()), place=place)


def test_who_does_not_wait_is_missing() -> None:
    standings = {0: waits(0, DP), 1: works(1), 2: waits(2, DP)}
    assert find_absence(standings, set()).ranks == (1,)
    assert find_absence(standings, {2}).ranks == (1, 2)
    assert find_absence({0: waits(0, DP), 1: replace(waits(1, DP), has_left=True)}, set()).ranks == (1,)


def test_a_rank_that_waits_elsewhere_with_fewer_collectives_is_missing() -> None:
    standings = {0: waits(0, DP, (DP, 7)), 2: waits(2, TP, (DP, 6))}
    assert find_absence(standings, set()).ranks == (2,)


def test_a_count_is_compared_only_where_somebody_waits() -> None:
    standings = {0: waits(0, TP, (TP, 4), (DP, 7)), 1: waits(1, TP, (TP, 4)), 2: waits(2, TP, (DP, 6))}
    assert find_absence(standings, set()).ranks == ()


def test_ranks_at_one_place_share_a_line_and_the_missing_come_first() -> None:
    standings = {rank: waits(rank, (0, 1, 2, 3)) for rank in (0, 1, 3)} | {2: works(2)}
    assert report(standings, set(), 61.2, "save/hang_0000011/") == (
        "error: hang: no rank has made progress for 61 s\n"
        "  did not arrive: rank 2 (the others wait, or cannot go on without them)\n"
        "  rank 2: iteration 12, take (megalite/train/batches.py:131), in forward of microbatch 3 for 60 s, "
        "on node\n"
        "  ranks 0-1, 3: iteration 12, all_reduce over dp in total_loss "
        "(megalite/train/step.py:124) for 60 s\n"
        "  stacks of every rank that answered: save/hang_0000011/\n"
        "  stack of rank 2:\n"
        "  its stack\n"
    )


def test_silent_ranks_are_told_by_what_was_last_heard_of_them() -> None:
    text = report({0: waits(0, DP), 1: Standing(1, "node7", 3, 10)}, {1, 2}, 60.0, "")
    assert "did not arrive: ranks 1-2" in text
    assert "  rank 1: did not answer; last heard of at iteration 11, on node7\n" in text
    assert "  rank 2: did not answer, and never has\n" in text


def test_nobody_missing_is_said() -> None:
    text = report({0: waits(0, DP), 2: waits(2, DP)}, set(), 60.0, "")
    assert "did not arrive: nobody is missing (every rank waits in a collective, and none is behind" in text
    assert text.count("its stack") == 1


def test_ranks_in_words() -> None:
    assert numbers({3}) == "rank 3"
    assert numbers([5, 0, 1, 2, 8, 9]) == "ranks 0-2, 5, 8-9"


def test_a_standing_travels_as_json() -> None:
    for standing in (waits(0, DP, (DP, 7)), works(1), Standing(2, "node", 1, 0)):
        assert Standing.of(json.loads(json.dumps(asdict(standing)))) == standing
