"""Traces a range of a run's iterations on all ranks, and says in a line where their time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.config import LoggingConfig
from megalite.errors import UserError
from megalite.folders import make_writable
from megalite.log import THIS_RANK, log
from megalite.observer import Observer
from megalite.train.telemetry.marks import HostMarks, marks_for
from megalite.train.tracing.chrome import Lane, write_trace
from megalite.train.tracing.clocks import Meetings, clock_offsets, meet
from megalite.train.tracing.spans import ITERATION, Recorder, Span
from megalite.train.tracing.verdict import verdict_of
from megalite.train.trainer import Trainer

_Told = tuple[tuple[int, int, int], Meetings, list[Span]]
"""What a rank gives for the file: its coordinates, its meetings and its spans."""


class PipelineTrace:
    """Records the iterations of `numbers` and writes them, once the last of them is over, to `path`.

    Outside of them nobody observes anything. Every rank calls everything alike.

    Attributes:
        numbers: iterations, counted from 1.
    """

    def __init__(self, numbers: range, path: Path, trainer: Trainer) -> None:
        self.numbers = numbers
        self._path = path
        self._trainer = trainer
        self._topology = trainer.topology
        self._recorder: Recorder | None = None
        self._has_traced = False

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """The block is this iteration."""
        if number not in self.numbers:
            yield
            return
        if self._recorder is None:
            if self._topology.device.type == "cuda":
                torch.cuda.synchronize(self._topology.device)
            self._recorder = Recorder(marks_for(self._topology.device), HostMarks())
        self._has_traced = True
        with _observed(self._trainer, self._recorder), self._recorder.iteration(number):
            yield

    def after(self, number: int) -> None:
        """Writes the file if this iteration was the range's last; a collective then."""
        if self.numbers and number == self.numbers[-1]:
            self.write()

    def write(self) -> None:
        """Gathers what there is on the reporting rank, which writes it; where there is nothing, nothing."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        topology = self._topology
        coordinates = topology.pp.rank, topology.tp.rank, topology.dp.rank
        mine: _Told = coordinates, meet(topology.rank), recorder.spans()
        told: list[Any] | None = [None] * topology.world_size if topology.is_reporter else None
        dist.gather_object(mine, told, dst=topology.world_size - 1)
        if told is not None:
            self._report(told)

    def finish(self) -> None:
        """Writes what is left at the run's end, or says that it had none of the range."""
        self.write()
        if self.numbers and not self._has_traced:
            first, last = self.numbers[0], self.numbers[-1]
            log.warning("--trace-pipeline %d:%d: no trace, as the run had no such iteration", first, last)

    def _report(self, told: list[_Told]) -> None:
        offsets = clock_offsets([meetings for _, meetings, _ in told])
        lanes = [
            Lane(rank, coordinates, [_moved(span, offset.seconds) for span in spans])
            for rank, ((coordinates, _, spans), offset) in enumerate(zip(told, offsets, strict=True))
        ]
        verdict = verdict_of(lane.spans for lane in lanes)
        error = max(offset.error for offset in offsets)
        traced = [int(span.name.split()[1]) for span in lanes[0].spans if span.category == ITERATION]
        first, last = traced[0], traced[-1]
        which = f"iterations {first}-{last}" if first < last else f"iteration {first}"
        log.info("pipeline trace of %s: %s", which, verdict, extra=THIS_RANK)
        topology = self._topology
        facts = {
            "first_iteration": first,
            "last_iteration": last,
            "verdict": dict(verdict.shares),
            "verdict_line": str(verdict),
            "clock_error_us": 1e6 * error,
            "layout": {axis.name: axis.size for axis in (topology.tp, topology.pp, topology.dp)},
        }
        try:
            write_trace(self._path, lanes, facts)
        except OSError as failure:  # a run of weeks does not end for want of a picture
            log.warning("the trace %s cannot be written: %s", self._path, failure.strerror, extra=THIS_RANK)
            return
        exact = f"agree to {1e6 * error:.0f} us" if error else "are one"
        log.info("pipeline trace: %s (%d lanes; clocks %s)", self._path, len(lanes), exact, extra=THIS_RANK)


@contextmanager
def pipeline_trace(trainer: Trainer) -> Iterator[PipelineTrace]:
    """Traces the iterations that --trace-pipeline names while the block trains; at its end what is left.

    Raises:
        UserError: the file's folder cannot be written; on every rank alike.
    """
    logging, topology = trainer.config.logging, trainer.topology
    numbers, path = logging.traced_iterations, trace_path(logging, trainer.config.checkpoint.save)
    if path is not None:
        if trainer.config.parallel.zero_stage_among(topology.dp.size) == 3:
            log.warning("--trace-pipeline: waits in --zero-stage 3 are torch's own, and told as compute")
        with topology.agreed():
            if topology.is_reporter:
                make_writable(path.parent, _folder_flag(logging))
                if path.is_dir():
                    raise UserError(f"{_folder_flag(logging)} {path} is a folder: give a file")
    trace = PipelineTrace(numbers, path or Path(), trainer)
    yield trace
    trace.finish()


def trace_path(logging: LoggingConfig, save: str | None) -> Path | None:
    """Where the trace goes; None where none is asked for."""
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


@contextmanager
def _observed(trainer: Trainer, observer: Observer[Any]) -> Iterator[None]:
    """Tells the observer all that happens on this rank."""
    with ExitStack() as stack:
        for observers in (*trainer.observer_lists(), trainer.timers.observers):
            observers.append(observer)
            stack.callback(observers.remove, observer)
        yield


def _moved(span: Span, seconds: float) -> Span:
    return span._replace(start=span.start + seconds, end=span.end + seconds)
