"""A run's figures in TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config import LoggingConfig
from megalite.errors import UserError
from megalite.folders import make_writable
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.output_file import OutputFile
from megalite.train.telemetry.scalars import main_scalars, run_scalars, validation_scalars
from megalite.train.telemetry.timer_table import TimesOfRanks

GRAD_NORMS = "grad-norm by layer"
_BINS = np.concatenate(([0.0], 1e-12 * 1.1 ** np.arange(774)))
"""Edges of the histograms of norms, up to 1e20."""
_FLUSH_SECONDS = 120.0
"""Events are held no longer than this, where figures come in often enough."""


class TensorBoardWriter:
    """Writes scalars by iteration, the main ones by consumed samples too.

    TensorBoard's own writer has a thread that a full disk ends for good. So TensorBoard's records go through
    an `OutputFile`, which outlives that.

    Args:
        folder: TensorBoard's; a resumed run adds a file to it.
        world_size: told as a scalar, so that runs of several sizes can be told apart.
        config_text: the run's config, shown as text.

    Raises:
        UserError: TensorBoard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: Path, config: LoggingConfig, world_size: int, config_text: str) -> None:
        try:
            # Here, not above: an optional package, and a second to import, that one rank alone needs.
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard import summary
        except ImportError:
            raise UserError(
                f"--tensorboard-dir {folder} needs the package tensorboard, which is not installed: "
                "pip install tensorboard, or leave the flag out"
            ) from None
        make_writable(folder, "--tensorboard-dir")
        self._config = config
        self._world_size = world_size
        self._summary, self._event = summary, Event
        self._records = RecordWriter(OutputFile(folder / _file_name(), "--tensorboard-dir"))
        self._num_held, self._flushed_at = 0, 0.0
        self._add(file_version="brain.Event:2")
        code = "".join(f"    {line}\n" for line in config_text.splitlines())
        self._add(summary=summary.text("config", code))
        self._flush()

    def iteration(self, metrics: IterationMetrics, times: TimesOfRanks) -> None:
        for tag, value in main_scalars(self._config, metrics).items():
            self._add_scalar(tag, value, metrics.iteration)
            self._add_scalar(f"{tag} vs samples", value, metrics.consumed_samples)
        for tag, value in run_scalars(self._config, self._world_size, metrics, times).items():
            self._add_scalar(tag, value, metrics.iteration)
        self._flush_if_due()

    def layer_norms(self, iteration: int, norms: Mapping[str, float]) -> None:
        histogram = self._summary.histogram(GRAD_NORMS, np.array(list(norms.values())), _BINS)
        self._add(summary=histogram, step=iteration)
        for layer, norm in norms.items():
            self._add_scalar(f"{GRAD_NORMS}/{layer}", norm, iteration)
        self._flush_if_due()

    def validation(self, metrics: ValidationMetrics) -> None:
        for tag, value in validation_scalars(self._config, metrics).items():
            self._add_scalar(tag, value, metrics.iteration)
        # Evaluations are rare: what they found must not wait for the queue.
        self._flush()

    def close(self, *, has_failed: bool = False) -> None:
        self._records.close()

    def _add_scalar(self, tag: str, value: float, step: int) -> None:
        self._add(summary=self._summary.scalar(tag, value), step=step)

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._num_held += 1

    def _flush_if_due(self) -> None:
        is_old = time.monotonic() - self._flushed_at > _FLUSH_SECONDS
        if is_old or self._num_held >= self._config.tensorboard_queue_size:
            self._flush()

    def _flush(self) -> None:
        self._records.flush()
        self._num_held, self._flushed_at = 0, time.monotonic()


def _file_name() -> str:
    """Return a new name as TensorBoard looks for them: when and where the file was begun, and a number."""
    number = time.perf_counter_ns()  # tells files of one second apart
    return f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{number}"
