"""A run's figures in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megalite.config import LoggingConfig
from megalite.errors import UserError
from megalite.folders import make_writable
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.scalars import main_scalars, run_scalars, validation_scalars
from megalite.train.telemetry.timer_table import TimesOfRanks

GRAD_NORMS = "grad-norm by layer"


class TensorBoardWriter:
    """Writes scalars by iteration, the main ones by consumed samples too.

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
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                f"--tensorboard-dir {folder} needs the package tensorboard, which is not installed: "
                "pip install tensorboard, or leave the flag out"
            ) from None
        make_writable(folder, "--tensorboard-dir")
        self._config = config
        self._world_size = world_size
        self._writer = SummaryWriter(str(folder), max_queue=config.tensorboard_queue_size)
        code = "".join(f"    {line}\n" for line in config_text.splitlines())
        self._writer.add_text("config", code)

    def iteration(self, metrics: IterationMetrics, times: TimesOfRanks) -> None:
        for tag, value in main_scalars(self._config, metrics).items():
            self._writer.add_scalar(tag, value, metrics.iteration)
            self._writer.add_scalar(f"{tag} vs samples", value, metrics.consumed_samples)
        for tag, value in run_scalars(self._config, self._world_size, metrics, times).items():
            self._writer.add_scalar(tag, value, metrics.iteration)

    def layer_norms(self, iteration: int, norms: Mapping[str, float]) -> None:
        self._writer.add_histogram(GRAD_NORMS, np.array(list(norms.values())), iteration)
        for layer, norm in norms.items():
            self._writer.add_scalar(f"{GRAD_NORMS}/{layer}", norm, iteration)

    def validation(self, metrics: ValidationMetrics) -> None:
        for tag, value in validation_scalars(self._config, metrics).items():
            self._writer.add_scalar(tag, value, metrics.iteration)
        # Evaluations are rare: what they found must not wait for the queue.
        self._writer.flush()

    def close(self, *, has_failed: bool = False) -> None:
        self._writer.close()
