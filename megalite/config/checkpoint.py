"""Where a run is saved and resumed from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    """Folders of checkpoints, and how often to write one."""

    save: str | None = None
    """Folder to save checkpoints to, at the end of the run and at each interval."""
    load: str | None = None
    """Folder whose last checkpoint the run resumes from."""
    save_interval: int | None = None
    """Iterations between checkpoints; by default only the end is saved."""
