"""Profiles of a few iterations: by PyTorch's profiler, by nsys, and of a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch.profiler
from torch.profiler import ProfilerActivity

from megalite.config import LoggingConfig
from megalite.errors import UserError
from megalite.folders import make_writable
from megalite.log import THIS_RANK, log
from megalite.topology import Topology

_SKIPPED, _TRACED = 2, 3
"""Iterations that --profile-execution passes over (allocations, warm-up), and that it traces."""

_DEFAULT_NAME = "profile"


class Profile(Protocol):
    """A profile under way."""

    def step(self) -> None:
        """Tells that an iteration has ended."""


class _NoProfile:
    def step(self) -> None:
        pass


class _Window(NamedTuple):
    """The iterations that are profiled, counted from 1; `flag` asks for it."""

    flag: str
    first: int
    last: int


def profiler(config: LoggingConfig, topology: Topology, num_done: int = 0) -> AbstractContextManager[Profile]:
    """Profiles some iterations of the block: those that --profile names, or the third to fifth.

    PyTorch's profiler writes ``tensorboard_dir/profile_name/rank<N>.*.pt.trace.json``, each rank its own:
    all of them with --profile-execution, --profile-ranks with --profile. Without either nothing happens.
    A collective.

    Args:
        num_done: iterations before the block's first.

    Raises:
        UserError: a rank cannot write into the folder, or --profile is for nsys and there is no GPU; on every
            rank alike.
    """
    if config.profile_execution:
        first = num_done + _SKIPPED + 1
        window = _Window("--profile-execution", first, first + _TRACED - 1)
        return _pytorch(window, config, topology, num_done, range(topology.world_size))
    window = _Window("--profile", config.profile_step_start + 1, config.profile_step_end)
    if config.profile and config.use_pytorch_profiler:
        return _pytorch(window, config, topology, num_done, config.profile_ranks)
    if config.profile:
        return _nsys(window, topology, num_done, config.profile_ranks)
    return _nothing()


@contextmanager
def _nothing() -> Iterator[Profile]:
    yield _NoProfile()


@contextmanager
def _pytorch(
    window: _Window, config: LoggingConfig, topology: Topology, num_done: int, ranks: Collection[int]
) -> Iterator[Profile]:
    assert config.tensorboard_dir is not None  # a rule of the config
    folder = Path(config.tensorboard_dir) / (config.profile_name or _DEFAULT_NAME)
    is_on = topology.rank in ranks
    with topology.agreed():
        if is_on:
            make_writable(folder, "--tensorboard-dir")
    num_before = window.first - 1 - num_done
    if not is_on or num_before < 0:
        _warn_if_missed(window, topology, ranks, is_missed=num_before < 0)
        yield _NoProfile()
        return
    write = torch.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank{topology.rank}")
    was_active = False

    def on_trace_ready(profile: torch.profiler.profile) -> None:
        nonlocal was_active
        was_active = True
        if reason := _why_not_written(lambda: write(profile), folder, topology.rank):
            text = "%s: the trace in %s cannot be written (%s): training goes on without it"
            log.warning(text, window.flag, folder, reason, extra=THIS_RANK)
        elif topology.rank == min(ranks):
            log.info("profiler: the trace is in %s", folder, extra=THIS_RANK)

    num_warmup = min(1, num_before)
    num_active = window.last - window.first + 1
    with torch.profiler.profile(
        activities=_activities(topology),
        schedule=torch.profiler.schedule(
            wait=num_before - num_warmup, warmup=num_warmup, active=num_active, repeat=1
        ),
        on_trace_ready=on_trace_ready,
    ) as profile:
        yield profile
    _warn_if_missed(window, topology, ranks, is_missed=not was_active)


def _why_not_written(write: Callable[[], object], folder: Path, rank: int) -> str | None:
    """Write a rank's trace, and return why that failed; None where the trace is whole.

    PyTorch's writer says nothing when the disk is full: the end of the file shows it.
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
    """Lets nsys (started with ``-c cudaProfilerApi``) record the window's iterations."""

    def __init__(self, window: _Window, num_done: int, start: Callable[[], None], stop: Callable[[], None]):
        self._window = window
        self._num_done = num_done
        self._start, self._stop = start, stop
        self.is_recorded = False
        self._begin_if_due()

    def step(self) -> None:
        """Tells that an iteration has ended."""
        self._num_done += 1
        if self._num_done == self._window.last and self.is_recorded:
            self._stop()
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self._num_done == self._window.first - 1:
            self._start()
            self.is_recorded = True


@contextmanager
def _nsys(window: _Window, topology: Topology, num_done: int, ranks: Collection[int]) -> Iterator[Profile]:
    if topology.device.type != "cuda":
        raise UserError(
            "--profile without --use-pytorch-profiler lets nsys record a GPU, and there is none: give "
            "--use-pytorch-profiler"
        )
    if topology.rank not in ranks:
        yield _NoProfile()
        return
    runtime = torch.cuda.cudart()
    profile = _NsysProfile(window, num_done, runtime.cudaProfilerStart, runtime.cudaProfilerStop)
    with torch.autograd.profiler.emit_nvtx():
        yield profile
    _warn_if_missed(window, topology, ranks, is_missed=not profile.is_recorded)


@contextmanager
def memory_history(config: LoggingConfig, topology: Topology) -> Iterator[None]:
    """Records who takes and frees a GPU's memory in the block, and writes it however the block ends.

    On --profile-ranks; on a machine without a GPU a warning says that there is nothing to record.
    """
    if not config.record_memory_history:
        yield
        return
    if topology.device.type != "cuda":
        log.warning("--record-memory-history is without effect: it records a GPU's memory, and there is none")
        yield
        return
    if topology.rank not in config.profile_ranks:
        yield
        return
    torch.cuda.memory._record_memory_history()
    try:
        yield
    finally:
        path = snapshot_path(config, topology.rank)
        try:
            torch.cuda.memory._dump_snapshot(str(path))
            log.info("memory history: %s; drop it on pytorch.org/memory_viz", path, extra=THIS_RANK)
        except OSError as error:
            log.warning("the memory history %s cannot be written (%s)", path, error.strerror, extra=THIS_RANK)
        torch.cuda.memory._record_memory_history(enabled=None)


def snapshot_path(config: LoggingConfig, rank: int) -> Path:
    """A rank's file of --record-memory-history: the first of --profile-ranks has the path as given."""
    path = Path(config.memory_snapshot_path)
    return path if rank == config.profile_ranks[0] else path.with_stem(f"{path.stem}_rank{rank}")


def _warn_if_missed(window: _Window, topology: Topology, ranks: Collection[int], *, is_missed: bool) -> None:
    if is_missed and topology.rank == min(ranks):
        text = "%s: no trace, as the run had no iteration %d"
        log.warning(text, window.flag, window.first, extra=THIS_RANK)


def _activities(topology: Topology) -> list[ProfilerActivity]:
    on_cuda = [ProfilerActivity.CUDA] if topology.device.type == "cuda" else []
    return [ProfilerActivity.CPU, *on_cuda]
