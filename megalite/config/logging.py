"""What a run tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from megalite.config.flags import flags


@dataclass(frozen=True)
class LoggingConfig:
    """The log line, TensorBoard, the metrics file and the profiler."""

    log_interval: int = 100
    """Iterations between log lines."""
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
    metrics_file: str | None = None
    """JSON Lines file that gets one object for each logged iteration and evaluation."""
    profile_execution: bool = False
    """Write a PyTorch profiler trace of a few iterations into TensorBoard's folder."""
    profile_name: str | None = None
    """Name of the profiler's trace."""
