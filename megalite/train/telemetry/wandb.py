"""A run's figures in Weights & Biases, under the names that TensorBoard has them by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megalite.config import LoggingConfig
from megalite.errors import UserError
from megalite.folders import make_writable
from megalite.log import THIS_RANK, log
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.scalars import main_scalars, run_scalars, validation_scalars
from megalite.train.telemetry.tensorboard import GRAD_NORMS
from megalite.train.telemetry.timer_table import TimesOfRanks


class WandbWriter:
    """Writes scalars by iteration, with the consumed samples beside them as another axis to plot by.

    Args:
        folder: of wandb's own files; None leaves it to wandb.
        config_text: the run's config as YAML, shown with the run.

    Raises:
        UserError: wandb is not installed, or the folder cannot be written.
    """

    def __init__(self, config: LoggingConfig, folder: Path | None, world_size: int, config_text: str) -> None:
        try:
            import wandb  # here, not above: an optional package that one rank alone needs
        except ImportError:
            raise UserError(
                f"--wandb-project {config.wandb_project} needs the package wandb, which is not installed: "
                "pip install wandb, or leave the flag out"
            ) from None
        if folder is not None:
            make_writable(folder, "--wandb-save-dir")
        self._wandb = wandb
        self._config = config
        self._world_size = world_size
        self._is_failing = False
        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            dir=None if folder is None else str(folder),
            config=yaml.safe_load(config_text),
        )

    def iteration(self, metrics: IterationMetrics, times: TimesOfRanks) -> None:
        scalars = {
            **main_scalars(self._config, metrics),
            **run_scalars(self._config, self._world_size, metrics, times),
            "samples": metrics.consumed_samples,
        }
        self._send(lambda: self._run.log(scalars, step=metrics.iteration))

    def layer_norms(self, iteration: int, norms: Mapping[str, float]) -> None:
        histogram = self._wandb.Histogram(list(norms.values()))
        scalars = {f"{GRAD_NORMS}/{layer}": norm for layer, norm in norms.items()}
        self._send(lambda: self._run.log({GRAD_NORMS: histogram, **scalars}, step=iteration))

    def validation(self, metrics: ValidationMetrics) -> None:
        scalars = validation_scalars(self._config, metrics)
        self._send(lambda: self._run.log(scalars, step=metrics.iteration))

    def close(self, *, has_failed: bool = False) -> None:
        self._send(lambda: self._run.finish(exit_code=int(has_failed)))

    def _send(self, call: Callable[[], object]) -> None:
        """Make a call of wandb's; log a failure, of whatever kind, when it begins and when it ends."""
        try:
            call()
        except Exception as error:  # a full disk, a lost connection, wandb's own process that has ended
            if not self._is_failing:
                log.warning(
                    "--wandb-project %s cannot be written (%s: %s): training goes on without it",
                    self._config.wandb_project,
                    type(error).__name__,
                    error,
                    extra=THIS_RANK,
                )
            self._is_failing = True
            return
        if self._is_failing:
            log.warning("--wandb-project %s is written again", self._config.wandb_project, extra=THIS_RANK)
        self._is_failing = False
