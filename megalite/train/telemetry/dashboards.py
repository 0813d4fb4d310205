"""Write metrics to TensorBoard and Weights & Biases, under the names of Megatron-LM's dashboards."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from megalite.config import LoggingConfig
from megalite.train.telemetry.metrics import (
    ExpertUse,
    IterationMetrics,
    MetricsWriter,
    TaskScores,
    ValidationMetrics,
)
from megalite.train.telemetry.metrics_file import OutputFile
from megalite.train.telemetry.timers import TimesByRank
from megalite.utils.errors import UserError
from megalite.utils.files import make_writable
from megalite.utils.log import THIS_RANK, log

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

Edges = npt.NDArray[np.float64]
SPLIT_TAGS = {"valid": "lm loss validation", "test": "lm loss test"}
NAMED_EVALUATION = "lm-loss-validation/"
"""Beginning of the tag of a named dataset's loss, as in BLOOM's dashboards."""
GRAD_NORMS = "grad-norm by layer"
_BIN_EDGES = np.concatenate(([0.0], 1e-12 * 1.1 ** np.arange(774)))  # of norms in histograms, up to 1e20
_LOADS = "tokens of experts by layer"
_LOAD_EDGES = np.concatenate(([0.0], 2.0 ** np.arange(48)))  # of numbers of tokens in histograms
SAMPLES = "samples"
"""Subfolder of TensorBoard's folder for the scalars by consumed samples."""
_FLUSH_SECONDS = 120.0
"""Seconds that events are held at most, while metrics keep coming."""


class Tag(NamedTuple):
    """Metric that has a tag in dashboards.

    Attributes:
        metric: its name in `IterationMetrics`; None there is not written.
        factor: factor from the value under the tag to the metric.
        flag: field of `LoggingConfig` that requests it; empty if it is always written.
    """

    metric: str
    factor: float = 1.0
    flag: str = ""


MAIN_TAGS = {
    "lm loss": Tag("lm_loss"),
    "learning-rate": Tag("learning_rate"),
    "decoupled-learning-rate": Tag("decoupled_learning_rate"),
    "grad-norm": Tag("grad_norm"),
    "loss-scale": Tag("loss_scale"),
    "batch-size": Tag("global_batch_size", flag="log_batch_size_to_tensorboard"),
    "params-norm": Tag("params_norm"),
    "num-zeros": Tag("num_zeros"),
}
"""Metrics that are also written by consumed samples, by tag."""
SPEED_TAGS = {
    "iteration-time": Tag("iteration_time_ms", 1e3),
    "throughput": Tag("tflops_per_gpu", flag="log_throughput"),
    "tokens-per-second": Tag("tokens_per_second", flag="log_throughput"),
    "mfu": Tag("mfu", flag="log_throughput"),
    "mem-allocated-bytes": Tag("memory_allocated_mb", 2.0**-20, "log_memory_to_tensorboard"),
    "mem-reserved-bytes": Tag("memory_reserved_mb", 2.0**-20, "log_memory_to_tensorboard"),
}
"""Metrics of time, throughput and memory, by tag."""


def _tagged(tags: Mapping[str, Tag], config: LoggingConfig, metrics: IterationMetrics) -> dict[str, float]:
    """Return the requested metrics by tag."""
    wanted = {tag: each for tag, each in tags.items() if not each.flag or getattr(config, each.flag)}
    values = {tag: getattr(metrics, each.metric) for tag, each in wanted.items()}
    return {tag: value / tags[tag].factor for tag, value in values.items() if value is not None}


def main_scalars(config: LoggingConfig, metrics: IterationMetrics) -> dict[str, float]:
    """Return the scalars that are also written by consumed samples."""
    terms = {name.replace("_", " "): loss for name, loss in metrics.other_losses.items()}
    return _tagged(MAIN_TAGS, config, metrics) | terms


def run_scalars(
    config: LoggingConfig, world_size: int, metrics: IterationMetrics, times: TimesByRank
) -> dict[str, float]:
    """Return the scalars of speed: time, throughput, memory, and the slowest rank's time of each timer."""
    scalars = _tagged(SPEED_TAGS, config, metrics) | {"world-size": float(world_size)}
    if config.log_timers_to_tensorboard:
        scalars |= {f"{name}-time": max(by_rank.values()) / 1e3 for name, by_rank in times.items()}
    return scalars


def validation_scalars(config: LoggingConfig, metrics: ValidationMetrics) -> dict[str, float]:
    """Return the scalars of an evaluation."""
    folder = f"{NAMED_EVALUATION}{metrics.name}/" if metrics.name else ""
    tag = f"{folder}{SPLIT_TAGS[metrics.split]}{' ema' if metrics.is_of_average else ''}"
    scalars = {tag: metrics.lm_loss}
    if config.log_validation_ppl_to_tensorboard:
        scalars[f"{tag} ppl"] = metrics.ppl
    for name, loss in metrics.other_losses.items():
        scalars[tag.replace("lm loss", name.replace("_", " "))] = loss
    return scalars


class ScalarWriter(MetricsWriter):
    """Base class of writers to an output that plots scalars by iteration, with the samples beside them."""

    def __init__(self, config: LoggingConfig, world_size: int) -> None:
        self.config = config
        self.world_size = world_size

    def histograms(self, iteration: int, values: Mapping[str, Sequence[float]], edges: Edges) -> None:
        """Write the distributions of values by their tags, if the output shows any.

        Args:
            edges: bounds of the bins, for an output that counts no values itself.
        """

    def iteration(self, metrics: IterationMetrics, times: TimesByRank) -> None:
        scalars = {
            **main_scalars(self.config, metrics),
            **run_scalars(self.config, self.world_size, metrics, times),
            "samples": metrics.consumed_samples,
        }
        self.scalars(metrics.iteration, scalars)

    def layer_norms(self, iteration: int, norms: Mapping[str, float]) -> None:
        self.histograms(iteration, {GRAD_NORMS: tuple(norms.values())}, _BIN_EDGES)
        self.scalars(iteration, {f"{GRAD_NORMS}/{layer}": norm for layer, norm in norms.items()})

    def expert_use(self, loads: ExpertUse) -> None:
        tokens = {f"{_LOADS}/{name}": layer.tokens for name, layer in loads.layers.items()}
        self.histograms(loads.iteration, tokens, _LOAD_EDGES)
        figures = {
            f"experts/{name} {figure.replace('_', ' ')}": value
            for name, layer in loads.layers.items()
            for figure, value in layer.figures.items()
        }
        self.scalars(loads.iteration, figures)

    def validation(self, metrics: ValidationMetrics) -> None:
        self.scalars(metrics.iteration, validation_scalars(self.config, metrics))

    def task_scores(self, metrics: TaskScores) -> None:
        self.scalars(metrics.iteration, {f"tasks/{name}": score for name, score in metrics.scores.items()})


def _missing(output: str, package: str | None, install: str) -> UserError:
    problem = f"{output} needs the package {package}, which is not installed"
    return UserError(f"{problem}: pip install {install}, or omit the flag")


class TensorBoardWriter(ScalarWriter):
    """Writer of scalars by iteration, and of the main ones also by consumed samples.

    The scalars by samples are a TensorBoard run of their own, in the subfolder `SAMPLES`: a restart drops the
    later steps of all scalars of a TensorBoard run, so all of them must count the same thing.

    A full disk ends the thread of TensorBoard's own writer for good. This class uses an `OutputFile` instead,
    which recovers from a full disk.

    Args:
        folder: TensorBoard's folder; a resumed run adds files to it.
        world_size: number of ranks, written as a scalar.
        config_text: the run's config, shown as text.

    Raises:
        UserError: TensorBoard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: Path, config: LoggingConfig, world_size: int, config_text: str) -> None:
        super().__init__(config, world_size)
        try:
            # Imported here because it is an optional package that only one rank needs, and takes a second.
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard import summary
        except ImportError:
            raise _missing(f"--tensorboard-dir {folder}", "tensorboard", "tensorboard") from None
        make_writable(folder, "--tensorboard-dir")
        self._config_text = config_text
        self._summary, self._event, self._restart = summary, Event, SessionLog(status=SessionLog.START)
        self._records, self._by_samples = (
            RecordWriter(OutputFile(place / _file_name(), "--tensorboard-dir"))
            for place in (folder, folder / SAMPLES)
        )
        self._num_held, self._flushed_at = 0, 0.0
        for records in (self._records, self._by_samples):
            self._add(records, file_version="brain.Event:2")
        self._flush()

    def start(self, iteration: int, consumed_samples: int) -> None:
        """Write the config. A resumed run also hides the later steps of earlier starts, which it repeats."""
        if iteration > 0:
            for records, step in ((self._records, iteration), (self._by_samples, consumed_samples)):
                for _ in range(2):  # TensorBoard's own reader ignores the first one in a folder
                    self._add(records, session_log=self._restart, step=step + 1)
        code = "".join(f"    {line}\n" for line in self._config_text.splitlines())
        self._add(self._records, summary=self._summary.text("config", code), step=iteration + 1)
        self._flush()

    def iteration(self, metrics: IterationMetrics, times: TimesByRank) -> None:
        for tag, value in main_scalars(self.config, metrics).items():
            self._add_scalar(tag, value, metrics.iteration)
            by_samples = self._summary.scalar(f"{tag} vs samples", value)
            self._add(self._by_samples, summary=by_samples, step=metrics.consumed_samples)
        for tag, value in run_scalars(self.config, self.world_size, metrics, times).items():
            self._add_scalar(tag, value, metrics.iteration)
        self._flush_if_due()

    def histograms(self, iteration: int, values: Mapping[str, Sequence[float]], edges: Edges) -> None:
        for tag, of_tag in values.items():
            histogram = self._summary.histogram(tag, np.array(of_tag), edges)
            self._add(self._records, summary=histogram, step=iteration)

    def scalars(self, iteration: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self._add_scalar(tag, value, iteration)
        self._flush_if_due()

    def validation(self, metrics: ValidationMetrics) -> None:
        super().validation(metrics)
        self._flush()  # evaluations are rare: their results do not wait for the queue to fill

    def close(self, *, has_failed: bool = False) -> None:
        self._records.close()
        self._by_samples.close()

    def _add_scalar(self, tag: str, value: float, step: int) -> None:
        self._add(self._records, summary=self._summary.scalar(tag, value), step=step)

    def _add(self, records: RecordWriter, **fields: Any) -> None:
        records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._num_held += 1

    def _flush_if_due(self) -> None:
        is_old = time.monotonic() - self._flushed_at > _FLUSH_SECONDS
        if is_old or self._num_held >= self.config.tensorboard_queue_size:
            self._flush()

    def _flush(self) -> None:
        self._records.flush()
        self._by_samples.flush()
        self._num_held, self._flushed_at = 0, time.monotonic()


def _file_name() -> str:
    """Return a new file name in TensorBoard's pattern: start time, host and a number."""
    number = time.perf_counter_ns()  # distinguishes files of the same second
    return f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{number}"


class GuardedCalls:
    """Calls of a library whose failures must not end the run.

    Args:
        output: the flag that requested the output, for the log.
    """

    def __init__(self, output: str) -> None:
        self._output = output
        self._is_failing = False

    def __call__(self, call: Callable[[], object]) -> None:
        """Call it; log when calls begin to fail, for any reason, and when they succeed again."""
        try:
            call()
        except Exception as error:  # a full disk, a lost connection, the end of the library's own process
            if not self._is_failing:
                log.warning(
                    "%s cannot be written (%s: %s): training continues without it",
                    self._output,
                    type(error).__name__,
                    error,
                    extra=THIS_RANK,
                )
            self._is_failing = True
            return
        if self._is_failing:
            log.warning("%s is written again", self._output, extra=THIS_RANK)
        self._is_failing = False


class WandbWriter(ScalarWriter):
    """Writer to Weights & Biases, histograms too.

    Args:
        folder: folder of wandb's own files; None for wandb's default.
        config_text: the run's config as YAML, shown with the run.

    Raises:
        UserError: wandb is not installed, or the folder cannot be written.
    """

    def __init__(self, config: LoggingConfig, folder: Path | None, world_size: int, config_text: str) -> None:
        super().__init__(config, world_size)
        output = f"--wandb-project {config.wandb_project}"
        try:
            import wandb  # imported here because it is an optional package that only one rank needs
        except ImportError:
            raise _missing(output, "wandb", "wandb") from None
        if folder is not None:
            make_writable(folder, "--wandb-save-dir")
        self._wandb = wandb
        self._send = GuardedCalls(output)
        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            dir=None if folder is None else str(folder),
            config=yaml.safe_load(config_text),
        )

    def histograms(self, iteration: int, values: Mapping[str, Sequence[float]], edges: Edges) -> None:
        histograms = {tag: self._wandb.Histogram(list(of_tag)) for tag, of_tag in values.items()}
        self._send(lambda: self._run.log(histograms, step=iteration))  # added to the step's scalars

    def scalars(self, iteration: int, scalars: Mapping[str, float]) -> None:
        self._send(lambda: self._run.log(dict(scalars), step=iteration))

    def close(self, *, has_failed: bool = False) -> None:
        self._send(lambda: self._run.finish(exit_code=int(has_failed)))


_PARAMS_PER_CALL = 100  # MLflow's limit


class MlflowWriter(ScalarWriter):
    """Writer to a run of MLflow, with the config as parameters such as ``model.num_layers``.

    MLflow sends them from a thread of its own, so that a slow server does not slow the run.

    Args:
        config_text: the run's config as YAML.

    Raises:
        UserError: mlflow is not installed, or its server refuses the run.
    """

    def __init__(self, config: LoggingConfig, world_size: int, config_text: str) -> None:
        super().__init__(config, world_size)
        output = f"--mlflow-experiment {config.mlflow_experiment}"
        try:
            import mlflow  # imported here because it is an optional package that only one rank needs
        except ImportError:
            raise _missing(output, "mlflow", "mlflow-skinny") from None
        self._mlflow: Any = mlflow
        self._send = GuardedCalls(output)
        try:
            mlflow.set_experiment(config.mlflow_experiment)
            mlflow.start_run()
        except mlflow.exceptions.MlflowException as error:
            problem = str(error).splitlines()[0]
            raise UserError(f"{output} cannot be written at MLFLOW_TRACKING_URI: {problem}") from None
        groups = yaml.safe_load(config_text)
        params = [(f"{group}.{name}", value) for group, of in groups.items() for name, value in of.items()]
        for first in range(0, len(params), _PARAMS_PER_CALL):
            part = dict(params[first : first + _PARAMS_PER_CALL])
            self._send(lambda part=part: mlflow.log_params(part, synchronous=False))  # type: ignore[misc]

    def scalars(self, iteration: int, scalars: Mapping[str, float]) -> None:
        self._send(lambda: self._mlflow.log_metrics(dict(scalars), step=iteration, synchronous=False))

    def close(self, *, has_failed: bool = False) -> None:
        self._send(self._mlflow.flush_async_logging)
        self._send(lambda: self._mlflow.end_run("FAILED" if has_failed else "FINISHED"))


class OpenTelemetryWriter(ScalarWriter):
    """Gauge for each scalar: ``megalite.lm_loss``. OpenTelemetry sends their latest values regularly.

    Its own environment variables configure it: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_METRIC_EXPORT_INTERVAL,
    OTEL_EXPORTER_PROMETHEUS_HOST, OTEL_EXPORTER_PROMETHEUS_PORT, OTEL_SERVICE_NAME and
    OTEL_RESOURCE_ATTRIBUTES.

    Raises:
        UserError: OpenTelemetry is not installed, or Prometheus' port is in use.
    """

    def __init__(self, config: LoggingConfig, world_size: int) -> None:
        super().__init__(config, world_size)
        output = f"--opentelemetry {config.opentelemetry}"
        try:
            # Imported here because they are optional packages that only one rank needs.
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource

            reader, self._stop = _prometheus() if config.opentelemetry == "prometheus" else _otlp()
        except ImportError as error:
            raise _missing(output, error.name, "'megalite[opentelemetry]'") from None
        except OSError as error:
            raise UserError(
                f"{output} cannot be served ({error.strerror}): "
                "set OTEL_EXPORTER_PROMETHEUS_PORT to a free port"
            ) from None
        resource = Resource({"service.name": "megalite"}).merge(OTELResourceDetector().detect())
        self._provider = MeterProvider([reader], resource)
        self._meter = self._provider.get_meter("megalite")
        self._gauges: dict[str, Any] = {}
        self._send = GuardedCalls(output)

    def scalars(self, iteration: int, scalars: Mapping[str, float]) -> None:
        for tag, value in {"iteration": iteration, **scalars}.items():
            name = "megalite." + re.sub(r"[^\w./-]", "_", tag)
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(value)

    def close(self, *, has_failed: bool = False) -> None:
        self._send(self._provider.shutdown)  # which sends the last values
        self._stop()


def _otlp() -> tuple[Any, Callable[[], None]]:
    """Return a reader that sends to a collector, and what ends it besides the reader's own shutdown."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter()), lambda: None


def _prometheus() -> tuple[Any, Callable[[], None]]:
    """Return a reader for the page that Prometheus reads, and what ends the server of the page."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import start_http_server

    host = os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "localhost")
    server, thread = start_http_server(int(os.environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", "9464")), host)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return PrometheusMetricReader(), stop
