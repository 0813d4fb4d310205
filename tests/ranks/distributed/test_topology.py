"""What several ranks do together before anything is computed."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.distributed.axis import Observer, Wait, observing
from megalite.distributed.local_ranks import RankError, run_ranks
from megalite.distributed.topology import Topology
from megalite.utils.errors import ConfigError, UserError


def agree(topology, faulty):
    """What each rank meets when the ranks `faulty` meet a mistake."""
    passed = False
    try:
        with topology.agreed():
            if topology.rank in faulty:
                raise UserError(f"mistake of {topology.rank}")
            passed = True
    except UserError as error:
        return passed, str(error)
    return passed, None


def agree_on_all(topology):
    return [agree(topology, faulty) for faulty in ((), (1,), (0, 1))]


def raise_as(topology, kind):
    if topology.rank == 1:
        raise ConfigError(["one", "two"]) if kind == "user" else ZeroDivisionError("of rank 1")
    topology.tp.group.barrier().wait()  # rank 1 never comes


def place(topology):
    return topology.rank, topology.pp.rank, topology.dp.rank, topology.tp.rank


def test_one_ranks_mistake_is_everybodys():
    results = run_ranks(agree_on_all, ParallelConfig().mesh, 2)
    assert results == [
        [(True, None), (True, "mistake of 1"), (False, "mistake of 0")],
        [(True, None), (False, "mistake of 1"), (False, "mistake of 0")],
    ]


class _CollectiveStarts(Observer):
    """When this rank began to wait in collectives, by the machine's clock."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def begins(self, what: object) -> None:
        if isinstance(what, Wait) and what.what == "all-gather":
            self.times.append(time.monotonic())

    def ends(self, what: object) -> None:
        pass


def _agree_after(topology: Topology, seconds: float) -> tuple[float, list[float]]:
    """Return when this rank's work was done, and when it began the collectives of two meetings."""
    with observing(topology.observers, starts := _CollectiveStarts()):
        with topology.agreed():
            if topology.rank == 0:
                time.sleep(seconds)
            done = time.monotonic()
        with topology.agreed():
            pass
    return done, starts.times


def test_who_waits_for_one_at_work_does_not_time_out() -> None:
    """The time-out is that of collectives, and no rank begins one before the work is done."""
    (done, _), *others = run_ranks(_agree_after, ParallelConfig().mesh, 3, 1.0)
    for _, times in others:
        assert len(times) == 2
        assert min(times) >= done


def test_places_of_real_ranks():
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert run_ranks(place, parallel.mesh, 4) == [(0, 0, 0, 0), (1, 0, 0, 1), (2, 1, 0, 0), (3, 1, 0, 1)]


def test_world_of_another_size_is_everybodys_mistake():
    with pytest.raises(UserError, match="world size 3 is not tp 2"):
        run_ranks(place, ParallelConfig(tensor_model_parallel_size=2).mesh, 3)


@pytest.mark.parametrize(("kind", "error"), [("user", ConfigError), ("defect", RankError)])
def test_a_rank_that_raises_ends_those_that_wait(kind, error):
    with pytest.raises(error) as caught:
        run_ranks(raise_as, ParallelConfig(tensor_model_parallel_size=2).mesh, 2, kind)
    if kind == "user":
        assert str(caught.value) == "one\ntwo"
    else:
        assert "rank 1:" in str(caught.value) and "ZeroDivisionError: of rank 1" in str(caught.value)


def _timeouts(topology: Topology) -> list[float]:
    groups = [axis.group for axis in (topology.pp, topology.dp, topology.tp)] + [topology.pp.backward_group]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_every_axis_has_the_timeout_that_was_given() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, distributed_timeout_minutes=3)
    assert run_ranks(_timeouts, parallel.mesh, 2) == [[180.0] * 4] * 2


def _policies(topology: Topology) -> set[int]:
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            found.add(os.sched_getscheduler(int(thread.name)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")
def test_ranks_that_share_cores_are_scheduled_as_batch_work() -> None:
    """Among their threads is gloo's own."""
    assert run_ranks(_policies, ParallelConfig().mesh, 2) == [{os.SCHED_BATCH}] * 2
    assert run_ranks(_policies, ParallelConfig().mesh, 1) == [{os.SCHED_OTHER}]
