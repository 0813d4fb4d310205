"""A run's figures as TensorBoard's scalars, under the names that Megatron-LM's dashboards look for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megalite.config import LoggingConfig
from megalite.errors import UserError
from megalite.folders import make_writable
from megalite.train.metrics import IterationMetrics, ValidationMetrics

_SPLIT_TAGS = {"valid": "lm loss validation", "test": "lm loss test"}


class TensorBoardWriter:
    """Writes scalars by iteration, the main ones by consumed samples too; times in seconds as Megatron's.

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

    def iteration(self, metrics: IterationMetrics, timers_ms: Mapping[str, float]) -> None:
        for tag, value in self._by_samples_too(metrics).items():
            self._writer.add_scalar(tag, value, metrics.iteration)
            self._writer.add_scalar(f"{tag} vs samples", value, metrics.consumed_samples)
        for tag, value in self._by_iteration(metrics, timers_ms).items():
            self._writer.add_scalar(tag, value, metrics.iteration)

    def validation(self, metrics: ValidationMetrics) -> None:
        # A dataset with a name is told where BLOOM's dashboards look for it.
        folder = f"lm-loss-validation/{metrics.name}/" if metrics.name else ""
        tag = f"{folder}{_SPLIT_TAGS[metrics.split]}"
        self._writer.add_scalar(tag, metrics.lm_loss, metrics.iteration)
        if self._config.log_validation_ppl_to_tensorboard:
            self._writer.add_scalar(f"{tag} ppl", metrics.ppl, metrics.iteration)
        # Evaluations are rare: what they found must not wait for the queue.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _by_samples_too(self, metrics: IterationMetrics) -> dict[str, float]:
        scalars: dict[str, float] = {
            "lm loss": metrics.lm_loss,
            "learning-rate": metrics.learning_rate,
            "grad-norm": metrics.grad_norm,
            "loss-scale": metrics.loss_scale,
        }
        if self._config.log_batch_size_to_tensorboard:
            scalars["batch-size"] = metrics.global_batch_size
        if metrics.params_norm is not None:
            scalars["params-norm"] = metrics.params_norm
        if metrics.num_zeros is not None:
            scalars["num-zeros"] = metrics.num_zeros
        return scalars

    def _by_iteration(self, metrics: IterationMetrics, timers_ms: Mapping[str, float]) -> dict[str, float]:
        scalars = {"iteration-time": metrics.iteration_time_ms / 1e3, "world-size": float(self._world_size)}
        if self._config.log_throughput:
            scalars["throughput"] = metrics.tflops_per_gpu
        if self._config.log_memory_to_tensorboard:
            scalars["mem-allocated-bytes"] = metrics.memory_allocated_mb * 2**20
            scalars["mem-reserved-bytes"] = metrics.memory_reserved_mb * 2**20
        if self._config.log_timers_to_tensorboard:
            scalars |= {f"{name}-time": milliseconds / 1e3 for name, milliseconds in timers_ms.items()}
        return scalars
