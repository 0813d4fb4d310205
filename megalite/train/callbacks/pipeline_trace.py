"""Trace a range of iterations on all ranks, and log where their time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.config import LoggingConfig
from megalite.distributed.axis import DEVICE, observing
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.telemetry.timers import WallClock, clock_for
from megalite.train.tracing import (
    ITERATION,
    ClockSamples,
    Lane,
    Recorder,
    TraceSpan,
    clock_offsets,
    sample_clocks,
    time_breakdown,
    write_trace,
)
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError
from megalite.utils.files import make_writable
from megalite.utils.log import THIS_RANK, log


class PipelineTracing(Callback):
    """Trace of the iterations of --trace-pipeline."""

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        with pipeline_trace(loop.trainer) as self._trace, ExitStack() as self._iteration:
            yield

    def before_step(self, loop: TrainingLoop) -> None:
        self._iteration.enter_context(self._trace.iteration(loop.next_iteration))

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self._iteration.close()

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        self._trace.after(loop.iteration)


_RankTrace = tuple[dict[str, int], ClockSamples, list[TraceSpan]]
"""One rank's part of the file: its coordinate along each axis, its clock samples and its spans."""


class PipelineTrace:
    """Trace of the iterations of `numbers`, which it writes to `path` after the last of them.

    Other iterations are not observed. Every rank must make the same calls.

    Attributes:
        numbers: iterations, counted from 1.
    """

    def __init__(self, numbers: range, path: Path, trainer: Trainer) -> None:
        self.numbers = numbers
        self._path = path
        self._topology = trainer.topology
        self._recorder: Recorder | None = None
        self._has_traced = False

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Record the block as this iteration, if it is one of `numbers`."""
        if number not in self.numbers:
            yield
            return
        if self._recorder is None:
            if self._topology.device.type == "cuda":
                with self._topology.events.during(DEVICE):
                    torch.cuda.synchronize(self._topology.device)
            self._recorder = Recorder(clock_for(self._topology.device), WallClock())
        self._has_traced = True
        with observing(self._topology.observers, self._recorder), self._recorder.iteration(number):
            yield

    def after(self, number: int) -> None:
        """Write the file if this iteration was the range's last; then this is a collective."""
        if self.numbers and number == self.numbers[-1]:
            self.write()

    def write(self) -> None:
        """Gather the spans on the reporting rank, which writes them, if there are any."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        topology = self._topology
        with topology.world.wait("all-reduce", "the trace's clocks"):
            samples = sample_clocks(topology.rank)
        with topology.events.during(DEVICE):
            spans = recorder.spans()
        mine: _RankTrace = topology.coordinates, samples, spans
        gathered: list[Any] | None = [None] * topology.world_size if topology.is_reporter else None
        with topology.world.wait("gather", "the trace"):
            dist.gather_object(mine, gathered, dst=topology.world_size - 1)
        if gathered is not None:
            self._report(gathered)

    def finish(self) -> None:
        """Write the recorded iterations at the run's end, or warn that the run had none of them."""
        self.write()
        if self.numbers and not self._has_traced:
            first, last = self.numbers[0], self.numbers[-1]
            log.warning("--trace-pipeline %d:%d: no trace, as the run had no such iteration", first, last)

    def _report(self, gathered: list[_RankTrace]) -> None:
        offsets = clock_offsets([samples for _, samples, _ in gathered])
        lanes = []
        for rank, ((coordinates, _, spans), (offset, _)) in enumerate(zip(gathered, offsets, strict=True)):
            moved = [span._replace(start=span.start + offset, end=span.end + offset) for span in spans]
            lanes.append(Lane(rank, coordinates, moved))
        breakdown = time_breakdown(lane.spans for lane in lanes)
        error = max(offset.error for offset in offsets)
        traced = [int(span.name.split()[1]) for span in lanes[0].spans if span.category == ITERATION]
        first, last = traced[0], traced[-1]
        which = f"iterations {first}-{last}" if first < last else f"iteration {first}"
        log.info("pipeline trace of %s: %s", which, breakdown, extra=THIS_RANK)
        topology = self._topology
        facts = {
            "first_iteration": first,
            "last_iteration": last,
            "verdict": dict(breakdown.shares),
            "verdict_line": str(breakdown),
            "clock_error_us": 1e6 * error,
            "layout": topology.sizes,
        }
        try:
            write_trace(self._path, lanes, facts)
        except OSError as failure:  # a missing trace must not end the run
            log.warning("the trace %s cannot be written: %s", self._path, failure.strerror, extra=THIS_RANK)
            return
        exact = f"agree to {1e6 * error:.0f} us" if error else "are identical"
        log.info("pipeline trace: %s (%d lanes; clocks %s)", self._path, len(lanes), exact, extra=THIS_RANK)


@contextmanager
def pipeline_trace(trainer: Trainer) -> Iterator[PipelineTrace]:
    """Trace the iterations of --trace-pipeline while the block trains.

    Raises:
        UserError: the file's folder cannot be written; raised on every rank.
    """
    logging, topology = trainer.config.logging, trainer.topology
    numbers, path = logging.traced_iterations, trace_path(logging, trainer.config.checkpoint.save)
    if path is not None:
        with topology.agreed():
            if topology.is_reporter:
                make_writable(path.parent, _folder_flag(logging))
                if path.is_dir():
                    raise UserError(f"{_folder_flag(logging)} {path} is a folder: pass a file")
    trace = PipelineTrace(numbers, path or Path(), trainer)
    yield trace
    trace.finish()


def trace_path(logging: LoggingConfig, save: str | None) -> Path | None:
    """Return the file of the trace, or None if none is requested."""
    if not logging.traced_iterations:
        return None
    if logging.trace_pipeline_path is not None:
        return Path(logging.trace_pipeline_path)
    folder = logging.tensorboard_dir or save
    assert folder is not None  # a rule of the config
    first, last = logging.traced_iterations[0], logging.traced_iterations[-1]
    return Path(folder) / f"pipeline_trace_{first}-{last}.json"


def _folder_flag(logging: LoggingConfig) -> str:
    if logging.trace_pipeline_path is not None:
        return "--trace-pipeline-path"
    return "--tensorboard-dir" if logging.tensorboard_dir else "--save"
