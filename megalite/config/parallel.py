"""How the model is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalite.config.flags import flags

PipelineSchedule = Literal["1f1b", "gpipe"]
Backend = Literal["auto", "gloo", "nccl"]


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the axes and how their ranks talk; world size = tp x pp x dp."""

    tensor_model_parallel_size: int = field(default=1, metadata=flags("--tp"))
    """Ranks that share every layer's matrices (tp)."""
    pipeline_model_parallel_size: int = field(default=1, metadata=flags("--pp"))
    """Pipeline stages that the layers are spread over (pp)."""
    data_parallel_size: int | None = field(default=None, metadata=flags("--dp"))
    """Replicas of the model (dp); checked against world size / (tp x pp), which it is by default."""
    pipeline_schedule: PipelineSchedule = "1f1b"
    """Order of forward and backward passes in the pipeline."""
    pipeline_layers: tuple[int, ...] | None = None
    """Layers of each stage, one number a stage (3 5); by default the same on every stage."""
    ddp_bucket_size: int = 40_000_000
    """Elements of a gradient bucket, whose all-reduce starts once its gradients are there."""
    distributed_backend: Backend = "auto"
    """What the ranks talk through; auto is nccl on GPUs and gloo without."""
    distributed_timeout_minutes: int = 10
    """Minutes after which a collective that some rank does not join is an error."""
    num_threads: int | None = None
    """CPU threads of a rank; by default 1 where several ranks share the machine, else torch's choice."""

    keep_freed_memory: bool = True
    """Let a CPU rank keep freed memory for its next tensors: faster steps, for a third more memory or so."""

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline-parallel size: the number of stages."""
        return self.pipeline_model_parallel_size
