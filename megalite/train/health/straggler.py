"""Names the rank that computes slowest: the others wait for it, and only it is slow by itself."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from megalite.config import LoggingConfig
from megalite.errors import UserError
from megalite.log import THIS_RANK, log
from megalite.topology import Topology
from megalite.train.health.compute_time import ComputeClock, DeviceClock, HostClock


@dataclass(frozen=True)
class ComputeTime:
    """What one rank computed in an interval.

    Attributes:
        coordinates: of the rank along pp, dp and tp.
        seconds: of an iteration, waits for other ranks left out.
    """

    rank: int
    host: str
    coordinates: tuple[int, int, int]
    seconds: float


def straggler_line(times: Sequence[ComputeTime]) -> str:
    """Names the rank that is slowest compared to the others of its stage.

    Stages are unlike by design, so that ranks are compared with those of their own; with one rank a stage,
    with all.

    Args:
        times: of all ranks, two at least.
    """
    stages: dict[int, list[ComputeTime]] = {}
    for each in times:
        stages.setdefault(each.coordinates[0], []).append(each)
    alike = list(stages.values()) if len(stages) < len(times) else [list(times)]
    slowest, others = max((_slowest(peers) for peers in alike), key=_ratio)
    fastest = min(others, key=lambda each: each.seconds)
    pp, dp, tp = slowest.coordinates
    of_stage = " of its stage" if 1 < len(stages) < len(times) else ""
    compared = f"the other rank{of_stage}" if len(others) == 1 else f"the {len(others)} others{of_stage}"
    return (
        f"straggler: rank {slowest.rank} ({slowest.host}, dp {dp} pp {pp} tp {tp}) computes "
        f"{1e3 * slowest.seconds:.1f} ms an iteration, {_ratio((slowest, others)):.2f} x the median "
        f"{1e3 * _median(others):.1f} ms of {compared}; fastest: rank {fastest.rank} "
        f"{1e3 * fastest.seconds:.1f} ms"
    )


class StragglerLog:
    """Tells the slowest rank every `interval` iterations; every rank calls it alike.

    Args:
        interval: None measures nothing.
    """

    def __init__(self, interval: int | None, topology: Topology, clock: ComputeClock | None) -> None:
        self._interval = interval
        self._topology = topology
        self._clock = clock

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """The block is this iteration, counted from 1."""
        if self._clock is None or self._interval is None:
            yield
            return
        is_last = number % self._interval == 0
        with self._clock.iteration(is_last):
            yield
        if is_last:
            self._tell(self._clock.take())

    def _tell(self, seconds: float) -> None:
        topology = self._topology
        coordinates = topology.pp.rank, topology.dp.rank, topology.tp.rank
        mine = ComputeTime(topology.rank, socket.gethostname(), coordinates, seconds)
        times: list[ComputeTime | None] = [None] * topology.world_size
        dist.all_gather_object(times, mine)
        if topology.is_reporter and topology.world_size > 1:
            log.info(straggler_line([each for each in times if each]), extra=THIS_RANK)


def straggler_log(config: LoggingConfig, topology: Topology) -> StragglerLog:
    """Measures where --log-straggler-interval asks for it.

    Raises:
        UserError: the profiler, which measures on GPUs, is in use; on every rank alike.
    """
    interval, device = config.log_straggler_interval, topology.device
    if interval is None or topology.world_size == 1:
        return StragglerLog(None, topology, None)
    flag = "--profile" if config.profile else "--profile-execution"
    if device.type == "cuda" and (config.profile or config.profile_execution):
        raise UserError(f"--log-straggler-interval and {flag} both need the profiler on a GPU: leave one out")
    clock: ComputeClock = DeviceClock(device) if device.type == "cuda" else HostClock()
    return StragglerLog(interval, topology, clock)


def _slowest(peers: Sequence[ComputeTime]) -> tuple[ComputeTime, list[ComputeTime]]:
    """The slowest of some ranks, and the others."""
    slowest = max(peers, key=lambda each: each.seconds)
    return slowest, [each for each in peers if each is not slowest]


def _median(others: Sequence[ComputeTime]) -> float:
    return statistics.median(each.seconds for each in others)


def _ratio(found: tuple[ComputeTime, Sequence[ComputeTime]]) -> float:
    slowest, others = found
    return slowest.seconds / max(_median(others), 1e-9)
