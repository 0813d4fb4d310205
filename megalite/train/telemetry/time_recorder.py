"""Record the time terms of the last iteration of each log interval, on all ranks.

The kernels of that iteration are timed by kind: GEMMs, attention and memory-bound kernels.
"""

from __future__ import annotations

import gc
import inspect
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.profiler import DeviceType, ProfilerActivity

from megalite.attention.plain import attend, attend_backward
from megalite.config import Config
from megalite.distributed.axis import DEVICE, EventStack, Observer, observing
from megalite.distributed.topology import Topology
from megalite.observe.operator_log import kernel_kind, kind_by_name
from megalite.observe.recorder import Reader
from megalite.observe.unit_record import ATTENTION, KERNEL_KINDS, MEMORY_BOUND, KernelKind
from megalite.pipeline.simulator import step_makespan
from megalite.train.telemetry.time_terms import (
    BETWEEN,
    COLLECTION,
    EVALUATION,
    LOGGING,
    SAVING,
    ActionTimes,
    RankTime,
    TimeSample,
    compare,
    compute_terms,
    time_sample,
)
from megalite.train.telemetry.timers import PostedProfile, Timed, WallClock, clock_for
from megalite.train.tracing import ITERATION, Recorder, seconds_by_action, seconds_by_category
from megalite.train.trainer import Trainer
from megalite.utils.log import THIS_RANK, log

_TERM_OF_TIMER = {
    "eval-time": EVALUATION,
    "save-checkpoint": SAVING,
    "save-checkpoint-non-persistent": SAVING,
}


class TimeRecorder(Observer):
    """Recorder of the last iteration of each log interval, and of the time between iterations.

    Other iterations are not observed. Every rank makes the same calls. On a GPU, the times of an iteration
    are times of the stream: events are recorded without waiting for it.

    Attributes:
        samples: samples since this start, on the reporting rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.samples: list[TimeSample] = []
        self._trainer = trainer
        self._topology: Topology = trainer.topology
        self._between = defaultdict[str, float](float)  # seconds between iterations by term
        self._began = self._collection_began = 0.0
        self._collected = 0.0  # seconds of Python's garbage collections in this process
        self._open = ExitStack()  # observers of the iteration
        self._measuring = ExitStack()  # the timer of its kernels
        self._recorder: Recorder | None = None
        self._timer: OperatorTimer | KernelProfile | None = None  # of this iteration's kernels
        self._kernels: Mapping[KernelKind, float] | None = None  # seconds in the last measured iteration
        self._ended: RankTime | None = None
        self._collected_before = 0.0
        self._left: float | None = None  # when the last iteration ended
        self._gap = 0.0
        self._num_iterations = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Observe the run in the block, and log its slow terms in one line at its end."""
        gc.callbacks.append(self._note_collection)
        try:
            with observing(self._topology.observers, self):
                yield
        finally:
            self._open.close()
            self._measuring.close()
            gc.callbacks.remove(self._note_collection)
        steady = self.samples[1:] or self.samples  # the first iteration compiles and allocates
        if steady and (summary := compare(steady).summary()):
            log.info("time breakdown: %s", summary, extra=THIS_RANK)

    def begins(self, what: Timed) -> None:
        """Begin an evaluation or a save between iterations; other events do not count."""
        if isinstance(what, str) and what in _TERM_OF_TIMER:
            self._began = time.perf_counter()

    def ends(self, what: Timed) -> None:
        if isinstance(what, str) and what in _TERM_OF_TIMER:
            self._between[_TERM_OF_TIMER[what]] += time.perf_counter() - self._began

    def _note_collection(self, phase: str, _: dict[str, int]) -> None:
        """Measure a garbage collection; Python calls it before and after each."""
        if phase == "start":
            self._collection_began = time.perf_counter()
        else:
            self._collected += time.perf_counter() - self._collection_began

    def begin(self, *, is_sampled: bool, measures_kernels: bool) -> None:
        """Begin an iteration, and record it if `is_sampled`.

        Args:
            measures_kernels: measure the kernels of this iteration, for the next sample. This makes short
                kernels slower, so it is best the iteration before a sampled one.
        """
        if self._left is not None:
            self._gap += time.perf_counter() - self._left
            self._between[COLLECTION] += self._collected - self._collected_before
        self._num_iterations += 1
        if measures_kernels:
            self._timer = kernel_timer(self._trainer.config, self._topology)
            if self._timer is not None:
                self._measuring.enter_context(self._timer)
        if not is_sampled:
            return
        self._recorder = Recorder(clock_for(self._topology.device), WallClock())
        self._collected_before = self._collected
        self._open.enter_context(observing(self._topology.observers, self._recorder))
        self._open.enter_context(self._recorder.iteration(self._trainer.progress.iteration + 1))

    def end_iteration(self) -> float:
        """End an iteration. Return the seconds that reading the record of its kernels took."""
        self._open.close()
        collected = self._collected - self._collected_before
        spans = None
        if self._recorder is not None:
            with self._topology.events.during(DEVICE):
                spans, self._recorder = self._recorder.spans(), None
        began, overhead = time.perf_counter(), 0.0
        if self._timer is not None:
            self._measuring.close()
            self._kernels, overhead, self._timer = self._timer.seconds(), self._timer.overhead, None
        seconds = time.perf_counter() - began
        if spans is not None:
            terms = seconds_by_category(spans)
            total = terms.pop(ITERATION)
            terms[COLLECTION] = collected
            computing = max(0.0, total - overhead - sum(terms.values()))
            self._ended = RankTime(
                self._topology.rank,
                socket.gethostname(),
                self._topology.coordinates,
                terms | compute_terms(computing, self._kernels),
                seconds_by_action(spans),
            )
        return seconds

    def sample(self, num_microbatches: int) -> TimeSample | None:
        """Gather all ranks' times of a recorded iteration, a collective, and return its terms.

        The result is None for other iterations, and on ranks other than the reporting one.
        """
        if self._ended is None:
            return None
        mine, self._ended = self._ended, None
        topology = self._topology
        ranks = topology.world.objects_at_last(mine, "time terms")  # on the reporting rank
        between, self._between = self._between, defaultdict(float)
        known = sum(seconds for term, seconds in between.items() if term != LOGGING)
        between[BETWEEN] = max(0.0, self._gap - known)
        count, self._gap, self._num_iterations = self._num_iterations, 0.0, 0
        if ranks is None:
            return None
        found = time_sample(
            self._trainer.progress.iteration,
            count,
            ranks,
            topology.sizes,
            dict(between),
            partial(self._step_seconds, num_microbatches),
        )
        self.samples.append(found)
        return found

    def _step_seconds(self, num_microbatches: int, stages: Sequence[ActionTimes]) -> float:
        """Return the seconds of all microbatches if messages took no time.

        Args:
            stages: times of actions by pipeline rank.
        """
        return step_makespan(
            self._trainer.config.parallel.schedule,
            self._trainer.pipeline.stages,
            num_microbatches,
            lambda rank, action: stages[rank][action.kind.value, action.chunk],
        )

    def end(self, logging_seconds: float) -> None:
        """Begin the time between iterations, after `logging_seconds` of logging."""
        self._between[LOGGING] += logging_seconds
        self._collected_before = self._collected
        self._left = time.perf_counter()


class OperatorTimer(Reader):
    """Timer of the operators of a CPU, whose result exists when an operator returns.

    Unfused attention is several operators.

    Attributes:
        overhead: seconds inside the block that the measurement itself took.
    """

    def __init__(self) -> None:
        self.overhead = 0.0
        self._seconds = dict.fromkeys(KERNEL_KINDS, 0.0)
        self._kinds: dict[Any, KernelKind] = {}  # of the operators that launch kernels
        self._kind: KernelKind = MEMORY_BOUND  # of the operator that runs
        self._began = 0.0

    def reads(self, func: Any) -> bool:
        kind = kernel_kind(func)
        if kind is not None:
            self._kinds[func] = kind
        return kind is not None

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        entered = time.perf_counter()
        self._kind = ATTENTION if _is_in_unfused_attention() else self._kinds[func]
        self._began = time.perf_counter()
        self.overhead += self._began - entered

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        ended = time.perf_counter()
        self._seconds[self._kind] += ended - self._began
        self.overhead += time.perf_counter() - ended

    def seconds(self) -> Mapping[KernelKind, float]:
        """Return the seconds of the block's operators by kind."""
        return self._seconds


_UNFUSED_ATTENTION = {attend.__code__, attend_backward.__code__}


def _is_in_unfused_attention() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in _UNFUSED_ATTENTION:
        frame = frame.f_back
    return frame is not None


class KernelProfile(PostedProfile):
    """Timer of a GPU's kernels with PyTorch's profiler, which knows the operator that launched each."""

    overhead = 0.0
    """The stream does not wait for the profiler, unless it waits for the host."""

    def __init__(self, events: EventStack) -> None:
        super().__init__(events, activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def seconds(self) -> Mapping[KernelKind, float]:
        return kernel_seconds(self.results())


_NOT_COMPUTING = ("nccl", "Memcpy HtoD", "Memcpy DtoH")
"""Beginnings of the names of kernels and copies that run beside the computation."""


def kernel_seconds(events: Iterable[Any]) -> dict[KernelKind, float]:
    """Return the seconds of a GPU's kernels by kind, from the events of a profile.

    Args:
        events: events of kineto. A kernel's `linked_correlation_id` is the `correlation_id` of the innermost
            operator that launched it. An operator is linked to nothing.
    """
    operators: dict[int, str] = {}
    kernels = []
    for event in events:
        if event.is_user_annotation():  # its time on the GPU is the time of the kernels inside
            continue
        if event.device_type() != DeviceType.CPU:
            kernels.append(event)
        elif event.linked_correlation_id() == 0:
            operators[event.correlation_id()] = event.name()
    found: dict[KernelKind, float] = dict.fromkeys(KERNEL_KINDS, 0.0)
    for kernel in kernels:
        if not kernel.name().startswith(_NOT_COMPUTING):
            operator = operators.get(kernel.linked_correlation_id(), kernel.name())
            found[kind_by_name(operator)] += kernel.duration_ns() / 1e9
    return found


def kernel_timer(config: Config, topology: Topology) -> OperatorTimer | KernelProfile | None:
    """Return a timer of this rank's kernels; None if they cannot be measured one by one.

    PyTorch has one profiler per process, which --profile and --profile-execution use. On a CPU, a compiled
    layer is one operator.
    """
    if topology.device.type == "cuda":
        is_used = config.logging.profile or config.logging.profile_execution
        return None if is_used else KernelProfile(topology.events)
    return None if config.training.compile else OperatorTimer()
