"""Everything a run writes about itself, behind one door."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

from megalite.checkpoint.lease import FolderLease
from megalite.config import LoggingConfig
from megalite.log import THIS_RANK, log
from megalite.topology import Topology
from megalite.train.telemetry.log_line import LogLineWriter, startup_line
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.metrics_file import MetricsFile
from megalite.train.telemetry.tensorboard import TensorBoardWriter
from megalite.train.telemetry.timer_table import TimesOfRanks, times_of_all_ranks
from megalite.train.telemetry.timers import INTERVAL, Timers
from megalite.train.telemetry.wandb import WandbWriter

__all__ = ["Writers", "startup_line"]


class Writer(Protocol):
    """One place that a run's figures go to."""

    def iteration(self, metrics: IterationMetrics, times: TimesOfRanks) -> None:
        """Tells an interval's figures, and those of its timers where they were taken."""

    def validation(self, metrics: ValidationMetrics) -> None:
        """Tells an evaluation's result."""

    def close(self, *, has_failed: bool = False) -> None:
        """Writes what is still held, and how the run ended."""


class BoardWriter(Writer, Protocol):
    """One that draws, and by an interval of its own."""

    def layer_norms(self, iteration: int, norms: Mapping[str, float]) -> None:
        """Tells the gradient's norm of each layer."""


class Writers:
    """The log line, and the metrics file, TensorBoard and wandb where the config names them.

    They are written by the one rank that reports; on the others every method does nothing but what all ranks
    do together.

    Args:
        resolved_config_text: the whole run's config, told to TensorBoard.
        save: the run's checkpoint folder.
        lease: on that folder: a run that has lost it writes no figures any more.

    Attributes:
        intervals: iterations between two calls of `iteration`; where several are due, in this order.

    Raises:
        UserError: an output cannot be written; raised on the reporting rank alone, as it alone tries, so
            construct inside `topology.agreed()`.
    """

    def __init__(
        self,
        config: LoggingConfig,
        topology: Topology,
        resolved_config_text: str,
        save: str | None = None,
        lease: FolderLease | None = None,
    ) -> None:
        self._config = config
        self._lease = lease
        self._topology = topology
        has_boards = config.tensorboard_dir is not None or config.wandb_project is not None
        boards = (config.board_interval,) if has_boards else ()
        self.intervals = tuple(dict.fromkeys((config.log_interval, *boards)))
        self._times: TimesOfRanks = {}  # those that the boards have not had
        self._logs: list[Writer] = []
        self._boards: list[BoardWriter] = []
        if not topology.is_reporter:
            return
        self._logs.append(LogLineWriter(config))
        try:
            if config.metrics_file is not None:
                self._logs.append(MetricsFile(Path(config.metrics_file)))
            for board in _boards(config, topology.world_size, resolved_config_text, save):
                self._boards.append(board)
        except BaseException:
            self.close(has_failed=True)
            raise

    def iteration(self, interval: int, metrics: IterationMetrics, timers: Timers) -> None:
        """Tells the figures of an interval of `intervals`.

        With the log line the timers start anew, on every rank. Those that are on (level 1 and 2) are told of
        all ranks: a collective.
        """
        self._stop_if_lost()
        if interval == self._config.log_interval:
            self._times = self._take(metrics, timers)
            for writer in self._logs:
                writer.iteration(metrics, self._times)
        if interval == self._config.board_interval:
            for board in self._boards:
                board.iteration(metrics, self._times)
            self._times = {}

    def layer_norms(self, iteration: int, norms: Mapping[str, float]) -> None:
        """Tells the gradient's norm of each layer."""
        self._stop_if_lost()
        for board in self._boards:
            board.layer_norms(iteration, norms)

    def validation(self, metrics: ValidationMetrics) -> None:
        """Tells an evaluation's result."""
        self._stop_if_lost()
        for writer in (*self._logs, *self._boards):
            writer.validation(metrics)

    def close(self, *, has_failed: bool = False) -> None:
        """Writes what is still held and closes the files; a second call does nothing."""
        writers: list[Writer] = [*self._logs, *self._boards]
        self._logs, self._boards = [], []
        while writers:
            writers.pop().close(has_failed=has_failed)

    def __enter__(self) -> Writers:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(has_failed=error is not None)

    def _stop_if_lost(self) -> None:
        """Write no more if another run has taken over the folder; the run itself ends soon after."""
        writes = bool(self._logs or self._boards)
        if writes and self._lease is not None and self._lease.is_lost():
            log.warning("%s", self._lease.loss(), extra=THIS_RANK)
            self._logs, self._boards = [], []

    def _take(self, metrics: IterationMetrics, timers: Timers) -> TimesOfRanks:
        own = timers.take(metrics.num_iterations)
        if timers.level == 0:
            return {name: {self._topology.rank: milliseconds} for name, milliseconds in own.items()}
        return times_of_all_ranks({INTERVAL: metrics.iteration_time_ms, **own}, self._topology)


def _boards(
    config: LoggingConfig, world_size: int, config_text: str, save: str | None
) -> Iterator[BoardWriter]:
    if config.tensorboard_dir is not None:
        yield TensorBoardWriter(Path(config.tensorboard_dir), config, world_size, config_text)
    if config.wandb_project is not None:
        folder = config.wandb_save_dir or save
        yield WandbWriter(config, Path(folder) if folder else None, world_size, config_text)
