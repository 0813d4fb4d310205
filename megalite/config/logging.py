"""The configuration of logs, metrics, timers and profilers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megalite.config.model.feed_forward import HAS_EXPERTS
from megalite.config.option import (
    LOCAL_PATH,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    TIMERS,
    AnyOf,
    Bound,
    Conflicts,
    OnResume,
    Setting,
    option,
)
from megalite.config.training import ITERATIONS, iteration_range

TimingLogOption = Literal["max", "minmax", "all"]
OpenTelemetryExporter = Literal["otlp", "prometheus"]
LogLine = Literal["auto", "short", "megatron", "megatron-deepspeed"]

_DASHBOARDS = AnyOf(
    ("tensorboard_dir", "wandb_project", "mlflow_experiment", "opentelemetry"), "--tensorboard-dir is not set"
)
_PYTORCH_PROFILER = AnyOf(
    ("profile_execution", "use_pytorch_profiler"),
    "PyTorch's profiler is off: pass --profile --use-pytorch-profiler",
)
_PROFILES = AnyOf(("profile", "profile_execution"), "neither --profile nor --profile-execution is set")
_ON_RANKS = AnyOf(
    ("profile", "record_memory_history"), "neither --profile nor --record-memory-history is set"
)


@dataclass(frozen=True)
class LoggingConfig:
    """Options of logs, TensorBoard, other dashboards, the metrics file, timers, traces and profilers."""

    default_on_resume: ClassVar[OnResume] = OnResume.FREE

    log_interval: int = option(100, allowed=POSITIVE)
    """Iterations between log lines."""
    log_line: LogLine = option("auto", "--log-format", sets={"--deepspeed": "megatron-deepspeed"})
    """Fields of the log line: Megatron-LM's, Megatron-DeepSpeed's, or short ones: step, loss, tokens/s, time
    left. By default short on a terminal, and Megatron-LM's elsewhere."""
    profile_modules: int | None = option(None, allowed=POSITIVE)
    """Log the parameters, operations, time and memory of each module's forward and backward, before this
    iteration."""
    profile_modules_depth: int | None = option(None, allowed=NOT_NEGATIVE, only_with="profile_modules")
    """With --profile-modules: depth of the module tree in the tables; 0 shows only the whole model. By
    default the tables show the whole tree."""
    profile_modules_top: int | None = option(None, allowed=SIZE, only_with="profile_modules")
    """With --profile-modules: for each module, show only this many of its most expensive submodules. By
    default all are shown."""
    profile_modules_file: str | None = option(None, only_with="profile_modules", allowed=LOCAL_PATH)
    """With --profile-modules: also write the tables to this text file. Pipeline ranks after the first append
    their rank to the file name."""
    log_throughput: bool = False
    """Log TFLOP/s per rank, in the log line and in TensorBoard."""
    log_params_norm: bool = False
    """Log the 2-norm of all weights, in the log line, TensorBoard and the metrics file."""
    log_num_zeros_in_grad: bool = False
    """Log the number of zeros in the gradient, in the log line, TensorBoard and the metrics file."""
    log_straggler_interval: int | None = option(None, allowed=POSITIVE, sets={"--log-straggler": 100})
    """Iterations between log lines that name the slowest rank; --log-straggler sets 100."""
    log_time_breakdown: bool = False
    """Record where the time of each log interval's last iteration went in the metrics file, for the report,
    and log what made the run slow at its end."""
    tensorboard_dir: str | None = option(None, allowed=LOCAL_PATH)
    """Folder to write TensorBoard files to."""
    tensorboard_log_interval: int | None = option(None, allowed=POSITIVE, only_with=_DASHBOARDS)
    """Iterations between points in TensorBoard and other dashboards. By default --log-interval."""
    tensorboard_queue_size: int = option(1000, allowed=SIZE, only_with="tensorboard_dir")
    """Number of TensorBoard events to buffer in memory before they are written to the file."""
    log_timers_to_tensorboard: bool = option(False, only_with=_DASHBOARDS)
    """Log the timers to TensorBoard."""
    log_batch_size_to_tensorboard: bool = option(False, only_with=_DASHBOARDS)
    """Log the global batch size to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = option(False, only_with=_DASHBOARDS)
    """Log the validation perplexity to TensorBoard."""
    log_memory_to_tensorboard: bool = option(False, only_with=_DASHBOARDS)
    """Log the memory use of the rank that writes the log to TensorBoard."""
    log_optimizer_states_to_tensorboard: bool = option(False, only_with=_DASHBOARDS)
    """Log norms of the weights and of Adam's moments to TensorBoard: 1-norm, 2-norm and largest magnitude."""
    log_layer_grad_norms_interval: int | None = option(None, allowed=POSITIVE)
    """Iterations between histograms of each layer's gradient norm in TensorBoard and Weights & Biases."""
    log_experts_interval: int = option(100, allowed=NOT_NEGATIVE, only_with=HAS_EXPERTS)
    """Iterations between records of each layer's tokens by expert, and entropy of the routing, in the metrics
    file, TensorBoard and other dashboards. 0 records none."""
    record_routing: str | None = None
    """Write the experts of each token to this folder. A run in any layout replays them with
    --replay-routing-from."""
    record_routing_iterations: str | None = option(None, allowed=ITERATIONS, only_with="record_routing")
    """With --record-routing: the iterations to record, for example 5:6. By default all."""
    wandb_project: str | None = None
    """Weights & Biases project to log to. It needs the package wandb."""
    wandb_exp_name: str | None = option(None, only_with="wandb_project")
    """Name of the run in Weights & Biases. By default a random one."""
    wandb_save_dir: str | None = option(None, only_with="wandb_project", allowed=LOCAL_PATH)
    """Folder for wandb's own files. By default the --save folder, or the working directory."""
    mlflow_experiment: str | None = None
    """MLflow experiment to log to, on the server of MLFLOW_TRACKING_URI. It needs the extra mlflow."""
    opentelemetry: OpenTelemetryExporter | None = None
    """Export metrics with OpenTelemetry: by OTLP, or on a page for Prometheus. It needs the extra
    opentelemetry."""
    metrics_file: str | None = option(None, sets={"--no-metrics-file": ""}, allowed=LOCAL_PATH)
    """Write a JSON Lines file with an object for each logged iteration and evaluation. By default
    metrics.jsonl in the --save folder; --no-metrics-file writes none."""
    timing_log_level: int | None = option(None, allowed=TIMERS)
    """What timers measure. 0: evaluation, saving and so on; 1: the parts of an iteration; 2: the parts of a
    microbatch. By default 0, or 1 with --log-timers-to-tensorboard."""
    timing_log_option: TimingLogOption = option("minmax", only_with="timing_log_level")
    """How to log a timer: the maximum over ranks, the minimum and maximum, or every rank's value."""
    trace_pipeline: str | None = option(None, allowed=ITERATIONS)
    """Iterations to trace, for example 5:6. The actions and waits of all ranks are written to one file for
    Perfetto."""
    trace_pipeline_path: str | None = option(None, only_with="trace_pipeline", allowed=LOCAL_PATH)
    """File to write --trace-pipeline to. By default pipeline_trace_FIRST-LAST.json in TensorBoard's folder,
    or in the --save folder."""
    profile_execution: bool = False
    """Write a PyTorch profiler trace of three iterations on every rank to TensorBoard's folder."""
    profile_name: str | None = option(None, only_with=_PYTORCH_PROFILER)
    """Name of the subfolder of TensorBoard's folder for PyTorch profiler traces."""
    profile: bool = False
    """Profile iterations on --profile-ranks with nsys, or with --use-pytorch-profiler."""
    profile_step_start: int = option(10, allowed=NOT_NEGATIVE, only_with="profile")
    """With --profile: number of iterations before the first profiled iteration."""
    profile_step_end: int = option(12, allowed=POSITIVE, only_with="profile")
    """With --profile: the last profiled iteration."""
    profile_repeat: int = option(1, allowed=POSITIVE, only_with=_PROFILES)
    """Number of times to profile. Before each, as many iterations are skipped as before the first."""
    profile_ranks: tuple[int, ...] = option((0,), allowed=NOT_NEGATIVE, only_with=_ON_RANKS)
    """Ranks that --profile and --record-memory-history apply to."""
    use_pytorch_profiler: bool = option(False, only_with="profile")
    """With --profile: write a PyTorch profiler trace, as --profile-execution does."""
    pytorch_profiler_collect_shapes: bool = option(False, only_with=_PYTORCH_PROFILER)
    """Record the shapes of each operator's inputs in the PyTorch profiler's trace."""
    pytorch_profiler_collect_callstack: bool = option(False, only_with=_PYTORCH_PROFILER)
    """Record the Python call stack in the PyTorch profiler's trace."""
    pytorch_profiler_collect_memory: bool = option(False, only_with=_PYTORCH_PROFILER)
    """Record each allocation in the PyTorch profiler's trace, for TensorBoard's memory view."""
    record_memory_history: bool = False
    """Record GPU memory allocations, and write them at the end of the run or when memory runs out."""
    memory_snapshot_path: str = option(
        "snapshot.pickle", only_with="record_memory_history", allowed=LOCAL_PATH
    )
    """File to write --record-memory-history to, for pytorch.org/memory_viz. All but the first of
    --profile-ranks append their rank to the file name."""

    conflicts: ClassVar[Conflicts] = {
        "record_routing": {"replay_routing_from": ": the run would record what it replays; remove one"},
        "profile": {"profile_execution": ": both start the profiler; remove one"},
        ("profile_execution", "use_pytorch_profiler"): {
            Setting("tensorboard_dir", (None,)): ", where the trace is written: pass it too",
        },
    }
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound(
            "profile_step_start",
            "profile_step_end",
            ", the last profiled iteration: pass less",
            is_strict=True,
        ),
    )

    @property
    def timers_level(self) -> int:
        """Return --timing-log-level, with its default resolved."""
        if self.timing_log_level is not None:
            return self.timing_log_level
        return 1 if self.log_timers_to_tensorboard and self.has_dashboards else 0

    @property
    def has_dashboards(self) -> bool:
        """Return whether metrics are also written as curves by iteration, to one of the dashboards."""
        return any(getattr(self, name) is not None for name in _DASHBOARDS.fields)

    def metrics_path(self, save: str | None) -> Path | None:
        """Return the path of the metrics file, by default in the --save folder; None for no file."""
        if self.metrics_file is not None:
            return Path(self.metrics_file) if self.metrics_file else None
        return Path(save) / "metrics.jsonl" if save is not None else None

    @property
    def traced_iterations(self) -> range:
        """Return the iterations of --trace-pipeline, counted from 1; empty without it."""
        return iteration_range(self.trace_pipeline or "") or range(0)

    def records_routing(self, iteration: int) -> bool:
        """Return whether --record-routing records this iteration, counted from 1."""
        text = self.record_routing_iterations
        return self.record_routing is not None and (
            text is None or iteration in (iteration_range(text) or ())
        )

    @property
    def dashboard_interval(self) -> int:
        """Return --tensorboard-log-interval, with its default resolved."""
        return self.tensorboard_log_interval or self.log_interval
