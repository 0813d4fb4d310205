"""Ranks that are told to stop one by one, and stop together."""

from __future__ import annotations

from megalite.config import ParallelConfig, TrainingConfig
from megalite.local_ranks import run_ranks
from megalite.topology import Topology
from megalite.train.stopping.requeue import RequeueNote
from megalite.train.stopping.signals import StopSignals
from megalite.train.stopping.stop import StopConditions

LAYOUT = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


def _reasons(topology: Topology, of_rank: dict[int, str]) -> list[str | None]:
    """What each rank hears of it if these ranks get these signals, before and after."""
    signals = StopSignals(RequeueNote(None))
    signals.hold()
    stop = StopConditions(TrainingConfig(), topology, signals)
    before = stop.now()
    if name := of_rank.get(topology.rank):
        signals.notice(name)
    after = stop.now()
    return [None if found is None else found.reason for found in (before, after)]


def test_a_signal_to_one_rank_stops_all() -> None:
    heard = run_ranks(_reasons, LAYOUT, 4, {2: "SIGUSR1"})
    assert heard == 4 * [[None, "received SIGUSR1"]]


def test_of_several_signals_all_tell_the_same() -> None:
    heard = run_ranks(_reasons, LAYOUT, 4, {0: "SIGINT", 1: "SIGTERM", 3: "SIGUSR1"})
    assert heard == 4 * [[None, "received SIGTERM"]]
