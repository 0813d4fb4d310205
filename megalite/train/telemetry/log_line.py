"""The lines that a run prints, in the form that parsers of Megatron-LM's logs read."""

from __future__ import annotations

from megalite.config import LoggingConfig
from megalite.log import THIS_RANK, log
from megalite.topology import Topology
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.timer_table import TimesOfRanks, timer_table

_SPLIT_WORDS = {"valid": "", "test": " on test set"}


def startup_line(topology: Topology) -> str:
    """The layout of the run."""
    return (
        f"using world size: {topology.world_size}, data-parallel-size: {topology.dp.size}, "
        f"tensor-model-parallel size: {topology.tp.size}, pipeline-model-parallel size: {topology.pp.size}"
    )


def iteration_line(metrics: IterationMetrics, log_throughput: bool) -> str:
    """One log line; a loss that is NaN or infinite stands in it as it is."""
    fields = [
        f"iteration {metrics.iteration:8d}/{metrics.train_iters:8d}",
        f"consumed samples: {metrics.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {metrics.iteration_time_ms:.1f}",
        f"learning rate: {metrics.learning_rate:.3E}",
        f"global batch size: {metrics.global_batch_size:5d}",
        f"lm loss: {metrics.lm_loss:.6E}",
        f"loss scale: {metrics.loss_scale:.1f}",
        f"grad norm: {metrics.grad_norm:.3f}",
        f"number of skipped iterations: {metrics.num_skipped:3d}",
        f"number of nan iterations: {metrics.num_nan:3d}",
    ]
    further = []
    if metrics.num_zeros is not None:
        further.append(f"num zeros: {metrics.num_zeros}")
    if metrics.params_norm is not None:
        further.append(f"params norm: {metrics.params_norm:.3f}")
    fields[-2:-2] = further  # after the grad norm
    if log_throughput:
        fields.insert(3, f"throughput per GPU (TFLOP/s/GPU): {metrics.tflops_per_gpu:.1f}")
    return "".join(f" {field} |" for field in fields)


def validation_block(metrics: ValidationMetrics) -> str:
    """An evaluation's line, between two dashed ones."""
    name = f" on {metrics.name}" if metrics.name else ""
    line = (
        f"validation loss at iteration {metrics.iteration}{_SPLIT_WORDS[metrics.split]}{name} | "
        f"lm loss value: {metrics.lm_loss:.6E} | lm loss PPL: {metrics.ppl:.6E} |"
    )
    dashes = "-" * len(line)
    return f"{dashes}\n{line}\n{dashes}"


class LogLineWriter:
    """Prints what is told through megalite's logger, whichever rank this is."""

    def __init__(self, config: LoggingConfig) -> None:
        self._config = config

    def iteration(self, metrics: IterationMetrics, times: TimesOfRanks) -> None:
        for warning in metrics.warnings:
            log.warning(warning, extra=THIS_RANK)
        log.info(iteration_line(metrics, self._config.log_throughput), extra=THIS_RANK)
        if self._config.timing_log_level:
            log.info(timer_table(times, self._config.timing_log_option), extra=THIS_RANK)

    def validation(self, metrics: ValidationMetrics) -> None:
        log.info(validation_block(metrics), extra=THIS_RANK)

    def close(self, *, has_failed: bool = False) -> None:
        """Nothing is held open."""
