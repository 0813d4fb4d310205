"""The slowest rank among its peers, and the time of an iteration that a rank computes."""

from __future__ import annotations

import time

import pytest
import torch

from megalite.distributed.axis import EventStack
from megalite.train.callbacks.straggler import (
    ComputeTime,
    DeviceClock,
    HostClock,
    straggler_line,
    thread_seconds,
)


def time_of(rank: int, pp: int, seconds: float, dp: int = 0) -> ComputeTime:
    return ComputeTime(rank, f"node{rank}", {"pp": pp, "dp": dp, "tp": 0}, seconds)


def test_ranks_are_compared_within_their_stage() -> None:
    times = [time_of(0, 0, 0.2), time_of(1, 0, 0.21, 1), time_of(2, 1, 0.05), time_of(3, 1, 0.08, 1)]
    assert straggler_line(times) == (
        "straggler: rank 3 (node3, pp 1 dp 1 tp 0) computes 80.0 ms an iteration, 1.60 x the median 50.0 ms "
        "of the other rank of its stage; fastest: rank 2 50.0 ms"
    )


def test_with_one_rank_a_stage_all_are_compared() -> None:
    times = [time_of(0, 0, 0.2), time_of(1, 1, 0.1), time_of(2, 2, 0.05)]
    assert straggler_line(times) == (
        "straggler: rank 0 (node0, pp 0 dp 0 tp 0) computes 200.0 ms an iteration, 2.67 x the median 75.0 ms "
        "of the 2 others; fastest: rank 2 50.0 ms"
    )


def test_an_interval_is_the_mean_of_its_iterations() -> None:
    now = 100.0
    clock = HostClock(lambda: now)
    for seconds in (2.0, 3.0):
        clock.begin(is_last=False)
        now += seconds
        clock.end()
        now += 50.0  # an evaluation, say
    assert clock.take() == 2.5
    assert clock.take() == 0.0


def test_sleep_does_not_count() -> None:
    start, before = time.monotonic(), thread_seconds()
    time.sleep(0.5)
    own = thread_seconds() - before  # on a busy machine the way back to a core is in it, and in what passed
    assert time.monotonic() - start - own >= 0.4
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    assert thread_seconds() - before >= 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_kernels_are_timed_in_the_last_iteration() -> None:
    device = torch.device("cuda")
    clock, x = DeviceClock(device, EventStack()), torch.ones(2048, 2048, device=device)
    for is_last in (False, True):
        assert clock.take() == 0.0
        clock.begin(is_last=is_last)
        x = x @ x
        clock.end()
    assert 0.0 < clock.take() < 1.0
