"""Profile a few iterations: with PyTorch's profiler, nsys, or PyTorch's memory history of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch.profiler
from torch.profiler import ProfilerActivity

from megalite.config import LoggingConfig
from megalite.distributed.topology import Topology
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.telemetry.timers import PostedProfile
from megalite.train.train_step import StepResult
from megalite.utils.errors import UserError
from megalite.utils.files import make_writable
from megalite.utils.log import THIS_RANK, log
from megalite.utils.torch_private import (
    profiler_options,
    save_memory_history,
    start_memory_history,
    stop_memory_history,
)

_SKIPPED, _TRACED = 2, 3
"""Number of iterations that --profile-execution skips (allocations, warm-up), and that it traces."""

_DEFAULT_NAME = "profile"
Step = Callable[[], None]
"""Marks the end of an iteration."""


class Profiler(Callback):
    """Profiler of --profile and --profile-execution, and recorder of --record-memory-history."""

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        logging, topology = loop.trainer.config.logging, loop.trainer.topology
        profile = profiler(logging, topology, range(loop.next_iteration, loop.num_iterations + 1))
        with memory_history(logging, topology), profile as self._step:
            yield

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return False  # a profile shows iterations as they run without it

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self._step()


def _no_step() -> None:
    """Profile nothing."""


class _Window(NamedTuple):
    """Iterations to profile, counted from 1.

    Attributes:
        flag: the flag that requests the profile.
        num_skipped: iterations skipped before each profile.
        repeat: number of profiles.
    """

    flag: str
    first: int
    last: int
    num_skipped: int
    repeat: int

    @property
    def num_active(self) -> int:
        """Return the number of iterations in one profile."""
        return self.last - self.first + 1

    @property
    def period(self) -> int:
        """Return the number of iterations from one profile to the next."""
        return self.num_skipped + self.num_active

    def from_iteration(self, start: int) -> _Window:
        """Return the window without profiles before the resumed run's first iteration; the last one stays."""
        num_over = min(max(0, -(-(start - self.first) // self.period)), self.repeat - 1)
        first, last = (each + num_over * self.period for each in (self.first, self.last))
        return self._replace(first=first, last=last, repeat=self.repeat - num_over)


def profiler(config: LoggingConfig, topology: Topology, iterations: range) -> AbstractContextManager[Step]:
    """Profile some iterations of the block: the range of --profile, or the third to fifth; a collective.

    --profile-repeat profiles further iterations, after as many skipped ones.

    PyTorch's profiler writes a file for each rank, ``tensorboard_dir/profile_name/rank<N>.*.pt.trace.json``:
    for all ranks with --profile-execution, for --profile-ranks with --profile. Without these flags nothing
    happens.

    Args:
        iterations: iterations of the block, counted from 1. If none of them is in the window, it warns.

    Raises:
        UserError: a rank cannot write to the folder, or --profile requests nsys and there is no GPU; raised
            on every rank.
    """
    if config.profile_execution:
        first = iterations.start + _SKIPPED
        window = _Window("--profile-execution", first, first + _TRACED - 1, _SKIPPED, config.profile_repeat)
        ranks: Collection[int] = range(topology.world_size)
    elif config.profile:
        num_skipped, last = config.profile_step_start, config.profile_step_end
        window = _Window("--profile", num_skipped + 1, last, num_skipped, config.profile_repeat)
        window = window.from_iteration(iterations.start)
        ranks = config.profile_ranks
    else:
        return nullcontext(_no_step)
    uses_pytorch = config.profile_execution or config.use_pytorch_profiler
    if not uses_pytorch and topology.device.type != "cuda":
        raise UserError(
            "--profile without --use-pytorch-profiler lets nsys record a GPU, and there is no GPU: pass "
            "--use-pytorch-profiler"
        )
    if window.first not in iterations:
        trained = f"{iterations[0]} to {iterations[-1]}" if iterations else "none"
        text = "%s: no trace, as its first iteration is %d, and the iterations of this run are %s"
        log.warning(text, window.flag, window.first, trained)
        return nullcontext(_no_step)
    num_before = window.first - iterations.start
    if uses_pytorch:
        return _pytorch(window, config, topology, num_before, ranks)
    return _nsys(window, topology, num_before, ranks)


@contextmanager
def _pytorch(
    window: _Window, config: LoggingConfig, topology: Topology, num_before: int, ranks: Collection[int]
) -> Iterator[Step]:
    assert config.tensorboard_dir is not None  # a rule of the config
    folder = Path(config.tensorboard_dir) / (config.profile_name or _DEFAULT_NAME)
    is_on = topology.rank in ranks
    with topology.agreed():
        if is_on:
            make_writable(folder, "--tensorboard-dir")
    if not is_on:
        yield _no_step
        return
    write = torch.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank{topology.rank}")
    was_active = False

    def on_trace_ready(profile: torch.profiler.profile) -> None:
        nonlocal was_active
        was_active = True
        if reason := _why_not_written(lambda: write(profile), folder, topology.rank):
            text = "%s: the trace in %s cannot be written (%s): training continues without it"
            log.warning(text, window.flag, folder, reason, extra=THIS_RANK)
        elif topology.rank == min(ranks):
            log.info("profiler: the trace is in %s", folder, extra=THIS_RANK)

    num_warmup = min(1, num_before, window.num_skipped)
    on_cuda = [ProfilerActivity.CUDA] if topology.device.type == "cuda" else []
    with PostedProfile(
        topology.events,
        activities=[ProfilerActivity.CPU, *on_cuda],
        schedule=torch.profiler.schedule(
            skip_first=num_before - num_warmup,
            skip_first_wait=1,
            wait=window.num_skipped - num_warmup,
            warmup=num_warmup,
            active=window.num_active,
            repeat=window.repeat,
        ),
        on_trace_ready=on_trace_ready,
        record_shapes=config.pytorch_profiler_collect_shapes,
        with_stack=config.pytorch_profiler_collect_callstack,
        profile_memory=config.pytorch_profiler_collect_memory,
        # Verbose adds each operator's call stack, which TensorBoard's plugin shows, to the Python functions.
        experimental_config=profiler_options(verbose=config.pytorch_profiler_collect_callstack),
    ) as profile:
        yield profile.step
    _warn_if_missed(window, topology, ranks, is_missed=not was_active)


def _why_not_written(write: Callable[[], object], folder: Path, rank: int) -> str | None:
    """Write a rank's trace. Return the reason for a failure, or None if the trace is complete.

    PyTorch's writer does not report a full disk, so the end of the file is checked.
    """
    try:
        write()
        newest = max(folder.glob(f"rank{rank}.*"), key=lambda file: file.stat().st_mtime_ns)
        with newest.open("rb") as file:
            file.seek(-min(16, file.seek(0, 2)), 2)
            is_whole = file.read().rstrip().endswith(b"}")
        if not is_whole:
            newest.unlink()
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: there is no file at all
        return str(error)
    return None if is_whole else "the file is incomplete: is the disk full?"


class _NsysProfile:
    """Profile by nsys (started with ``-c cudaProfilerApi``) of the window's iterations."""

    def __init__(self, window: _Window, num_before: int, start: Callable[[], None], stop: Callable[[], None]):
        self._window = window
        self._position = -num_before  # iterations since the window's first
        self._start, self._stop = start, stop
        self._is_recording = False
        self.is_recorded = False
        self._start_if_due()

    def step(self) -> None:
        """Mark the end of an iteration."""
        self._position += 1
        if self._is_recording and (self._position - self._window.num_active) % self._window.period == 0:
            self._stop()
            self._is_recording = False
        self._start_if_due()

    def _start_if_due(self) -> None:
        num_times, offset = divmod(self._position, self._window.period)
        if offset == 0 and 0 <= num_times < self._window.repeat:
            self._start()
            self._is_recording = self.is_recorded = True


@contextmanager
def _nsys(window: _Window, topology: Topology, num_before: int, ranks: Collection[int]) -> Iterator[Step]:
    if topology.rank not in ranks:
        yield _no_step
        return
    runtime = torch.cuda.cudart()
    profile = _NsysProfile(window, num_before, runtime.cudaProfilerStart, runtime.cudaProfilerStop)
    with torch.autograd.profiler.emit_nvtx():
        yield profile.step
    _warn_if_missed(window, topology, ranks, is_missed=not profile.is_recorded)


@contextmanager
def memory_history(config: LoggingConfig, topology: Topology) -> Iterator[None]:
    """Record the allocations of GPU memory in the block, and write them even if the block raises.

    Only --profile-ranks record. Without a GPU, it warns that there is nothing to record. A collective.

    Raises:
        UserError: a rank cannot write to the folder; raised on every rank.
    """
    if not config.record_memory_history:
        yield
        return
    if topology.device.type != "cuda":
        log.warning("--record-memory-history has no effect: it records GPU memory, and there is no GPU")
        yield
        return
    is_on, path = topology.rank in config.profile_ranks, snapshot_path(config, topology.rank)
    with topology.agreed():
        if is_on:
            make_writable(path.parent, "--memory-snapshot-path in")
    if not is_on:
        yield
        return
    start_memory_history()
    try:
        yield
    finally:
        try:
            save_memory_history(str(path))
            log.info("memory history: %s; open it on pytorch.org/memory_viz", path, extra=THIS_RANK)
        except OSError as error:
            log.warning("the memory history %s cannot be written (%s)", path, error.strerror, extra=THIS_RANK)
        stop_memory_history()


def snapshot_path(config: LoggingConfig, rank: int) -> Path:
    """Return a rank's file for --record-memory-history: the first of --profile-ranks uses the path itself."""
    path = Path(config.memory_snapshot_path)
    return path if rank == config.profile_ranks[0] else path.with_stem(f"{path.stem}_rank{rank}")


def _warn_if_missed(window: _Window, topology: Topology, ranks: Collection[int], *, is_missed: bool) -> None:
    if is_missed and topology.rank == min(ranks):
        text = "%s: no trace, as the run ended before iteration %d"
        log.warning(text, window.flag, window.first, extra=THIS_RANK)
