"""Everything a run writes about itself, behind one door."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

from megalite.config import LoggingConfig
from megalite.topology import Topology
from megalite.train.log_line import LogLineWriter, startup_line
from megalite.train.metrics import IterationMetrics, ValidationMetrics
from megalite.train.metrics_file import MetricsFile
from megalite.train.tensorboard import TensorBoardWriter
from megalite.train.timers import Timers

__all__ = ["Writers", "startup_line"]


class Writer(Protocol):
    """One place that a run's figures go to."""

    def iteration(self, metrics: IterationMetrics, timers_ms: Mapping[str, float]) -> None:
        """Tells an interval's figures, and the milliseconds of its timers."""

    def validation(self, metrics: ValidationMetrics) -> None:
        """Tells an evaluation's result."""

    def close(self) -> None:
        """Writes what is still held."""


class Writers:
    """The log line, and the metrics file and TensorBoard where the config names them.

    They are written by the one rank that reports; on the others every method does nothing.

    Args:
        resolved_config_text: the whole run's config, told to TensorBoard.

    Raises:
        UserError: an output cannot be written; raised on the reporting rank alone, as it alone tries, so
            construct inside `topology.agreed()`.
    """

    def __init__(self, config: LoggingConfig, topology: Topology, resolved_config_text: str) -> None:
        self._writers: list[Writer] = []
        if not topology.is_reporter:
            return
        self._writers.append(LogLineWriter(config.log_throughput))
        try:
            if config.metrics_file is not None:
                self._writers.append(MetricsFile(Path(config.metrics_file)))
            if config.tensorboard_dir is not None:
                folder = Path(config.tensorboard_dir)
                self._writers.append(
                    TensorBoardWriter(folder, config, topology.world_size, resolved_config_text)
                )
        except BaseException:
            self.close()
            raise

    def iteration(self, metrics: IterationMetrics, timers: Timers) -> None:
        """Tells an interval's figures; the timers start anew, on every rank."""
        timers_ms = timers.take(metrics.num_iterations)
        for writer in self._writers:
            writer.iteration(metrics, timers_ms)

    def validation(self, metrics: ValidationMetrics) -> None:
        """Tells an evaluation's result."""
        for writer in self._writers:
            writer.validation(metrics)

    def close(self) -> None:
        """Writes what is still held and closes the files; a second call does nothing."""
        while self._writers:
            self._writers.pop().close()

    def __enter__(self) -> Writers:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
