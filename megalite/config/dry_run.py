"""A rank of a run that is told of and not run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DryRunConfig:
    """What one rank of a run would hold, compute and send: told on any machine, without other ranks."""

    dry_run: bool = False
    """Tell what one rank of the run would hold, compute and send, exactly, without doing it, and exit."""
    world_size: int | None = None
    """With --dry-run, ranks of the run; by default tp x pp x dp."""
    rank: int = 0
    """With --dry-run, the rank that is told of."""
    dry_run_json: str | None = None
    """With --dry-run, file that gets all of it as one JSON object."""
