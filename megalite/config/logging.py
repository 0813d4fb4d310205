"""What a run tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalite.config.flags import flags
from megalite.config.training import iteration_range

TimingLogOption = Literal["max", "minmax", "all"]


@dataclass(frozen=True)
class LoggingConfig:
    """The log line, TensorBoard, the metrics file and the profiler."""

    log_interval: int = 100
    """Iterations between log lines."""
    profile_modules: int | None = None
    """Iteration before which the forward is taken apart: parameters, FLOPs and latency of each module."""
    log_throughput: bool = False
    """Show TFLOP/s a rank in the log line and in TensorBoard."""
    log_params_norm: bool = False
    """Show the 2-norm of all weights in the log line, TensorBoard and the metrics file."""
    log_num_zeros_in_grad: bool = False
    """Show there how many elements of the gradient are zero."""
    log_straggler_interval: int | None = field(default=None, metadata=flags(sets={"--log-straggler": 100}))
    """Iterations between lines that name the rank which computes slowest; --log-straggler stands for 100."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard's files."""
    tensorboard_log_interval: int | None = None
    """Iterations between points in TensorBoard (and wandb); by default --log-interval."""
    tensorboard_queue_size: int = 1000
    """Events held in memory before TensorBoard's file is written."""
    log_timers_to_tensorboard: bool = False
    """Write the timers to TensorBoard too."""
    log_batch_size_to_tensorboard: bool = False
    """Write the global batch size to TensorBoard too."""
    log_validation_ppl_to_tensorboard: bool = False
    """Write the validation perplexity to TensorBoard too."""
    log_memory_to_tensorboard: bool = False
    """Write the memory of the reporting rank to TensorBoard too."""
    log_layer_grad_norms_interval: int | None = None
    """Iterations between histograms of each layer's gradient norm in TensorBoard (and wandb)."""
    wandb_project: str | None = None
    """Project in Weights & Biases that gets the scalars; needs the package wandb."""
    wandb_exp_name: str | None = None
    """The run's name there; by default one that wandb makes up."""
    wandb_save_dir: str | None = None
    """Folder for wandb's own files; by default the --save folder, or the working directory."""
    metrics_file: str | None = None
    """JSON Lines file that gets one object for each logged iteration and evaluation."""
    timing_log_level: int | None = None
    """Timers: 0 of rare things, 1 of an iteration's parts, 2 of each microbatch's; by default 0, or 1 for
    TensorBoard."""
    timing_log_option: TimingLogOption = "minmax"
    """What of the ranks' timers is shown: the largest, the smallest and the largest, or each rank's."""
    trace_pipeline: str | None = None
    """Iterations FIRST:LAST whose every action and wait, on every rank, goes into one file for Perfetto."""
    trace_pipeline_path: str | None = None
    """That file; by default pipeline_trace_FIRST-LAST.json in TensorBoard's folder, or the --save folder."""
    profile_execution: bool = False
    """Write a PyTorch profiler trace of three iterations of every rank into TensorBoard's folder."""
    profile_name: str | None = None
    """Name of the profiler's folder there."""
    profile: bool = False
    """Profile some iterations of --profile-ranks: for nsys, or with --use-pytorch-profiler."""
    profile_step_start: int = 10
    """Iterations that are over when --profile begins."""
    profile_step_end: int = 12
    """The last iteration of --profile."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that --profile and --record-memory-history are for."""
    use_pytorch_profiler: bool = False
    """Write the trace of --profile by PyTorch's profiler, as --profile-execution does."""
    record_memory_history: bool = False
    """Record who takes a GPU's memory, and write it at the run's end or when memory runs out."""
    memory_snapshot_path: str = "snapshot.pickle"
    """File of --record-memory-history, for pytorch.org/memory_viz; another rank's has its number besides."""

    @property
    def timers_level(self) -> int:
        """Level of the timers that are run."""
        if self.timing_log_level is not None:
            return self.timing_log_level
        has_board = self.tensorboard_dir is not None or self.wandb_project is not None
        return 1 if self.log_timers_to_tensorboard and has_board else 0

    @property
    def traced_iterations(self) -> range:
        """The iterations of --trace-pipeline, counted from 1; none without it."""
        return iteration_range(self.trace_pipeline or "") or range(0)

    @property
    def board_interval(self) -> int:
        """Iterations between points in TensorBoard and wandb."""
        return self.tensorboard_log_interval or self.log_interval
