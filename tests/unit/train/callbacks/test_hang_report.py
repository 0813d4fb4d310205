"""The ranks that are named for a hang, and the text that names them."""

from dataclasses import replace

from megalite.train.callbacks.hang_report import RankStatus, find_late_ranks, number_ranks, report

DP, TP = (0, 2), (0, 1)


def waits(rank: int, over: tuple[int, ...], *counts: tuple[tuple[int, ...], int]) -> RankStatus:
    return RankStatus(
        rank,
        "node",
        9,
        11,
        60.0,
        True,
        activity="all-reduce of the loss over dp",
        waits_for=over,
        collectives=counts,
        stack="its stack",
    )


def works(rank: int) -> RankStatus:
    activity = "reading data from sample 8 on, in forward of microbatch 1"
    return replace(waits(rank, ()), activity=activity, waits_for=None)


def test_a_rank_that_does_not_wait_is_late() -> None:
    statuses = {0: waits(0, DP), 1: works(1), 2: waits(2, DP)}
    assert find_late_ranks(statuses, set())[0] == (1,)
    assert find_late_ranks(statuses, {2})[0] == (1, 2)
    assert find_late_ranks({0: waits(0, DP), 1: replace(waits(1, DP), has_left=True)}, set())[0] == (1,)


def test_a_rank_that_waits_elsewhere_with_fewer_collectives_is_late() -> None:
    statuses = {0: waits(0, DP, (DP, 7)), 2: waits(2, TP, (DP, 6))}
    assert find_late_ranks(statuses, set())[0] == (2,)


def test_a_count_is_compared_only_where_a_rank_waits() -> None:
    statuses = {0: waits(0, TP, (TP, 4), (DP, 7)), 1: waits(1, TP, (TP, 4)), 2: waits(2, TP, (DP, 6))}
    assert find_late_ranks(statuses, set())[0] == ()


def test_ranks_at_one_position_share_a_line_and_late_ones_come_first() -> None:
    statuses = {rank: waits(rank, (0, 1, 2, 3)) for rank in (0, 1, 3)} | {2: works(2)}
    assert report(statuses, set(), 61.2, "save/hang_0000011/") == (
        "error: hang: no rank has made progress for 61 s\n"
        "  did not arrive: rank 2 (the others wait, or cannot continue without them)\n"
        "  rank 2: iteration 12, reading data from sample 8 on, in forward of microbatch 1 for 60 s, "
        "on node\n"
        "  ranks 0-1, 3: iteration 12, all-reduce of the loss over dp for 60 s\n"
        "  stacks of every rank that answered: save/hang_0000011/\n"
        "  stack of rank 2:\n"
        "  its stack\n"
    )


def test_silent_ranks_are_reported_by_their_last_status() -> None:
    text = report({0: waits(0, DP), 1: RankStatus(1, "node7", 3, 10)}, {1, 2}, 60.0, "")
    assert "did not arrive: ranks 1-2" in text
    assert "  rank 1: did not answer; last status: iteration 11, on node7\n" in text
    assert "  rank 2: did not answer, and never has\n" in text


def test_a_report_without_late_ranks_says_so() -> None:
    text = report({0: waits(0, DP), 2: waits(2, DP)}, set(), 60.0, "")
    assert "did not arrive: no rank is missing (every rank waits in a collective, and none is behind" in text
    assert text.count("its stack") == 1


def test_rank_numbers_as_text() -> None:
    assert number_ranks({3}) == "rank 3"
    assert number_ranks([5, 0, 1, 2, 8, 9]) == "ranks 0-2, 5, 8-9"


def test_a_status_travels_as_json() -> None:
    for status in (waits(0, DP, (DP, 7)), works(1), RankStatus(2, "node", 1, 0)):
        assert RankStatus.from_json(status.to_json()) == status
