"""Resume in each layout what the layout before has saved, and compare it with the run on one rank."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from megalite.config import CheckpointConfig, Config
from megalite.distributed.local_ranks import RankError
from megalite.errors import UserError
from megalite.verify.record_run import RunRecord

Record = Callable[[Config, int], RunRecord]
"""Records the run of a config on a number of ranks; it saves and resumes as the config says."""


class SaveChain:
    """Runs of which each resumes what the one before has saved.

    Args:
        folder: folder of the saves, which are as large as two checkpoints; None to save nothing.
        record: records a run.
    """

    def __init__(self, folder: Path | None, record: Record) -> None:
        self._folder = folder
        self._record = record
        self._last: tuple[str, Path] | None = None
        self._num_saves = 0

    def run(self, name: str, config: Config, world_size: int) -> tuple[RunRecord, RunRecord | str | None]:
        """Record a run and its save, then what this layout makes of the save of the run before.

        Args:
            name: what to call the run.

        Returns:
            The run, and what `resume` returns.

        Raises:
            UserError: the config cannot run; the next run then resumes the save before it.
        """
        if self._folder is None:
            return self._record(config, world_size), None
        self._num_saves += 1
        own = self._folder / str(self._num_saves)
        own.mkdir()
        run = self._record(_with(config, CheckpointConfig(save=str(own))), world_size)
        resumed = self.resume(config, world_size)
        self._last = name, own
        return run, resumed

    @property
    def last(self) -> str:
        """Return the name of the run whose save is resumed next."""
        return "" if self._last is None else self._last[0]

    def resume(self, config: Config, world_size: int) -> RunRecord | str | None:
        """Record the run that resumes the last save, and delete the save.

        Returns:
            The run, or the error that ends it; None if there is no save.
        """
        if self._last is None:
            return None
        (_, folder), self._last = self._last, None
        try:
            return self._record(_with(config, CheckpointConfig(load=str(folder))), world_size)
        except (RankError, UserError) as error:
            return f"the run ends with {str(error).strip().splitlines()[-1]}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _with(config: Config, checkpoint: CheckpointConfig) -> Config:
    return dataclasses.replace(config, checkpoint=checkpoint)
