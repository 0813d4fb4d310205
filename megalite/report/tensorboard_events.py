"""Read TensorBoard's event files as a run's history, for runs without a metrics file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.errors import UserError
from megalite.report.run_history import History, HistoryRow, segments_of

EVENTS = "events.out.tfevents"
_TAGS = {
    "lm loss": ("lm_loss", 1.0),
    "learning-rate": ("learning_rate", 1.0),
    "decoupled-learning-rate": ("decoupled_learning_rate", 1.0),
    "grad-norm": ("grad_norm", 1.0),
    "loss-scale": ("loss_scale", 1.0),
    "batch-size": ("global_batch_size", 1.0),
    "params-norm": ("params_norm", 1.0),
    "num-zeros": ("num_zeros", 1.0),
    "iteration-time": ("iteration_time_ms", 1e3),
    "throughput": ("tflops_per_gpu", 1.0),
    "tokens-per-second": ("tokens_per_second", 1.0),
    "mfu": ("mfu", 1.0),
    "mem-allocated-bytes": ("memory_allocated_mb", 2.0**-20),
    "mem-reserved-bytes": ("memory_reserved_mb", 2.0**-20),
}
"""For each TensorBoard tag, the metric's name in a metrics file, and the factor to its unit there."""
_SPLITS = {
    "lm loss validation": "valid",
    "lm loss test": "test",
    "lm loss validation ema": "valid ema",
    "lm loss test ema": "test ema",
}
_NAMED = "lm-loss-validation/"


def read_events(folders: Sequence[Path]) -> History:
    """Read the history in folders of event files.

    Raises:
        UserError: tensorboard is not installed, or the files have no scalars of a run.
    """
    rows = list[HistoryRow]()
    try:
        for file in _event_files(folders):
            rows += _rows(_open(file), _start_time(file))
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


def _rows(events: Any, start_time: float | None) -> list[HistoryRow]:
    iterations: dict[int, dict[str, float]] = {}
    started = {} if start_time is None else {"start_time": start_time}
    rows: list[HistoryRow] = []
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            times = {"wall_time": event.wall_time, **started}
            if name := _evaluation(tag):
                rows.append(HistoryRow(event.step, {"lm_loss": event.value, **times}, name))
            elif tag in _TAGS or tag.endswith(" loss"):  # a term of the loss
                key, factor = _TAGS.get(tag, (tag.replace(" ", "_"), 1.0))
                iterations.setdefault(event.step, times)[key] = event.value * factor
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
    if tag.startswith(_NAMED):
        dataset, _, tag = tag.removeprefix(_NAMED).rpartition("/")
        return f"{_SPLITS[tag]} {dataset}" if tag in _SPLITS else ""
    return _SPLITS.get(tag, "")


def _texts(events: Any) -> Iterator[str]:
    for tag in events.Tags()["tensors"]:
        if tag.startswith("config"):
            for event in events.Tensors(tag)[:1]:
                raw = event.tensor_proto.string_val[0].decode(errors="replace")
                # The config is a Markdown code block, indented by four spaces.
                yield "\n".join(line[4:] if line.startswith("    ") else line for line in raw.splitlines())
