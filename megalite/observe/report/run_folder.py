"""Find the files of a run: metrics, checkpoints, config, pipeline trace and logs."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.folder import iterations_in
from megalite.checkpoint.manifest import (
    CONFIG,
    RUN,
    DamagedCheckpoint,
    Manifest,
    read_manifest,
    times_written,
)
from megalite.observe.report.run_history import EVENTS, History, config_in, read_events, read_history
from megalite.utils.errors import UserError
from megalite.utils.files import parse_json, read_regular

_DEPTH = 3
"""Number of folder levels to search, including the run's own folder."""
_MAX_CONFIG_BYTES = 1 << 24
_MANY = 20_000
"""Maximum number of entries to read from a folder. A larger folder holds a dataset, not a run."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint of the run.

    Attributes:
        start_time: when the first rank began to write it, in seconds since 1970; None if unknown.
        end_time: when all tensors were written, in the same way.
    """

    iteration: int
    folder: Path
    start_time: float | None
    end_time: float | None


@dataclass(frozen=True)
class Run:
    """Run and its files.

    Attributes:
        source: file or folder that the metrics come from.
        config: resolved config, as YAML; empty if neither a checkpoint nor TensorBoard's files have it.
        manifest: manifest of the newest checkpoint; None without one, or if its text files are damaged.
        trace: file with a trace of the run's pipeline.
    """

    name: str
    source: Path
    history: History
    checkpoints: tuple[Checkpoint, ...] = ()
    config: str = ""
    config_source: str = ""
    manifest: Manifest | None = None
    trace: Path | None = None
    logs: tuple[Path, ...] = ()


def open_run(path: Path, *, logs: tuple[Path, ...] = ()) -> Run:
    """Find the files of a run in its folder, or in the folder of its metrics file.

    Args:
        path: a folder or a metrics file.
        logs: logs to use besides the logs that are found.

    Raises:
        UserError: there are no metrics, or metrics of several runs.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: pass a run's folder, or its metrics file")
    folder = path if path.is_dir() else path.parent
    files = list(_files(folder, _DEPTH))
    metrics = [path] if path.is_file() else [file for file in files if _is_metrics(file)]
    if len(metrics) > 1:
        names = " ".join(map(str, metrics))
        raise UserError(f"{path} holds the metrics of several runs: pass one or more of them: {names}")
    # If the folder holds metrics of other runs too, its other files may belong to any of them.
    is_alone = path.is_dir() or [file for file in files if _is_metrics(file)] == [path]
    files = files if is_alone else []
    events = sorted({file.parent for file in files if EVENTS in file.name})
    if not metrics and not events:
        raise UserError(
            f"{path} holds no metrics of a run: train with --save, --metrics-file or --tensorboard-dir in "
            "it, or pass the metrics file itself"
        )
    history = read_history(metrics[0]) if metrics else read_events(events)
    checkpoints = tuple(_checkpoints(files))
    config, config_source = _config(checkpoints, events)
    return Run(
        name=_name(path),
        source=metrics[0] if metrics else events[0],
        history=history,
        checkpoints=checkpoints,
        config=config,
        config_source=config_source,
        manifest=_manifest(checkpoints),
        trace=max(filter(_is_pipeline_trace, files), key=_numbers_in_name, default=None),
        logs=(*logs, *(file for file in files if file.suffix in (".log", ".out"))),
    )


def trace_summary(file: Path) -> str:
    """Return the time breakdown in a pipeline trace, or why there is none."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        content = parse_json(raw)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        return f"the trace cannot be read: {error}"
    about = content.get("otherData") if isinstance(content, dict) else None
    line = about.get("verdict_line") if isinstance(about, dict) else None
    return str(line or "the trace contains no time breakdown")


def _is_pipeline_trace(file: Path) -> bool:
    """Return whether a file has the name of a pipeline trace, rather than of a PyTorch profiler trace."""
    name = file.name
    return "trace" in name and name.endswith((".json", ".json.gz")) and ".pt.trace." not in name


def _numbers_in_name(file: Path) -> tuple[list[int], Path]:
    return [int(number) for number in re.findall(r"\d+", file.name)], file


def _name(path: Path) -> str:
    path = path.resolve()
    is_plain = path.is_file() and path.stem in ("metrics", "m")
    return path.parent.name if is_plain else path.stem if path.is_file() else path.name


def _files(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())[:_MANY]
    except OSError:
        return
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink() and depth > 1 and not entry.name.startswith("."):
            yield from _files(entry, depth - 1)
        elif entry.is_file() and entry.suffix != ".safetensors":
            yield entry


def _is_metrics(file: Path) -> bool:
    """Return whether the first line of a file is a row of a metrics file."""
    if file.suffix not in (".jsonl", ".json"):
        return False
    try:
        with file.open("rb") as lines:
            record = parse_json(lines.readline(1 << 16))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and ("lm_loss" in record or "validation" in record)


def _checkpoints(files: list[Path]) -> Iterator[Checkpoint]:
    folders = {file.parent.parent for file in files if file.name == RUN}
    for folder in sorted(folders):
        for iteration, name in iterations_in(folder).items():
            if (folder / name / RUN).is_file():
                written = _times(folder / name / RUN)
                yield Checkpoint(iteration, folder / name, written.get("start_time"), written.get("end_time"))


def _times(file: Path) -> dict[str, float]:
    """Return when a checkpoint was written, according to its run.json; empty if it does not say."""
    with suppress(OSError, ValueError):
        return times_written(parse_json(read_regular(file, _MAX_CONFIG_BYTES)))
    return {}


def _manifest(checkpoints: tuple[Checkpoint, ...]) -> Manifest | None:
    newest = max(checkpoints, key=lambda each: each.iteration, default=None)
    if newest is None:
        return None
    try:
        return read_manifest(newest.folder)
    except (OSError, DamagedCheckpoint):
        return None


def _config(checkpoints: tuple[Checkpoint, ...], events: list[Path]) -> tuple[str, str]:
    """Return the config of the newest checkpoint, or else TensorBoard's, and its source."""
    for checkpoint in sorted(checkpoints, key=lambda each: each.iteration, reverse=True):
        file = checkpoint.folder / CONFIG
        with suppress(OSError):
            return read_regular(file, _MAX_CONFIG_BYTES).decode(errors="replace"), str(file)
    text = config_in(events) if events else ""
    return text, str(events[-1]) if text else ""
