"""History of a run: the rows of its metrics file, or of TensorBoard's files, split at restarts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.train.telemetry.dashboards import MAIN_TAGS, NAMED_EVALUATION, SPEED_TAGS, SPLIT_TAGS, Tag
from megalite.train.telemetry.metrics import LayerLoads, loads_in
from megalite.train.telemetry.time_terms import TimeSample, sample_in
from megalite.utils.errors import UserError
from megalite.utils.files import parse_json

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Spelling of the floats that JSON cannot represent."""
_MAX_ITERATION = 2**53
"""Above this, a float cannot represent every integer."""
_SMALLEST, _LARGEST = 1e-100, 1e100
"""Smaller values are read as 0, and larger values as infinite, so that ratios stay within a float's range."""
TASKS = "tasks"
"""Name of the rows with scores of benchmark tasks, whose values have names such as `arc_easy/acc`."""
EXPERTS = "experts"
"""Name of the rows with the tokens of experts."""
LAYOUT = "layout"
"""Name of the rows of changes of the layout."""
POSITIONS = {
    "num_iterations",
    "train_iters",
    "consumed_samples",
    "consumed_tokens",
    "start_time",
    "wall_time",
}
"""Metrics that order the rows. A row where one is not finite is dropped."""
EVENTS = "events.out.tfevents"
_TAGS = MAIN_TAGS | SPEED_TAGS
_SPLITS = {
    f"{tag}{ending}": f"{split}{ending}" for split, tag in SPLIT_TAGS.items() for ending in ("", " ema")
}
"""Split of the evaluation under a TensorBoard tag, and whether it is of the weights' average."""


@dataclass(frozen=True)
class HistoryRow:
    """Logged iteration or evaluation.

    Attributes:
        values: the metrics in the line, by their names in the file.
        name: split and dataset of an evaluation, `TASKS`, `EXPERTS` or `LAYOUT`; empty for an iteration.
        device: type of the device that it ran on, "cpu" or "cuda"; empty if the line does not say.
        sample: where the iteration's time went; None if it was not recorded.
        loads: tokens of the experts by layer, in rows with the name `EXPERTS`.
        layouts: the layouts before and after, in rows with the name `LAYOUT`.
    """

    iteration: int
    values: Mapping[str, float]
    name: str = ""
    device: str = ""
    sample: TimeSample | None = None
    loads: Mapping[str, LayerLoads] = field(default_factory=dict)
    layouts: tuple[str, str] = ("", "")

    @property
    def first(self) -> int:
        """Return the first of the iterations that this row sums up (see --log-interval)."""
        return self.iteration - int(self.values.get("num_iterations", 1)) + 1

    @property
    def wall_time(self) -> float | None:
        """Time at which the row was written, in seconds since 1970; None in files of old versions."""
        return self.values.get("wall_time")


@dataclass
class RunSegment:
    """Rows that the run logged from one of its starts to the next.

    Attributes:
        num_kept: number of rows in `iterations` that count; a later segment repeated the rest.
    """

    iterations: list[HistoryRow] = field(default_factory=list)
    evaluations: list[HistoryRow] = field(default_factory=list)
    expert_use: list[HistoryRow] = field(default_factory=list)
    layout_changes: list[HistoryRow] = field(default_factory=list)
    num_kept: int = 0

    @property
    def kept(self) -> list[HistoryRow]:
        return self.iterations[: self.num_kept]

    @property
    def lost(self) -> list[HistoryRow]:
        return self.iterations[self.num_kept :]

    @property
    def rows(self) -> list[HistoryRow]:
        """Return the iterations and evaluations, in the order they were written."""
        return sorted([*self.iterations, *self.evaluations], key=lambda row: (row.iteration, bool(row.name)))


@dataclass
class History:
    """Everything that a run logged.

    Attributes:
        num_broken: number of incomplete lines, as a killed run or a full disk leaves them.
    """

    segments: list[RunSegment]
    num_broken: int = 0

    @property
    def iterations(self) -> list[HistoryRow]:
        """Return the rows that count: the last one of each repeated iteration."""
        return [row for segment in self.segments for row in segment.kept]

    @property
    def samples(self) -> list[TimeSample]:
        """Return where the time of iterations went. The first of each start is omitted if there are more."""
        by_start = [[row.sample for row in segment.kept if row.sample] for segment in self.segments]
        later = [sample for samples in by_start for sample in samples[1:]]
        return later or [sample for samples in by_start for sample in samples]

    @property
    def device(self) -> str:
        """Return the type of the device that the run used last; empty if it is not known."""
        return next((row.device for row in reversed(self.iterations) if row.device), "")

    @property
    def evaluations(self) -> list[HistoryRow]:
        """Return the evaluations that count: the last one of each repeated evaluation."""
        found = {(row.name, row.iteration): row for segment in self.segments for row in segment.evaluations}
        return sorted(found.values(), key=lambda row: row.iteration)

    @property
    def expert_use(self) -> list[HistoryRow]:
        """Return the rows with tokens of experts that count, in the order of their iterations."""
        found = {row.iteration: row for segment in self.segments for row in segment.expert_use}
        return [found[iteration] for iteration in sorted(found)]


def read_history(file: Path) -> History:
    """Read a metrics file.

    Raises:
        UserError: the file cannot be read, or has no iterations.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"metrics file {file} cannot be read ({error.strerror})") from None
    rows, num_broken = list[HistoryRow](), 0
    for line in filter(str.strip, lines):
        row = _row(line)
        if row is None:
            num_broken += 1
        else:
            rows.append(row)
    if not any(not row.name for row in rows):
        raise UserError(
            f"{file} has no metrics of an iteration: pass the file of --metrics-file, a JSON object per line"
        )
    return History(segments_of(rows), num_broken)


def segments_of(rows: Iterable[HistoryRow]) -> list[RunSegment]:
    """Group rows by the process that wrote them: by start time, or else at each step back in the iterations.

    A process that outlives its launcher may write at the same time as its successor. It is the earlier
    segment. Of iterations that both computed, the later segment's rows count.
    """
    found: dict[float, RunSegment] = {}
    last: HistoryRow | None = None
    number = 0
    for row in rows:
        if last is not None:
            # An evaluation has the number of the iteration before it.
            number += row.iteration < last.iteration or (row.iteration == last.iteration and not row.name)
        segment = found.setdefault(row.values.get("start_time", float(number)), RunSegment())
        kinds = {"": segment.iterations, EXPERTS: segment.expert_use, LAYOUT: segment.layout_changes}
        kinds.get(row.name, segment.evaluations).append(row)
        last = row
    segments = [found[key] for key in sorted(found)]
    end = math.inf
    for segment in reversed(segments):
        segment.num_kept = sum(row.iteration < end for row in segment.iterations)
        segment.evaluations = [row for row in segment.evaluations if row.iteration < end]
        segment.expert_use = [row for row in segment.expert_use if row.iteration < end]
        segment.layout_changes = [row for row in segment.layout_changes if row.iteration < end]
        end = min([end, *(row.first for row in segment.iterations)])
    return [segment for segment in segments if segment.rows]


def _row(line: str) -> HistoryRow | None:
    """Parse a line; return None if it is not a complete record."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    values, name, layouts = record, "", ("", "")
    if isinstance(validation := record.get("validation"), dict):
        values = {**record, **validation}
        split = str(validation.get("split", "valid"))
        if weights := validation.get("weights"):
            split = f"{split} {weights}"
        name = f"{split} {validation['name']}" if validation.get("name") else split
    elif isinstance(tasks := record.get("tasks"), dict) and isinstance(scores := tasks.get("scores"), dict):
        values, name = {**scores, **record, **tasks}, TASKS
    elif isinstance(change := record.get("layout_change"), dict):
        values, name = {**record, **change}, LAYOUT
        layouts = str(change.get("before", "")), str(change.get("after", ""))
    loads = loads_in(record.get("experts"))
    if loads is not None:
        values, name = {**record, **record["experts"]}, EXPERTS
    iteration = values.get("iteration")
    if type(iteration) is not int or not 0 <= iteration <= _MAX_ITERATION:
        return None
    sample = sample_in(record.get("time_breakdown"))
    device = str(values.get("device", ""))
    return HistoryRow(iteration, dict(_numbers(values)), name, device, sample, loads or {}, layouts)


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        number = _FLOATS.get(value, value) if isinstance(value, str) else value
        if not isinstance(number, int | float):  # a bool is an int
            continue
        try:
            value = float(number)
        except OverflowError:  # an integer too large for a float
            value = math.inf if number > 0 else -math.inf
        if abs(value) < _SMALLEST:
            value = 0.0
        elif abs(value) > _LARGEST:
            value = math.copysign(math.inf, value)
        if math.isfinite(value) or key not in POSITIONS:
            yield key, value


def read_events(folders: Sequence[Path]) -> History:
    """Read the history in folders of event files.

    Raises:
        UserError: tensorboard is not installed, or the files have no scalars of a run.
    """
    rows = list[HistoryRow]()
    try:
        for file in _event_files(folders):
            rows += _event_rows(_open(file), _start_time(file))
    except ImportError:
        raise UserError(
            f"{folders[0]} has only TensorBoard files, and reading them needs tensorboard: pip install "
            "tensorboard, or train with --metrics-file"
        ) from None
    if not any(not row.name for row in rows):
        raise UserError(f"{folders[0]} holds no scalars of a run: pass the file of --metrics-file")
    return History(segments_of(rows))


def config_in(folders: Sequence[Path]) -> str:
    """Return the config of the last start; empty without one, or if tensorboard is not installed."""
    for file in reversed(_event_files(folders)):
        try:
            text = "\n".join(_texts(_open(file)))
        except ImportError:
            return ""
        if text:
            return text
    return ""


def _event_files(folders: Sequence[Path]) -> list[Path]:
    """Return the file of each start of the run, in order."""
    return sorted(
        {path for folder in folders for path in folder.glob(f"{EVENTS}*")},
        key=lambda file: _start_time(file) or 0.0,
    )


def _open(file: Path) -> Any:
    """Open one file. A reader of the whole folder would drop repeated iterations.

    Raises:
        ImportError: tensorboard is not installed.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 1})
    events.Reload()
    return events


def _start_time(file: Path) -> float | None:
    """Return the start time in the file's name; None if the name has another pattern."""
    parts = file.name.split(".")  # events.out.tfevents.SECONDS.HOST…
    return float(parts[3]) if len(parts) > 3 and parts[3].isdecimal() else None


def _event_rows(events: Any, start_time: float | None) -> list[HistoryRow]:
    iterations: dict[int, dict[str, float]] = {}
    started = {} if start_time is None else {"start_time": start_time}
    rows: list[HistoryRow] = []
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            times = {"wall_time": event.wall_time, **started}
            if name := _evaluation(tag):
                rows.append(HistoryRow(event.step, {"lm_loss": event.value, **times}, name))
            elif tag in _TAGS or tag.endswith(" loss"):  # a term of the loss
                known = _TAGS.get(tag, Tag(tag.replace(" ", "_")))
                iterations.setdefault(event.step, times)[known.metric] = event.value * known.factor
    # Each row covers the iterations since the previous row.
    steps = sorted(iterations)
    for step, before in zip(steps, [None, *steps], strict=False):
        count = 1 if before is None else step - before
        rows.append(HistoryRow(step, {"num_iterations": float(count), **iterations[step]}))
    return sorted(
        rows, key=lambda row: (row.iteration, bool(row.name), row.values.get("wall_time", math.nan))
    )


def _evaluation(tag: str) -> str:
    """Return the split and dataset in an evaluation's tag; empty for other tags."""
    if tag.startswith(NAMED_EVALUATION):
        dataset, _, tag = tag.removeprefix(NAMED_EVALUATION).rpartition("/")
        return f"{_SPLITS[tag]} {dataset}" if tag in _SPLITS else ""
    return _SPLITS.get(tag, "")


def _texts(events: Any) -> Iterator[str]:
    for tag in events.Tags()["tensors"]:
        if tag.startswith("config"):
            for event in events.Tensors(tag)[:1]:
                raw = event.tensor_proto.string_val[0].decode(errors="replace")
                # The config is a Markdown code block, indented by four spaces.
                yield "\n".join(line[4:] if line.startswith("    ") else line for line in raw.splitlines())
