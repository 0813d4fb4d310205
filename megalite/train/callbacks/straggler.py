"""Name the slowest rank by its compute time, without waits: all ranks' iterations take equally long."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import DeviceType, ProfilerActivity

from megalite.distributed.axes import coordinates_text
from megalite.distributed.axis import DEVICE, EventStack
from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.telemetry.timers import PostedProfile
from megalite.train.train_step import StepResult
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
    for each in times:
        stages.setdefault(each.coordinates["pp"], []).append(each)
    groups = list(stages.values()) if len(stages) < len(times) else [list(times)]
    candidates = []
    for group in groups:
        slowest = max(group, key=lambda each: each.seconds)
        others = [each for each in group if each is not slowest]
        median = statistics.median(each.seconds for each in others)
        candidates.append((slowest.seconds / max(median, 1e-9), median, slowest, others))
    ratio, median, slowest, others = max(candidates, key=lambda candidate: candidate[0])
    fastest = min(others, key=lambda each: each.seconds)
    of_stage = " of its stage" if 1 < len(stages) < len(times) else ""
    compared = f"the other rank{of_stage}" if len(others) == 1 else f"the {len(others)} others{of_stage}"
    return (
        f"straggler: rank {slowest.rank} ({slowest.host}, {coordinates_text(slowest.coordinates)}) computes "
        f"{1e3 * slowest.seconds:.1f} ms an iteration, {ratio:.2f} x the median "
        f"{1e3 * median:.1f} ms of {compared}; fastest: rank {fastest.rank} "
        f"{1e3 * fastest.seconds:.1f} ms"
    )


class Stragglers(Callback):
    """Log of the slowest rank every --log-straggler-interval iterations."""

    def on_start(self, loop: TrainingLoop) -> None:
        """Choose the clock.

        Raises:
            UserError: another option uses the profiler, which this one needs on GPUs; on every rank.
        """
        config, topology = loop.trainer.config.logging, loop.trainer.topology
        self._interval = config.log_straggler_interval if topology.world_size > 1 else None
        self._clock: HostClock | DeviceClock = HostClock()
        if topology.device.type == "cuda" and self._interval is not None:
            if config.profile or config.profile_execution:
                flag = "--profile" if config.profile else "--profile-execution"
                raise UserError(
                    f"--log-straggler-interval and {flag} both need the profiler on a GPU: omit one of them"
                )
            self._clock = DeviceClock(topology.device, topology.events)

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return is_due(iteration, self._interval) or is_due(iteration + 1, self._interval)

    def before_step(self, loop: TrainingLoop) -> None:
        self._clock.begin(is_last=is_due(loop.next_iteration, self._interval))

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self._clock.end()
        if is_due(loop.iteration, self._interval):
            topology = loop.trainer.topology
            mine = ComputeTime(topology.rank, socket.gethostname(), topology.coordinates, self._clock.take())
            times = topology.world.gather_objects(mine, "compute times")
            if topology.is_reporter:
                log.info(straggler_line(times), extra=THIS_RANK)


_SCHEDULER_STATISTICS = Path("/proc/thread-self/schedstat")
"""Scheduler statistics of this thread: nanoseconds on a core and waiting for one, time slices (proc(5))."""
_NCCL = "nccl"
"""Part of the name of each NCCL kernel, which runs until the other ranks have started it too."""


class HostClock:
    """Clock of the time in which the main thread computes, or waits for a free core.

    It sleeps while it waits for other ranks, with gloo, or for a disk: neither counts.

    Args:
        now: returns the seconds of this thread that count, from any origin.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or thread_seconds
        self._total = 0.0
        self._num_iterations = 0

    def begin(self, *, is_last: bool) -> None:
        """Begin an iteration; `is_last`: `take` is called after it."""
        self._begin = self._now()

    def end(self) -> None:
        """Add the iteration to the interval."""
        self._total += self._now() - self._begin
        self._num_iterations += 1

    def take(self) -> float:
        """Return the mean of the iterations since the last call."""
        mean = self._total / max(self._num_iterations, 1)
        self._total, self._num_iterations = 0.0, 0
        return mean


def thread_seconds() -> float:
    """Return the seconds that the calling thread ran, and waited for a core if the system reports that."""
    try:
        delay = int(_SCHEDULER_STATISTICS.read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these figures
        delay = 0
    return time.thread_time() + 1e-9 * delay


class DeviceClock:
    """Clock of the kernels of an interval's last iteration on a GPU, without NCCL's.

    CUDA events around parts of an iteration would include the waits in collectives between them. The profiler
    lists single kernels; it runs in that one iteration.

    Args:
        events: the stack that the profiler's work is posted to.
    """

    def __init__(self, device: torch.device, events: EventStack) -> None:
        self._device = device
        self._events = events
        self._profile: PostedProfile | None = None
        self._seconds = 0.0

    def begin(self, *, is_last: bool) -> None:
        """Begin an iteration, and measure it if it is the last."""
        if is_last:
            self._synchronize()
            self._profile = PostedProfile(self._events, activities=[ProfilerActivity.CUDA])
            self._profile.start()

    def end(self) -> None:
        """End the iteration."""
        if self._profile is not None:
            self._synchronize()
            self._profile.stop()
            kernels = (each for each in self._profile.results() if each.device_type() == DeviceType.CUDA)
            own = (each.duration_ns() for each in kernels if _NCCL not in each.name().lower())
            self._seconds, self._profile = 1e-9 * sum(own), None

    def take(self) -> float:
        """Return the seconds of the iteration that was measured last."""
        return self._seconds

    def _synchronize(self) -> None:
        with self._events.during(DEVICE):
            torch.cuda.synchronize(self._device)
