"""TensorBoard's event files as a run's history, for runs that wrote no metrics file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.errors import UserError
from megalite.reporting.history import History, Row, sittings_of

EVENTS = "events.out.tfevents"
_TAGS = {
    "lm loss": ("lm_loss", 1.0),
    "learning-rate": ("learning_rate", 1.0),
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
"""Scalars by TensorBoard's tag: the metrics file's name, and how many of its units one there is."""
_SPLITS = {"lm loss validation": "valid", "lm loss test": "test"}
_NAMED = "lm-loss-validation/"


def read_events(folders: Sequence[Path]) -> History:
    """The history in folders of event files.

    Raises:
        UserError: tensorboard is not installed, or there are no scalars of a run.
    """
    rows = list[Row]()
    try:
        for file in _event_files(folders):
            rows += _rows(_open(file), _began(file))
    except ImportError:
        raise UserError(
            f"{folders[0]} has TensorBoard's files alone, and reading them needs tensorboard: pip install "
            "tensorboard, or train with --metrics-file"
        ) from None
    if not any(not row.name for row in rows):
        raise UserError(f"{folders[0]} holds no scalars of a run: give the file of --metrics-file")
    return History(sittings_of(rows))


def config_in(folders: Sequence[Path]) -> str:
    """The last start's config; empty where there is none or tensorboard is not installed."""
    for file in reversed(_event_files(folders)):
        try:
            text = "\n".join(_texts(_open(file)))
        except ImportError:
            return ""
        if text:
            return text
    return ""


def _event_files(folders: Sequence[Path]) -> list[Path]:
    """One for each start of the run, the first one first."""
    return sorted({path for folder in folders for path in folder.glob(f"{EVENTS}*")}, key=_began)


def _open(file: Path) -> Any:
    """A reader of one file: one of a folder would leave out what was made again.

    Raises:
        ImportError: tensorboard is not installed.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 1})
    events.Reload()
    return events


def _began(file: Path) -> float:
    """When a file's process began, as its name tells."""
    words = file.name.split(".")
    return float(words[3]) if len(words) > 3 and words[3].isdecimal() else file.stat().st_mtime


def _rows(events: Any, began: float) -> list[Row]:
    iterations: dict[int, dict[str, float]] = {}
    rows: list[Row] = []
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            times = {"wall_time": event.wall_time, "start_time": began}
            if name := _evaluation(tag):
                rows.append(Row(event.step, {"lm_loss": event.value, **times}, name))
            elif tag in _TAGS:
                key, factor = _TAGS[tag]
                iterations.setdefault(event.step, times)[key] = event.value * factor
    # Each stands for the iterations since the one before, as far as is known.
    steps = sorted(iterations)
    for step, before in zip(steps, [None, *steps], strict=False):
        count = 1 if before is None else step - before
        rows.append(Row(step, {"num_iterations": float(count), **iterations[step]}))
    return sorted(
        rows, key=lambda row: (row.iteration, bool(row.name), row.values.get("wall_time", math.nan))
    )


def _evaluation(tag: str) -> str:
    """Of an evaluation's tag the split, and the dataset where it has a name."""
    if tag.startswith(_NAMED):
        dataset, _, tag = tag.removeprefix(_NAMED).rpartition("/")
        return f"{_SPLITS[tag]} {dataset}" if tag in _SPLITS else ""
    return _SPLITS.get(tag, "")


def _texts(events: Any) -> Iterator[str]:
    for tag in events.Tags()["tensors"]:
        if tag.startswith("config"):
            for event in events.Tensors(tag)[:1]:
                raw = event.tensor_proto.string_val[0].decode(errors="replace")
                # As code of Markdown, each line stands four spaces in.
                yield "\n".join(line[4:] if line.startswith("    ") else line for line in raw.splitlines())
