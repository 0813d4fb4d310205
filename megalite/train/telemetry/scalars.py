"""A run's figures as scalars, under the names that Megatron-LM's dashboards look for; times in seconds."""

from __future__ import annotations

from megalite.config import LoggingConfig
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.timer_table import TimesOfRanks

_SPLIT_TAGS = {"valid": "lm loss validation", "test": "lm loss test"}


def main_scalars(config: LoggingConfig, metrics: IterationMetrics) -> dict[str, float]:
    """Those that are of interest by consumed samples too."""
    scalars: dict[str, float] = {
        "lm loss": metrics.lm_loss,
        "learning-rate": metrics.learning_rate,
        "grad-norm": metrics.grad_norm,
        "loss-scale": metrics.loss_scale,
    }
    if config.log_batch_size_to_tensorboard:
        scalars["batch-size"] = metrics.global_batch_size
    if metrics.params_norm is not None:
        scalars["params-norm"] = metrics.params_norm
    if metrics.num_zeros is not None:
        scalars["num-zeros"] = metrics.num_zeros
    return scalars


def run_scalars(
    config: LoggingConfig, world_size: int, metrics: IterationMetrics, times: TimesOfRanks
) -> dict[str, float]:
    """Those of the machine: time, speed, memory, and of each timer the slowest rank's time."""
    scalars = {"iteration-time": metrics.iteration_time_ms / 1e3, "world-size": float(world_size)}
    if config.log_throughput:
        scalars["throughput"] = metrics.tflops_per_gpu
        scalars["tokens-per-second"] = metrics.tokens_per_second
        if metrics.mfu is not None:
            scalars["mfu"] = metrics.mfu
    if config.log_memory_to_tensorboard:
        scalars["mem-allocated-bytes"] = metrics.memory_allocated_mb * 2**20
        scalars["mem-reserved-bytes"] = metrics.memory_reserved_mb * 2**20
    if config.log_timers_to_tensorboard:
        scalars |= {f"{name}-time": max(by_rank.values()) / 1e3 for name, by_rank in times.items()}
    return scalars


def validation_scalars(config: LoggingConfig, metrics: ValidationMetrics) -> dict[str, float]:
    """An evaluation's; a dataset with a name is told where BLOOM's dashboards look for it."""
    folder = f"lm-loss-validation/{metrics.name}/" if metrics.name else ""
    tag = f"{folder}{_SPLIT_TAGS[metrics.split]}"
    scalars = {tag: metrics.lm_loss}
    if config.log_validation_ppl_to_tensorboard:
        scalars[f"{tag} ppl"] = metrics.ppl
    return scalars
