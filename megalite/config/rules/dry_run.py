"""Rules of what can be told of a rank without running it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.problem import Problem


def rank_of_world(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The rank is one of the run's."""
    dry_run = config.dry_run
    if dry_run.dry_run and world_size is not None and dry_run.rank >= world_size:
        yield Problem(
            ("rank", "world_size"),
            f"--rank {dry_run.rank} is none of {world_size} ranks: give 0 to {world_size - 1}, or a larger "
            "--world-size",
        )


def whole_weights(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Weights that are shared out are torch's to gather, which it does not on tensors without memory."""
    if config.dry_run.dry_run and config.parallel.zero_stage == 3:
        yield Problem(
            ("dry_run", "zero_stage"),
            "--dry-run with --zero-stage 3, whose weights are gathered by torch's FSDP: give --zero-stage 2 "
            "to see the same rank with whole weights, or estimate it with tools/plan.py",
        )


def json_folder(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The file's folder is there before any work is done."""
    path = config.dry_run.dry_run_json
    if config.dry_run.dry_run and path is not None and not os.path.isdir(os.path.dirname(path) or "."):
        yield Problem(
            ("dry_run_json",),
            f"--dry-run-json {path} cannot be written: there is no folder {os.path.dirname(path)}",
        )
