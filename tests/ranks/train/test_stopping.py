"""Test that ranks stop together, whichever ranks receive a signal."""

from __future__ import annotations

from megalite.config import ParallelConfig, TrainingConfig
from megalite.distributed.topology import Topology
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from tests.live_ranks import run_ranks

LAYOUT = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


def _reasons(topology: Topology, of_rank: dict[int, str]) -> list[str | None]:
    """Return why a rank stops, before and after these ranks receive these signals."""
    signals = StopSignals(RequeueNote(None))
    signals.hold()
    stop = StopConditions(TrainingConfig(), topology, signals)
    before = stop.now()
    if name := of_rank.get(topology.rank):
        signals.notice(name)
    after = stop.now()
    return [None if found is None else found.reason for found in (before, after)]


def test_a_signal_to_one_rank_stops_all() -> None:
    reasons = run_ranks(_reasons, LAYOUT.mesh, 4, {2: "SIGUSR1"})
    assert reasons == 4 * [[None, "received SIGUSR1"]]


def test_of_several_signals_all_ranks_report_the_same() -> None:
    reasons = run_ranks(_reasons, LAYOUT.mesh, 4, {0: "SIGINT", 1: "SIGTERM", 3: "SIGUSR1"})
    assert reasons == 4 * [[None, "received SIGTERM"]]


def _minutes(topology: Topology) -> int:
    """Return the age of a run that started a minute earlier on each rank than on the one before."""
    signals = StopSignals(RequeueNote(None))
    signals.start -= 60.0 * topology.rank
    stop = StopConditions(TrainingConfig(exit_signals=()), topology, signals)
    stop.now()
    return int(stop.minutes)


def test_ranks_agree_on_the_age_of_the_run() -> None:
    assert run_ranks(_minutes, LAYOUT.mesh, 4) == [3, 3, 3, 3]
