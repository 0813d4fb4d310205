"""Name the slowest rank by its compute time: all ranks' iterations take equally long."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from megalite.config import LoggingConfig
from megalite.distributed.axes import coordinates_text
from megalite.distributed.topology import Topology
from megalite.train.health.compute_time import ComputeClock, DeviceClock, HostClock
from megalite.utils.errors import UserError
from megalite.utils.log import THIS_RANK, log


@dataclass(frozen=True)
class ComputeTime:
    """Compute time of one rank in an interval.

    Attributes:
        coordinates: the rank's coordinate along each axis.
        seconds: seconds per iteration, without waits for other ranks.
    """

    rank: int
    host: str
    coordinates: Mapping[str, int]
    seconds: float


def straggler_line(times: Sequence[ComputeTime]) -> str:
    """Name the rank that is slowest compared to the others of its stage.

    Stages differ by design, so ranks are compared within their stage. If each stage has one rank, all ranks
    are compared.

    Args:
        times: compute times of all ranks, at least two.
    """
    stages: dict[int, list[ComputeTime]] = {}
    for time in times:
        stages.setdefault(time.coordinates["pp"], []).append(time)
    groups = list(stages.values()) if len(stages) < len(times) else [list(times)]
    candidates = []
    for group in groups:
        slowest = max(group, key=lambda time: time.seconds)
        others = [time for time in group if time is not slowest]
        median = statistics.median(time.seconds for time in others)
        candidates.append((slowest.seconds / max(median, 1e-9), median, slowest, others))
    ratio, median, slowest, others = max(candidates, key=lambda candidate: candidate[0])
    fastest = min(others, key=lambda time: time.seconds)
    of_stage = " of its stage" if 1 < len(stages) < len(times) else ""
    compared = f"the other rank{of_stage}" if len(others) == 1 else f"the {len(others)} others{of_stage}"
    return (
        f"straggler: rank {slowest.rank} ({slowest.host}, {coordinates_text(slowest.coordinates)}) computes "
        f"{1e3 * slowest.seconds:.1f} ms an iteration, {ratio:.2f} x the median "
        f"{1e3 * median:.1f} ms of {compared}; fastest: rank {fastest.rank} "
        f"{1e3 * fastest.seconds:.1f} ms"
    )


class StragglerLog:
    """Log of the slowest rank every `interval` iterations; every rank calls it.

    Args:
        clock: measures the compute time; None, or an interval of None, measures nothing.
    """

    def __init__(self, interval: int | None, topology: Topology, clock: ComputeClock | None) -> None:
        self._interval = interval
        self._topology = topology
        self._clock = clock

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Measure the block, which runs this iteration, counted from 1."""
        if self._clock is None or self._interval is None:
            yield
            return
        is_last = number % self._interval == 0
        with self._clock.iteration(is_last):
            yield
        if is_last:
            self._log_slowest(self._clock.take())

    def _log_slowest(self, seconds: float) -> None:
        topology = self._topology
        mine = ComputeTime(topology.rank, socket.gethostname(), topology.coordinates, seconds)
        times: list[ComputeTime | None] = [None] * topology.world_size
        with topology.world.wait("all-gather", "compute times"):
            dist.all_gather_object(times, mine)
        if topology.is_reporter and topology.world_size > 1:
            log.info(straggler_line([time for time in times if time]), extra=THIS_RANK)


def straggler_log(config: LoggingConfig, topology: Topology) -> StragglerLog:
    """Create the log of --log-straggler-interval.

    Raises:
        UserError: another option uses the profiler, which this one needs on GPUs; on every rank.
    """
    interval, device = config.log_straggler_interval, topology.device
    if interval is None or topology.world_size == 1:
        return StragglerLog(None, topology, None)
    flag = "--profile" if config.profile else "--profile-execution"
    if device.type == "cuda" and (config.profile or config.profile_execution):
        raise UserError(
            f"--log-straggler-interval and {flag} both need the profiler on a GPU: omit one of them"
        )
    clock: ComputeClock = DeviceClock(device, topology.events) if device.type == "cuda" else HostClock()
    return StragglerLog(interval, topology, clock)
