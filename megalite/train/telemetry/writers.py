"""Write a run's metrics: log lines, metrics file, TensorBoard, Weights & Biases, MLflow, OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.checkpoint.lease import FolderLease
from megalite.config import LoggingConfig
from megalite.distributed.axis import CHECKPOINT, DEVICE
from megalite.distributed.topology import Topology
from megalite.train.telemetry.dashboards import (
    MlflowWriter,
    OpenTelemetryWriter,
    TensorBoardWriter,
    WandbWriter,
)
from megalite.train.telemetry.metrics import (
    ExpertUse,
    IterationMetrics,
    MetricsWriter,
    TaskScores,
    ValidationMetrics,
)
from megalite.train.telemetry.metrics_file import MachineLoad, MetricsFile
from megalite.train.telemetry.timers import INTERVAL, Timers, TimesByRank, gather_times, timer_table
from megalite.utils.log import THIS_RANK, is_on_terminal, log


def iteration_line(metrics: IterationMetrics, config: LoggingConfig) -> str:
    """Return the log line of an interval, in the format of Megatron's and Megatron-DeepSpeed's logs."""
    fields = [
        f"iteration {metrics.iteration:8d}/{metrics.train_iters:8d}",
        f"consumed samples: {metrics.consumed_samples:12d}",
    ]
    if config.log_line == "megatron-deepspeed":
        fields.append(f"consumed tokens: {metrics.consumed_tokens:12d}")
    fields.append(f"elapsed time per iteration (ms): {metrics.iteration_time_ms:.1f}")
    if config.log_throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {_tflops(metrics, 1)}")
    fields.append(f"learning rate: {metrics.learning_rate:.3E}")
    if metrics.decoupled_learning_rate is not None:
        fields.append(f"decoupled learning rate: {metrics.decoupled_learning_rate:.3E}")
    fields += [
        f"global batch size: {metrics.global_batch_size:5d}",
        f"lm loss: {metrics.lm_loss:.6E}",
    ]
    fields += [f"{name.replace('_', ' ')}: {loss:.6E}" for name, loss in metrics.other_losses.items()]
    fields += [
        f"loss scale: {metrics.loss_scale:.1f}",
        f"grad norm: {metrics.grad_norm:.3f}",
    ]
    if metrics.num_zeros is not None:
        fields.append(f"num zeros: {metrics.num_zeros}")
    if metrics.params_norm is not None:
        fields.append(f"params norm: {metrics.params_norm:.3f}")
    fields += [
        f"number of skipped iterations: {metrics.num_skipped:3d}",
        f"number of nan iterations: {metrics.num_nan:3d}",
    ]
    if config.log_line == "megatron-deepspeed":
        seq_length = metrics.consumed_tokens / metrics.consumed_samples
        fields += [
            f"samples per second: {metrics.tokens_per_second / seq_length:.3f}",
            f"TFLOPs: {_tflops(metrics, 2)}",
        ]
    return "".join(f" {field} |" for field in fields)


def short_line(metrics: IterationMetrics, config: LoggingConfig) -> str:
    """Return the log line of an interval for a terminal: step, losses, speed and the time left.

    The time left does not count evaluations and saves.
    """
    width = len(str(metrics.train_iters))
    seconds = (metrics.train_iters - metrics.iteration) * metrics.iteration_time_ms / 1000
    counts = {"skipped": metrics.num_skipped, "nan": metrics.num_nan}
    fields = [f"step {metrics.iteration:{width}d}/{metrics.train_iters}", f"loss {metrics.lm_loss:.4f}"]
    fields += [f"{name.replace('_', ' ')} {loss:.4f}" for name, loss in metrics.other_losses.items()]
    if metrics.num_zeros is not None:
        fields.append(f"{metrics.num_zeros} zeros in the gradient")
    if metrics.params_norm is not None:
        fields.append(f"params norm {metrics.params_norm:.3f}")
    fields += [f"{count} {name}" for name, count in counts.items() if count]
    fields.append(f"{metrics.tokens_per_second:,.0f} tokens/s")
    if config.log_throughput:
        fields.append(f"{_tflops(metrics, 1)} TFLOP/s per GPU")
    return " | ".join([*fields, f"{clock_text(seconds)} left"])


def _tflops(metrics: IterationMetrics, decimals: int) -> str:
    """Return TFLOP/s of a rank, with more decimals for a CPU, whose rate would be 0.0."""
    return f"{metrics.tflops_per_gpu:.{decimals if metrics.tflops_per_gpu >= 1 else 4}f}"


def clock_text(seconds: float) -> str:
    """Return a length of time as minutes:seconds, hours:minutes:seconds, or with days in front."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def validation_block(metrics: ValidationMetrics) -> str:
    """Return the log line of an evaluation between two dashed lines."""
    test_set = " on test set" if metrics.split == "test" else ""
    name = f" on {metrics.name}" if metrics.name else ""
    weights = " with EMA weights" if metrics.is_of_average else ""
    line = (
        f"validation loss at iteration {metrics.iteration}{test_set}{name}{weights} | "
        f"lm loss value: {metrics.lm_loss:.6E} | lm loss PPL: {metrics.ppl:.6E} |"
    )
    for other, loss in metrics.other_losses.items():
        line += f" {other.replace('_', ' ')} value: {loss:.6E} |"
    dashes = "-" * len(line)
    return f"{dashes}\n{line}\n{dashes}"


def task_line(metrics: TaskScores) -> str:
    """Return the log line of an evaluation of benchmark tasks."""
    fields = "".join(f" {name.replace('/', ' ')}: {score:.6E} |" for name, score in metrics.scores.items())
    return f"task scores at iteration {metrics.iteration} |{fields}"


def expert_line(loads: ExpertUse) -> str:
    """Return the log line of the layer whose experts have the most uneven loads."""
    name, worst = max(loads.layers.items(), key=lambda item: item[1].max_violation)
    return (
        f"experts at iteration {loads.iteration} | largest load above the mean: {worst.max_violation:.1%} "
        f"in {name} |"
    )


class LogLineWriter(MetricsWriter):
    """Writer of log lines, whichever rank this is."""

    def __init__(self, config: LoggingConfig) -> None:
        self._config = config
        is_short = config.log_line == "short" or (config.log_line == "auto" and is_on_terminal())
        self._line = short_line if is_short else iteration_line

    def iteration(self, metrics: IterationMetrics, times: TimesByRank) -> None:
        for warning in metrics.warnings:
            log.warning(warning, extra=THIS_RANK)
        log.info(self._line(metrics, self._config), extra=THIS_RANK)
        if self._config.timing_log_level:
            log.info(timer_table(times, self._config.timing_log_option), extra=THIS_RANK)

    def validation(self, metrics: ValidationMetrics) -> None:
        log.info(validation_block(metrics), extra=THIS_RANK)

    def task_scores(self, metrics: TaskScores) -> None:
        log.info(task_line(metrics), extra=THIS_RANK)

    def expert_use(self, loads: ExpertUse) -> None:
        log.info(expert_line(loads), extra=THIS_RANK)


class Writers:
    """Writers of metrics to the log, and if requested to the metrics file and to dashboards.

    Only the reporting rank writes. On the other ranks each method only takes part in the collectives. See
    `MetricsWriter`.

    Args:
        resolved_config_text: the whole run's config, shown in dashboards.
        save: the run's checkpoint folder.
        lease: lease on that folder; a run that has lost it writes no more metrics, but a record it had begun.

    Attributes:
        intervals: intervals in iterations at which to call `iteration`; if several are due, in this order.

    Raises:
        UserError: an output cannot be written. Only the reporting rank raises it, because only it opens
                outputs: construct this class inside `topology.agreed()`.
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
        of_dashboards = (config.dashboard_interval,) if config.has_dashboards else ()
        self.intervals = tuple(dict.fromkeys((config.log_interval, *of_dashboards)))
        self._times: TimesByRank = {}  # not yet written to the dashboards
        self._logs: list[MetricsWriter] = []
        self._dashboards: list[MetricsWriter] = []
        if not topology.is_reporter:
            return
        self._logs.append(LogLineWriter(config))
        try:
            if (metrics_path := config.metrics_path(save)) is not None:
                self._logs.append(MetricsFile(metrics_path, MachineLoad(topology.device)))
            if config.tensorboard_dir is not None:
                folder = Path(config.tensorboard_dir)
                self._dashboards.append(
                    TensorBoardWriter(folder, config, topology.world_size, resolved_config_text)
                )
            if config.wandb_project is not None:
                wandb_folder = config.wandb_save_dir or save
                self._dashboards.append(
                    WandbWriter(
                        config,
                        Path(wandb_folder) if wandb_folder else None,
                        topology.world_size,
                        resolved_config_text,
                    )
                )
            if config.mlflow_experiment is not None:
                self._dashboards.append(MlflowWriter(config, topology.world_size, resolved_config_text))
            if config.opentelemetry is not None:
                self._dashboards.append(OpenTelemetryWriter(config, topology.world_size))
        except BaseException:
            self.close(has_failed=True)
            raise

    def start(self, iteration: int, consumed_samples: int) -> None:
        """Begin after an iteration, 0 in a new run, before any metrics are written."""
        for writer in self._writing():
            writer.start(iteration, consumed_samples)

    def iteration(self, interval: int, metrics: IterationMetrics, timers: Timers) -> None:
        """Write the metrics of an interval, one of `intervals`.

        The log line resets the timers on every rank. If timers of level 1 or 2 are enabled, it gathers them
        from all ranks: a collective.
        """
        self._writing()
        if interval == self._config.log_interval:
            self._times = self._take(metrics, timers)
            for writer in self._logs:
                writer.iteration(metrics, self._times)
        if interval == self._config.dashboard_interval:
            for dashboard in self._dashboards:
                dashboard.iteration(metrics, self._times)
            self._times = {}

    def layer_norms(self, iteration: int, norms: Mapping[str, float]) -> None:
        for writer in self._writing():
            writer.layer_norms(iteration, norms)

    def scalars(self, iteration: int, scalars: Mapping[str, float]) -> None:
        for writer in self._writing():
            writer.scalars(iteration, scalars)

    def expert_use(self, loads: ExpertUse) -> None:
        for writer in self._writing():
            writer.expert_use(loads)

    def validation(self, metrics: ValidationMetrics) -> None:
        for writer in self._writing():
            writer.validation(metrics)

    def task_scores(self, metrics: TaskScores) -> None:
        for writer in self._writing():
            writer.task_scores(metrics)

    def layout_change(self, iteration: int, change: Mapping[str, Any]) -> None:
        for writer in self._writing():
            writer.layout_change(iteration, change)

    def close(self, *, has_failed: bool = False) -> None:
        """Write pending metrics and close the files; a second call does nothing."""
        writers = [*self._logs, *self._dashboards]
        self._logs, self._dashboards = [], []
        while writers:
            writers.pop().close(has_failed=has_failed)

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self.close(has_failed=error is not None)

    def _writing(self) -> list[MetricsWriter]:
        """Return the writers; none once another run has taken over the folder: this run ends soon after."""
        with self._topology.events.during(CHECKPOINT):  # the lease is in the folder of checkpoints
            is_lost = (
                bool(self._logs or self._dashboards) and self._lease is not None and self._lease.is_lost()
            )
        if is_lost:
            assert self._lease is not None
            log.warning("%s", self._lease.loss(), extra=THIS_RANK)
            self._logs, self._dashboards = [], []
        return [*self._logs, *self._dashboards]

    def _take(self, metrics: IterationMetrics, timers: Timers) -> TimesByRank:
        with self._topology.events.during(DEVICE):
            own = timers.take(metrics.num_iterations)
        if timers.level == 0:
            return {name: {self._topology.rank: milliseconds} for name, milliseconds in own.items()}
        return gather_times({INTERVAL: metrics.iteration_time_ms, **own}, self._topology)
