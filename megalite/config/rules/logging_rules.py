"""Rules for traces and profilers."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.utils.errors import Problem


def pipeline_trace(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the trace has a file."""
    logging = config.logging
    folders = (logging.trace_pipeline_path, logging.tensorboard_dir, config.checkpoint.save)
    if logging.trace_pipeline is not None and not any(folders):
        yield Problem(
            ("trace_pipeline", "trace_pipeline_path", "tensorboard_dir", "save"),
            "--trace-pipeline has no folder to write to: pass --tensorboard-dir, or --trace-pipeline-path",
        )


def profiled_ranks(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that the ranks to profile exist."""
    logging = config.logging
    if world_size is None or not (logging.profile or logging.record_memory_history):
        return
    if unknown := [rank for rank in logging.profile_ranks if rank >= world_size]:
        yield Problem(
            ("profile_ranks",),
            f"--profile-ranks {' '.join(map(str, unknown))}: the run's ranks are 0 to {world_size - 1}",
        )


def layer_norms(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that histograms of gradient norms have a writer."""
    logging = config.logging
    if logging.log_layer_grad_norms_interval and not logging.has_dashboards:
        yield Problem(
            ("log_layer_grad_norms_interval", "tensorboard_dir", "wandb_project"),
            "--log-layer-grad-norms-interval has no folder to write to: pass --tensorboard-dir",
        )
