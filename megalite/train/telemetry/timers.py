"""Time the parts of an iteration, on this rank and over all ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.profiler

from megalite.distributed.axes import MODEL, SHARD
from megalite.distributed.axis import PROFILER, EventStack, Observer, Wait, observed
from megalite.distributed.topology import Topology
from megalite.pipeline.schedules import Action, ActionKind
from megalite.tensor_parallel.vocab_parallel import EMBEDDING_GRADS

M = TypeVar("M")


class Clock(Protocol[M]):
    """Clock of points in time, and of the time between two of them once both have passed."""

    def now(self) -> M:
        """Record a point in time without waiting for the device."""

    def seconds(self, begin: M, end: M) -> float:
        """Return the time from `begin` to `end`; on a GPU, wait until `end` has passed."""


class WallClock:
    """Host's clock, which on Linux is the same for all processes of a machine."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class StreamClock:
    """Clock of events in the CUDA stream; an event passes when the kernels launched before it are done.

    The time between two events is time of the stream: it computed, waited for a collective on another
    stream, or waited for the host to launch. Recording an event does not wait, so it does not slow the run.
    """

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def clock_for(device: torch.device) -> Clock[Any]:
    """Return the clock that measures work on this device."""
    return StreamClock() if device.type == "cuda" else WallClock()


class PostedProfile(torch.profiler.profile):
    """PyTorch's profiler, which posts an event while it starts, collects or writes a trace."""

    def __init__(self, events: EventStack, **options: Any) -> None:
        super().__init__(**options)
        self._events = events

    def start(self) -> None:
        with self._events.during(PROFILER):
            super().start()

    def step(self) -> None:
        with self._events.during(PROFILER):
            super().step()

    def stop(self) -> None:
        with self._events.during(PROFILER):
            super().stop()

    def results(self) -> Sequence[Any]:
        """Return kineto's events of the stopped profile: kernels, and operators that launched them."""
        assert self.profiler is not None and self.profiler.kineto_results is not None
        return self.profiler.kineto_results.events()


BATCH_GENERATOR = "batch-generator"
INTERVAL = "interval-time"

_NAMES = {
    1: """
        forward-backward all-grads-sync embedding-grads-all-reduce params-all-gather optimizer
        optimizer-unscale-and-check-inf optimizer-clip-main-grad optimizer-inner-step""",
    2: """
        forward-compute backward-compute batch-generator
        forward-recv forward-send backward-recv backward-send""",
}
LEVELS = {name: level for level, names in _NAMES.items() for name in names.split()}
"""Level of each timer, by Megatron-LM's names: 1 runs once per iteration, 2 once per microbatch.

All other timers have level 0: setup, evaluations, checkpoints.
"""

Timed = Action | Wait | str
"""An event of an iteration: a pipeline action, a wait for other ranks, or a part by its timer's name."""


class _Use(NamedTuple):
    """One use of a timer; `is_subtracted` if its time is subtracted instead of added."""

    begin: Any
    end: Any
    clock: Clock[Any]
    is_subtracted: bool = False

    @property
    def seconds(self) -> float:
        seconds = self.clock.seconds(self.begin, self.end)
        return -seconds if self.is_subtracted else seconds


class Timers(Observer):
    """Sums of the time spent in parts of the program: ``with timers("forward-backward"): ...``.

    A timer above the level costs two table look-ups. On a GPU, timers of level 1 and 2 record events in the
    stream: a kernel's time counts for the part that launched it, and nothing waits until `take`.

    Args:
        device: device that computes the parts; None for the host.
        level: 0, 1 or 2; see `LEVELS`.
        observers: notified of every part, whatever its level. Append these timers to time other events too.
    """

    def __init__(
        self, device: torch.device | None = None, level: int = 0, observers: Sequence[Observer] = ()
    ) -> None:
        self.level = level
        self._observers = observers
        self._wall_clock = WallClock()
        self._clock = clock_for(device or torch.device("cpu"))
        self._open: list[tuple[str, Any, Clock[Any]]] = []
        self._uses: dict[str, list[_Use]] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Add the block's time to the timer `name`, even if the block raises."""
        known = self._observers
        return observed(known if self in known else (self, *known), name)

    def begins(self, what: Timed) -> None:
        name = _timer_of(what)
        if self._counts(name):
            clock = self._clock if name in LEVELS else self._wall_clock
            self._open.append((name, clock.now(), clock))

    def ends(self, what: Timed) -> None:
        name = _timer_of(what)
        while any(name == open_name for open_name, *_ in self._open):
            open_name, begin, clock = self._open.pop()  # a part that an exception interrupted is dropped
            if open_name == name:
                self._add(name, _Use(begin, clock.now(), clock), isinstance(what, Wait))
                return

    def take(self, num_iterations: int = 1) -> dict[str, float]:
        """Return the milliseconds of each timer used since the last call, and reset the timers.

        A timer used in every iteration, once or several times, returns its mean over the iterations. A timer
        used less often (an evaluation, a save) returns its mean over the uses.
        """
        uses, self._uses = self._uses, {}
        return {name: 1e3 * _mean(of_name, num_iterations) for name, of_name in uses.items()}

    def _counts(self, name: str) -> bool:
        """Return whether a part is timed now; a part inside a part of level 0 is not timed separately."""
        if LEVELS.get(name, 0) > self.level or not name:
            return False
        return not self._open or self._open[0][0] in LEVELS

    def _add(self, name: str, use: _Use, is_wait: bool) -> None:
        self._uses.setdefault(name, []).append(use)
        if is_wait and self._open and self._open[-1][0] in _COMPUTING.values():
            self._uses.setdefault(self._open[-1][0], []).append(use._replace(is_subtracted=True))


_COMPUTING = {
    ActionKind.FORWARD: "forward-compute",
    ActionKind.BACKWARD: "backward-compute",
    ActionKind.BACKWARD_INPUT: "backward-compute",
    ActionKind.BACKWARD_WEIGHT: "backward-compute",
}
_WAITS = {
    **{("pp", name): name for name in LEVELS if name.endswith(("-recv", "-send"))},
    ("pp", EMBEDDING_GRADS): EMBEDDING_GRADS,
    **{
        (f"{name}{part}", "all-gather"): "params-all-gather"
        for name in MODEL.names_of("replicas")
        for part in ("", SHARD)
    },
}


def _timer_of(what: Timed) -> str:
    """Return the timer's name, or "" if the event has none."""
    if isinstance(what, Action):
        return _COMPUTING[what.kind]
    if isinstance(what, Wait):
        return _WAITS.get((what.axis, what.what), "")
    return what


def _mean(uses: list[_Use], num_iterations: int) -> float:
    num_uses = sum(not use.is_subtracted for use in uses)
    return sum(use.seconds for use in uses) / max(1, min(num_uses, num_iterations))


TimesByRank = Mapping[str, Mapping[int, float]]
"""Milliseconds by timer and by rank; a rank that has not used the timer is missing."""


def gather_times(own: Mapping[str, float], topology: Topology) -> TimesByRank:
    """Gather the timers of all ranks on every rank; a collective."""
    gathered = topology.world.gather_objects(own, "timers")
    names = dict.fromkeys(name for times in gathered for name in times)
    return {
        name: {rank: times[name] for rank, times in enumerate(gathered) if name in times} for name in names
    }


def timer_table(times: TimesByRank, option: str) -> str:
    """Return the table that Megatron-LM logs with --timing-log-option, plus the slowest rank."""
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, by_rank in times.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {milliseconds:.2f}" for rank, milliseconds in by_rank.items()]
        return "\n".join(lines)
    lines = [f"{'(min, max)' if option == 'minmax' else 'max'} time across ranks (ms):"]
    for name, by_rank in times.items():
        slowest, longest = max(by_rank.items(), key=lambda item: item[1])
        shown = f"({min(by_rank.values()):.2f}, {longest:.2f})" if option == "minmax" else f"{longest:.2f}"
        rank = f" slowest: rank {slowest}" if len(by_rank) > 1 else ""
        lines.append(f"    {name + ' ':.<48}: {shown}{rank}")
    return "\n".join(lines)
