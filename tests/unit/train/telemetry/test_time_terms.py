"""Test how the times of ranks become terms, and which terms are named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megalite.train.telemetry.time_terms import (
    ActionTimes,
    RankTime,
    TimeSample,
    compare,
    compute_terms,
    sample_in,
    time_sample,
)


def _ranks(*times: Mapping[str, float], pp: tuple[int, ...] | None = None) -> list[RankTime]:
    stages = pp or (0,) * len(times)
    return [
        RankTime(
            rank,
            f"host{rank}",
            {"pp": stages[rank], "dp": rank},
            dict(seconds),
            {("forward", 0): seconds["compute"] / 2} if "compute" in seconds else {},
        )
        for rank, seconds in enumerate(times)
    ]


def _sample(
    *times: Mapping[str, float],
    pp: tuple[int, ...] | None = None,
    num_iterations: int = 1,
    between: Mapping[str, float] = {},
) -> TimeSample:
    layout = {"pp": len(set(pp or (0,))), "dp": len(times)}
    return time_sample(7, num_iterations, _ranks(*times, pp=pp), layout, between, _two_microbatches)


def _two_microbatches(stages: Sequence[ActionTimes]) -> float:
    """Return the time of GPipe with one kind of action: a microbatch, and one behind the slowest stage."""
    seconds = [sum(times.values()) for times in stages]
    return sum(seconds) + max(seconds)


def test_the_rank_that_waits_least_is_compared_with_its_peers() -> None:
    slow, usual = {"compute": 5.0, "dp wait": 0.5}, {"compute": 2.0, "dp wait": 3.5}
    sample = _sample(usual, slow, usual)
    assert (sample.rank, sample.host, sample.compared) == (1, "host1", 2)
    assert sample.seconds == {"compute": 2.0, "straggler": 3.0, "dp wait": 0.5}


def test_ranks_are_compared_within_their_stage() -> None:
    long, short = {"compute": 5.0, "pp wait": 0.0}, {"compute": 2.0, "pp wait": 3.0}
    assert _sample(long, long, short, short, pp=(0, 0, 1, 1)).seconds["straggler"] == 0.0
    slower, early = {"compute": 9.0, "pp wait": 0.0}, {"compute": 5.0, "pp wait": 4.0}
    seconds = _sample(early, slower, short, short, pp=(0, 0, 1, 1)).seconds
    assert seconds == {
        "compute": 2.0,
        "straggler": 4.0,
        "stage imbalance": 3.0,
        "bubble": 0.0,
        "pp wait": 0.0,
    }


def test_a_wait_for_a_slow_stage_is_not_the_bubble() -> None:
    """Two microbatches pass 3 stages in (2 + 2 + 1) + 2 s, of which the slow stage computes 4 s."""
    slow, usual, fast = ({"compute": each, "pp wait": 7.5 - each} for each in (4.0, 4.0, 2.0))
    even = _sample(slow, usual, fast, pp=(0, 1, 2))
    assert even.seconds == {
        "compute": 4.0,
        "straggler": 0.0,
        "stage imbalance": 0.0,
        "bubble": 3.0,
        "pp wait": 0.5,
    }
    fast = {"compute": 2.0, "pp wait": 5.5}
    uneven = _sample(slow, fast, fast, pp=(0, 1, 2))
    assert uneven.seconds == {
        "compute": 2.0,
        "straggler": 0.0,
        "stage imbalance": 2.0,
        "bubble": 2.0,
        "pp wait": 1.5,
    }
    assert sum(uneven.seconds.values()) == 7.5
    evidence = [line.split(": ")[1] for line in compare([uneven], {"compute": 2.0}).findings()]
    assert evidence[0] == (
        "the stage of rank 0 (host0, pp 0 dp 0) computes 2000.0 ms longer than the median of 3 stages in "
        "iteration 7; likely cause"
    )


def test_an_iteration_without_actions_has_no_bubble() -> None:
    seconds = _sample({"data": 1.0, "pp wait": 2.0}, {"pp wait": 2.5}, pp=(0, 1)).seconds
    assert (seconds["bubble"], seconds["pp wait"]) == (0.0, 2.0)


def test_kernels_and_the_gaps_between_them_are_the_computation() -> None:
    kernels = {"GEMMs": 2.0, "attention": 1.0, "memory-bound kernels": 1.0}
    assert compute_terms(5.0, kernels) == kernels | {"kernel launches": 1.0}
    halved = {name: seconds / 2 for name, seconds in kernels.items()}
    assert compute_terms(2.0, kernels) == halved | {"kernel launches": 0.0}
    assert compute_terms(2.0, None) == {"compute": 2.0}


def test_the_kernels_are_those_of_the_usual_rank() -> None:
    usual, slow = {"GEMMs": 2.0, "kernel launches": 1.0}, {"GEMMs": 2.5, "kernel launches": 4.0}
    seconds = _sample(slow | {"dp wait": 0.0}, usual | {"dp wait": 3.5}).seconds
    assert seconds == usual | {"straggler": 3.5, "dp wait": 0.0}


def test_a_plan_has_no_more_terms_than_the_run() -> None:
    planned = {"GEMMs": 2.0, "kernel launches": 1.0, "dp wait": 0.5}
    whole, split = _sample({"compute": 4.0}), _sample({"GEMMs": 3.0, "kernel launches": 1.0})
    for samples in ([whole], [whole, split]):
        (term,) = compare(samples, planned, "the plan").slow_terms()
        assert (term.name, term.seconds, term.expected) == ("compute", 4.0, 3.0)
    (term,) = compare([split], planned, "the plan").slow_terms()
    assert (term.name, term.lost) == ("GEMMs", 1.0)


def test_one_rank_has_no_peers() -> None:
    sample = _sample({"compute": 2.0, "data": 1.0})
    assert sample.seconds == {"compute": 2.0, "straggler": 0.0, "data": 1.0}


def test_terms_add_up_to_the_time_of_an_iteration() -> None:
    """An evaluation of 6 s in every 3 iterations takes 2 s of each."""
    between = {"evaluation": 6.0, "garbage collection": 3.0}
    sample = _sample({"compute": 2.0, "garbage collection": 0.5}, num_iterations=3, between=between)
    comparison = compare([sample])
    assert {term.name: term.seconds for term in comparison.terms} == {
        "compute": 2.0,
        "straggler": 0.0,
        "garbage collection": 1.5,
        "evaluation": 2.0,
    }
    assert (comparison.seconds, comparison.expected) == (5.5, 2.0)
    assert [term.name for term in comparison.slow_terms()] == ["evaluation", "garbage collection"]
    assert comparison.summary().endswith("; also garbage collection 27%")


def test_computation_is_compared_with_the_fastest() -> None:
    samples = [_sample({"compute": seconds}) for seconds in (1.0, 1.0, 4.0)]
    (slow,) = compare(samples).slow_terms()
    assert (slow.name, slow.seconds, slow.expected) == ("compute", 2.0, 1.0)
    assert compare(samples[:2]).summary() == ""


def test_a_plan_expects_its_terms_and_nothing_else() -> None:
    sample = _sample({"compute": 3.0, "dp wait": 2.0, "data": 1.0})
    comparison = compare([sample], {"compute": 3.0, "dp wait": 1.5, "pp wait": 0.25}, "the plan")
    lost = {term.name: term.lost for term in comparison.terms if term.lost}
    assert lost == {"dp wait": 0.5, "data": 1.0}
    assert [line.split()[0] for line in comparison.findings()] == ["data"]  # 0.5 of 6 is less than 10%
    *_, total = comparison.table()
    assert total == ("iteration", "6000.0", "4750.0", "+1250.0", "100%")


def test_evidence_says_how_often_a_rank_is_the_last() -> None:
    slow, usual = {"compute": 5.0, "dp wait": 0.0}, {"compute": 2.0, "dp wait": 3.0}
    samples = [_sample(slow, usual), _sample(usual, slow), _sample(slow, usual)]
    assert "rank 0 (host0, pp 0 dp 0) computes 3000.0 ms longer" in compare(samples).summary()
    assert "and is the last in 2 of 3;" in compare(samples).summary()


@pytest.mark.parametrize(
    "change",
    [
        {"num_iterations": 0},
        {"rank": "first"},
        {"seconds": {"compute": -1.0}},
        {"seconds": {"compute": "NaN"}},
        {"between": None},
        {"new": 1},
    ],
    ids=str,
)
def test_a_damaged_record_is_no_sample(change: dict[str, Any]) -> None:
    sample = _sample({"compute": 1.0}, between={"saving": 1.0})
    record = json.loads(json.dumps(dataclasses.asdict(sample)))
    assert sample_in(record) == sample
    assert sample_in(record | change) is None
