"""A run's folder as somebody sees it who knows nothing of megalite but the format on disk."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path


def newest_whole(folder: Path) -> int:
    """Iteration of the newest checkpoint all of whose files are what its SHA256SUMS says; 0 where none is.

    Counted are those that a load takes by itself: what `latest` names and what is older.
    """
    if not (folder / "latest").exists():
        return 0
    latest = int((folder / "latest").read_text().strip().removeprefix("iter_"))
    places = [*folder.glob("iter_*"), *folder.glob(".iter_*.replaced")]
    iterations = {int(place.name.split("iter_")[1].split(".")[0]): place for place in reversed(places)}
    for iteration in sorted((number for number in iterations if number <= latest), reverse=True):
        if is_whole(iterations[iteration]):
            return iteration
    return 0


def is_whole(checkpoint: Path) -> bool:
    """Whether every file that SHA256SUMS names is there with that digest, as `sha256sum -c` tells it."""
    try:
        lines = (checkpoint / "SHA256SUMS").read_text().splitlines()
        json.loads((checkpoint / "run.json").read_text())
        return bool(lines) and all(_has_digest(checkpoint, line) for line in lines)
    except (OSError, ValueError):
        return False


def traces_of_saving(folder: Path) -> set[tuple[str, int]]:
    """What stands in the folder only while a checkpoint is written, or after a run died of it.

    Each with its time of change, so that what is left of an earlier save can be told from what goes on.
    """
    asides = [*folder.glob(".iter_*.partial"), *folder.glob(".iter_*.replaced")]
    latest = (folder / "latest").read_text().strip() if (folder / "latest").exists() else ""
    newer = [place for place in folder.glob("iter_*") if place.name > latest]
    traces = set()
    for place in (*asides, *newer):
        with suppress(FileNotFoundError):
            traces.add((place.name, place.stat().st_ctime_ns))
    return traces


def iterations_of(folder: Path) -> list[int]:
    """Iterations in the metrics file, in its order."""
    return [iteration for iteration, _ in _records(folder)]


def losses_of(folder: Path) -> dict[int, set[float]]:
    """Every loss that an iteration ever had: more than one value means that a resumed run went astray."""
    losses: dict[int, set[float]] = {}
    for iteration, loss in _records(folder):
        losses.setdefault(iteration, set()).add(loss)
    return losses


def tensors_of(folder: Path) -> list[str]:
    """Digests of the tensor files of the latest checkpoint, as SHA256SUMS has them."""
    sums = folder / (folder / "latest").read_text().strip() / "SHA256SUMS"
    return sorted(line for line in sums.read_text().splitlines() if line.endswith(".safetensors"))


def _records(folder: Path) -> list[tuple[int, float]]:
    file = folder / "metrics.jsonl"
    records = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            record = json.loads(line)
            records.append((record["iteration"], record["lm_loss"]))
        except (ValueError, KeyError):  # half a line of a rank that was killed
            continue
    return records


def _has_digest(checkpoint: Path, line: str) -> bool:
    digest, _, name = line.partition("  ")
    return hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == digest
