"""Measure how long the kernels of an iteration take: GEMMs, attention and memory-bound kernels."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity

from megalite.attention.blockwise import attend, attend_backward
from megalite.config import Config
from megalite.distributed.axis import PROFILER, EventStack
from megalite.distributed.topology import Topology
from megalite.observe.operator_log import kernel_kind, kind_by_name
from megalite.observe.recorder import Reader
from megalite.observe.unit_record import ATTENTION, KERNEL_KINDS, MEMORY_BOUND, KernelKind


class KernelTimer(Protocol):
    """Timer of the kernels that this rank launches in a block."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def seconds(self) -> Mapping[KernelKind, float]:
        """Return the seconds of the block's kernels by kind."""

    @property
    def overhead(self) -> float:
        """Return the seconds inside the block that the measurement itself took."""


class OperatorTimer(Reader):
    """Seconds of the operators of a CPU, whose result exists when an operator returns.

    Unfused attention is several operators.
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
        return self._seconds


_UNFUSED_ATTENTION = {attend.__code__, attend_backward.__code__}


def _is_in_unfused_attention() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in _UNFUSED_ATTENTION:
        frame = frame.f_back
    return frame is not None


class KernelProfile:
    """Timer of a GPU's kernels with PyTorch's profiler, which knows the operator that launched each.

    Args:
        events: is notified while the profiler starts and stops.
    """

    overhead = 0.0
    """The stream does not wait for the profiler, unless it waits for the host."""

    def __init__(self, events: EventStack) -> None:
        self._events = events
        self._profile = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def __enter__(self) -> None:
        with self._events.during(PROFILER):
            self._profile.start()

    def __exit__(self, *_: object) -> None:
        with self._events.during(PROFILER):
            self._profile.stop()

    def seconds(self) -> Mapping[KernelKind, float]:
        profiler = self._profile.profiler
        assert profiler is not None and profiler.kineto_results is not None
        return kernel_seconds(profiler.kineto_results.events())


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


def kernel_timer(config: Config, topology: Topology) -> KernelTimer | None:
    """Return a timer of this rank's kernels; None if they cannot be measured one by one.

    PyTorch has one profiler per process, which --profile and --profile-execution use. On a CPU, a compiled
    layer is one operator.
    """
    if topology.device.type == "cuda":
        is_used = config.logging.profile or config.logging.profile_execution
        return None if is_used else KernelProfile(topology.events)
    return None if config.training.compile else OperatorTimer()
