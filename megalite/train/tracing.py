"""Trace a range of iterations: record what each rank does, put the ranks on one clock, and write the trace.

The log says where the time went, and Perfetto shows the file.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megalite.config import LoggingConfig
from megalite.distributed.axes import MODEL, coordinates_text, whole_axis
from megalite.distributed.axis import DEVICE, WORLD, Observer, Wait, observing
from megalite.pipeline.schedules import Action
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.telemetry.timers import BATCH_GENERATOR, Clock, Timed, WallClock, clock_for
from megalite.train.train_step import StepResult
from megalite.utils.errors import UserError
from megalite.utils.files import make_writable, replace_file
from megalite.utils.log import THIS_RANK, log

ITERATION = "iteration"
DATA = "data"
PART = "part"
WAIT = " wait"
OTHER_WAIT = f"other{WAIT}"


class TraceSpan(NamedTuple):
    """Interval of a rank's time.

    Attributes:
        category: "iteration"; the kind of an action; "pp wait" and the like; "data"; "part" for all others.
        start: start in seconds of the host's clock.
        end: end in seconds of the host's clock.
        microbatch: microbatch of an action; None for other spans.
        chunk: chunk of an action; None for other spans.
    """

    name: str
    category: str
    start: float
    end: float
    microbatch: int | None = None
    chunk: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Recorder(Observer):
    """Recorder of when events begin and end; `spans` converts the times to seconds.

    Args:
        clock: records points in time.
        wall_clock: the host's clock, which the spans use.
    """

    def __init__(self, clock: Clock[Any], wall_clock: Clock[float]) -> None:
        self._clock = clock
        # On a GPU the stream is empty here, so both are the same point in time.
        self._origin, self._origin_seconds = clock.now(), wall_clock.now()
        self._open: list[tuple[Timed, Any]] = []
        self._done: list[tuple[Timed, str | None, Any, Any]] = []

    def begins(self, what: Timed) -> None:
        self._open.append((what, self._clock.now()))

    def ends(self, what: Timed) -> None:
        while self._open:  # an exception interrupted these events
            begun, start = self._open.pop()
            if begun == what:
                self._done.append((what, None, start, self._clock.now()))
                return

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Record the block as this iteration, unless it raises."""
        start = self._clock.now()
        yield
        self._done.append((f"{ITERATION} {number}", ITERATION, start, self._clock.now()))

    def spans(self) -> list[TraceSpan]:
        """Return the events that have ended, sorted by start; an event comes before the events inside it."""
        found = []
        for what, category, start, end in self._done:
            first = self._origin_seconds + self._clock.seconds(self._origin, start)
            last = first + self._clock.seconds(start, end)
            found.append(_span(what, category, first, last))
        return sorted(found, key=lambda span: (span.start, -span.end))


def _span(what: Timed, category: str | None, start: float, end: float) -> TraceSpan:
    if isinstance(what, Action):
        return TraceSpan(str(what), what.kind.value, start, end, what.microbatch, what.chunk)
    if isinstance(what, Wait):
        # Ranks that share slices of experts exchange tokens with ep's.
        axis = "ep" if what.axis in ("etp", "ep_etp") else whole_axis(what.axis)
        category = OTHER_WAIT if what.axis == WORLD else f"{axis}{WAIT}"
        return TraceSpan(what.what, category, start, end)
    return TraceSpan(what, category or (DATA if what == BATCH_GENERATOR else PART), start, end)


_NUM_CLOCK_SAMPLES = 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ClockSamples:
    """Rank's clock readings before and after each of several collectives of all ranks.

    Attributes:
        machine: identifies the machine; ranks of one machine share one clock.
    """

    machine: str
    before: tuple[float, ...]
    after: tuple[float, ...]


class ClockOffset(NamedTuple):
    """Seconds to add to a rank's clock to get rank 0's time.

    Attributes:
        error: largest possible error in seconds.
    """

    seconds: float
    error: float


def sample_clocks(rank: int) -> ClockSamples:
    """Read this rank's clock around collectives in host memory; every rank calls it at the same point."""
    before, after, token = [], [], torch.zeros(1)
    for _ in range(_NUM_CLOCK_SAMPLES):
        before.append(time.perf_counter())
        dist.all_reduce(token)
        after.append(time.perf_counter())
    machine = _BOOT.read_text().strip() if _BOOT.exists() else f"rank {rank}"
    return ClockSamples(machine, tuple(before), tuple(after))


def clock_offsets(samples: Sequence[ClockSamples]) -> list[ClockOffset]:
    """Return the offset of each rank's clock against rank 0's.

    No rank leaves a collective before all ranks have entered it. So for every collective, the offset of rank
    r is at least rank 0's time before it minus rank r's time after it, and at most rank 0's time after it
    minus rank r's time before it. The tightest of these bounds are used; the error of their middle is at most
    half of their distance. Ranks of one machine have one clock and share their bounds. On rank 0's machine
    the offset is zero.
    """
    first = samples[0]
    bounds: dict[str, tuple[float, float]] = {first.machine: (0.0, 0.0)}
    for each in samples:
        low = max(a - b for a, b in zip(first.before, each.after, strict=True))
        high = min(a - b for a, b in zip(first.after, each.before, strict=True))
        known_low, known_high = bounds.get(each.machine, (low, high))
        bounds[each.machine] = max(low, known_low), min(high, known_high)
    offsets = {name: ClockOffset((low + high) / 2, (high - low) / 2) for name, (low, high) in bounds.items()}
    return [offsets[each.machine] for each in samples]


COMPUTE = "compute"
_TERM_OF_CATEGORY = {f"pp{WAIT}": "bubble", OTHER_WAIT: "other waits"}
"""Categories whose term has another name."""


@dataclass(frozen=True)
class TimeBreakdown:
    """Shares of the traced iterations' time, summed over all ranks.

        bubble       waits along pp: for hidden states or gradients of another stage, for a message to be
                                  sent, and at the end of an iteration for stages that are not done
        tp wait      collectives over tp, including the time of the messages
        dp wait      waits for collectives over dp: the part that does not overlap with other work
                     (and so on for each further axis that ranks waited on)
        data         waits for the samples of the next microbatch, and their copy to the device
        other waits  collectives of all ranks (the gradient's norm)
        compute      everything else: GEMMs, optimizer, and work of the host

    Attributes:
        shares: share of the time by these names; the sum is 1.
    """

    shares: Mapping[str, float]

    def __str__(self) -> str:
        """Return the shares in whole percents whose sum is 100."""
        percents = {name: math.floor(100 * share) for name, share in self.shares.items()}
        by_remainder = sorted(self.shares, key=lambda name: percents[name] - 100 * self.shares[name])
        for name in by_remainder[: 100 - sum(percents.values())]:
            percents[name] += 1
        return ", ".join(f"{name} {percent}%" for name, percent in percents.items())


def seconds_by_category(spans: Iterable[TraceSpan]) -> dict[str, float]:
    """Return the seconds of whole iterations, and of waits and data, which are inside and do not overlap."""
    always = [axis.name for axis in MODEL.weights_first if axis.is_named(1)]
    waits = {f"{name}{WAIT}": 0.0 for name in always}
    others = {DATA: 0.0, OTHER_WAIT: 0.0, ITERATION: 0.0}
    for span in spans:
        if span.category in others:
            others[span.category] += span.seconds
        elif span.category.endswith(WAIT):
            waits[span.category] = waits.get(span.category, 0.0) + span.seconds
    return waits | others


def seconds_by_action(spans: Iterable[TraceSpan]) -> dict[tuple[str, int], float]:
    """Return the mean seconds of a rank's actions by kind and chunk, without the waits and data inside them.

    Args:
        spans: sorted as by `Recorder.spans`.
    """
    found: dict[tuple[str, int], list[float]] = {}
    last: TraceSpan | None = None
    for span in spans:
        if span.chunk is not None:
            last = span
            found.setdefault((span.category, span.chunk), []).append(span.seconds)
        elif (
            last is not None
            and last.chunk is not None
            and span.start < last.end
            and (span.category == DATA or span.category.endswith(WAIT))
        ):
            found[last.category, last.chunk][-1] -= span.seconds
    return {key: max(0.0, sum(seconds) / len(seconds)) for key, seconds in found.items()}


def time_breakdown(spans_by_rank: Iterable[Iterable[TraceSpan]]) -> TimeBreakdown:
    """Return the shares of the iterations' time over all ranks."""
    seconds = seconds_by_category(span for spans in spans_by_rank for span in spans)
    total = seconds.pop(ITERATION)
    seconds[COMPUTE] = total - sum(seconds.values())
    shares = {_TERM_OF_CATEGORY.get(name, name): each / (total or 1.0) for name, each in seconds.items()}
    return TimeBreakdown(shares if total else {name: float(name == COMPUTE) for name in shares})


@dataclass(frozen=True)
class Lane:
    """One rank's row of the trace file, with its spans in rank 0's time.

    Attributes:
        coordinates: the rank's coordinate along each axis.
    """

    rank: int
    coordinates: Mapping[str, int]
    spans: Sequence[TraceSpan]

    @property
    def name(self) -> str:
        return f"rank {self.rank} · {coordinates_text(self.coordinates)}"


def write_trace(path: Path, lanes: Sequence[Lane], facts: Mapping[str, Any]) -> None:
    """Write the file, under a temporary name until it is complete.

    Args:
        facts: values to write beside the events, as `otherData`.

    Raises:
        OSError: the file cannot be written.
    """
    with replace_file(path) as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(facts)},"traceEvents":[\n'.encode())
        for number, event in enumerate(_events(lanes)):
            file.write(((",\n" if number else "") + json.dumps(event, ensure_ascii=False)).encode())
        file.write(b"\n]}\n")


def _events(lanes: Sequence[Lane]) -> Iterator[dict[str, Any]]:
    origin = min((span.start for lane in lanes for span in lane.spans), default=0.0)
    yield _metadata("process_name", 0, {"name": "megalite"})
    for lane in lanes:
        yield _metadata("thread_name", lane.rank, {"name": lane.name})
        yield _metadata("thread_sort_index", lane.rank, {"sort_index": lane.rank})
        for span in lane.spans:
            yield _event(lane.rank, span, origin)


def _metadata(name: str, rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 0, "tid": rank, "args": arguments}


def _event(rank: int, span: TraceSpan, origin: float) -> dict[str, Any]:
    # In whole nanoseconds, so that rounding does not make a span overlap the next one.
    start, end = (round(1e9 * (moment - origin)) for moment in (span.start, span.end))
    event = {
        "ph": "X",
        "name": span.name,
        "cat": span.category,
        "pid": 0,
        "tid": rank,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
    }
    if span.microbatch is not None:
        event["args"] = {"microbatch": span.microbatch, "chunk": span.chunk}
    return event


_RankTrace = tuple[dict[str, int], ClockSamples, list[TraceSpan]]
"""One rank's part of the file: its coordinate along each axis, its clock samples and its spans."""


class PipelineTracing(Callback):
    """Trace of the iterations of --trace-pipeline, which is written after the last of them.

    Other iterations are not observed.
    """

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        """Trace while the block trains.

        Raises:
            UserError: the file's folder cannot be written; raised on every rank.
        """
        config, topology = loop.trainer.config, loop.trainer.topology
        self._path = trace_path(config.logging, config.checkpoint.run_folder)
        with topology.agreed():
            if topology.is_reporter:
                make_writable(self._path.parent, _folder_flag(config.logging))
                if self._path.is_dir():
                    raise UserError(f"{_folder_flag(config.logging)} {self._path} is a folder: pass a file")
        self._topology = topology
        self._numbers = config.logging.traced_iterations  # counted from 1
        self._recorder: Recorder | None = None
        self._has_traced = False
        with ExitStack() as self._iteration:
            yield
        self._write()
        if not self._has_traced:
            first, last = self._numbers[0], self._numbers[-1]
            log.warning("--trace-pipeline %d:%d: no trace, as the run had no such iteration", first, last)

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return iteration in self._numbers or iteration + 1 in self._numbers

    def before_step(self, loop: TrainingLoop) -> None:
        if loop.next_iteration not in self._numbers:
            return
        topology = self._topology
        if self._recorder is None:
            if topology.device.type == "cuda":
                with topology.events.during(DEVICE):
                    torch.cuda.synchronize(topology.device)
            self._recorder = Recorder(clock_for(topology.device), WallClock())
        self._has_traced = True
        self._iteration.enter_context(observing(topology.observers, self._recorder))
        self._iteration.enter_context(self._recorder.iteration(loop.next_iteration))

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self._iteration.close()

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        if loop.iteration == self._numbers[-1]:
            self._write()

    def _write(self) -> None:
        """Gather the spans on the reporting rank, which writes them, if there are any; a collective."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        topology = self._topology
        with topology.world.wait("all-reduce", "the trace's clocks"):
            samples = sample_clocks(topology.rank)
        with topology.events.during(DEVICE):
            spans = recorder.spans()
        mine: _RankTrace = topology.coordinates, samples, spans
        gathered = topology.world.objects_at_last(mine, "the trace")  # on the reporting rank
        if gathered is not None:
            self._report(gathered)

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


def trace_path(logging: LoggingConfig, save: str | None) -> Path:
    """Return the file of a requested trace."""
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
